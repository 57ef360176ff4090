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

// Two neighbouring elements of kBytes, or one, to and from the low bytes of a word, or of two words: in one access that
// is aligned to two elements, or to one. No branch: most threads of a warp have two.
#define CUPYNORM_ONE_OR_TWO(ACCESS) "{ .reg .pred both; setp.ne.u32 both, %1, 0;" ACCESS " }"
template <int kBytes>
inline void load_one_or_two(const void* from, bool both, unsigned* word) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  const auto place = __cvta_generic_to_global(from);
  if constexpr (kBytes == 1)
    asm volatile(CUPYNORM_ONE_OR_TWO("@both ld.global.u16 %0, [%2]; @!both ld.global.u8 %0, [%2];")
        : "=r"(word[0]) : "r"(unsigned(both)), "l"(place));
  else if constexpr (kBytes == 2)
    asm volatile(CUPYNORM_ONE_OR_TWO("@both ld.global.u32 %0, [%2]; @!both ld.global.u16 %0, [%2];")
        : "=r"(word[0]) : "r"(unsigned(both)), "l"(place));
  else
    asm volatile(
        "{ .reg .pred both; setp.ne.u32 both, %2, 0; mov.u32 %1, 0;"
        " @both ld.global.v2.u32 {%0, %1}, [%3]; @!both ld.global.u32 %0, [%3]; }"
        : "=r"(word[0]), "=r"(word[1]) : "r"(unsigned(both)), "l"(place));
}
template <int kBytes>
inline void store_one_or_two(void* to, bool both, const unsigned* word) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  const auto place = __cvta_generic_to_global(to);
  if constexpr (kBytes == 1)
    asm volatile(CUPYNORM_ONE_OR_TWO("@both st.global.u16 [%2], %0; @!both st.global.u8 [%2], %0;")
        ::"r"(word[0]), "r"(unsigned(both)), "l"(place) : "memory");
  else if constexpr (kBytes == 2)
    asm volatile(CUPYNORM_ONE_OR_TWO("@both st.global.u32 [%2], %0; @!both st.global.u16 [%2], %0;")
        ::"r"(word[0]), "r"(unsigned(both)), "l"(place) : "memory");
  else
    asm volatile(
        "{ .reg .pred both; setp.ne.u32 both, %2, 0;"
        " @both st.global.v2.u32 [%3], {%0, %1}; @!both st.global.u32 [%3], %0; }"
        ::"r"(word[0]), "r"(word[1]), "r"(unsigned(both)), "l"(place) : "memory");
}
#undef CUPYNORM_ONE_OR_TWO

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
