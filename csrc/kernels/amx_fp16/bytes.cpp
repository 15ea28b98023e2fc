#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/fp8_fp16.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/weights.h"

namespace moe::amx_fp16 {

const Kernels* bytes(Format format) {
  return format == Format::kFp8 ? &kTileKernels<Fp8Fp16, Fp8Tiles> : nullptr;
}

}  // namespace moe::amx_fp16
