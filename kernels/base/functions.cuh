// The functions that a user's expression may call (cupynorm/functions.py), for float and double. Each is fn_ and its
// name there. In float: a few units of the last place, in instructions that leave a 16-bit kernel its bandwidth;
// subnormals are flushed.
#pragma once
#include <base/math.cuh>

namespace cupynorm {

// A constant by its bits, as float and as double (not as a double that is converted: the compiler would leave that to
// the device).
template <typename T>
inline T fn_constant(unsigned single, unsigned low, unsigned high) {
  if constexpr (sizeof(T) == sizeof(float)) return as_float(single);
  else return as_double(low, high);
}

inline float fn_abs(float x) { return magnitude(x); }
inline double fn_abs(double x) { return magnitude(x); }

// nan if either is nan, unlike fminf and fmaxf
template <typename T>
inline T fn_minimum(T a, T b) {
  return a < b || a != a ? a : b;
}
template <typename T>
inline T fn_maximum(T a, T b) {
  return a > b || a != a ? a : b;
}

// The same with a limit that is not nan: one comparison passes on x's.
template <typename T>
inline T fn_at_most(T x, T limit) {
  return x > limit ? limit : x;
}
template <typename T>
inline T fn_at_least(T x, T limit) {
  return x < limit ? limit : x;
}

// 2 units of the last place. The approximate reciprocal of what is above 2^126 is flushed to 0, so from 2^125 both are
// made smaller.
inline float fn_divide(float a, float b) {
  const float scale = magnitude(b) >= 4.2535296e37f ? 0.25f : 1.0f;
  return a * scale * reciprocal_approx(b * scale);
}
inline double fn_divide(double a, double b) { return a / b; }

// 1 unit of the last place, for numbers of float16: their reciprocals are no subnormals.
inline float fn_half_reciprocal(float x) { return reciprocal_approx(x); }
inline double fn_half_reciprocal(double x) { return 1 / x; }

inline float fn_exp(float x) { return expf(x); }
inline double fn_exp(double x) { return exp(x); }

inline float fn_log(float x) { return logf(x); }
inline double fn_log(double x) { return log(x); }

// x / sqrt(x), which is nan for 0 and inf
inline float fn_sqrt(float x) { return x == 0.0f || x == infinity<float>() ? x : x * reciprocal_root(x); }
inline double fn_sqrt(double x) { return sqrt(x); }

inline float fn_rsqrt(float x) { return reciprocal_root(x); }
inline double fn_rsqrt(double x) { return reciprocal_root(x); }

inline float fn_tanh(float x) { return tanhf(x); }
inline double fn_tanh(double x) { return tanh(x); }

inline float fn_erf(float x) { return erff(x); }
inline double fn_erf(double x) { return erf(x); }

inline float fn_sigmoid(float x) { return reciprocal_approx(1.0f + exponential(-x)); }
inline double fn_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// The activations give nan for -inf, as in PyTorch: -inf times 0.
template <typename T>
inline T fn_silu(T x) {
  return x * fn_sigmoid(x);
}

// The derivative p + x p q, where p is the sigmoid of x and q that of -x. Nothing cancels, and q is 1 where its parts
// are 0 and inf. 8 instructions.
inline float fn_silu_slope(float x) {
  const float e = exponential(-x), p = reciprocal_approx(1.0f + e), q = fminf(e * p, 1.0f);
  return multiply_add(x * p, q, p);
}
inline double fn_silu_slope(double x) {
  const double p = fn_sigmoid(x), q = fn_sigmoid(-x);
  return multiply_add(x * p, q, p);
}

// (1 + tanh(z)) / 2 is sigmoid(2 z), without the cancellation where tanh(z) is near -1.
inline float fn_gelu_tanh(float x) {
  // 2 sqrt(2 / pi) log2(e), and 0.044715 times that
  const float power = x * multiply_add(x * x, -0.10294324f, -2.3022082f);
  return x * reciprocal_approx(1.0f + exp2_approx(power));
}
inline double fn_gelu_tanh(double x) {
  return x * fn_sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x));
}

// x Phi(x) = max(x, 0) - |x| Q(|x|), where Q(a) = exp(-a^2 / 2) g(a) is the normal distribution's upper tail: no 1 +
// erf cancels. g(a) = erfc(a / sqrt(2)) exp(a^2 / 2) / 2 falls slowly; it is a polynomial in 1 / (1 + 0.34 a), whose
// relative error is at most 9.1e-8 (1 + a^2 / 8) up to a = 13.3, where Q is subnormal (least squares, reweighted until
// the error is level). With those of the reciprocal and of exp2 the result's relative error is 1e-6 down to x = -2,
// 2e-6 at -5.5 and 1e-5 at -13. 17 instructions; with erff they are 30.
inline float upper_tail_factor(float a) {
  const float t = reciprocal_approx(multiply_add(a, 0.34f, 1.0f));
  float g = 0.048413966f;
  g = multiply_add(g, t, -0.21652116f);
  g = multiply_add(g, t, 0.29371634f);
  g = multiply_add(g, t, -0.06018315f);
  g = multiply_add(g, t, 0.17343874f);
  g = multiply_add(g, t, 0.12423105f);
  g = multiply_add(g, t, 0.136969f);
  return multiply_add(g, t, -6.474122e-05f);
}
inline float fn_gelu(float x) {
  const float a = magnitude(x), g = upper_tail_factor(a);
  const float e = exp2_approx(x * -0.72134752f * x);
  // 14: inf times 0 would be nan; nan is e's to pass on, fminf drops it. What is subtracted is all of x or nothing, and
  // nan of -inf
  return multiply_add(-fminf(a, 14.0f) * e, g, x - fminf(x, 0.0f));
}
inline double fn_gelu(double x) { return x * (0.5 * erfc(x * -0.70710678118654752)); }

// The derivative Phi(x) + x phi(x) = [x >= 0] + sign(-x) exp(-a^2 / 2) (g(a) - a / sqrt(2 pi)), of the same g. Its
// error is at most 2.3e-7, and relative to it 3.6e-6 down to x = -8 but next to its root at -0.75. 17 instructions.
inline float fn_gelu_slope(float x) {
  const float a = magnitude(x), h = multiply_add(a, -0.39894228f, upper_tail_factor(a));
  const float part = exp2_approx(x * -0.72134752f * x) * h;
  return x < 0.0f ? part : 1.0f - part;
}
inline double fn_gelu_slope(double x) {
  return multiply_add(x * 0.39894228040143268, exp(-0.5 * x * x), 0.5 * erfc(x * -0.70710678118654752));
}

inline float fn_cast_float16(float x) { return half_to_float(float_to_half(x)); }
inline double fn_cast_float16(double x) { return double(half_to_float(double_to_half(x))); }

inline float fn_cast_bfloat16(float x) { return bfloat16_to_float(float_to_bfloat16(x)); }
inline double fn_cast_bfloat16(double x) {
  return double(bfloat16_to_float(float_to_bfloat16(double_to_float_to_odd(x))));
}

inline float fn_cast_float32(float x) { return x; }
inline double fn_cast_float32(double x) { return double(float(x)); }

}  // namespace cupynorm
