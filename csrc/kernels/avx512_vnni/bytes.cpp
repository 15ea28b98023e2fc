#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/int8_quads.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512_vnni {

const Kernels* bytes(Format format) {
  return format == Format::kInt8 ? &kKernels<RowQuads<Int8Quads>> : nullptr;
}

}  // namespace moe::avx512_vnni
