#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/bf16_pairs.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512_bf16 {

// bf16 alone has an instruction of its own here.
const Kernels* plain(Format format) {
  return format == Format::kBf16 ? &kKernels<Bf16Pairs> : nullptr;
}

}  // namespace moe::avx512_bf16
