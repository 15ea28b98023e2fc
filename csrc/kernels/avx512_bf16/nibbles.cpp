#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_pairs.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512_bf16 {

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &kKernels<Int4Pairs>;
    case Format::kMxfp4:
      return &kKernels<Mxfp4Pairs>;
    case Format::kNvfp4:
      return &kKernels<Nvfp4Pairs>;
    default:
      return nullptr;
  }
}

}  // namespace moe::avx512_bf16
