#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_pairs.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/nibble_weights.h"

namespace moe::amx {

namespace {

template <class Pairs, class Tiles>
constexpr const Kernels& kNibbles = kTileKernels<Pairs, NibbleTiles<Tiles>>;

}  // namespace

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &kNibbles<Int4Pairs, Int4Tiles>;
    case Format::kMxfp4:
      return &kNibbles<Mxfp4Pairs, Mxfp4Tiles>;
    case Format::kNvfp4:
      return &kNibbles<Nvfp4Pairs, Nvfp4Tiles>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
