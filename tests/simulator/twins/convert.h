// What kernels/base/convert.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline unsigned as_bits(float x) { return same_bits<unsigned>(x); }
inline float as_float(unsigned bits) { return same_bits<float>(bits); }
inline double as_double(unsigned low, unsigned high) {
  return same_bits<double>(low | static_cast<unsigned long long>(high) << 32);
}
inline unsigned low_word(double x) { return unsigned(same_bits<unsigned long long>(x)); }
inline unsigned high_word(double x) { return unsigned(same_bits<unsigned long long>(x) >> 32); }

inline float half_to_float(unsigned short bits) {
  unsigned sign = unsigned(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // inf, nan
  // 2^112 moves the exponent's bias from 15 to 127, and turns a subnormal half into a normal float
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

inline unsigned short double_to_half(double x) {
  unsigned short sign = std::signbit(x) ? 0x8000 : 0;
  double magnitude = std::fabs(x);
  if (magnitude != magnitude) return sign | 0x7fff;
  // halfway to the number after the largest: ties to even, which is inf
  if (magnitude >= 65520.0) return sign | 0x7c00;
  int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  // ties to even; 1024..2048, or less if subnormal
  double scaled = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return sign | static_cast<unsigned short>(int(scaled) + (exponent + 14) * 1024);
}

inline unsigned short float_to_half(float x) { return double_to_half(x); }

inline float double_to_float_toward_zero(double x) {
  float nearest = float(x);
  return std::fabs(nearest) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

inline unsigned floats_to_halves(float low, float high) {
  return float_to_half(low) | unsigned(float_to_half(high)) << 16;
}

inline int float_to_int(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : int(std::nearbyint(x));
}
inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> 4 * i & 15, byte = unsigned(both >> 8 * (digit & 7) & 0xff);
    chosen |= (digit < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * i;
  }
  return chosen;
}
inline unsigned bits_of_sum(float x) { return x != x ? 0x7fffffffu : as_bits(x); }

}  // namespace cupynorm
