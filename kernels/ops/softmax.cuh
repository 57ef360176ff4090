// Softmax and LogSoftmax: exp(x - max) / sum(exp(x - max)), and its logarithm.
#pragma once
#include <ops/contract.cuh>

namespace cupynorm {

// Maximum, and the sum of exp(x - max): partial sums are rescaled when they meet (Milakov and Gimelshein 2018).
// x - max is taken before the multiplication by log2(e): it is exact for near numbers and cannot overflow.
// kInfinite: elements may be +inf, whose sum is then inf. Else nan comes of it.
template <typename T, bool kInfinite = false>
struct Exponentials {
  T max, sum;

  // What exponentials are taken from, given the maximum. Written out where it is used: called there, it moved the
  // compiler's choices in ten kernels of softmax.
  static T pivot_of(T max) {
    return max == -infinity<T>() || (kInfinite && max == infinity<T>()) ? T(0) : max;
  }

  static Exponentials identity() { return {-infinity<T>(), 0}; }

  static Exponentials merge(Exponentials a, Exponentials b) {
    T max = larger(a.max, b.max), pivot = max == -infinity<T>() || (kInfinite && max == infinity<T>()) ? T(0) : max;
    return {max, a.sum * exponential(a.max - pivot) + b.sum * exponential(b.max - pivot)};
  }

  // Takes one exponential for each thread, where merging step by step takes two in each step.
  template <class Lanes>
  static Exponentials gather(Exponentials s, Lanes lanes) {
    const T max = lanes.max(s.max), pivot = max == -infinity<T>() || (kInfinite && max == infinity<T>()) ? T(0) : max;
    return {max, lanes.sum(s.sum * exponential(s.max - pivot))};
  }
};

// The maximum of x and the pivot that its exponentials are taken from: the maximum, or 0 where that is -inf.
template <int N, typename T>
inline T maximum(const T (&x)[N]) {
  T max = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) max = larger(max, x[i]);
  return max;
}

// What all ops of exponentials are made of. A row of only -inf: -inf - -inf is nan, and so is all that comes of it.
template <class Op, typename T, bool kInfinite = false>
struct OfExponentials : RowOp {
  using Compute = T;
  using State = Exponentials<T, kInfinite>;
  static constexpr bool kMaskable = true, kMapsPadding = true;
  static T padding() { return -infinity<T>(); }
  static State identity() { return State::identity(); }

  template <bool kEqual>
  static State merge(State a, State b) {
    return State::merge(a, b);
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return State::gather(s, lanes);
  }

  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate, T) {
    T max = maximum(x), pivot = max == -infinity<T>() || (kInfinite && max == infinity<T>()) ? T(0) : max,
      sum[Predicate::kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i % Predicate::kAccumulators] += Op::exponent(x[i], pivot);
    return {max, sum_of(sum)};
  }

  // One exponential less for what was seen before than merge takes, and one pivot for both.
  static constexpr bool kExtends = true;
  template <int N, class Predicate>
  static State extend(State s, T (&x)[N], Predicate) {
    const T max = larger(s.max, maximum(x));
    const bool has_none = max == -infinity<T>() || (kInfinite && max == infinity<T>());
    const T pivot = has_none ? T(0) : max;
    T sum = s.sum * exponential(s.max - pivot);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += Op::exponent(x[i], pivot);
    return {max, sum};
  }

  // The same of those vectors of kVector elements of which there are `some`, each of which `fill` puts into x first,
  // and of what is behind all vectors.
  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(T (&x)[N], const bool (&some)[kVectors], Fill fill) {
    T max = -infinity<T>(), sum = 0;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) max = larger(max, x[p * kVector + i]);
      } else {  // or its registers are taken from the begin on
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = 0;
      }
    }
#pragma unroll
    for (int i = kVector * kVectors; i < N; ++i) max = larger(max, x[i]);
    const T pivot = max == -infinity<T>() || (kInfinite && max == infinity<T>()) ? T(0) : max;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (!some[p]) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += Op::exponent(x[p * kVector + i], pivot);
    }
#pragma unroll
    for (int i = kVector * kVectors; i < N; ++i) sum += Op::exponent(x[i], pivot);
    return {max, sum};
  }
};

// The softmax of halves that wait in registers as they were loaded, kRows neighbouring ones of each column. Powers of
// two take one multiplication less: 2^(x * log2(e) - max), where max is that of x * log2(e). It is rounded once for a
// row, and stands for itself from then on, so that every element is off by the same factor. No half overflows so.
struct HalfSoftmax : RowOp {
  using Compute = float;
  struct State {
    float max, sum;
  };
  struct Row {
    float max, reciprocal_sum;
  };
  static constexpr float kScale = 1.4426950408889634f;

  static float pivot_of(float max) { return max == -infinity<float>() ? 0.0f : max; }
  static State identity() { return {-infinity<float>(), 0}; }

  template <bool kEqual>
  static State merge(State a, State b) {
    const float max = larger(a.max, b.max), pivot = pivot_of(max);
    return {max, a.sum * exp2_approx(a.max - pivot) + b.sum * exp2_approx(b.max - pivot)};
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const float max = lanes.max(s.max);
    return {max, lanes.sum(s.sum * exp2_approx(s.max - pivot_of(max)))};
  }

  // The maxima of rows, two halves at a time, and then the sums of some elements more.
  template <int kRows, int kCols>
  static void begin(const Vector<half, kRows> (&x)[kCols], State (&s)[kRows]) {
    Vector<half, kRows> largest = x[0];
#pragma unroll
    for (int j = 1; j < kCols; ++j) {
#pragma unroll
      for (int i = 0; i < largest.kWords; ++i) largest.word[i] = larger_halves(largest.word[i], x[j].word[i]);
    }
    float max[kRows];
    unpack<kRows>(largest, max);
#pragma unroll
    for (int r = 0; r < kRows; ++r) s[r] = {max[r] * kScale, 0};
  }
  template <int N>
  static void add(State& s, const float (&x)[N]) {
    const float pivot = pivot_of(s.max);
#pragma unroll
    for (int i = 0; i < N; ++i) s.sum += exp2_approx(multiply_add(x[i], kScale, -pivot));
  }

  template <typename Cols>
  static Row finish(State, State row, Cols, float) {
    return {row.max, reciprocal(row.sum)};
  }
  static float map_raw(float x, Row row) {
    return exp2_approx(multiply_add(x, kScale, -row.max)) * row.reciprocal_sum;
  }
  static bool drops_padding(Row row) { return row.max > -infinity<float>() && row.reciprocal_sum < infinity<float>(); }
};

template <typename T>
struct Softmax : OfExponentials<Softmax<T>, T> {
  using State = Exponentials<T>;
  using OfHalves = HalfSoftmax;  // row/whole.cuh
  struct Row {
    T max, reciprocal_sum, factor;
  };

  static T dropped() { return 0; }  // what becomes of an element that a mask drops
  // Whether map makes that of the padding by itself, as summarize left it: where something is kept, all of it numbers.
  static bool drops_padding(Row row) { return row.factor < infinity<T>(); }

  // It stays in x: finish folds the rescale to the row's maximum into one factor.
  static T exponent(T& x, T pivot) { return x = exponential(x - pivot); }

  template <typename Cols>
  Row finish(State mine, State row, Cols, T) const {
    T reciprocal_sum = reciprocal(row.sum);
    return {row.max, reciprocal_sum, exponential(mine.max - row.max) * reciprocal_sum};
  }

  static T map(T x, Row row) { return x * row.factor; }
  static T map_raw(T x, Row row) { return exponential(x - row.max) * row.reciprocal_sum; }
};

template <typename T>
struct LogSoftmax : OfExponentials<LogSoftmax<T>, T> {
  using State = Exponentials<T>;
  struct Row {
    T max, log_sum;
  };

  static T dropped() { return -infinity<T>(); }  // what becomes of an element that a mask drops
  // Whether map makes that of the padding by itself, as summarize left it: where something is kept, all of it numbers.
  static bool drops_padding(Row row) { return magnitude(row.max + row.log_sum) < infinity<T>(); }

  static T exponent(T x, T pivot) { return exponential(x - pivot); }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {row.max, logarithm(row.sum)};
  }

  // Two subtractions, not one of max + log_sum: that sum would be rounded at the size of max.
  static T map(T x, Row row) { return x - row.max - row.log_sum; }
  static T map_raw(T x, Row row) { return map(x, row); }
};

}  // namespace cupynorm
