// Which elements of a row count in its statistics, and how much: for ops that leave out what is missing.
#pragma once
#include <ops/contract.cuh>

namespace cupynorm {

// ALL: those that there are. MARKED: those that no mask drops. NUMBERS: those that are not nan, either. WEIGHTED: an
// element comes with its weight, as Fields<T, 2>, and counts as often as that says: not at all where it is 0. BYTES:
// all that there are, each of them a whole number of 8 bits.
constexpr int kBytesCount = -1, kAllCount = 0, kMarkedCount = 1, kNumbersCount = 2, kWeightsCount = 3;

// What stands for an element that does not count: a nan that no arithmetic makes, and no conversion from 16 bits. An x
// of float or double that holds these very bits where a mask keeps it counts as dropped.
inline float missing(float) { return as_float(0x7fc5a5a5u); }
inline double missing(double) { return as_double(0xa5a5a5a5u, 0x7ff8a5a5u); }
inline bool is_missing(float x) { return as_bits(x) == 0x7fc5a5a5u; }
inline bool is_missing(double x) { return high_word(x) == 0x7ff8a5a5u && low_word(x) == 0xa5a5a5a5u; }

template <typename T>
inline T not_a_number() {
  return T(as_float(0x7fc00000u));
}

// x / sqrt(x) is nan for 0 and inf.
inline float root(float x) { return x == 0.0f || x == infinity<float>() ? x : x * reciprocal_root(x); }
inline double root(double x) { return sqrt(x); }

// x / by, given 1 / by; a reciprocal of 0 gives 0. One step of Newton's after the product, so that x / x is 1.
template <typename T>
inline T quotient_of(T x, T by, T reciprocal_of_by) {
  const T near = x * reciprocal_of_by;
  return multiply_add(multiply_add(-near, by, x), reciprocal_of_by, near);
}

// kZero: what does not count is 0, and so adds nothing.
template <typename T, int kCounts, bool kZero = false>
struct Keeping {
  using Element = T;
  static constexpr bool kMasked = kCounts > kAllCount;
  static T padding() { return kZero || kCounts <= kAllCount ? T(0) : missing(T()); }
  static T value(T x) { return x; }
  // An element that a mask has marked as missing stays marked.
  static void subtract(T& x, T from) {
    if constexpr (kCounts == kMarkedCount) x = is_missing(x) ? x : x - from;
    else x -= from;
  }
  // How much element i of N counts.
  template <int N, class Predicate>
  static T weight(Predicate valid, int i, T x) {
    if constexpr (kZero) return T(1);
    else if constexpr (kCounts <= kAllCount) return T(valid.template has<N>(i));
    else if constexpr (kCounts == kMarkedCount) return T(!is_missing(x));
    else return T(x == x);
  }
};
template <typename T>
struct Keeping<T, kWeightsCount, false> {
  using Element = Fields<T, 2>;
  static constexpr bool kMasked = true;
  static Element padding() { return {0, 0}; }
  static T value(Element e) { return e.of[0]; }
  static void subtract(Element& e, T from) { e.of[0] -= from; }
  template <int N, class Predicate>
  static T weight(Predicate, int, Element e) {
    return e.of[1];
  }
};

// What all ops with a Keeping are made of: summarize_some by summarize, where what a mask drops becomes padding.
template <class Op, typename T, int kCounts, bool kZero = false>
struct OfKept : RowOp {
  using Compute = T;
  using Keep = Keeping<T, kCounts, kZero>;
  using Element = typename Keep::Element;
  static constexpr bool kHasArguments = true, kMaskable = Keep::kMasked;
  static Element padding() { return Keep::padding(); }
  static T dropped() { return 0; }
  template <class Row>
  static bool drops_padding(const Row&) {
    return false;
  }

  template <int kVector, int N, int kVectors, class Fill, class Each>
  static auto summarize_some(Each (&x)[N], const bool (&some)[kVectors], Fill fill) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = Op::padding();
      }
    }
    return Op::summarize(x, Predicate<N>{N, false}, T(0));
  }
};

}  // namespace cupynorm
