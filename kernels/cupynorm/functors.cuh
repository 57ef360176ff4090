// Load and Store functors: the only code that knows types, strides and affine parameters. Each has its twin of the same
// name in cupynorm/functors.py, with the same members in the same order.
//
// A Load has `Type` (that of x in memory), `Digits` (the type that can hold what it gives the op), Loaded<N> (N elements as they lie
// in memory: packs of x and of all else they are computed from), absent<N>(padding) for elements that are not there, and
// at(row), which gives a Line: load<N>(col) -> Loaded<N>, at multiples of the plan's packs; unpack<N>(loaded, x, col, padding), which
// computes, and returns a bit for each element that is not dropped; keep<N>(x, col), which writes what was computed. kDrops: it
// drops elements, kSpans: all but an interval of columns at least; kKeeps: it writes. kSent<N>: bytes of N elements, and of all that is
// loaded with them, that go through shared memory where rows are sent ahead: Line's send and sent (fused.cuh), or, of x alone,
// address. kDirect: there is x and nothing else: Loaded<N> is Pack<Type, N>, absent elements become
// padding themselves, and Line has load_anywhere<N>(col), at any column, and address(col), for copies that go ahead, too.
// A Store has `Type`, `kBytes` (of its widest result's element), columns<N>(col) -> Columns<N>, the parameters of N columns, the same for every row (columns_anywhere<N> where
// col may be any; or in steps: columns_from(col), which many packs share; columns_apart<N>(those, further), at col + further as in load_apart;
// put_together<N>()), and at(row), which gives a Line: store<N>(values, columns, col); head<N>(), how many elements lie before the
// first that is aligned to N; from(col), the same line from there on; address(). Columns may wait in registers: hide() keeps them packed there. All are asked only for
// columns below cols.
#pragma once
#include <cupynorm/math.cuh>
#include <cupynorm/pack.cuh>

namespace cupynorm {

// A division by what is known at the launch: of less than 2^31 two instructions instead of twenty (Granlund and Montgomery 1994).
// multiplier and shift: cupynorm/functors.py, division.
inline int64 quotient(int64 index, int64 divisor, unsigned multiplier, unsigned shift) {
  if ((index | divisor) >> 31) return static_cast<unsigned long long>(index) / static_cast<unsigned long long>(divisor);
  return (multiply_high(unsigned(index), multiplier) + unsigned(index)) >> shift;
}

// Where index i of some flattened axes lies: in elements, outermost axis first; neighbours that can be one axis are one.
template <int kAxes>
struct Strided {
  int64 extent[kAxes];  // extent[0] is not used
  int64 stride[kAxes];
  unsigned multiplier[kAxes], shift[kAxes];

  int64 offset(int64 index) const {
    int64 sum = 0;
#pragma unroll
    for (int axis = kAxes - 1; axis > 0; --axis) {
      const int64 outer = quotient(index, extent[axis], multiplier[axis], shift[axis]);
      sum += (index - outer * extent[axis]) * stride[axis];
      index = outer;
    }
    return sum + index * stride[0];
  }
};

// One axis: a kernel's arguments come in lines of 64 bytes, and fewer then do.
template <>
struct Strided<1> {
  int64 stride[1];
  int64 offset(int64 index) const { return index * stride[0]; }
};

// The same of operands, in 32 bits: fewer than 2^31 indices, and places within 2^31 of the first. kRepeats: all of the innermost axis
// lie at one place, as one length does for all of a batch's queries.
template <int kAxes, bool kRepeats>
struct Strided32 {
  unsigned extent[kAxes];
  int stride[kAxes];
  unsigned multiplier[kAxes], shift[kAxes];

  int64 offset(int64 row) const {
    unsigned index = unsigned(row);
    int sum = 0;
#pragma unroll
    for (int axis = kAxes - 1; axis > 0; --axis) {
      const unsigned outer = (multiply_high(index, multiplier[axis]) + index) >> shift[axis];
      if (!kRepeats || axis < kAxes - 1) sum += int(index - outer * extent[axis]) * stride[axis];
      index = outer;
    }
    return sum + int(index) * stride[0];
  }
};

template <typename T, int kAxes>
struct DirectLoad {
  using Type = T;
  using Digits = T;
  static constexpr bool kDirect = true, kDrops = false, kSpans = false, kKeeps = false;
  const T* pointer;  // first element of the first row
  Strided<kAxes> rows;

  template <int N>
  using Loaded = Pack<T, N>;
  template <int N>
  static constexpr int kSent = N * int(sizeof(T));
  template <int N, typename Compute>
  static Pack<T, N> absent(Compute padding) {
    return pack_filled<T, N>(padding);
  }

  struct Line {
    using Type = T;
    const T* pointer;
    void hide() { cupynorm::hide(pointer); }  // where it comes from, which a loop would compute again for each access
    template <int N, typename Index>
    Pack<T, N> load(Index col) const {
      return load_pack<T, N>(pointer + col);
    }
    template <int N, bool kAgain>
    Pack<T, N> load_twice(int col) const {
      return load_pack_twice<kAgain, T, N>(pointer + col);
    }
    template <int N>
    Pack<T, N> load_anywhere(int64 col) const {
      return load_pack_anywhere<T, N>(pointer + col);
    }
    template <int N, typename Compute, typename Index>
    static unsigned unpack(const Pack<T, N>& loaded, Compute* x, Index, Compute) {
      cupynorm::unpack<N>(loaded, x);
      return ~0u;
    }
    template <typename Index>
    const void* address(Index col) const {
      return pointer + col;
    }
  };
  Line at(int64 row) const { return {pointer + rows.offset(row)}; }
};

struct NoColumns {
  void hide() {}
};

template <typename T, int kAxes>
struct DirectStore {
  using Type = T;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kAhead = false, kScales = false;
  T* pointer;
  Strided<kAxes> rows;

  template <int N>
  using Ahead = NoColumns;
  template <int N>
  using Columns = NoColumns;
  template <int N>
  using ColumnsApart = NoColumns;
  NoColumns columns_from(int64) const { return {}; }
  template <int N, typename Index>
  NoColumns columns_apart(NoColumns, Index) const {
    return {};
  }
  template <int N>
  static NoColumns put_together(NoColumns) {
    return {};
  }
  template <int N, typename Index>
  NoColumns columns(Index) const {
    return {};
  }
  template <int N>
  NoColumns columns_anywhere(int64) const {
    return {};
  }

  struct Line {
    T* pointer;
    void hide() { cupynorm::hide(pointer); }
    T* address() const { return pointer; }
    Line from(int col) const { return {pointer + col}; }
    // how many elements lie before the first that is aligned to N elements
    template <int N>
    int head() const {
      return int(-(reinterpret_cast<unsigned long long>(pointer) / sizeof(T)) % N);
    }
    template <int N, bool kWhole = false, typename Compute, typename Index>
    void store(const Compute (&y)[N], NoColumns, Index col) const {
      store_pack<kWhole>(pointer + col, pack_from<T, N>(y));
    }
  };
  Line at(int64 row) const { return {pointer + rows.offset(row)}; }
};

// Parameters of the columns, the same for every row. Nothing may write to them while the kernel runs.

struct NoColumn {
  static constexpr bool kPresent = false;
  static constexpr int kBytes = 0;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  using Apart = NoColumns;
  using From = NoColumns;
  NoColumns from(int64) const { return {}; }
  template <int N, typename Index>
  NoColumns load_apart(NoColumns, Index) const {
    return {};
  }
  template <int N, typename Index>
  NoColumns load(Index) const {
    return {};
  }
  template <int N>
  NoColumns load_anywhere(int64) const {
    return {};
  }
};

// One value a column, next to each other, read in accesses of kWidth elements: as wide as the pointer's alignment allows.
template <typename T, int kWidth>
struct Column {
  static constexpr bool kPresent = true;
  static constexpr int kBytes = sizeof(T);
  const T* pointer;

  template <int N>
  using Packed = Pack<T, N>;
  // of two bytes: element i, and the one of which a word has the bits
  template <int N>
  static unsigned bits_of(const Packed<N>& values, int i) {
    return values.word[i / 2] >> 16 * (i % 2) & 0xffffu;
  }
  static Packed<1> one_of(unsigned bits) { return {{bits}}; }
  // in accesses of 8 bytes: of 16, one more instruction a word would choose among them
  template <int N>
  using Apart = cupynorm::Apart<T, N, 8>;
  using From = Anywhere<8>;
  From from(int64 col) const { return anywhere<8>(pointer + col); }
  template <int N, typename Index>
  Apart<N> load_apart(const From& first, Index further) const {
    return cupynorm::load_apart<T, N, true>(first, further);
  }
  template <int N, typename Index>
  Pack<T, N> load(Index col) const {
    return load_pack<T, N, (kWidth < N ? kWidth : N), true>(pointer + col);
  }
  template <int N>
  Pack<T, N> load_anywhere(int64 col) const {
    return load_pack_anywhere<T, N, true>(pointer + col);
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
    Pack<T, 1> element[N];
    void hide() {
#pragma unroll
      for (int i = 0; i < N; ++i) element[i].hide();
    }
  };
  template <int N>
  static unsigned bits_of(const Packed<N>& values, int i) {
    return values.element[i].word[0] & 0xffffu;
  }
  static Packed<1> one_of(unsigned bits) { return {{{{bits}}}}; }
  template <int N>
  struct Apart {
    Packed<N> values;
    friend Packed<N> together(const Apart& apart) { return apart.values; }
  };
  struct From {
    int64 col;
    void hide() {}
  };
  From from(int64 col) const { return {col}; }
  template <int N, typename Index>
  Apart<N> load_apart(From first, Index further) const {
    return {load<N>(first.col + further)};
  }
  template <int N, typename Index>
  Packed<N> load(Index col) const {
    Packed<N> values;
#pragma unroll
    for (int i = 0; i < N; ++i) values.element[i] = load_pack<T, 1, 1, true>(pointer + cols.offset(col + i));
    return values;
  }
  template <int N>
  Packed<N> load_anywhere(int64 col) const {
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
  void hide() { gamma.hide(), beta.hide(); }
};
template <class Gamma, class Beta>
struct Affine<Gamma, Beta, true, false> {
  Gamma gamma;
  void hide() { gamma.hide(); }
};
template <class Gamma, class Beta>
struct Affine<Gamma, Beta, false, true> {
  Beta beta;
  void hide() { beta.hide(); }
};

template <class Gamma, class Beta>
struct Affine<Gamma, Beta, false, false> {
  void hide() {}
};

// A column's parameters as numbers: z = scaling(y).
template <typename T, bool kGamma, bool kBeta>
struct Scaling {
  T operator()(T y) const { return y; }
};
template <typename T>
struct __align__(2 * sizeof(T)) Scaling<T, true, true> {
  T scale, shift;
  T operator()(T y) const { return multiply_add(y, scale, shift); }
};
template <typename T>
struct Scaling<T, true, false> {
  T scale;
  T operator()(T y) const { return y * scale; }
};
template <typename T>
struct Scaling<T, false, true> {
  T shift;
  T operator()(T y) const { return y + shift; }
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
    T scale, shift;
    unpack<1>(Gamma::one_of(word), &scale);
    unpack<1>(Beta::one_of(word >> 16), &shift);
    return multiply_add(y, scale, shift);
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
  using ColumnsApart = Affine<typename Gamma::template Apart<N>, typename Beta::template Apart<N>, Gamma::kPresent, Beta::kPresent>;
  using ColumnsFrom = Affine<typename Gamma::From, typename Beta::From, Gamma::kPresent, Beta::kPresent>;
  ColumnsFrom columns_from(int64 col) const {
    ColumnsFrom first;
    if constexpr (Gamma::kPresent) first.gamma = gamma.from(col);
    if constexpr (Beta::kPresent) first.beta = beta.from(col);
    return first;
  }
  template <int N, typename Index>
  ColumnsApart<N> columns_apart(const ColumnsFrom& first, Index further) const {
    ColumnsApart<N> apart;
    if constexpr (Gamma::kPresent) apart.gamma = gamma.template load_apart<N>(first.gamma, further);
    if constexpr (Beta::kPresent) apart.beta = beta.template load_apart<N>(first.beta, further);
    return apart;
  }
  template <int N>
  static Columns<N> put_together(const ColumnsApart<N>& apart) {
    Columns<N> columns;
    if constexpr (Gamma::kPresent) columns.gamma = together(apart.gamma);
    if constexpr (Beta::kPresent) columns.beta = together(apart.beta);
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
  Columns<N> columns_anywhere(int64 col) const {
    return put_together<N>(columns_apart<N>(columns_from(col), 0));
  }

  template <typename Compute>
  using Number = Scaling<Compute, Gamma::kPresent, Beta::kPresent>;
  template <int N, typename Compute>
  static void convert(const Columns<N>& columns, Number<Compute> (&numbers)[N]) {
    Compute scale[N], shift[N];
    if constexpr (Gamma::kPresent) unpack<N>(columns.gamma, scale);
    if constexpr (Beta::kPresent) unpack<N>(columns.beta, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (Gamma::kPresent) numbers[i].scale = scale[i];
      if constexpr (Beta::kPresent) numbers[i].shift = shift[i];
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
    Compute scale[N], shift[N];
    if constexpr (Gamma::kPresent) unpack<N>(columns.gamma, scale);
    if constexpr (Beta::kPresent) unpack<N>(columns.beta, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (Gamma::kPresent && Beta::kPresent) z[i] = multiply_add(y[i], scale[i], shift[i]);
      else if constexpr (Gamma::kPresent) z[i] = y[i] * scale[i];
      else if constexpr (Beta::kPresent) z[i] = y[i] + shift[i];
      else z[i] = y[i];
    }
  }
};

// What a column's parameters become, for Stores whose columns wait as numbers, or as pairs where there are two of two bytes; nothing where
// there are none, as for what is fused around softmax.
enum Lending { kNothing, kNumbers, kPairs };
template <class Store, typename Compute, Lending kLending>
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
inline constexpr Lending lending_of() {
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
  using ColumnsApart = typename Affines::template ColumnsApart<N>;
  using ColumnsFrom = typename Affines::ColumnsFrom;

  const Affines& own() const { return static_cast<const Store*>(this)->affine; }
  template <int N, typename Index>
  Columns<N> columns(Index col) const {
    return own().template columns<N>(col);
  }
  ColumnsFrom columns_from(int64 col) const { return own().columns_from(col); }
  template <int N, typename Index>
  ColumnsApart<N> columns_apart(const ColumnsFrom& first, Index further) const {
    return own().template columns_apart<N>(first, further);
  }
  template <int N>
  static Columns<N> put_together(const ColumnsApart<N>& apart) {
    return Affines::template put_together<N>(apart);
  }
  template <int N>
  Columns<N> columns_anywhere(int64 col) const {
    return own().template columns_anywhere<N>(col);
  }
};

// y * gamma + beta, rounded once.
template <typename T, int kAxes, class Gamma, class Beta>
struct AffineStore : ColumnsOf<AffineStore<T, kAxes, Gamma, Beta>, Gamma, Beta> {
  using Type = T;
  using Affines = AffineColumns<Gamma, Beta>;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kAhead = false, kScales = false;
  DirectStore<T, kAxes> to;
  Affines affine;

  template <int N>
  using Ahead = NoColumns;

  struct Line {
    typename DirectStore<T, kAxes>::Line to;
    void hide() { to.hide(); }
    T* address() const { return to.address(); }
    Line from(int col) const { return {to.from(col)}; }
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
  Line at(int64 row) const { return {to.at(row)}; }
};

// The one argument of every row kernel.
template <class Op, class Load, class Store>
struct Arguments {
  Load load;
  Store store;
  int64 rows;
  int64 cols;
  Op op;  // last: softmax's is empty, and all that is asked for before the first load lies in one line
};

}  // namespace cupynorm
