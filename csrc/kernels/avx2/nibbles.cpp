#include "kernels/avx2/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibbles.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx2 {

const Kernels* nibbles(Format format, Dtype dtype) {
  switch (format) {
    case Format::kInt4:
      return dtype == Dtype::kFp32   ? &kKernels<Int4<float>>
             : dtype == Dtype::kFp16 ? &kKernels<Int4<Fp16>>
                                     : &kKernels<Int4<Bf16>>;
    case Format::kMxfp4:
      return &kKernels<Mxfp4>;
    case Format::kNvfp4:
      return &kKernels<Nvfp4>;
    default:
      return nullptr;
  }
}

}  // namespace moe::avx2
