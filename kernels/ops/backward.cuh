// The gradients of row ops. An element has two fields, which the Load computes: what arrives (dy, or g = dy * gamma),
// and what the forward op gave (y, or xhat = (x - mean) * rstd). What a gradient is multiplied with or added to (a
// scale, rstd, another gradient) is the Store's.
#pragma once
#include <ops/contract.cuh>

namespace cupynorm {

// What they have in common: their State is kSums sums over the elements, to which Op::add(element, sum) adds.
template <class Op, typename T, int kSums>
struct OfSums : RowOp {
  using Compute = T;
  using Element = Fields<T, 2>;
  struct State {
    T sum[kSums];
  };
  static constexpr bool kOfSums = true;

  static Element padding() { return {0, 0}; }  // nothing is added for it
  static State identity() { return {}; }

  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate, T) {
    T sum[Predicate::kAccumulators][kSums] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) Op::add(x[i], sum[i % Predicate::kAccumulators]);
    State all;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      all.sum[k] = sum[0][k];
#pragma unroll
      for (int chain = 1; chain < Predicate::kAccumulators; ++chain) all.sum[k] += sum[chain][k];
    }
    return all;
  }

  // The same of those vectors of kVector elements of which there are `some`, each of which `fill` puts into x first,
  // and of what is behind all vectors.
  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(Element (&x)[N], const bool (&some)[kVectors], Fill fill) {
    State all = {};
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) Op::add(x[p * kVector + i], all.sum);
      } else {  // or its registers are taken from the begin on
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = {};
      }
    }
#pragma unroll
    for (int i = kVector * kVectors; i < N; ++i) Op::add(x[i], all.sum);
    return all;
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    State both;
#pragma unroll
    for (int k = 0; k < kSums; ++k) both.sum[k] = a.sum[k] + b.sum[k];
    return both;
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) s.sum[k] = lanes.sum(s.sum[k]);
    return s;
  }

  template <class Row>
  static T map_raw(Element e, Row row) {
    return Op::map(e, row);
  }
};

// Of softmax: y * (dy - sum(dy * y)), given (dy, y).
template <typename T>
struct SoftmaxBackward : OfSums<SoftmaxBackward<T>, T, 1> {
  using Element = Fields<T, 2>;
  using State = typename OfSums<SoftmaxBackward<T>, T, 1>::State;
  struct Row {
    T sum;
  };
  static constexpr bool kMaskable = true, kMapsPadding = true;
  static T dropped() { return 0; }
  static bool drops_padding(Row row) { return magnitude(row.sum) < infinity<T>(); }

  static void add(Element e, T (&sum)[1]) { sum[0] = multiply_add(e.of[0], e.of[1], sum[0]); }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {row.sum[0]};
  }
  static T map(Element e, Row row) { return e.of[1] * (e.of[0] - row.sum); }
};

// Of log-softmax: dy - exp(y) * sum(dy), given (dy, y). Where y is -inf, its exponential is 0.
template <typename T>
struct LogSoftmaxBackward : OfSums<LogSoftmaxBackward<T>, T, 1> {
  using Element = Fields<T, 2>;
  using State = typename OfSums<LogSoftmaxBackward<T>, T, 1>::State;
  struct Row {
    T sum;
  };
  static constexpr bool kMaskable = true, kMapsPadding = true;
  static T dropped() { return 0; }
  static Element padding() { return {0, -infinity<T>()}; }
  static bool drops_padding(Row row) { return magnitude(row.sum) < infinity<T>(); }

  static void add(Element e, T (&sum)[1]) { sum[0] += e.of[0]; }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {row.sum[0]};
  }
  static T map(Element e, Row row) { return multiply_add(-exponential(e.of[1]), row.sum, e.of[0]); }
};

// Of LayerNorm: g - mean(g) - xhat * mean(g * xhat), given (g, xhat). The Store multiplies it with rstd.
template <typename T>
struct LayerNormBackward : OfSums<LayerNormBackward<T>, T, 2> {
  using Element = Fields<T, 2>;
  using State = typename OfSums<LayerNormBackward<T>, T, 2>::State;
  struct Row {
    T mean, mean_of_products;
  };

  static void add(Element e, T (&sum)[2]) { sum[0] += e.of[0], sum[1] = multiply_add(e.of[0], e.of[1], sum[1]); }

  template <typename Cols>
  Row finish(State, State row, Cols cols, T) const {
    const T share = one_of<T>(cols);
    return {row.sum[0] * share, row.sum[1] * share};
  }
  static T map(Element e, Row row) { return multiply_add(-e.of[1], row.mean_of_products, e.of[0] - row.mean); }
};

// Of RMSNorm: g - xhat * mean(g * xhat), given (g, xhat). The Store multiplies it with rstd.
template <typename T>
struct RmsNormBackward : OfSums<RmsNormBackward<T>, T, 1> {
  using Element = Fields<T, 2>;
  using State = typename OfSums<RmsNormBackward<T>, T, 1>::State;
  struct Row {
    T mean_of_products;
  };

  static void add(Element e, T (&sum)[1]) { sum[0] = multiply_add(e.of[0], e.of[1], sum[0]); }

  template <typename Cols>
  Row finish(State, State row, Cols cols, T) const {
    return {row.sum[0] * one_of<T>(cols)};
  }
  static T map(Element e, Row row) { return multiply_add(-e.of[1], row.mean_of_products, e.of[0]); }
};

// The sums of both fields over rows that are read and not written: the gradients of a norm's parameters where the
// elements of a column, and not those of a row, lie next to one another.
template <typename T>
struct FieldSums : OfSums<FieldSums<T>, T, 2> {
  using Element = Fields<T, 2>;
  using State = typename OfSums<FieldSums<T>, T, 2>::State;
  using Row = State;

  T* first;   // one per row, or null if nobody asked
  T* second;  // likewise

  static constexpr bool kHasArguments = true, kOfSums = false;  // nothing is computed again
  static void add(Element e, T (&sum)[2]) { sum[0] += e.of[0], sum[1] += e.of[1]; }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return row;
  }
  static T map(Element e, Row) { return e.of[0]; }  // nothing is stored

  bool saves() const { return first || second; }
  void save(int64 index, Row row) const {
    if (first) first[index] = row.sum[0];
    if (second) second[index] = row.sum[1];
  }
};

}  // namespace cupynorm
