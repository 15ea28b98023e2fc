#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_pairs.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512_bf16 {

const Kernels* nibbles(Format format, Dtype dtype) {
  switch (format) {
    case Format::kInt4:
      return dtype == Dtype::kFp32   ? &kKernels<Int4Pairs<float>>
             : dtype == Dtype::kFp16 ? &kKernels<Int4Pairs<Fp16>>
                                     : &kKernels<Int4Pairs<Bf16>>;
    case Format::kMxfp4:
      return &kKernels<Mxfp4Pairs>;
    case Format::kNvfp4:
      return &kKernels<Nvfp4Pairs>;
    default:
      return nullptr;
  }
}

}  // namespace moe::avx512_bf16
