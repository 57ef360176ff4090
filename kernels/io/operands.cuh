// What is loaded beside x or an op's result, and numbers that come with the launch. Host mirrors: in
// cupynorm/lower/mirrors.py.
//
// An operand
//   kBytes              Bytes of an element in memory; 2 where nothing is loaded.
//   kPerRow             Whether it is one number for each row.
//   Packed<N>           N elements as they lie in memory.
//   kPrefetchBytes<N>   Where rows are prefetched into shared memory: bytes of N elements there; 0 if they cannot be
//                       copied, and are loaded when they are used.
//   at(row)             The RowPointer of a row.
// A RowPointer of an operand
//   load<N>(col)        Packed<N>. All loads are issued before the first is waited for.
//   unpack<N>(packed, x, col)
//                       Converts N elements to the compute type.
//   prefetch<N, kPlaces>(shared, place, col)
//                       kPrefetchBytes<N> > 0: begins to copy N elements to shared memory.
//   prefetched<N, kPlaces>(shared, place, col)
//                       The Packed<N> that prefetch copied.
//   make_opaque(), begins_at(place)
//                       As for the RowPointer of a Load (contract.cuh).
// Optional, kInSteps: a RowPointer can be asked for Steps of columns (io/strided.cuh), after
//   begin_at(col)       From which column on they are counted.
#pragma once
#include <base/functions.cuh>
#include <io/affine.cuh>

namespace cupynorm {

// Whether an operand or a mask can be asked for Steps of columns.
template <class Operand, class = void>
inline constexpr bool kLoadsInSteps = false;
template <class Operand>
inline constexpr bool kLoadsInSteps<Operand, decltype(void(Operand::kInSteps))> = Operand::kInSteps;

// Begins to copy what can be copied of an operand or a mask.
template <class Operand, int N, int kPlaces, typename Index>
inline void prefetch_if_any(const typename Operand::RowPointer& pointer, unsigned char* shared, int place, Index col) {
  if constexpr (Operand::template kPrefetchBytes<N> > 0) pointer.template prefetch<N, kPlaces>(shared, place, col);
}
// What came of it; what cannot be copied is loaded.
template <class Operand, int N, int kPlaces, typename Index>
inline typename Operand::template Packed<N> prefetched_or_loaded(const typename Operand::RowPointer& pointer,
    const unsigned char* shared, int place, Index col) {
  constexpr bool kPrefetched = Operand::template kPrefetchBytes<N> > 0;
  if constexpr (kPrefetched) return pointer.template prefetched<N, kPlaces>(shared, place, col);
  else return pointer.template load<N>(col);
}

// A vector that begins anywhere, as two accesses bring it: it is put together when it is used, so that nothing waits
// for it before.
template <typename T, int N>
struct InTwo {
  SplitVector<T, N, 16> split;
  void make_opaque() {
#pragma unroll
    for (unsigned& word : split.word) cupynorm::make_opaque(word);
    cupynorm::make_opaque(split.off);
  }
};
// An access that has none of the elements is the other once more: without a branch, all loads are issued at once.
// begin, end: which of the elements there are, at least one; what has none of them may lie outside of all memory.
template <bool kConstant, int N, typename T>
inline InTwo<T, N> load_in_two(const T* p, int begin = 0, int end = N) {
  const Unaligned<16> first = unaligned_at<16>(p);
  const int off = int(first.off), size = int(sizeof(T));
  InTwo<T, N> packed;
  packed.split.off = first.off;
#pragma unroll
  for (int i = 0; i < packed.split.kPieces; ++i) {
    int at = 16 * i < off + end * size ? 16 * i : 0;
    if (i == 0 && off + begin * size >= 16) at = 16;
    load_words<16, kConstant>(first.access + at, packed.split.word + 4 * i);
  }
  return packed;
}
template <int N, typename T, typename Compute>
inline void unpack(const InTwo<T, N>& packed, Compute* x) {
  unpack<N>(realign(packed.split), x);
}

// Whether an operand has the same elements for every row. A thread that goes through many rows keeps those of its
// columns, Kept<N, As>, and copies what is left of an operand to shared memory. As: void, to keep them as they lie in
// memory, or the compute type.
template <class Operand>
inline constexpr bool kOfColumns = false;

// Numbers that are converted: once, because the compiler cannot see that they could be converted again.
template <typename Compute, int N>
struct Numbers {
  Compute of[N];
};
template <int N, typename Compute>
inline void unpack(const Numbers<Compute, N>& numbers, Compute* x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = numbers.of[i];
}
template <typename T, int N>
inline void keep_as(const Vector<T, N>& vector, Vector<T, N>& kept) {
  kept = vector;
}
template <typename T, int N, typename Compute>
inline void keep_as(const Vector<T, N>& vector, Numbers<Compute, N>& kept) {
  unpack<N>(vector, kept.of);
#pragma unroll
  for (int i = 0; i < N; ++i) make_opaque(kept.of[i]);
}
template <typename T, int N>
inline void make_kept_opaque(Vector<T, N>& kept) {
  kept.make_opaque();
}
template <class Kept>
inline void make_kept_opaque(Kept&) {}

template <class Operand, int N, class As, bool kIsOfColumns>
struct KeptOf {
  using Type = NoColumns;
};
template <class Operand, int N, class As>
struct KeptOf<Operand, N, As, true> {
  using Type = Numbers<As, N>;
};
template <class Operand, int N>
struct KeptOf<Operand, N, void, true> {
  using Type = Vector<typename Operand::Type, N>;
};

// Elements next to each other along a row, rows anywhere or all at one place, read in accesses of kWidth elements; 0:
// vectors begin anywhere, and are put together from two accesses.
// kConstant: nothing writes there while the kernel runs.
template <typename T, class Rows, int kWidth, bool kConstant>
struct AlongRows {
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kPerRow = false, kInSteps = true;
  const T* pointer;
  Rows rows;

  template <int N>
  using Packed = typename Conditional<kWidth == 0 && (N > 1), InTwo<T, N>, Vector<T, N>>::Type;
  template <int N>
  static constexpr int kAccess = (kWidth < N ? kWidth : N) * kBytes;  // bytes
  template <int N>
  static constexpr int kPrefetchBytes = kAccess<N> >= 4 ? N * kBytes : 0;
  struct RowPointer {
    const T* pointer;
    void make_opaque() { cupynorm::make_opaque(pointer); }
    bool begins_at(const void* place) const { return pointer == place; }
    void begin_at(int col) { pointer += col; }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      const T* const place = pointer + Adjacent::offset(col);
      if constexpr (kWidth == 0 && N > 1) return load_in_two<kConstant, N>(place);
      else return load_vector<T, N, (kWidth > 0 && kWidth < N ? kWidth : N), kConstant>(place);
    }
    template <typename Index>
    void prefetch_across(Index col) const {
      prefetch_to_l2(pointer + Adjacent::offset(col));
    }
    // The same where only elements `begin` up to `end` are the row's: what is loaded beside them is in memory, too.
    template <int N>
    Packed<N> load_part(int64 col, int begin, int end) const {
      if constexpr (kWidth == 0 && N > 1) return load_in_two<kConstant, N>(pointer + col, begin, end);
      else return load<N>(col);
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      prefetch_vector<kPlaces, kAccess<N>, N>(shared, place, pointer + col);
    }
    template <int N, int kPlaces, typename Index>
    static Vector<T, N> prefetched(const unsigned char* shared, int place, Index) {
      return prefetched_vector<kPlaces, T, N>(shared, place);
    }
    // The elements themselves, with vectors that begin anywhere put together.
    template <int N, typename Index>
    Vector<T, N> whole(Index col) const {
      const Packed<N> packed = load<N>(col);
      if constexpr (kWidth == 0 && N > 1) return realign(packed.split);
      else return packed;
    }
    template <int N, typename Compute, typename Index>
    static void unpack(const Packed<N>& packed, Compute* x, Index) {
      cupynorm::unpack<N>(packed, x);
    }
  };
  RowPointer at(int64 row) const { return {pointer + rows.offset(row)}; }
};

// The same elements for every row. at() makes the address depend on the row, in form only: otherwise the compiler would
// load and convert them before the loop over rows, and wait for them before it asks for x.
template <typename T, int kWidth, bool kConstant>
struct AlongColumns {
  using Type = T;
  using Rows = AlongRows<T, Strided<1>, kWidth, kConstant>;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kPerRow = false, kInSteps = true;
  const T* pointer;

  template <int N>
  using Packed = typename Rows::template Packed<N>;
  template <int N>
  static constexpr int kPrefetchBytes = Rows::template kPrefetchBytes<N>;
  using RowPointer = typename Rows::RowPointer;
  RowPointer at(int64 row) const { return {pointer + (row >> 62)}; }
};

template <typename T, int kWidth, bool kConstant>
inline constexpr bool kOfColumns<AlongColumns<T, kWidth, kConstant>> = true;

// The part of an operand that loads nothing for its columns. Both structs are empty.
struct LoadsNoColumns {
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct Row {
    static void make_opaque() {}
    static void begin_at(int) {}
    template <typename Index>
    static void prefetch_across(Index) {}
    static bool begins_at(const void*) { return false; }
    template <int N, typename Index>
    NoColumns load(Index) const {
      return {};
    }
    template <int N>
    NoColumns load_part(int64, int, int) const {
      return {};
    }
  };
};

// One element a row.
template <typename T, class Rows>
struct PerRow : LoadsNoColumns {
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kPerRow = true, kInSteps = true;
  const T* pointer;
  Rows rows;

  struct RowPointer : LoadsNoColumns::Row {
    Vector<T, 1> element;
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index) const {
      Compute value[1];
      cupynorm::unpack<1>(element, value);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = value[0];
    }
  };
  RowPointer at(int64 row) const { return {{}, load_vector<T, 1>(pointer + rows.offset(row))}; }
};

// Elements anywhere: one at a time along a row. Cols: how far from the first of their row. Those of one column, in
// kAcross_ neighbouring rows, lie next to one another.
template <typename T, int kAxes, class Cols, int kAcross_ = 1>
struct Scattered {
  using Type = T;
  static constexpr int kBytes = sizeof(T), kAcross = kAcross_;
  static constexpr bool kPerRow = false, kInSteps = kEvenlyApart<Cols>;
  const T* pointer;
  Strided<kAxes> rows;
  Cols cols;

  template <int N>
  struct Packed {
    Vector<T, 1> element[N];
    void make_opaque() {
#pragma unroll
      for (int i = 0; i < N; ++i) element[i].make_opaque();
    }
  };
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {
    const T* pointer;
    Cols cols;
    static void make_opaque() {}
    bool begins_at(const void* place) const { return pointer == place; }
    void begin_at(int col) { pointer += cols.offset(col); }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      Packed<N> packed;
      if constexpr (N == 1) {
        packed.element[0] = load_vector<T, 1>(place_in_row(pointer, cols, col));
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) packed.element[i] = load_vector<T, 1>(pointer + cols.offset(col + i));
      }
      return packed;
    }
    template <typename Index>
    void prefetch_across(Index col) const {
      prefetch_to_l2(pointer + cols.offset(col));
    }
    template <int N, typename Compute, typename Index>
    static void unpack(const Packed<N>& packed, Compute* x, Index) {
      cupynorm::unpack<N>(packed, x);
    }
  };
  RowPointer at(int64 row) const { return {pointer + rows.offset(row), cols}; }
};

// A number that comes with the launch.
template <typename T>
struct Value : LoadsNoColumns {
  static constexpr int kBytes = 2;  // digits that it adds to those of an array: none that count
  static constexpr bool kPerRow = true, kInSteps = true;
  T value;

  struct RowPointer : LoadsNoColumns::Row {
    T value;
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index) const {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = value;
    }
  };
  RowPointer at(int64) const { return {{}, value}; }
};

// Several operands; values of operand k are row k of x.
template <class... Operands_>
struct Operands {
  static constexpr int kCount = 0, kBytes = 2;
  static constexpr bool kPerRow = true, kInSteps = true;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  template <int N>
  static constexpr int kRowBytes = 0;
  static constexpr int kKeptColumns = 0;
  template <int N, class As>
  using Kept = NoColumns;
  struct RowPointer {
    static void make_opaque() {}
    static bool begins_at(const void*) { return false; }
    static void begin_at(int) {}
    template <typename Index>
    static void prefetch_across(Index) {}
    template <int N, typename Index>
    NoColumns load(Index) const {
      return {};
    }
    template <int N, class As, typename Index>
    static NoColumns keep(Index) {
      return {};
    }
    template <int N, int kPlaces, typename Index>
    static void prefetch_row(unsigned char*, int, Index) {}
    template <int N, int kPlaces, class As, typename Compute, typename Index>
    static void unpack_row(NoColumns, const unsigned char*, int, Compute (*)[N], Index) {}
    template <int N, typename Compute, typename Index>
    static void unpack(NoColumns, Compute (*)[N], Index) {}
  };
  RowPointer at(int64) const { return {}; }
};
template <class First, class... Rest>
struct Operands<First, Rest...> {
  using Others = Operands<Rest...>;
  static constexpr int kCount = 1 + Others::kCount,
      kBytes = First::kBytes > Others::kBytes ? First::kBytes : Others::kBytes;
  static constexpr bool kPerRow = First::kPerRow && Others::kPerRow,
      kInSteps = kLoadsInSteps<First> && Others::kInSteps;
  First first;
  Others rest;

  template <int N>
  struct Packed {
    typename First::template Packed<N> first;
    typename Others::template Packed<N> rest;
    void make_opaque() { first.make_opaque(), rest.make_opaque(); }
  };
  template <int N>
  static constexpr int kPrefetchBytes = First::template kPrefetchBytes<N> + Others::template kPrefetchBytes<N>;
  template <int N>
  static constexpr int kFirstRowBytes = kOfColumns<First> ? 0 : First::template kPrefetchBytes<N>;
  template <int N>
  static constexpr int kRowBytes = kFirstRowBytes<N> + Others::template kRowBytes<N>;
  static constexpr int kKeptColumns = kOfColumns<First> + Others::kKeptColumns;  // arrays
  template <int N, class As>
  struct Kept {
    typename KeptOf<First, N, As, kOfColumns<First>>::Type first;
    typename Others::template Kept<N, As> rest;
    void make_opaque() { make_kept_opaque(first), rest.make_opaque(); }
  };
  struct RowPointer {
    typename First::RowPointer first;
    typename Others::RowPointer rest;
    void make_opaque() { first.make_opaque(), rest.make_opaque(); }
    bool begins_at(const void* place) const { return first.begins_at(place) || rest.begins_at(place); }
    void begin_at(int col) { first.begin_at(col), rest.begin_at(col); }
    template <typename Index>
    void prefetch_across(Index col) const {
      first.prefetch_across(col), rest.prefetch_across(col);
    }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      return {first.template load<N>(col), rest.template load<N>(col)};
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      prefetch_if_any<First, N, kPlaces>(first, shared, place, col);
      prefetch_if_any<Others, N, kPlaces>(rest, shared + kPlaces * First::template kPrefetchBytes<N>, place, col);
    }
    template <int N, int kPlaces, typename Index>
    Packed<N> prefetched(const unsigned char* shared, int place, Index col) const {
      const unsigned char* const behind = shared + kPlaces * First::template kPrefetchBytes<N>;
      return {prefetched_or_loaded<First, N, kPlaces>(first, shared, place, col),
          prefetched_or_loaded<Others, N, kPlaces>(rest, behind, place, col)};
    }
    // Where a thread keeps what is the same for every row: loads that; begins to copy the rest; converts both.
    template <int N, class As, typename Index>
    Kept<N, As> keep(Index col) const {
      Kept<N, As> kept = {{}, rest.template keep<N, As>(col)};
      if constexpr (kOfColumns<First>) keep_as(first.template whole<N>(col), kept.first);
      return kept;
    }
    template <int N, int kPlaces, typename Index>
    void prefetch_row(unsigned char* shared, int place, Index col) const {
      if constexpr (!kOfColumns<First>) prefetch_if_any<First, N, kPlaces>(first, shared, place, col);
      rest.template prefetch_row<N, kPlaces>(shared + kPlaces * kFirstRowBytes<N>, place, col);
    }
    template <int N, int kPlaces, class As, typename Compute, typename Index>
    void unpack_row(const Kept<N, As>& kept, const unsigned char* shared, int place, Compute (*x)[N], Index col) const {
      if constexpr (kOfColumns<First>) cupynorm::unpack<N>(kept.first, x[0]);
      else first.template unpack<N>(prefetched_or_loaded<First, N, kPlaces>(first, shared, place, col), x[0], col);
      rest.template unpack_row<N, kPlaces, As>(kept.rest, shared + kPlaces * kFirstRowBytes<N>, place, x + 1, col);
    }
    template <int N, typename Compute, typename Index>
    void unpack(const Packed<N>& packed, Compute (*x)[N], Index col) const {
      first.template unpack<N>(packed.first, x[0], col);
      rest.template unpack<N>(packed.rest, x + 1, col);
    }
  };
  RowPointer at(int64 row) const { return {first.at(row), rest.at(row)}; }
};

// Of how many neighbouring rows one access can load an element of an operand or a mask.
template <class Operand, class = void>
inline constexpr int kRowsAtOnce = 1;
template <class Operand>
inline constexpr int kRowsAtOnce<Operand, decltype(void(Operand::kAcross))> = Operand::kAcross;

// One element of each of kRows neighbouring rows of an operand or a mask, in one access if the rows lie so.
//   load(get, col)   Loads the elements of a column; get(r) gives the pointer of row r.
//   of(r)            What the pointer of row r would have loaded alone.
template <class Operand, int kRows, bool = (kRows > 1 && kRowsAtOnce<Operand> % kRows == 0)>
struct OfRows {
  typename Operand::template Packed<1> rows[kRows];
  template <class Get, typename Index>
  void load(Get get, Index col) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = get(r).template load<1>(col);
  }
  typename Operand::template Packed<1> of(int r) const { return rows[r]; }
};
template <class Operand, int kRows>
struct OfRows<Operand, kRows, true> {
  using Type = typename Operand::Type;
  Vector<Type, kRows> rows;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    rows = load_vector<Type, kRows>(place_in_row(get(0).pointer, get(0).cols, col));
  }
  typename Operand::template Packed<1> of(int r) const { return {{element_of(rows, r)}}; }
};
template <typename T, int kWidth, bool kConstant, int kRows>
struct OfRows<AlongColumns<T, kWidth, kConstant>, kRows, false> {
  typename AlongColumns<T, kWidth, kConstant>::template Packed<1> all;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    all = get(0).template load<1>(col);
  }
  const auto& of(int) const { return all; }
};
template <class First, class... Rest, int kRows>
struct OfRows<Operands<First, Rest...>, kRows, false> {
  OfRows<First, kRows> first;
  OfRows<Operands<Rest...>, kRows> rest;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    first.load([&](int r) -> const auto& { return get(r).first; }, col);
    rest.load([&](int r) -> const auto& { return get(r).rest; }, col);
  }
  typename Operands<First, Rest...>::template Packed<1> of(int r) const { return {first.of(r), rest.of(r)}; }
};

// in: kInputs numbers of each of N elements; out: kOutputs of each.
template <class Function, int kInputs, int kOutputs, int N, typename Compute>
inline void apply_to_each(const Compute (&in)[kInputs][N], Compute (&out)[kOutputs][N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    Compute given[kInputs], result[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) given[k] = in[k][i];
    Function::apply(given, result);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) out[k][i] = result[k];
  }
}

}  // namespace cupynorm
