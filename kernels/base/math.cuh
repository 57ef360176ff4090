// The few functions that ops are made of, for both compute types: float (approximate where that is enough) and double.
#pragma once
#include <base/arithmetic.cuh>

namespace cupynorm {

template <bool kNarrow, typename Narrow, typename Wide>
struct Conditional {
  using Type = Wide;
};
template <typename Narrow, typename Wide>
struct Conditional<true, Narrow, Wide> {
  using Type = Narrow;
};

// The numbers of an element that an op needs several of: a backward op has two, such as the gradient and the result.
template <typename T, int kFields>
struct Fields {
  T of[kFields];
};

// An element: one number or Fields. Number: the type of each. of(fields, i): element i of arrays of one field each.
// field(element, k) is number k.
template <typename Element>
struct ElementTraits {
  using Number = Element;
  static constexpr int kFields = 1;
  template <int N>
  static Element of(const Element (&fields)[1][N], int i) {
    return fields[0][i];
  }
};
template <typename T, int kCount>
struct ElementTraits<Fields<T, kCount>> {
  using Number = T;
  static constexpr int kFields = kCount;
  template <int N>
  static Fields<T, kCount> of(const T (&fields)[kCount][N], int i) {
    Fields<T, kCount> element;
#pragma unroll
    for (int k = 0; k < kCount; ++k) element.of[k] = fields[k][i];
    return element;
  }
};
template <typename T>
inline T& field(T& element, int) {
  return element;
}
template <typename T, int kFields>
inline T& field(Fields<T, kFields>& element, int k) {
  return element.of[k];
}
template <typename T, int kFields>
inline const T& field(const Fields<T, kFields>& element, int k) {
  return element.of[k];
}

// Room for N elements whose results are numbers in an array: none of its own where an element is one number, because
// results then take the places of their elements.
template <typename Element, int N>
struct ElementsOf {
  Element own[N];
  template <typename T>
  Element (&over(T (&)[N]))[N] {
    return own;
  }
};
template <int N>
struct ElementsOf<float, N> {
  static float (&over(float (&results)[N]))[N] { return results; }
};
template <int N>
struct ElementsOf<double, N> {
  static double (&over(double (&results)[N]))[N] { return results; }
};

// What one element is to an op: Op::Element, or Op::Compute where the op does not say.
template <class Op, class = void>
struct ElementOfOp {
  using Type = typename Op::Compute;
};
template <class Op>
struct ElementOfOp<Op, decltype(void(sizeof(typename Op::Element)))> {
  using Type = typename Op::Element;
};
template <class Op>
using ElementOf = typename ElementOfOp<Op>::Type;

// Which of a thread's elements count: the first `count`, kAlwaysValid of them for certain; and, behind all vectors,
// kEdge more, of the row's head or tail, if has_edge.
// kAccumulators: how many independent accumulators a thread adds up in, in turn. An addition waits for the one before
// it. Where a multiprocessor has few warps, and so nothing to fill the wait, two accumulators are faster than one
// (docs/notes/048, "Independent accumulators").
template <int kAlwaysValid, int kEdge = 0, int kAccumulators_ = 1>
struct Predicate {
  static constexpr int kAccumulators = kAccumulators_, kKept = 0;  // kKept: see AllKept
  int count;
  bool has_edge;

  template <int N>
  bool has(int i) const {
    return i < kAlwaysValid || (i < N - kEdge ? i < count : has_edge);
  }
  template <int N>
  bool all() const {
    return kAlwaysValid == N || (count == N - kEdge && (kEdge == 0 || has_edge));
  }
  int total() const { return count + (kEdge > 0 && has_edge ? kEdge : 0); }
};

// The same where a mask may drop elements, of which it keeps the first kKept_.
template <int kKept_>
struct AllKept : Predicate<kKept_> {
  static constexpr int kKept = kKept_;
  bool operator()(int) const { return true; }
};

template <typename T, int N>
inline T sum_of(const T (&x)[N]) {
  T sum = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) sum += x[i];
  return sum;
}

template <typename T>
inline T infinity() {
  return T(as_float(0x7f800000));
}

inline float exponential(float x) { return exp2_approx(x * 1.4426950408889634f); }
inline double exponential(double x) { return exp(x); }

inline float logarithm(float x) { return log2_approx(x) * 0.6931471805599453f; }
inline double logarithm(double x) { return log(x); }

// One Newton step after the approximation: half an ulp, for finite x other than 0.
inline float reciprocal(float x) {
  float r = reciprocal_approx(x);
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}
inline double reciprocal(double x) { return 1.0 / x; }

// A count that the compiler knows, and one part of so many: no division where it does.
template <int kCount>
struct Constant {
  constexpr operator int() const { return kCount; }
};
template <typename T, typename Count>
inline T one_of(Count count) {
  return reciprocal(T(count));
}
template <typename T, int kCount>
inline T one_of(Constant<kCount>) {
  return T(1) / kCount;
}

inline float reciprocal_root(float x) { return rsqrtf(x); }
inline double reciprocal_root(double x) { return 1.0 / sqrt(x); }

inline float magnitude(float x) { return fabsf(x); }
inline double magnitude(double x) { return fabs(x); }

inline float larger(float a, float b) { return fmaxf(a, b); }
inline double larger(double a, double b) { return fmax(a, b); }

inline double larger_or_nan(double a, double b) { return a > b || a != a ? a : b; }

inline unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned long long larger(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

inline unsigned magnitude_bits(float x) { return as_bits(x) & 0x7fffffffu; }
inline unsigned long long magnitude_bits(double x) {
  return static_cast<unsigned long long>(high_word(x) & 0x7fffffffu) << 32 | low_word(x);
}
inline float from_bits(unsigned bits) { return as_float(bits); }
inline double from_bits(unsigned long long bits) { return as_double(unsigned(bits), unsigned(bits >> 32)); }

// Bits in the order of the numbers, -inf's first, nan's behind inf's (or, with a sign, before -inf's); and back.
inline unsigned ordered_bits(float x) {
  const unsigned bits = as_bits(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float from_ordered_bits(unsigned bits) { return as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits); }

inline float smaller(float a, float b) { return fminf(a, b); }
inline double smaller(double a, double b) { return fmin(a, b); }

inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

}  // namespace cupynorm
