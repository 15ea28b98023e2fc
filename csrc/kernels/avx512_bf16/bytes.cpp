#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/fp8_pairs.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512_bf16 {

// INT8 is left to AVX-512: widening bytes to bf16 takes as many instructions as to floats.
const Kernels* bytes(Format format) {
  return format == Format::kFp8 ? &kKernels<Fp8Pairs> : nullptr;
}

}  // namespace moe::avx512_bf16
