// Numbers as bits, and conversions between the types of elements.
#pragma once
#include <base/types.cuh>

namespace cupynorm {

#ifdef __CUDACC_RTC__

inline unsigned as_bits(float x) { return __float_as_uint(x); }
inline float as_float(unsigned bits) { return __uint_as_float(bits); }
inline double as_double(unsigned low, unsigned high) { return __hiloint2double(int(high), int(low)); }
inline unsigned low_word(double x) { return unsigned(__double2loint(x)); }
inline unsigned high_word(double x) { return unsigned(__double2hiint(x)); }

inline float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

inline unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

inline unsigned short double_to_half(double x) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
  return bits;
}

inline float double_to_float_toward_zero(double x) { return __double2float_rz(x); }

// Two values in one word, the first in the low half: one instruction from sm_80 on.
inline unsigned floats_to_halves(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return float_to_half(low) | unsigned(float_to_half(high)) << 16;
#endif
}

// The nearest integer, to even in the middle; 0 for nan, the nearest int for what is beyond.
inline int float_to_int(float x) { return __float2int_rn(x); }

// Four bytes of a (0 to 3) and b (4 to 7), the lowest first: one for each digit of the selector; of a digit from 8 on,
// its top bit eight times.
inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  unsigned chosen;  // __byte_perm leaves a digit's top bit out
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(a), "r"(b), "r"(selector));
  return chosen;
}

// The bits of an arithmetic result: a nan has no sign then.
inline unsigned bits_of_sum(float x) { return as_bits(x); }

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(convert)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

inline float bfloat16_to_float(unsigned short bits) { return as_float(unsigned(bits) << 16); }

inline unsigned short float_to_bfloat16(float x) {
  unsigned bits = as_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // nan
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline unsigned floats_to_bfloat16s(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return float_to_bfloat16(low) | unsigned(float_to_bfloat16(high)) << 16;
#endif
}

// A double rounded to odd: rounding the result once more, to fewer bits, equals rounding the double once.
inline float double_to_float_to_odd(double x) {
  float truncated = double_to_float_toward_zero(x);
  return double(truncated) == x || x != x ? truncated : as_float(as_bits(truncated) | 1);
}

// -128 to 127: beyond them the nearest; 0 for nan. In the low byte.
inline unsigned float_to_int8(float x) {
  const int i = float_to_int(x);
  return unsigned(i < -128 ? -128 : i > 127 ? 127 : i) & 0xff;
}

inline unsigned floats_to_int8s(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 720
  unsigned word;
  asm("{\n.reg .b32 high;\ncvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\ncvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n}"
      : "=r"(word)
      : "r"(float_to_int(a)), "r"(float_to_int(b)), "r"(float_to_int(c)), "r"(float_to_int(d)));
  return word;
#else
  return float_to_int8(a) | float_to_int8(b) << 8 | float_to_int8(c) << 16 | float_to_int8(d) << 24;
#endif
}

// The same of numbers within -127 to 127, two instructions less for each four: in 1.5 * 2^23 + x the last place is 1.
constexpr float kLastPlaceIsOne = 12582912.0f;
constexpr unsigned kLowBytes = 0x40, kTopSigns = 0xfb;  // what of two such sums: their low bytes, or 0 in place of them
inline unsigned bytes_of(float a, float b, float c, float d, unsigned what) {
  const unsigned low = permute_bytes(bits_of_sum(a), bits_of_sum(b), what),
      high = permute_bytes(bits_of_sum(c), bits_of_sum(d), what);
  return permute_bytes(low, high, 0x5410);
}

// A number of 8 bits: sign, exponent, kFraction bits; kLargest is the largest finite one, which larger ones become, inf
// too. nan is 0x7f.
template <int kFraction, int kBias, unsigned kLargest>
inline unsigned float_to_float8(float x) {
  constexpr int kDropped = 23 - kFraction;
  const unsigned bits = as_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  unsigned rounded;
  if (magnitude < unsigned(128 - kBias) << 23) {  // subnormal: the sum's last place is the unit of those
    const float unit = as_float(unsigned(128 - kBias - kFraction + 23) << 23);
    rounded = as_bits(as_float(magnitude) + unit) - as_bits(unit);
  } else {
    rounded = (magnitude + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1)) >> kDropped;
    rounded -= unsigned(127 - kBias) << kFraction;
  }
  return sign | (rounded < kLargest ? rounded : kLargest);
}

inline unsigned floats_to_e4m3s(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_float8<3, 7, 0x7e>(low) | float_to_float8<3, 7, 0x7e>(high) << 8;
#endif
}
inline unsigned floats_to_e5m2s(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_float8<2, 15, 0x7b>(low) | float_to_float8<2, 15, 0x7b>(high) << 8;
#endif
}

}  // namespace cupynorm
