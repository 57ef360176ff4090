// Arithmetic that takes one instruction where C++ has several, or none.
#pragma once
#include <base/convert.cuh>

namespace cupynorm {

#ifdef __CUDACC_RTC__

// 2^x with a relative error of 2^-22; subnormal results are flushed to zero.
inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) with an absolute error of 2^-22 near 1 and a relative one elsewhere.
inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both halves of a product in one instruction: of 64 bits that are known to be 32 the compiler multiplies both halves.
inline unsigned long long wide_product(unsigned a, unsigned b) {
  unsigned long long product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// The address `count` times some bytes behind another, in one instruction: of a known count the compiler would make two
// additions in place of the product.
template <typename T>
inline const T* behind(const T* from, int bytes, int count) {
  const T* place;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(place) : "r"(bytes), "r"(count), "l"(from));
  __builtin_assume(__isGlobal(place));
  return place;
}

// a * b, both halves
inline unsigned multiply_high(unsigned a, unsigned b) { return __umulhi(a, b); }

// x if it is from low up to high, or if it is finite, and 1 is added to count; else nan. Each predicate is used where
// it is found: a thread has seven, and the compiler would keep those of 32 elements as bits.
inline float between_or_nan(float x, float low, float high) {
  float y;
  asm("{\n\t.reg .pred p;\n\tsetp.ge.ftz.f32 p, %1, %2;\n\tsetp.le.and.ftz.f32 p, %1, %3, p;\n\t"
      "selp.f32 %0, %1, 0f7FC00000, p;\n\t}" : "=f"(y) : "f"(x), "f"(low), "f"(high));
  return y;
}
inline float between_or_nan(float x, float low, float high, float& count) {
  float y;
  asm("{\n\t.reg .pred p;\n\tsetp.ge.ftz.f32 p, %2, %3;\n\tsetp.le.and.ftz.f32 p, %2, %4, p;\n\t"
      "selp.f32 %0, %2, 0f7FC00000, p;\n\t@p add.ftz.f32 %1, %1, 0f3F800000;\n\t}"
      : "=f"(y), "+f"(count) : "f"(x), "f"(low), "f"(high));
  return y;
}
inline float finite_or_nan(float x, float& count) {
  float y;
  asm("{\n\t.reg .pred p;\n\t.reg .f32 size;\n\tabs.ftz.f32 size, %2;\n\tsetp.lt.ftz.f32 p, size, 0f7F800000;\n\t"
      "selp.f32 %0, %2, 0f7FC00000, p;\n\t@p add.ftz.f32 %1, %1, 0f3F800000;\n\t}"
      : "=f"(y), "+f"(count) : "f"(x));
  return y;
}

// Counts x if it is no larger than `to`. most: the largest of those that are counted; least: the least of the others.
// nan leaves all of them as they are.
inline void count_up_to(float x, float to, float& count, float& most, float& least) {
  asm("{\n\t.reg .pred p;\n\tsetp.le.ftz.f32 p, %3, %4;\n\t@p add.ftz.f32 %0, %0, 0f3F800000;\n\t"
      "@p max.ftz.f32 %1, %1, %3;\n\t@!p min.ftz.f32 %2, %2, %3;\n\t}"
      : "+f"(count), "+f"(most), "+f"(least) : "f"(x), "f"(to));
}

// The larger number of each half of two words; of a number and nan the number.
inline unsigned larger_halves(unsigned a, unsigned b) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
#else
  auto half_of = [](unsigned word, int i) { return half_to_float(static_cast<unsigned short>(word >> 16 * i)); };
  return floats_to_halves(fmaxf(half_of(a, 0), half_of(b, 0)), fmaxf(half_of(a, 1), half_of(b, 1)));
#endif
}

// The larger, nan if either is: unlike fmaxf, which costs the same.
inline float larger_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float c;
  asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return a > b || a != a ? a : b;
#endif
}

// Over the 32 lanes of a warp, all of which call: one instruction for the five exchanges of before sm_80.
inline unsigned largest_of_warp(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, x, distance);
    x = x > other ? x : other;
  }
  return x;
#endif
}
inline unsigned sum_of_warp(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, x);
#else
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
#endif
}

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(arithmetic)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
