#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_pairs.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/sources.h"

namespace moe::amx {

namespace {

template <class Pairs, class Floats>
constexpr const Kernels& kNibbles = kTileKernels<Pairs, UnpackedTiles<Floats>>;

}  // namespace

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &kNibbles<Int4Pairs, Int4<Bf16>>;
    case Format::kMxfp4:
      return &kNibbles<Mxfp4Pairs, Mxfp4>;
    case Format::kNvfp4:
      return &kNibbles<Nvfp4Pairs, Nvfp4>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
