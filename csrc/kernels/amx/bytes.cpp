#include "kernels/avx512/vec.h"
// vec.h comes first: the others are written over its V.
#include "kernels/activation.h"
#include "kernels/formats/bytes.h"
// After the formats.
#include "kernels/amx/body.h"
#include "kernels/amx/weights.h"

namespace moe::amx {

namespace {

template <Format kFormat>
constexpr const Kernels& kBytes = kTileKernels<Bytes<kFormat>, ByteTiles<kFormat>>;

}  // namespace

const Kernels* bytes(Format format) {
  switch (format) {
    case Format::kFp8:
      return &kBytes<Format::kFp8>;
    // By bf16 tiles too: int8 tiles would need the activations rounded to 8 bits, which costs more
    // accuracy than the format itself.
    case Format::kInt8:
      return &kBytes<Format::kInt8>;
    default:
      return nullptr;
  }
}

}  // namespace moe::amx
