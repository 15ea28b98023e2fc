#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_floats.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512 {

const Kernels* nibbles(Format format, Dtype dtype) {
  switch (format) {
    case Format::kInt4:
      return dtype == Dtype::kFp32   ? &kKernels<NibbleFloats<Int4Table<float>>>
             : dtype == Dtype::kFp16 ? &kKernels<NibbleFloats<Int4Table<Fp16>>>
                                     : &kKernels<NibbleFloats<Int4Table<Bf16>>>;
    case Format::kMxfp4:
      return &kKernels<NibbleFloats<Mxfp4Table>>;
    case Format::kNvfp4:
      return &kKernels<NibbleFloats<Nvfp4Table>>;
    default:
      return nullptr;
  }
}

}  // namespace moe::avx512
