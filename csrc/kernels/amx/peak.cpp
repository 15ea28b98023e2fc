#include "kernels/amx/tiles.h"

namespace moe::amx {

// Two tiles by two, as the kernels do: no product waits for the one before.
void multiply_tiles(int64_t count) {
  [[maybe_unused]] const TileScope scope;
  MOE_TILE_ZERO(0);
  MOE_TILE_ZERO(1);
  MOE_TILE_ZERO(2);
  MOE_TILE_ZERO(3);
  MOE_TILE_ZERO(4);
  MOE_TILE_ZERO(5);
  MOE_TILE_ZERO(6);
  MOE_TILE_ZERO(7);
  for (int64_t i = 0; i < count; i += 4) {
    MOE_TILE_MULTIPLY(0, 4, 6);
    MOE_TILE_MULTIPLY(1, 4, 7);
    MOE_TILE_MULTIPLY(2, 5, 6);
    MOE_TILE_MULTIPLY(3, 5, 7);
  }
}

}  // namespace moe::amx
