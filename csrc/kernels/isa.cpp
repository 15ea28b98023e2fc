#include "kernels/isa.h"

#include <cstdint>
#include <stdexcept>

#ifdef MOE_X86
#include <cpuid.h>
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

bool has_avx512_bf16() {
  return has_avx512() && bit(cpuid(7, 1).a, 5) /* BF16 */ && bit(cpuid(7, 0).c, 11) /* VNNI */;
}

#endif

#define MOE_ALL_FORMATS(isa)                                         \
  [](Format format, Dtype dtype) {                                   \
    if (const Kernels* kernels = isa::plain(format)) return kernels; \
    if (const Kernels* kernels = isa::bytes(format)) return kernels; \
    return isa::nibbles(format, dtype);                              \
  }

std::vector<Isa> detect() {
  std::vector<Isa> found{{"scalar", MOE_ALL_FORMATS(scalar)}};
#ifdef MOE_X86
  if (has_avx2()) found.push_back({"avx2", MOE_ALL_FORMATS(avx2)});
  if (has_avx512()) found.push_back({"avx512", MOE_ALL_FORMATS(avx512)});
  if (has_avx512_bf16()) {
    found.push_back({"avx512_bf16", [](Format format, Dtype dtype) {
                       const Kernels* own = avx512_bf16::plain(format);
                       return own != nullptr ? own : MOE_ALL_FORMATS(avx512)(format, dtype);
                     }});
  }
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
  if (name.empty()) return isas.back();
  std::string known;
  for (const Isa& isa : isas) {
    if (name == isa.name) return isa;
    known += (known.empty() ? "" : ", ") + std::string(isa.name);
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is not available on this host (it has: " + known +
                              "); unset VLLM_MOE_OFFLOAD_ISA to take the fastest");
}

}  // namespace moe
