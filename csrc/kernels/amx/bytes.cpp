#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/fp8_halves.h"
// After the formats.
#include "kernels/amx/byte_codes.h"
#include "kernels/amx/few_tokens.h"
#include "kernels/amx/weights.h"

namespace moe::amx {

const Kernels* bytes(Format format) {
  switch (format) {
    case Format::kFp8:
      return &kTileKernels<Fp8Halves, Fp8Tiles>;
    case Format::kInt8:
      return &EitherTiles<Int8Codes, Int8Tiles>::kKernels;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
