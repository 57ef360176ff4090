// One number for each row: LogSumExp, which stores no elements; and CrossEntropy, whose elements become its gradient.
#pragma once
#include <ops/softmax.cuh>

namespace cupynorm {

// log(sum(exp(x))): +inf for a row that has that and no nan, -inf for one that has nothing or only that.
template <typename T>
struct LogSumExp : OfExponentials<LogSumExp<T>, T, true> {
  using State = Exponentials<T, true>;
  struct Row {
    T lse;
  };

  T* lse;  // one per row

  static constexpr bool kHasArguments = true;
  static T dropped() { return -infinity<T>(); }
  static bool drops_padding(Row) { return true; }  // nothing is stored
  static T exponent(T x, T pivot) { return exponential(x - pivot); }

  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {State::pivot_of(row.max) + logarithm(row.sum)};
  }

  static T map(T x, Row row) { return x - row.lse; }
  static T map_raw(T x, Row row) { return x - row.lse; }

  bool saves() const { return lse; }
  void save(int64 index, Row row) const {
    if (lse) lse[index] = row.lse;
  }
};

// The cross entropy of a row x and a label, which is all that a row's target is: log(sum(exp(x))) - x[label] +
// z * lse^2; and of its gradient what is the same in every column, (1 + 2 * z * lse) * softmax(x): the Store takes 1
// away in the label's. The row's own number is x[label]; nan: there is no such column; +inf where a mask keeps nothing:
// such a row does not count, and has loss and gradient 0.
template <typename T>
struct LabelCrossEntropy : RowOp {
  using Compute = T;
  // A row's blocks may know the number or not (-inf): the largest is it.
  struct State {
    Exponentials<T> exponentials;
    T own;
  };
  struct Row {
    T max, factor, raw_factor, loss, lse;
  };

  T* loss;  // one per row, or null if nobody asked
  T* lse;   // one per row, or null if nobody asked
  T z;

  static constexpr bool kHasArguments = true, kMaskable = true, kOwnNumber = true;
  static T padding() { return -infinity<T>(); }
  static State identity() { return {Exponentials<T>::identity(), -infinity<T>()}; }
  static State with_own(State s, T number) { return {s.exponentials, number}; }
  static T dropped() { return 0; }
  static bool drops_padding(Row row) { return magnitude(row.factor) < infinity<T>(); }

  // Leaves exp(x - max) in x, with the maximum of the thread.
  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate valid, T) {
    return {Softmax<T>::summarize(x, valid, T(0)), -infinity<T>()};
  }
  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(T (&x)[N], const bool (&some)[kVectors], Fill fill) {
    return {Softmax<T>::template summarize_some<kVector>(x, some, fill), -infinity<T>()};
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    return {Exponentials<T>::merge(a.exponentials, b.exponentials), larger(a.own, b.own)};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return {Exponentials<T>::gather(s.exponentials, lanes), lanes.max(s.own)};
  }

  template <typename Cols>
  Row finish(State mine, State row, Cols, T own) const {
    const T max = row.exponentials.max, log_sum = logarithm(row.exponentials.sum), lse = max + log_sum;
    const bool nothing = max == -infinity<T>() && row.own == infinity<T>();
    const T wrong = own == own ? T(0) : own;
    // what is subtracted first are near numbers, of which no digit is lost
    const T loss = multiply_add(z * lse, lse, max - row.own + log_sum) + wrong;
    const T raw = multiply_add(2 * z, lse, T(1)) * reciprocal(row.exponentials.sum) + wrong;
    const T factor = raw * exponential(mine.exponentials.max - max);
    return {max, nothing ? T(0) : factor, nothing ? T(0) : raw, nothing ? T(0) : loss, lse};
  }

  // summarize has left x with the thread's own maximum, to which `factor` belongs.
  static T map(T x, Row row) { return x * row.factor; }
  static T map_raw(T x, Row row) { return exponential(x - row.max) * row.raw_factor; }

  bool saves() const { return loss || lse; }
  void save(int64 index, Row row) const {
    if (loss) loss[index] = row.loss;
    if (lse) lse[index] = row.lse;
  }
};

// As LabelCrossEntropy, with a part `smoothing` of the target spread evenly over all columns: the Store takes
// 1 - smoothing away in the label's, and sum(q * (lse - x)) is (1 - smoothing) * (lse - x[label]) + smoothing *
// (lse - mean(x)). An element stays one number: the sum of x is one more of the State. A State of five doubles is more
// than blocks of a grid tell one another, so doubles take CrossEntropy.
template <typename T>
struct SmoothCrossEntropy : RowOp {
  using Compute = T;
  // Sum and number of the elements that were summarised; sum: of x - pivot, with the pivot of Exponentials. Counted
  // from there, and not from 0, the loss keeps its digits where logits are large. own: as in LabelCrossEntropy.
  struct State {
    Exponentials<T> exponentials;
    T own, sum, count;
  };
  struct Row {
    T max, factor, raw_factor, spread, loss, lse;
  };

  T* loss;  // one per row, or null if nobody asked
  T* lse;   // one per row, or null if nobody asked
  T z, smoothing, spread;  // spread: smoothing / columns

  static constexpr bool kHasArguments = true, kMaskable = true, kOwnNumber = true;
  static T padding() { return -infinity<T>(); }
  static State identity() { return {Exponentials<T>::identity(), -infinity<T>(), 0, 0}; }
  static State with_own(State s, T number) { return s.own = number, s; }
  static T dropped() { return 0; }
  static bool drops_padding(Row row) { return row.spread == 0 && magnitude(row.factor) < infinity<T>(); }

  // Leaves exp(x - max) in x, with the maximum of the thread.
  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate valid, T) {
    constexpr int kAccumulators = Predicate::kAccumulators;
    const T max = maximum(x), pivot = Exponentials<T>::pivot_of(max);
    T powers[kAccumulators] = {}, sum[kAccumulators] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T below = x[i] - pivot;
      if (valid.template has<N>(i)) sum[i % kAccumulators] += below;
      powers[i % kAccumulators] += x[i] = exponential(below);
    }
    return {{max, sum_of(powers)}, -infinity<T>(), sum_of(sum), T(valid.total())};
  }

  // The same of some vectors. Nothing says which of their elements are padding: -inf is not counted, and `finish`
  // misses those that are a row's own.
  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(T (&x)[N], const bool (&some)[kVectors], Fill fill) {
    State all = identity();
    T& max = all.exponentials.max;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) max = larger(max, x[p * kVector + i]);
      } else {  // else the compiler would take its registers from the start
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = 0;
      }
    }
#pragma unroll
    for (int i = kVector * kVectors; i < N; ++i) max = larger(max, x[i]);
    const T pivot = Exponentials<T>::pivot_of(max);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < kVector * kVectors && !some[i / kVector]) continue;
      const T below = x[i] - pivot;
      if (x[i] != -infinity<T>()) all.sum += below, all.count += 1;
      all.exponentials.sum += x[i] = exponential(below);
    }
    return all;
  }

  // The sum of a State whose pivot becomes another one.
  static T moved(State s, T pivot) {
    return multiply_add(s.count, Exponentials<T>::pivot_of(s.exponentials.max) - pivot, s.sum);
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    const auto both = Exponentials<T>::merge(a.exponentials, b.exponentials);
    const T pivot = Exponentials<T>::pivot_of(both.max);
    return {both, larger(a.own, b.own), moved(a, pivot) + moved(b, pivot), a.count + b.count};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const auto all = Exponentials<T>::gather(s.exponentials, lanes);
    const T pivot = Exponentials<T>::pivot_of(all.max);
    return {all, lanes.max(s.own), lanes.sum(moved(s, pivot)), lanes.sum(s.count)};
  }

  template <typename Cols>
  Row finish(State mine, State row, Cols cols, T own) const {
    const T max = row.exponentials.max, log_sum = logarithm(row.exponentials.sum), lse = max + log_sum;
    const bool nothing = max == -infinity<T>() && row.own == infinity<T>();
    const T wrong = own == own ? T(0) : own, kept = 1 - smoothing;
    // all terms are 0 or positive; one of q = 0 is 0
    const T of_label = kept == 0 ? T(0) : kept * (max - row.own);
    const T of_all = row.count == T(cols) ? -spread * row.sum : infinity<T>();
    const T loss = multiply_add(z * lse, lse, of_label + of_all + log_sum) + wrong;
    const T raw = multiply_add(2 * z, lse, T(1)) * reciprocal(row.exponentials.sum) + wrong;
    const T factor = raw * exponential(mine.exponentials.max - max);
    if (nothing) return {max, 0, 0, 0, 0, lse};
    return {max, factor, raw, spread, loss, lse};
  }

  // summarize has left x with the thread's own maximum, to which `factor` belongs.
  static T map(T x, Row row) { return multiply_add(x, row.factor, -row.spread); }
  static T map_raw(T x, Row row) { return multiply_add(exponential(x - row.max), row.raw_factor, -row.spread); }

  bool saves() const { return loss || lse; }
  void save(int64 index, Row row) const {
    if (loss) loss[index] = row.loss;
    if (lse) lse[index] = row.lse;
  }
};

// The cross entropy of a row x and a target q of any sum Q: sum(q * (lse - x)) + z * lse^2 with lse = log(sum(exp(x)));
// and its gradient (Q + 2 * z * lse) * softmax(x) - q. A term with q = 0 is 0, also where x is -inf. An element is
// (x, q), and as `summarize` leaves it (exp(x - max), q) with the maximum of the thread. A row of which a mask keeps
// nothing has loss and gradient 0; so has one of only -inf with q = 0 throughout, which looks the same.
template <typename T>
struct CrossEntropy : RowOp {
  using Compute = T;
  using Element = Fields<T, 2>;
  // Sums of exp(x - pivot), of q, and of q * (x - pivot), with the pivot of Exponentials. Counted from there, and not
  // from 0, the loss keeps its digits where logits are large.
  struct State {
    Exponentials<T> exponentials;
    T target, product;
  };
  struct Row {
    T max, factor, raw_factor, loss, lse;
  };

  T* loss;  // one per row, or null if nobody asked
  T* lse;   // one per row, or null if nobody asked
  T z;

  static constexpr bool kHasArguments = true, kMaskable = true;
  static Element padding() { return {-infinity<T>(), 0}; }
  static State identity() { return {Exponentials<T>::identity(), 0, 0}; }
  static T dropped() { return 0; }
  static bool drops_padding(Row row) { return magnitude(row.factor) < infinity<T>(); }

  // Adds q * (x - pivot) to the product: q = 0 counts as 0 whatever x is.
  static T plus_product(Element e, T pivot, T product) {
    return e.of[1] == 0 ? product : multiply_add(e.of[1], e.of[0] - pivot, product);
  }
  // Adds an element to sums, and leaves its exponential in its place.
  static void add(Element& e, T pivot, T& sum, T& target, T& product) {
    product = plus_product(e, pivot, product);
    target += e.of[1];
    sum += e.of[0] = exponential(e.of[0] - pivot);
  }

  template <int N, class Predicate>
  static State summarize(Element (&x)[N], Predicate, T) {
    constexpr int kAccumulators = Predicate::kAccumulators;
    T max = x[0].of[0], sum[kAccumulators] = {}, target[kAccumulators] = {}, product[kAccumulators] = {};
#pragma unroll
    for (int i = 1; i < N; ++i) max = larger(max, x[i].of[0]);
    const T pivot = Exponentials<T>::pivot_of(max);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int chain = i % kAccumulators;
      add(x[i], pivot, sum[chain], target[chain], product[chain]);
    }
    return {{max, sum_of(sum)}, sum_of(target), sum_of(product)};
  }

  // The same of those vectors of kVector elements of which there are `some`, each of which `fill` puts into x first,
  // and of what is behind all vectors.
  template <int kVector, int N, int kVectors, class Fill>
  static State summarize_some(Element (&x)[N], const bool (&some)[kVectors], Fill fill) {
    State all = identity();
    T& max = all.exponentials.max;
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (some[p]) {
        fill(p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) max = larger(max, x[p * kVector + i].of[0]);
      } else {  // else the compiler would take its registers from the start
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = {};
      }
    }
#pragma unroll
    for (int i = kVector * kVectors; i < N; ++i) max = larger(max, x[i].of[0]);
    const T pivot = Exponentials<T>::pivot_of(max);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= kVector * kVectors || some[i / kVector])
        add(x[i], pivot, all.exponentials.sum, all.target, all.product);
    }
    return all;
  }

  // The product of a State whose pivot becomes another one.
  static T moved(State s, T pivot) {
    return multiply_add(s.target, Exponentials<T>::pivot_of(s.exponentials.max) - pivot, s.product);
  }

  template <bool kEqual>
  static State merge(State a, State b) {
    const auto both = Exponentials<T>::merge(a.exponentials, b.exponentials);
    const T pivot = Exponentials<T>::pivot_of(both.max);
    return {both, a.target + b.target, moved(a, pivot) + moved(b, pivot)};
  }

  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    const auto all = Exponentials<T>::gather(s.exponentials, lanes);
    const T pivot = Exponentials<T>::pivot_of(all.max);
    return {all, lanes.sum(s.target), lanes.sum(moved(s, pivot))};
  }

  template <typename Cols>
  Row finish(State mine, State row, Cols, T) const {
    const T max = row.exponentials.max, log_sum = logarithm(row.exponentials.sum), lse = max + log_sum;
    // A sum of 0 is one of no element but -inf: the maximum may be -inf beside nan, too.
    const bool nothing = row.exponentials.sum == 0 && row.target == 0 && row.product == 0;
    const T loss = multiply_add(z * lse, lse, multiply_add(row.target, log_sum, -row.product));
    const T raw = multiply_add(2 * z, lse, row.target) * reciprocal(row.exponentials.sum);
    const T factor = raw * exponential(mine.exponentials.max - max);
    return {max, nothing ? T(0) : factor, nothing ? T(0) : raw, nothing ? T(0) : loss, lse};
  }

  // summarize has left x with the thread's own maximum, to which `factor` belongs.
  static T map(Element e, Row row) { return multiply_add(e.of[0], row.factor, -e.of[1]); }
  static T map_raw(Element e, Row row) {
    return multiply_add(exponential(e.of[0] - row.max), row.raw_factor, -e.of[1]);
  }

  bool saves() const { return loss || lse; }
  void save(int64 index, Row row) const {
    if (loss) loss[index] = row.loss;
    if (lse) lse[index] = row.lse;
  }
};

}  // namespace cupynorm
