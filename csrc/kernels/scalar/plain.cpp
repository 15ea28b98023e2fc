#include "kernels/scalar/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/plain.h"
// After the formats.
#include "kernels/body.h"

namespace moe::scalar {

const Kernels* plain(Format format) {
  switch (format) {
    case Format::kFp32:
      return &kKernels<Plain<float>>;
    case Format::kFp16:
      return &kKernels<Plain<Fp16>>;
    case Format::kBf16:
      return &kKernels<Plain<Bf16>>;
    default:
      return nullptr;
  }
}

}  // namespace moe::scalar
