#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/fp8_halves.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512 {

const Kernels* bytes(Format format) {
  switch (format) {
    case Format::kFp8:
      return &kKernels<Fp8Halves>;
    case Format::kInt8:
      return &kKernels<Bytes<Format::kInt8>>;
    default:
      return nullptr;
  }
}

}  // namespace moe::avx512
