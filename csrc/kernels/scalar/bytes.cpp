#include "kernels/scalar/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/bytes.h"
// After the formats.
#include "kernels/body.h"

namespace moe::scalar {

const Kernels* bytes(Format format) {
  switch (format) {
    case Format::kFp8:
      return &kKernels<Bytes<Format::kFp8>>;
    case Format::kInt8:
      return &kKernels<Bytes<Format::kInt8>>;
    default:
      return nullptr;
  }
}

}  // namespace moe::scalar
