#include "kernels/isa.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#ifdef MOE_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moe {
namespace {

#ifdef MOE_X86

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

bool bit(uint32_t value, int index) { return (value >> index & 1u) != 0; }

// The register state that the operating system saves on a context switch (XCR0).
uint64_t os_state() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE: xgetbv may not be executed without it
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// A CPU flag alone is not enough: without the operating system's share the registers are lost.
bool has_avx2() {
  constexpr uint64_t kYmm = 0x6;  // SSE and AVX state
  const Registers basic = cpuid(1, 0);
  return (os_state() & kYmm) == kYmm && bit(basic.c, 28) /* AVX */ && bit(basic.c, 12) /* FMA */ &&
         bit(basic.c, 29) /* F16C */ && bit(cpuid(7, 0).b, 5) /* AVX2 */;
}

bool has_avx512() {
  constexpr uint64_t kZmm = 0xe6;  // SSE, AVX, mask and both halves of the ZMM state
  const uint32_t flags = cpuid(7, 0).b;
  return has_avx2() && (os_state() & kZmm) == kZmm && bit(flags, 16) /* F */ &&
         bit(flags, 17) /* DQ */ && bit(flags, 30) /* BW */ && bit(flags, 31) /* VL */;
}

// Skylake-X has AVX-512 without these, Cascade Lake without VBMI: there has_avx512's kernels serve.
bool has_avx512_vnni() {
  const uint32_t flags = cpuid(7, 0).c;
  return has_avx512() && bit(flags, 1) /* VBMI */ && bit(flags, 11) /* VNNI */;
}

bool has_avx512_bf16() {
  return has_avx512() && bit(cpuid(7, 1).a, 5) /* BF16 */ && bit(cpuid(7, 0).c, 11) /* VNNI */;
}

bool has_avx512_fp16() { return has_avx512() && bit(cpuid(7, 0).d, 23) /* FP16 */; }

#ifdef MOE_EMULATE_AMX

bool has_amx() { return has_avx512_bf16(); }
bool may_use_tiles() { return true; }

#else

// Linux gives a process the large tile state only when it asks for it.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
  constexpr uint64_t kTiles = 0x60000;  // tile configuration and data
  const uint32_t flags = cpuid(7, 0).d;
  return has_avx512_vnni() && has_avx512_bf16() && (os_state() & kTiles) == kTiles &&
         bit(flags, 22) /* AMX-BF16 */ && bit(flags, 24) /* AMX-TILE */;
}

#endif

#endif

// The first of the three kinds that has the format; null where the set leaves it to another.
#define MOE_FIND(isa, format, dtype)                   \
  isa::plain(format) != nullptr   ? isa::plain(format) \
  : isa::bytes(format) != nullptr ? isa::bytes(format) \
                                  : isa::nibbles(format, dtype)

const Kernels* scalar_kernels(Format format, Dtype dtype) {
  return MOE_FIND(scalar, format, dtype);
}

#ifdef MOE_X86

const Kernels* avx2_kernels(Format format, Dtype dtype) { return MOE_FIND(avx2, format, dtype); }

const Kernels* avx512_kernels(Format format, Dtype dtype) {
  return MOE_FIND(avx512, format, dtype);
}

// Products of 16 bits, whole numbers or bf16, would round activations that are finer than bf16. The
// set has kernels of its own for nibbles and INT8.
const Kernels* avx512_vnni_kernels(Format format, Dtype dtype) {
  if (dtype == Dtype::kBf16) {
    if (const Kernels* own = avx512_vnni::nibbles(format, dtype); own != nullptr) return own;
    if (const Kernels* own = avx512_vnni::bytes(format); own != nullptr) return own;
  }
  return avx512_kernels(format, dtype);
}

const Kernels* avx512_bf16_kernels(Format format, Dtype dtype) {
  const Kernels* own = dtype == Dtype::kBf16 ? MOE_FIND(avx512_bf16, format, dtype) : nullptr;
  return own != nullptr ? own : avx512_kernels(format, dtype);
}

// Every CPU with tiles has fp16 too; a virtual one may lack it, and so do those that emulate tiles.
const Kernels* amx_kernels(Format format, Dtype dtype) {
  static const bool is_fp16 = has_avx512_fp16();
  if (dtype == Dtype::kBf16 && is_fp16) {
    if (const Kernels* own = amx_fp16::bytes(format); own != nullptr) return own;
  }
  const Kernels* own = dtype == Dtype::kBf16 ? MOE_FIND(amx, format, dtype) : nullptr;
  return own != nullptr ? own : avx512_bf16_kernels(format, dtype);
}

#endif
#undef MOE_FIND

std::vector<Isa> detect() {
  std::vector<Isa> found{{"scalar", scalar_kernels, nullptr, nullptr}};
#ifdef MOE_X86
  if (has_avx2()) found.push_back({"avx2", avx2_kernels, nullptr, nullptr});
  if (has_avx512()) found.push_back({"avx512", avx512_kernels, nullptr, nullptr});
  if (has_avx512_vnni()) found.push_back({"avx512_vnni", avx512_vnni_kernels, nullptr, nullptr});
  if (has_avx512_bf16()) found.push_back({"avx512_bf16", avx512_bf16_kernels, nullptr, nullptr});
  if (has_amx()) found.push_back({"amx", amx_kernels, amx::multiply_tiles, may_use_tiles});
#endif
  return found;
}

}  // namespace

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

const Isa& select_isa(const std::string& name) {
  const std::vector<Isa>& isas = available_isas();
  if (name.empty()) {
    const auto usable = [](const Isa& isa) { return isa.acquire == nullptr || isa.acquire(); };
    return *std::find_if(isas.rbegin(), isas.rend(), usable);
  }
  std::string known;
  for (const Isa& isa : isas) {
    if (name == isa.name) {
      if (isa.acquire == nullptr || isa.acquire()) return isa;
      throw std::invalid_argument("the operating system refuses this process the state of '" +
                                  name + "': name another, or none for the fastest that it allows");
    }
    known += (known.empty() ? "" : ", ") + std::string(isa.name);
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is not available on this host (it has: " + known +
                              "); name one of those, or none for the fastest");
}

}  // namespace moe
