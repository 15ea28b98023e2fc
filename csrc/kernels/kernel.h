// What a kernel is given and what it does: the seam between the schedule (engine/) and SIMD
// (kernels/<isa>/). Plain data only, no inline functions: this header is compiled under every
// instruction set's flags.
//
// Shape letters: T tokens, K experts routed to per token, E experts, N experts of this shard,
// H hidden size, I intermediate size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe {

// The most tokens and the most weight rows of one call to a product: its result stays in L1.
inline constexpr int64_t kTokenBlock = 64;
inline constexpr int64_t kRowBlock = 32;
// Row ranges of tasks are multiples of this (and of `Kernels::inner_align`), so that the same rows
// always share a register block and a sum does not depend on how the work was split.
inline constexpr int64_t kRowAlign = 4;
// Operand rows are padded with zeros to a multiple of this many elements: kernels need no tail on
// the activations' side.
inline constexpr int64_t kOperandAlign = 128;

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// How weights are stored; csrc/kernels/formats/ has a file for each kind.
enum class Format : int32_t { kFp32, kFp16, kBf16, kFp8, kInt8, kInt4, kMxfp4, kNvfp4 };
inline constexpr int32_t kFormats = 8;

// Dtype of the input rows, of the biases, and of the scales of kInt4.
enum class Dtype : int32_t { kFp32, kFp16, kBf16 };
inline constexpr int32_t kDtypes = 3;

// kSilu is g sigmoid(alpha g) (u + beta), which with other alpha and beta is SwiGLU-OAI.
enum class Activation : int32_t { kSilu, kGelu, kGeluTanh, kRelu2 };
inline constexpr int32_t kActivations = 4;

// One weight matrix of all N experts, [N, rows, K] in its format, K contiguous, and what scales it.
// A row's scale row is found within its part: w13 has two parts of I rows, whose scale blocks do
// not straddle them.
struct Matrix {
  const std::byte* weight;
  int64_t expert_bytes;
  int64_t row_bytes;
  int64_t rows;
  const std::byte* bias;  // [N, rows] in `Layer::dtype`, or null

  int64_t part_rows;       // rows of a part: rows / 2, or rows
  const std::byte* scale;  // [N, scale rows, K >> scale_shift], or null
  int64_t scale_expert_bytes;
  int64_t scale_row_bytes;
  int64_t scale_block_rows;  // weight rows that share a scale row
  int64_t scale_part_rows;   // scale rows of a part; 0 where both parts share
  int64_t scale_shift;       // log2 of the weights of a row that share a scale
  const std::byte* zero;     // kInt4: [N, rows / 2, K >> scale_shift], the even row's nibble low
  const float* global;       // kNvfp4: [N]
};

// One layer's shard. Gated: out = w2 @ f(gate, up) + b2, [gate; up] = w13 @ x + b13;
// else out = w2 @ f(w13 @ x + b13) + b2.
struct Layer {
  Matrix w13;  // [N, 2I, H]: gate rows, then up rows, or in turns; not gated: [N, I, H]
  Matrix w2;   // [N, H, I]
  int64_t experts;
  int64_t hidden;
  int64_t intermediate;
  Format format;
  Dtype dtype;
  Activation activation;
  bool gated;
  bool interleaved;  // gate and up rows in turns
  float alpha;
  float beta;
  float limit;  // the gate is at most this, |up| too; infinity for none
  bool router_weight_on_input;
};

// Tokens of a packed group are packed in blocks of this many.
inline constexpr int64_t kPackBlock = 16;

// The tokens of one expert: pairs [begin, begin + count) of the lists in `Work`.
struct Group {
  int64_t expert;
  int64_t begin;
  int64_t count;
  int64_t packed;  // its first block of packed tokens, or -1 if it is not packed
};

// One call's operands. A pair is one (token, expert); pairs are sorted by expert.
// The call computes rows [inner_begin, inner_end) of the intermediate dimension and the partial sum
// they give; b2 belongs to the part that begins at 0.
struct Work {
  const Layer* layer;
  const Group* groups;
  int64_t group_count;
  const int32_t* pair_token;
  const float* pair_weight;
  int64_t tokens;
  const void* source;  // [T, H] in the layer's dtype
  const std::byte* x;  // [T, x_stride] operand elements, made by `prepare`
  int64_t x_stride;
  std::byte* inner;  // [pairs, inner_stride] operand elements: the activated intermediate rows
  int64_t inner_stride;
  std::byte* packed_x;      // operands of packed groups, in the kernels' own layout: kPackBlock
  std::byte* packed_inner;  // columns of bf16 for each of the blocks' tokens and 32 columns
  int64_t inner_begin;
  int64_t inner_end;
  float* sums;  // [T, H]: the output, or scratch when `rounded` is the output
  bool accumulate;
  Bf16* rounded;  // [T, H] or null
};

// The kernels of one instruction set for one format.
struct Kernels {
  // Bytes of one element of `Work::x` and `Work::inner`.
  int64_t operand_bytes;
  // `up` takes rows from multiples of this on, and ends at one or at the last row.
  int64_t inner_align;
  // Rows of `source` ([count, H] in the layer's dtype) to operand rows, padding included.
  void (*prepare)(const Layer& layer, const void* source, int64_t count, std::byte* x,
                  int64_t x_stride);
  // Rows [begin, end) of the intermediate dimension for every token of one group. `buffer` is the
  // thread's own.
  void (*up)(const Work& work, const Group& group, int64_t begin, int64_t end, std::byte* buffer);
  // Columns [begin, end) of the output for every token and every group, in the groups' order.
  void (*down)(const Work& work, int64_t begin, int64_t end, std::byte* buffer);

  // Once every row of a group has been through `up`; null: nothing.
  void (*finish)(const Work& work, const Group& group);

  // Groups of at least this many tokens are packed first; 0: never.
  int64_t packed_tokens;
  // Packs one block of a group.
  void (*pack)(const Work& work, const Group& group, int64_t block);
  // Bytes of a thread's buffer; null: none.
  int64_t (*buffer_bytes)(const Layer& layer);
};

// Each instruction set defines these in its own namespace: one for each kind of format, null where
// the kind is another's. `dtype` is that of kInt4's scales.
#define MOE_DECLARE_KERNELS(isa)                      \
  namespace isa {                                     \
  const Kernels* plain(Format format);                \
  const Kernels* bytes(Format format);                \
  const Kernels* nibbles(Format format, Dtype dtype); \
  }
MOE_DECLARE_KERNELS(scalar)
MOE_DECLARE_KERNELS(avx2)
MOE_DECLARE_KERNELS(avx512)
MOE_DECLARE_KERNELS(avx512_vnni)
MOE_DECLARE_KERNELS(avx512_bf16)
MOE_DECLARE_KERNELS(amx)
#undef MOE_DECLARE_KERNELS

namespace amx_fp16 {
// The format's kernels where they have fp16 products, else null.
const Kernels* bytes(Format format);
}  // namespace amx_fp16

namespace amx {
// Issues `count` tile products (16 by 32 by 16), to find how fast they can be.
void multiply_tiles(int64_t count);
}  // namespace amx

}  // namespace moe
