#include "kernels/amx/tiles.h"

namespace moe::amx {

// Four sums in turn, so that no product waits for the one before.
void multiply_tiles(int64_t count) {
  [[maybe_unused]] const TileScope scope;
  MOE_TILE_ZERO(0);
  MOE_TILE_ZERO(1);
  MOE_TILE_ZERO(2);
  MOE_TILE_ZERO(3);
  MOE_TILE_ZERO(4);
  MOE_TILE_ZERO(5);
  for (int64_t i = 0; i < count; i += 4) {
    MOE_TILE_MULTIPLY(0, 4, 5);
    MOE_TILE_MULTIPLY(1, 4, 5);
    MOE_TILE_MULTIPLY(2, 4, 5);
    MOE_TILE_MULTIPLY(3, 4, 5);
  }
}

}  // namespace moe::amx
