// Accesses of global memory: wide ones, and hints for the caches.
#pragma once

namespace cupynorm {

#ifdef __CUDACC_RTC__

// One store of 8 or 16 bytes to global memory.
inline void store_pair(void* to, unsigned a, unsigned b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b) : "memory");
}
inline void store_quad(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b), "r"(c),
      "r"(d) : "memory");
}

// One number to global memory, where the compiler may have lost that it is there: that of sm_120 does, and for others
// to be told so costs registers.
template <typename T>
inline void store_number(T* to, T value) {
#if __CUDA_ARCH__ >= 1200
  __builtin_assume(__isGlobal(to));
#endif
  *to = value;
}

// One load of 16 bytes that caches keep longer than others, or give up before others; from sm_80 on.
#if __CUDA_ARCH__ >= 800
#define CUPYNORM_LOAD_QUAD(PRIORITY)                                                              \
  asm volatile(                                                                                   \
      "{ .reg .b64 policy; createpolicy.fractional.L2::" PRIORITY ".b64 policy, 1.0;"             \
      " ld.global.L1::" PRIORITY ".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy; }"       \
      : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])                                \
      : "l"(__cvta_generic_to_global(from)))
#else
#define CUPYNORM_LOAD_QUAD(PRIORITY)                                 \
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"            \
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) \
               : "l"(__cvta_generic_to_global(from)))
#endif
inline void load_quad_evicted_last(const void* from, unsigned* word) { CUPYNORM_LOAD_QUAD("evict_last"); }
inline void load_quad_evicted_first(const void* from, unsigned* word) { CUPYNORM_LOAD_QUAD("evict_first"); }
#undef CUPYNORM_LOAD_QUAD

// So that who looks for what lies there finds it in the L2 cache: from memory it would come too late.
inline void prefetch_to_l2(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(place)));
}

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(memory)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
