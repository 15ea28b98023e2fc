// Sorts a batch's (token, expert) pairs by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel.h"

namespace moe {

// What the router chose for a batch.
struct Routing {
  const int32_t* ids;    // [T, K], each -1 (nothing) or an expert's id
  const float* weights;  // [T, K]
  int64_t tokens;        // T
  int64_t top_k;         // K
  const int32_t* map;    // [map_size] id -> row of the shard or -1 (skip), or null: the id itself
  int64_t map_size;
};

// Throws std::invalid_argument when an id is below -1 or has no entry in the map (without a map: is
// not below `experts`), or when the map names a row that the shard does not have.
void check_routing(const Routing& routing, int64_t experts);

// Pairs grouped by shard row, rows ascending; within a group by token, then by k. The order is that
// of the sums, and does not depend on anything but the batch.
class PairSorter {
 public:
  // Room for `pairs` pairs over `experts` experts; never shrinks.
  void reserve(int64_t pairs, int64_t experts);
  // Sorts tokens [begin, end) of a checked routing; pair_token counts from `begin`. Groups of at
  // least `packed_tokens` (unless it is 0) get blocks of packed tokens.
  void sort(const Routing& routing, int64_t begin, int64_t end, int64_t experts,
            int64_t packed_tokens);

  // The most blocks of packed tokens that `pairs` pairs over `experts` experts can need.
  static int64_t max_blocks(int64_t pairs, int64_t experts, int64_t packed_tokens);

  const Group* groups() const { return groups_.data(); }
  // The blocks of packed tokens, and the group that each belongs to.
  int64_t block_count() const { return block_count_; }
  const int32_t* block_group() const { return block_group_.data(); }
  int64_t group_count() const { return group_count_; }
  bool all_packed() const { return all_packed_; }
  const int32_t* pair_token() const { return pair_token_.data(); }
  const float* pair_weight() const { return pair_weight_.data(); }

 private:
  std::vector<int64_t> position_;  // [experts]
  std::vector<Group> groups_;
  std::vector<int32_t> pair_token_;
  std::vector<float> pair_weight_;
  std::vector<int32_t> block_group_;
  int64_t group_count_ = 0;
  int64_t block_count_ = 0;
  bool all_packed_ = true;
};

}  // namespace moe
