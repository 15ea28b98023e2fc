#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
// After it.
#include "kernels/amx/few_tokens.h"
#include "kernels/amx/nibble_codes.h"
#include "kernels/amx/nibble_weights.h"

namespace moe::amx {

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &EitherTiles<AnyInt4Codes, NibbleTiles<Int4Tiles>>::kKernels;
    case Format::kMxfp4:
      return &EitherTiles<Mxfp4Codes, NibbleTiles<Mxfp4Tiles>>::kKernels;
    case Format::kNvfp4:
      return &EitherTiles<Nvfp4Codes, NibbleTiles<Nvfp4Tiles>>::kKernels;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
