#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_floats.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/nibble_weights.h"

namespace moe::amx {

namespace {

template <class Table, class Tiles>
constexpr const Kernels& kNibbles = kTileKernels<NibbleFloats<Table>, NibbleTiles<Tiles>>;

}  // namespace

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &kNibbles<Int4Table<Bf16>, Int4Tiles>;
    case Format::kMxfp4:
      return &kNibbles<Mxfp4Table, Mxfp4Tiles>;
    case Format::kNvfp4:
      return &kNibbles<Nvfp4Table, Nvfp4Tiles>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
