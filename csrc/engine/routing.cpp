#include "engine/routing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace moe {
namespace {

// The shard row of an id, or -1.
inline int32_t row_of(const Routing& routing, int32_t id) {
  return id < 0 || routing.map == nullptr ? id : routing.map[id];
}

[[noreturn]] void reject_id(const Routing& routing, int64_t index, int64_t limit) {
  const std::string where = "topk_ids[" + std::to_string(index / routing.top_k) + ", " +
                            std::to_string(index % routing.top_k) + "]";
  throw std::invalid_argument(
      where + " is " + std::to_string(routing.ids[index]) + ", and " +
      (routing.map == nullptr ? "this shard has experts 0 to " : "expert_map has entries 0 to ") +
      std::to_string(limit - 1) + ": pass ids in that range, or -1 for none");
}

}  // namespace

void check_routing(const Routing& routing, int64_t experts) {
  const int64_t limit = routing.map == nullptr ? experts : routing.map_size;
  const int64_t pairs = routing.tokens * routing.top_k;
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t id = routing.ids[i];
    if (id < -1 || id >= limit) reject_id(routing, i, limit);
    const int32_t row = row_of(routing, id);
    if (row < -1 || row >= experts) {
      throw std::invalid_argument("expert_map[" + std::to_string(id) + "] is " +
                                  std::to_string(row) + ", and this shard has rows 0 to " +
                                  std::to_string(experts - 1) +
                                  ": map to one of them, or to -1 for none");
    }
  }
}

void PairSorter::reserve(int64_t pairs, int64_t experts) {
  const auto grow = [](auto& list, int64_t size) {
    if (static_cast<int64_t>(list.size()) < size) list.resize(static_cast<size_t>(size));
  };
  grow(position_, experts);
  grow(groups_, experts);
  grow(pair_token_, pairs);
  grow(pair_weight_, pairs);
  // Whatever the kernels' threshold: a block has a token at least.
  grow(block_group_, pairs);
}

// Whole blocks, and one that is not for each group: of an expert, of at least `packed_tokens`.
int64_t PairSorter::max_blocks(int64_t pairs, int64_t experts, int64_t packed_tokens) {
  if (packed_tokens == 0) return 0;
  return pairs / kPackBlock + std::min(pairs / packed_tokens, experts);
}

void PairSorter::sort(const Routing& routing, int64_t begin, int64_t end, int64_t experts,
                      int64_t packed_tokens) {
  const int64_t first = begin * routing.top_k;
  const int64_t last = end * routing.top_k;
  std::fill_n(position_.begin(), experts, 0);
  for (int64_t i = first; i < last; ++i) {
    const int32_t row = row_of(routing, routing.ids[i]);
    if (row >= 0) ++position_[static_cast<size_t>(row)];
  }
  group_count_ = 0;
  block_count_ = 0;
  all_packed_ = true;
  int64_t total = 0;
  for (int64_t row = 0; row < experts; ++row) {
    int64_t& position = position_[static_cast<size_t>(row)];
    const int64_t count = position;
    position = total;
    if (count == 0) continue;
    const bool packed = packed_tokens > 0 && count >= packed_tokens;
    all_packed_ = all_packed_ && packed;
    groups_[static_cast<size_t>(group_count_)] = {row, total, count, packed ? block_count_ : -1};
    for (int64_t token = 0; packed && token < count; token += kPackBlock) {
      block_group_[static_cast<size_t>(block_count_++)] = static_cast<int32_t>(group_count_);
    }
    ++group_count_;
    total += count;
  }
  for (int64_t i = first; i < last; ++i) {
    const int32_t row = row_of(routing, routing.ids[i]);
    if (row < 0) continue;
    const auto at = static_cast<size_t>(position_[static_cast<size_t>(row)]++);
    pair_token_[at] = static_cast<int32_t>(i / routing.top_k - begin);
    pair_weight_[at] = routing.weights[i];
  }
}

}  // namespace moe
