#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/bf16_pairs.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/weights.h"

namespace moe::amx {

// fp32 and fp16 keep their precision in the AVX-512 kernels.
const Kernels* plain(Format format) {
  return format == Format::kBf16 ? &kTileKernels<Bf16Pairs, Bf16Tiles> : nullptr;
}

}  // namespace moe::amx
