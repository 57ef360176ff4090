// Affine parameters (gamma and beta): how they are loaded, converted and applied; and the Store that applies them.
#pragma once
#include <base/math.cuh>
#include <io/load_store.cuh>

namespace cupynorm {

// Affine parameters: one number a column, the same for every row. Nothing may write to them while the kernel runs.

struct NoColumn {
  static constexpr bool kPresent = false;
  static constexpr int kBytes = 0;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  using SplitVector = NoColumns;
  using From = NoColumns;
  NoColumns from(int64) const { return {}; }
  template <int N, typename Index>
  NoColumns load_split(NoColumns, Index) const {
    return {};
  }
  template <int N, typename Index>
  NoColumns load(Index) const {
    return {};
  }
  template <int N>
  NoColumns load_unaligned(int64) const {
    return {};
  }
};

// One value a column, next to each other, read in accesses of kWidth elements: as wide as the pointer's alignment
// allows.
template <typename T, int kWidth>
struct Column {
  static constexpr bool kPresent = true;
  static constexpr int kBytes = sizeof(T);
  const T* pointer;

  template <int N>
  using Packed = Vector<T, N>;
  // of two bytes: element i, and the one of which a word has the bits
  template <int N>
  static unsigned bits_of(const Packed<N>& values, int i) {
    return values.word[i / 2] >> 16 * (i % 2) & 0xffffu;
  }
  static Packed<1> one_of(unsigned bits) { return {{bits}}; }
  // in accesses of 8 bytes: of 16, one more instruction a word would choose among them
  template <int N>
  using SplitVector = cupynorm::SplitVector<T, N, 8>;
  using From = Unaligned<8>;
  From from(int64 col) const { return unaligned_at<8>(pointer + col); }
  template <int N, typename Index>
  SplitVector<N> load_split(const From& first, Index further) const {
    return cupynorm::load_split<T, N, true>(first, further);
  }
  template <int N, typename Index>
  Vector<T, N> load(Index col) const {
    return load_vector<T, N, (kWidth < N ? kWidth : N), true>(pointer + col);
  }
  template <int N>
  Vector<T, N> load_unaligned(int64 col) const {
    return load_vector_unaligned<T, N, true>(pointer + col);
  }
};

// The same, broadcast or strided in any way: an element at a time.
template <typename T, int kAxes>
struct StridedColumn {
  static constexpr bool kPresent = true;
  static constexpr int kBytes = sizeof(T);
  const T* pointer;
  Strided<kAxes> cols;

  template <int N>
  struct Packed {
    Vector<T, 1> element[N];
    void make_opaque() {
#pragma unroll
      for (int i = 0; i < N; ++i) element[i].make_opaque();
    }
  };
  template <int N>
  static unsigned bits_of(const Packed<N>& values, int i) {
    return values.element[i].word[0] & 0xffffu;
  }
  static Packed<1> one_of(unsigned bits) { return {{{{bits}}}}; }
  template <int N>
  struct SplitVector {
    Packed<N> values;
    friend Packed<N> realign(const SplitVector& split) { return split.values; }
  };
  struct From {
    int64 col;
    void make_opaque() {}
  };
  From from(int64 col) const { return {col}; }
  template <int N, typename Index>
  SplitVector<N> load_split(From first, Index further) const {
    return {load<N>(first.col + further)};
  }
  template <int N, typename Index>
  Packed<N> load(Index col) const {
    Packed<N> values;
#pragma unroll
    for (int i = 0; i < N; ++i) values.element[i] = load_vector<T, 1, 1, true>(pointer + cols.offset(col + i));
    return values;
  }
  template <int N>
  Packed<N> load_unaligned(int64 col) const {
    return load<N>(col);
  }
};

template <int N, class Values, typename Compute>
inline void unpack(const Values& values, Compute* x) {
#pragma unroll
  for (int i = 0; i < N; ++i) unpack<1>(values.element[i], x + i);
}

// What is there of the parameters of some columns, and nothing else: it waits in registers or in shared memory.
template <class Gamma, class Beta, bool kGamma, bool kBeta>
struct Affine {
  Gamma gamma;
  Beta beta;
  void make_opaque() { gamma.make_opaque(), beta.make_opaque(); }
};
template <class Gamma, class Beta>
struct Affine<Gamma, Beta, true, false> {
  Gamma gamma;
  void make_opaque() { gamma.make_opaque(); }
};
template <class Gamma, class Beta>
struct Affine<Gamma, Beta, false, true> {
  Beta beta;
  void make_opaque() { beta.make_opaque(); }
};

template <class Gamma, class Beta>
struct Affine<Gamma, Beta, false, false> {
  void make_opaque() {}
};

// A column's affine parameters in the compute type: z = scaling(y).
template <typename T, bool kGamma, bool kBeta>
struct Scaling {
  T operator()(T y) const { return y; }
};
template <typename T>
struct __align__(2 * sizeof(T)) Scaling<T, true, true> {
  T gamma, beta;
  T operator()(T y) const { return multiply_add(y, gamma, beta); }
};
template <typename T>
struct Scaling<T, true, false> {
  T gamma;
  T operator()(T y) const { return y * gamma; }
};
template <typename T>
struct Scaling<T, false, true> {
  T beta;
  T operator()(T y) const { return y + beta; }
};
template <class Number, int N>
struct Scalings {
  Number column[N];
};
// The same of two of two bytes, as they were loaded: one word, and an instruction more for each.
template <class Gamma, class Beta>
struct PairedScaling {
  unsigned word;
  template <typename T>
  T operator()(T y) const {
    T gamma, beta;
    unpack<1>(Gamma::one_of(word), &gamma);
    unpack<1>(Beta::one_of(word >> 16), &beta);
    return multiply_add(y, gamma, beta);
  }
};

// gamma and beta of all columns: z = y * gamma + beta.
template <class Gamma, class Beta>
struct AffineColumns {
  Gamma gamma;
  Beta beta;

  template <int N>
  using Columns =
      Affine<typename Gamma::template Packed<N>, typename Beta::template Packed<N>, Gamma::kPresent, Beta::kPresent>;
  template <int N>
  using ColumnsSplit =
      Affine<typename Gamma::template SplitVector<N>, typename Beta::template SplitVector<N>, Gamma::kPresent,
      Beta::kPresent>;
  using ColumnsFrom = Affine<typename Gamma::From, typename Beta::From, Gamma::kPresent, Beta::kPresent>;
  ColumnsFrom columns_from(int64 col) const {
    ColumnsFrom first;
    if constexpr (Gamma::kPresent) first.gamma = gamma.from(col);
    if constexpr (Beta::kPresent) first.beta = beta.from(col);
    return first;
  }
  template <int N, typename Index>
  ColumnsSplit<N> columns_split(const ColumnsFrom& first, Index further) const {
    ColumnsSplit<N> split;
    if constexpr (Gamma::kPresent) split.gamma = gamma.template load_split<N>(first.gamma, further);
    if constexpr (Beta::kPresent) split.beta = beta.template load_split<N>(first.beta, further);
    return split;
  }
  template <int N>
  static Columns<N> realign_columns(const ColumnsSplit<N>& split) {
    Columns<N> columns;
    if constexpr (Gamma::kPresent) columns.gamma = realign(split.gamma);
    if constexpr (Beta::kPresent) columns.beta = realign(split.beta);
    return columns;
  }
  template <int N, typename Index>
  Columns<N> columns(Index col) const {
    Columns<N> columns;
    if constexpr (Gamma::kPresent) columns.gamma = gamma.template load<N>(col);
    if constexpr (Beta::kPresent) columns.beta = beta.template load<N>(col);
    return columns;
  }
  template <int N>
  Columns<N> columns_unaligned(int64 col) const {
    return realign_columns<N>(columns_split<N>(columns_from(col), 0));
  }

  template <typename Compute>
  using Number = Scaling<Compute, Gamma::kPresent, Beta::kPresent>;
  template <int N, typename Compute>
  static void convert(const Columns<N>& columns, Number<Compute> (&numbers)[N]) {
    Compute gamma[N], beta[N];
    if constexpr (Gamma::kPresent) unpack<N>(columns.gamma, gamma);
    if constexpr (Beta::kPresent) unpack<N>(columns.beta, beta);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (Gamma::kPresent) numbers[i].gamma = gamma[i];
      if constexpr (Beta::kPresent) numbers[i].beta = beta[i];
    }
  }
  static constexpr bool kPresent = Gamma::kPresent || Beta::kPresent;
  static constexpr bool kPairs = Gamma::kBytes == 2 && Beta::kBytes == 2;
  using Pair = PairedScaling<Gamma, Beta>;
  template <int N>
  static void convert(const Columns<N>& columns, Pair (&pairs)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) pairs[i] = {Gamma::bits_of(columns.gamma, i) | Beta::bits_of(columns.beta, i) << 16};
  }
  template <int N, typename Compute, class Number>
  static void apply(const Compute (&y)[N], const Scalings<Number, N>& numbers, Compute (&z)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = numbers.column[i](y[i]);
  }

  template <int N, typename Compute>
  static void apply(const Compute (&y)[N], const Columns<N>& columns, Compute (&z)[N]) {
    Compute gamma[N], beta[N];
    if constexpr (Gamma::kPresent) unpack<N>(columns.gamma, gamma);
    if constexpr (Beta::kPresent) unpack<N>(columns.beta, beta);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (Gamma::kPresent && Beta::kPresent) z[i] = multiply_add(y[i], gamma[i], beta[i]);
      else if constexpr (Gamma::kPresent) z[i] = y[i] * gamma[i];
      else if constexpr (Beta::kPresent) z[i] = y[i] + beta[i];
      else z[i] = y[i];
    }
  }
};

// What a column's parameters become, for Stores whose columns wait as numbers, or as pairs where there are two of two
// bytes; nothing where there are none, as for what is fused around softmax.
enum Conversion { kNothing, kNumbers, kPairs };
template <class Store, typename Compute, Conversion kConversion>
struct NumberOf {
  using Type = NoColumns;
};
template <class Store, typename Compute>
struct NumberOf<Store, Compute, kNumbers> {
  using Type = typename Store::Affines::template Number<Compute>;
};
template <class Store, typename Compute>
struct NumberOf<Store, Compute, kPairs> {
  using Type = typename Store::Affines::Pair;
};
template <class Store, bool kPaired>
inline constexpr Conversion conversion_of() {
  if constexpr (kPaired) return Store::Affines::kPairs ? kPairs : Store::Affines::kPresent ? kNumbers : kNothing;
  else return kNumbers;
}

// What a Store says of its parameters, where it has them in `affine`.
template <class Store, class Gamma, class Beta>
struct ColumnsOf {
  using Affines = AffineColumns<Gamma, Beta>;
  template <int N>
  using Columns = typename Affines::template Columns<N>;
  template <int N>
  using ColumnsSplit = typename Affines::template ColumnsSplit<N>;
  using ColumnsFrom = typename Affines::ColumnsFrom;

  const Affines& own() const { return static_cast<const Store*>(this)->affine; }
  template <int N, typename Index>
  Columns<N> columns(Index col) const {
    return own().template columns<N>(col);
  }
  ColumnsFrom columns_from(int64 col) const { return own().columns_from(col); }
  template <int N, typename Index>
  ColumnsSplit<N> columns_split(const ColumnsFrom& first, Index further) const {
    return own().template columns_split<N>(first, further);
  }
  template <int N>
  static Columns<N> realign_columns(const ColumnsSplit<N>& split) {
    return Affines::template realign_columns<N>(split);
  }
  template <int N>
  Columns<N> columns_unaligned(int64 col) const {
    return own().template columns_unaligned<N>(col);
  }
};

// y * gamma + beta, rounded once.
template <typename T, int kAxes, class Gamma, class Beta>
struct AffineStore : ColumnsOf<AffineStore<T, kAxes, Gamma, Beta>, Gamma, Beta> {
  using Type = T;
  using Affines = AffineColumns<Gamma, Beta>;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kHasEpilogueOperands = false, kScales = false;
  DirectStore<T, kAxes> to;
  Affines affine;

  template <int N>
  using EpilogueOperands = NoColumns;

  struct RowPointer {
    typename DirectStore<T, kAxes>::RowPointer to;
    void make_opaque() { to.make_opaque(); }
    T* address() const { return to.address(); }
    RowPointer from(int col) const { return {to.from(col)}; }
    template <int N>
    int head() const {
      return to.template head<N>();
    }

    // columns: as they were loaded, or numbers
    template <int N, bool kWhole = false, typename Compute, class Columns, typename Index>
    void store(const Compute (&y)[N], const Columns& columns, Index col) const {
      Compute z[N];
      Affines::template apply<N>(y, columns, z);
      to.template store<N, kWhole>(z, NoColumns{}, col);
    }
  };
  RowPointer at(int64 row) const { return {to.at(row)}; }
};

}  // namespace cupynorm
