// What kernels/base/arithmetic.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline unsigned multiply_high(unsigned a, unsigned b) { return unsigned(static_cast<unsigned long long>(a) * b >> 32); }
inline unsigned long long wide_product(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b; }
template <typename T>
inline const T* behind(const T* from, int bytes, int count) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + static_cast<long long>(bytes) * count);
}
inline float between_or_nan(float x, float low, float high) {
  return x >= low && x <= high ? x : as_float(0x7fc00000u);
}
inline float between_or_nan(float x, float low, float high, float& count) {
  count += x >= low && x <= high;
  return between_or_nan(x, low, high);
}
inline float finite_or_nan(float x, float& count) {
  const float most = as_float(0x7f7fffffu);
  return between_or_nan(x, -most, most, count);
}
inline void count_up_to(float x, float to, float& count, float& most, float& least) {
  if (x <= to) count += 1, most = std::fmax(most, x);
  else least = std::fmin(least, x);
}
inline float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }
inline unsigned largest_of_warp(unsigned x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, x, distance);
    x = x > other ? x : other;
  }
  return x;
}
inline unsigned sum_of_warp(unsigned x) {
  for (int distance = 1; distance < kWarp; distance *= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

inline unsigned larger_halves(unsigned a, unsigned b) {
  auto half_of = [](unsigned word, int i) { return half_to_float(static_cast<unsigned short>(word >> 16 * i)); };
  return floats_to_halves(std::fmax(half_of(a, 0), half_of(b, 0)), std::fmax(half_of(a, 1), half_of(b, 1)));
}

}  // namespace cupynorm
