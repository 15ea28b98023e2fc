#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibble_quads.h"
// After the formats.
#include "kernels/body.h"

namespace moe::avx512_vnni {

const Kernels* nibbles(Format format, Dtype) {
  switch (format) {
    case Format::kInt4:
      return &kKernels<RowQuads<AnyInt4Quads>>;
    case Format::kMxfp4:
      return &kKernels<RowQuads<Mxfp4Quads>>;
    case Format::kNvfp4:
      return &kKernels<RowQuads<Nvfp4Quads>>;
    default:
      return nullptr;
  }
}

}  // namespace moe::avx512_vnni
