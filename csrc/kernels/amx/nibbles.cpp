#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_quads.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/nibble_weights.h"

namespace moe::amx {

namespace {

template <class Small, class Tiles>
constexpr const Kernels& kNibbles = kTileKernels<Small, NibbleTiles<Tiles>>;

}  // namespace

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &kNibbles<RowQuads<AnyInt4Quads>, Int4Tiles>;
    case Format::kMxfp4:
      return &kNibbles<RowQuads<Mxfp4Quads>, Mxfp4Tiles>;
    case Format::kNvfp4:
      return &kNibbles<RowQuads<Nvfp4Quads>, Nvfp4Tiles>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
