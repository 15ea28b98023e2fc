#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/nibbles.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/sources.h"

namespace moe::amx {

namespace {

template <class W>
constexpr const Kernels& kNibbles = kTileKernels<W, UnpackedTiles<W>>;

}  // namespace

const Kernels* nibbles(Format format, Dtype dtype) {
  switch (format) {
    case Format::kInt4:
      return dtype == Dtype::kFp32   ? &kNibbles<Int4<float>>
             : dtype == Dtype::kFp16 ? &kNibbles<Int4<Fp16>>
                                     : &kNibbles<Int4<Bf16>>;
    case Format::kMxfp4:
      return &kNibbles<Mxfp4>;
    case Format::kNvfp4:
      return &kNibbles<Nvfp4>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
