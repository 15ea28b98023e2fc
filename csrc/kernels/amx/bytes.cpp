#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/fp8_halves.h"
#include "kernels/formats/int8_quads.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/weights.h"

namespace moe::amx {

const Kernels* bytes(Format format) {
  switch (format) {
    case Format::kFp8:
      return &kTileKernels<Fp8Halves, Fp8Tiles>;
    // Many tokens by bf16 tiles too: int8 tiles would need the activations in 8 bits, which costs
    // more accuracy than the format itself, or in digits, which takes two products.
    case Format::kInt8:
      return &kTileKernels<RowQuads<Int8Quads>, Int8Tiles>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
