// The Load and the Store that compute: from x or the op's result, and from operands; and masks. Host mirrors: of masks
// in cupynorm/lower/masks.py, of all others in lower/mirrors.py. What they compute is a struct that lower/tracing.py
// writes, `Function`.
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
#pragma once
#include <base/functions.cuh>
#include <io/affine.cuh>
#include <base/philox.cuh>

namespace cupynorm {

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
  static constexpr bool kPerRow = false;
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
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      if constexpr (kWidth == 0 && N > 1) return load_in_two<kConstant, N>(pointer + col);
      else return load_vector<T, N, (kWidth > 0 && kWidth < N ? kWidth : N), kConstant>(pointer + col);
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
  static constexpr bool kPerRow = false;
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
  static constexpr bool kPerRow = true;
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

// Elements anywhere: one at a time along a row. Those of one column, in kAcross_ neighbouring rows, lie next to one
// another.
template <typename T, int kAxes, int kColumnAxes, int kAcross_ = 1>
struct Scattered {
  using Type = T;
  static constexpr int kBytes = sizeof(T), kAcross = kAcross_;
  static constexpr bool kPerRow = false;
  const T* pointer;
  Strided<kAxes> rows;
  Strided<kColumnAxes> cols;

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
    Strided<kColumnAxes> cols;
    static void make_opaque() {}
    bool begins_at(const void* place) const { return pointer == place; }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      Packed<N> packed;
#pragma unroll
      for (int i = 0; i < N; ++i) packed.element[i] = load_vector<T, 1>(pointer + cols.offset(col + i));
      return packed;
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
  static constexpr bool kPerRow = true;
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

// A dropout as an operand: 1 where it keeps an element, 0 where it drops it. cupynorm/host/philox.py says which.
//   kWhole: true        Vectors begin at multiples of N, or of four if N is more, counted in all of x. So four
//                       neighbouring elements, or all N if they are fewer, take their random words from one block of
//                       Philox.
//   kWhole: false       A vector begins at any word of a block.
struct Dropped {
  unsigned long long seed, offset, threshold;
};
template <bool kWhole>
struct DropoutMask : LoadsNoColumns {
  static constexpr int kBytes = 2;
  static constexpr bool kPerRow = false;
  Dropped dropped;
  int64 cols;

  struct RowPointer : LoadsNoColumns::Row {
    Dropped dropped;           // offset: of the block that has the row's first element
    unsigned before;           // words of that block that are of the row before
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index col) const {
      using Unsigned = typename Conditional<sizeof(Index) == 4, unsigned, unsigned long long>::Type;
      const Unsigned index = before + Unsigned(col);
      const uint2 key = {unsigned(dropped.seed), unsigned(dropped.seed >> 32)};
      const unsigned least = unsigned(dropped.threshold);
      const bool any = dropped.threshold >> 32 == 0;  // whether anything is kept at all
      if constexpr (!kWhole && N > 1) {
        constexpr int kBlocks = (N + 6) / 4;
        unsigned word[4 * kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const unsigned long long block = dropped.offset + (index / 4 + b);
          const uint4 random = philox_block(block, key);
          word[4 * b] = random.x, word[4 * b + 1] = random.y, word[4 * b + 2] = random.z, word[4 * b + 3] = random.w;
        }
        const int at = int(index % 4);
#pragma unroll
        for (int i = 0; i < N + 2; ++i) word[i] = at & 1 ? word[i + 1] : word[i];
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = Compute(any && (at & 2 ? word[i + 2] : word[i]) >= least);
        return;
      }
      constexpr int kEach = N < 4 ? N : 4;
#pragma unroll
      for (int b = 0; b < N / kEach; ++b) {
        const unsigned long long block = dropped.offset + (index / 4 + b);
        const uint4 random = philox_block(block, key);
        const int at = kEach < 4 ? int(index % 4) : 0;
        const unsigned word[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          unsigned own = word[i];
          if constexpr (kEach == 2) own = at ? word[2 + i] : own;
          if constexpr (kEach == 1) own = at == 0 ? word[0] : at == 1 ? word[1] : at == 2 ? word[2] : word[3];
          x[b * kEach + i] = Compute(any && own >= least);
        }
      }
    }
  };
  RowPointer at(int64 row) const {
    const auto first = static_cast<unsigned long long>(row * cols);
    return {{}, {dropped.seed, dropped.offset + first / 4, dropped.threshold}, unsigned(first % 4)};
  }
};

// The same where elements lie anywhere: rows and cols give the number of an element, in the order that the random words
// have, and vectors have one element.
template <class Rows, class Cols>
struct DropoutAnywhere : LoadsNoColumns {
  static constexpr int kBytes = 2;
  static constexpr bool kPerRow = false;
  Dropped dropped;
  Rows rows;
  Cols cols;

  struct RowPointer : LoadsNoColumns::Row {
    Dropped dropped;
    int64 first;  // number of the row's first element
    Cols cols;
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index col) const {
      static_assert(N == 1, "elements lie apart");
      const auto number = static_cast<unsigned long long>(first + cols.offset(col)),
          block = dropped.offset + number / 4;
      const uint2 key = {unsigned(dropped.seed), unsigned(dropped.seed >> 32)};
      const uint4 random = philox_block(block, key);
      const int at = int(number % 4);
      const unsigned own = at == 0 ? random.x : at == 1 ? random.y : at == 2 ? random.z : random.w;
      x[0] = Compute(dropped.threshold >> 32 == 0 && own >= unsigned(dropped.threshold));
    }
  };
  RowPointer at(int64 row) const { return {{}, dropped, rows.offset(row), cols}; }
};

// A row's label as an operand: 1 in the label's column, else 0. A label outside 0 .. cols - 1 matches no column, or,
// with kNan, makes the whole row nan.
template <typename T, class Rows, bool kNan>
struct LabelMask : LoadsNoColumns {
  static constexpr int kBytes = 2;
  static constexpr bool kPerRow = false;
  const T* pointer;
  Rows rows;
  int64 cols;

  struct RowPointer : LoadsNoColumns::Row {
    int64 label;  // -1: none
    float other;  // what stands in other columns
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index col) const {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = col + i == Index(label) ? Compute(1) : Compute(other);
    }
  };
  RowPointer at(int64 row) const {
    const auto label = static_cast<int64>(pointer[rows.offset(row)]);  // what is negative is large without a sign
    const bool there = static_cast<unsigned long long>(label) < static_cast<unsigned long long>(cols);
    return {{}, there ? label : -1, as_float(kNan && !there ? 0x7fc00000u : 0u)};
  }
};

// Several operands; values of operand k are row k of x.
template <class... Operands_>
struct Operands {
  static constexpr int kCount = 0, kBytes = 2;
  static constexpr bool kPerRow = true;
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
  static constexpr bool kPerRow = First::kPerRow && Others::kPerRow;
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
    rows = load_vector<Type, kRows>(get(0).pointer + get(0).cols.offset(col));
  }
  typename Operand::template Packed<1> of(int r) const { return {{element_of(rows, r)}}; }
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

// Masks: which elements are dropped. Bounds: the interval of columns that a row keeps, from begin up to end.
template <typename Index>
struct Bounds {
  Index begin, end;
};

struct NoLengths {};
template <typename Index>
inline Index length_at(NoLengths, int64, Index cols) {
  return cols;
}
// Whatever number the caller has: none is read beyond the row.
template <typename T, class Rows, typename Index>
inline Index length_at(const PerRow<T, Rows>& lengths, int64 row, Index cols) {
  using Wide = typename Conditional<sizeof(T) <= 4 && sizeof(Index) == 4, unsigned, unsigned long long>::Type;
  const T length = lengths.pointer[lengths.rows.offset(row)];
  return length < T(1) ? 0 : Wide(length) > Wide(cols) ? cols : Index(length);
}

struct AllColumns {
  static constexpr bool kWhole = true;
  using Index = int64;
  static int most_kept(int cols) { return cols; }
};

// cupynorm/call/masks.py, Mask.interval. Without a bound low and high are beyond every column. Index_: what cols +
// queries fit into.
template <class Lengths, bool kLeftPadded, bool kBand, typename Index_>
struct Interval {
  static constexpr bool kWhole = false;
  using Index = Index_;
  Lengths lengths;
  Index cols, queries, low, high;
  unsigned multiplier, shift;  // of a division by queries

  // How many columns a row keeps at most, as far as that follows from the band: Mask.most_band_cols.
  int most_kept(int cols) const {
    if constexpr (!kBand) return cols;
    const int64 to_end = int64(queries) - 1 + high, from_begin = int64(cols) - low, between = int64(high) - low;
    int64 most = to_end < from_begin ? to_end : from_begin;
    most = most < between ? most : between;
    return most < 0 ? 0 : most < cols ? int(most) : cols;
  }
  Bounds<Index> at(int64 row) const {
    const Index length = length_at(lengths, row, cols);
    Bounds<Index> interval = {kLeftPadded ? cols - length : 0, kLeftPadded ? cols : length};
    if constexpr (kBand) {
      const Index query = Index(row) - Index(quotient(row, queries, multiplier, shift)) * queries;
      if (query + low > interval.begin) interval.begin = query + low < cols ? query + low : cols;
      if (query + high < interval.end) interval.end = query + high;
      if (interval.end < interval.begin) interval.end = interval.begin;
    }
    return interval;
  }
};

struct NoWhere {
  static constexpr bool kPresent = false, kPerRow = false;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {};
  RowPointer at(int64) const { return {}; }
};

// Bytes, of which those that are not 0 keep.
template <class Bytes>
struct Where {
  static constexpr bool kPresent = true, kPerRow = Bytes::kPerRow;
  Bytes bytes;
  template <int N>
  using Packed = typename Bytes::template Packed<N>;
  template <int N>
  static constexpr int kPrefetchBytes = Bytes::template kPrefetchBytes<N>;
  using RowPointer = typename Bytes::RowPointer;
  RowPointer at(int64 row) const { return bytes.at(row); }
};

// As bytes of whole rows: 0 for those whose label is `ignored`.
template <typename T, class Rows>
struct LabelCounts {
  static constexpr bool kPerRow = true;
  const T* pointer;
  Rows rows;
  T ignored;

  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {
    Vector<unsigned char, 1> element;
  };
  RowPointer at(int64 row) const { return {{{unsigned(pointer[rows.offset(row)] != ignored)}}}; }
};

// A bit for each of N bytes: whether it is not 0.
template <int N>
inline unsigned bits_of(const Vector<unsigned char, N>& vector) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const unsigned word = N < 4 ? vector.word[0] & ((1u << 8 * N % 32) - 1) : vector.word[i / 4];
    // the top bit of each byte that is not 0, brought together by a multiplication whose sums never meet
    const unsigned tops = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
    bits |= ((tops >> 7) * 0x10204080u >> 28) << i;
  }
  return bits;
}
template <int N>
inline unsigned bits_of(const InTwo<unsigned char, N>& packed) {
  return bits_of<N>(realign(packed.split));
}
template <int N, class Packed>
inline unsigned bits_of(const Packed& packed) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bits |= unsigned((packed.element[i].word[0] & 0xff) != 0) << i;
  return bits;
}

struct NoMask {
  static constexpr bool kDrops = false, kWhole = true, kInterval = false;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {
    template <int N, typename Index>
    static NoColumns load(Index) {
      return {};
    }
  };
  RowPointer at(int64) const { return {}; }
};

template <class Structure, class Where_>
struct Mask {
  static constexpr bool kDrops = true, kWhole = Structure::kWhole && !Where_::kPerRow;
  static constexpr bool kBytes = Where_::kPresent && !Where_::kPerRow, kInterval = !kWhole;
  Structure structure;
  Where_ where;
  int64 cols;

  template <int N>
  using Packed = typename Where_::template Packed<N>;
  template <int N>
  static constexpr int kPrefetchBytes = Where_::template kPrefetchBytes<N>;
  struct RowPointer {
    Bounds<typename Structure::Index> interval;
    typename Where_::RowPointer where;

    template <int N, typename Index>
    bool reads(Index col) const {
      return kWhole || (col < Index(interval.end) && col + N > Index(interval.begin));
    }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      if constexpr (kBytes) return where.template load<N>(col);
      else return {};
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      where.template prefetch<N, kPlaces>(shared, place, col);
    }
    template <int N, int kPlaces, typename Index>
    Packed<N> prefetched(const unsigned char* shared, int place, Index col) const {
      return where.template prefetched<N, kPlaces>(shared, place, col);
    }
    // Columns are then counted from this one.
    template <typename Index>
    void count_from(Index col) {
      interval.begin -= col, interval.end -= col;
    }
    template <int N, typename Index>
    unsigned bits(const Packed<N>& packed, Index col) const {
      unsigned bits = ~0u >> (32 - N);
      if constexpr (kBytes) bits = bits_of<N>(packed);
      if constexpr (!kWhole) {
        const Index from = Index(interval.begin) - col, to = Index(interval.end) - col;
        const int first = from < 0 ? 0 : from > N ? N : int(from), last = to < 0 ? 0 : to > N ? N : int(to);
        bits &= ((1u << last) - 1) & ~((1u << first) - 1);
      }
      return bits;
    }
  };
  RowPointer at(int64 row) const {
    RowPointer pointer = {{0, typename Structure::Index(cols)}, where.at(row)};
    if constexpr (!Structure::kWhole) pointer.interval = structure.at(row);
    if constexpr (Where_::kPerRow) {
      if ((pointer.where.element.word[0] & 0xff) == 0) pointer.interval.end = pointer.interval.begin;
    }
    return pointer;
  }
};

template <class Structure, class Bytes, int kRows>
struct OfRows<Mask<Structure, Where<Bytes>>, kRows, false> {
  using Masks = Mask<Structure, Where<Bytes>>;
  OfRows<Bytes, kRows> bytes;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    if constexpr (Masks::kBytes) bytes.load([&](int r) -> const auto& { return get(r).where; }, col);
  }
  typename Masks::template Packed<1> of(int r) const { return bytes.of(r); }
};

// Where what was computed is written, too.
struct NoStoreComputed {
  static constexpr bool kStoresComputed = false;
  struct RowPointer {};
  RowPointer at(int64) const { return {}; }
};
template <class To>
struct StoreComputed {
  static constexpr bool kStoresComputed = true;
  To to;
  using RowPointer = typename To::RowPointer;
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (&y)[kRows], Index col) {
    To::template store_across<kRows>(rows, y, col);
  }
  RowPointer at(int64 row) const { return to.at(row); }
};

// Whether a function takes so few steps that they may be taken twice.
template <class Function, class = void>
inline constexpr bool kHasFewSteps = false;
template <class Function>
inline constexpr bool kHasFewSteps<Function, decltype(void(Function::kFewSteps))> = Function::kFewSteps;

// Whether a function gives its one argument.
template <class Function, class = void>
inline constexpr bool kIsIdentity = false;
template <class Function>
inline constexpr bool kIsIdentity<Function, decltype(void(Function::kIdentity))> = Function::kIdentity;

// 16 bits that have more digits than a half: integers.
template <typename T>
inline constexpr bool kLongDigits = false;
template <>
inline constexpr bool kLongDigits<short> = true;
template <>
inline constexpr bool kLongDigits<unsigned short> = true;

// Whether numbers of a type have digits that only a double holds.
template <typename T>
inline constexpr bool kWideDigits = sizeof(T) == 8;
template <>
inline constexpr bool kWideDigits<int> = true;

// Function(x, operands), of what the mask does not drop. It has as many outputs as the op's elements have fields. Cols:
// how far x's columns lie from the first of their row: Adjacent, or a Strided where only single elements are asked for.
template <typename T, int kAxes, class Function, class Mask_, class Keep, class Operands_, class Cols>
struct FusedLoad : Cols {
  using Type = T;
  using Precision =
      typename Conditional<sizeof(T) == 2 && !kLongDigits<T> && Operands_::kBytes <= 2, T,
      typename Conditional<sizeof(T) == 8, T, float>::Type>::Type;
  static constexpr bool kDirect = false, kDrops = Mask_::kDrops, kInterval = Mask_::kInterval;
  static constexpr bool kStoresComputed = Keep::kStoresComputed,
      kWaitsAsLoaded = kHasFewSteps<Function> && Operands_::kPerRow, kIdentity = kIsIdentity<Function>,
      kInSteps = kEvenlyApart<Cols> && Operands_::kPerRow && !kDrops && !kStoresComputed;
  const T* pointer;
  Strided<kAxes> rows;
  Mask_ mask;
  Keep keeping;
  Operands_ operands;

  template <int N>
  struct Loaded {
    Vector<T, N> x;
    typename Operands_::template Packed<N> operands;
    typename Mask_::template Packed<N> mask;
  };
  template <int N>
  static Vector<T, N> x_of(const Loaded<N>& loaded) {
    return loaded.x;
  }
  template <int N, typename Compute>
  static Loaded<N> absent(Compute) {
    return {};
  }
  template <int N>
  static constexpr int kPrefetchBytes =
      N * int(sizeof(T)) + Operands_::template kPrefetchBytes<N> + Mask_::template kPrefetchBytes<N>;
  template <int N>
  static constexpr int kRowBytes = N * int(sizeof(T)) + Operands_::template kRowBytes<N>;  // without a mask
  static constexpr int kKeptColumns = Operands_::kKeptColumns;
  template <int N, class As>
  using Kept = typename Operands_::template Kept<N, As>;

  struct RowPointer : Cols {
    const T* pointer;
    typename Mask_::RowPointer mask;
    typename Keep::RowPointer keeping;
    typename Operands_::RowPointer operands;

    void make_opaque() { cupynorm::make_opaque(pointer), operands.make_opaque(); }
    bool begins_at(const void* place) const { return pointer == place || operands.begins_at(place); }
    void begin_at(int col) { pointer += this->offset(col); }

    template <typename Index>
    bool keeps_all(Index first, Index end) const {
      return !Mask_::kBytes && Index(mask.interval.begin) <= first && end <= Index(mask.interval.end);
    }
    // What a mask keeps is then asked for by columns counted from this one.
    template <typename Index>
    void count_kept_from(Index col) {
      mask.count_from(col);
    }
    // Narrows first .. last, numbers of vectors counted from column `origin`, to the vectors of which the mask keeps
    // some elements.
    template <int N>
    void keep_vectors(int origin, int& first, int& last) const {
      const int begin = int(mask.interval.begin) - origin, end = int(mask.interval.end) - origin;
      if (begin > 0) first = first > begin / N ? first : begin / N;
      last = end <= 0 ? 0 : last < (end + N - 1) / N ? last : (end + N - 1) / N;
      if (first >= last || mask.interval.begin >= mask.interval.end) first = last = 0;
    }
    // Whether anything of a vector is kept: what lies outside the mask's interval is not read.
    template <int N, typename Index>
    bool reads(Index col) const {
      if constexpr (kInterval) return mask.template reads<N>(col);
      return true;
    }
    template <int N, typename Index>
    Loaded<N> load(Index col) const {
      if (!reads<N>(col)) return {};
      return load_kept<N>(col);
    }
    template <int N, bool kAgain>
    Loaded<N> load_twice(int col) const {
      if (!reads<N>(col)) return {};
      const auto x = load_vector_twice<kAgain, T, N>(pointer + this->offset(col));
      if constexpr (kDrops) return {x, operands.template load<N>(col), mask.template load<N>(col)};
      else return {x, operands.template load<N>(col), {}};
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      constexpr int kOperands = kPlaces * N * int(sizeof(T)),
          kMask = kOperands + kPlaces * Operands_::template kPrefetchBytes<N>;
      prefetch_vector<kPlaces, 16, N>(shared, place, pointer + this->offset(col));
      prefetch_if_any<Operands_, N, kPlaces>(operands, shared + kOperands, place, col);
      prefetch_if_any<Mask_, N, kPlaces>(mask, shared + kMask, place, col);
    }
    template <int N, int kPlaces, typename Index>
    Loaded<N> prefetched(const unsigned char* shared, int place, Index col) const {
      constexpr int kOperands = kPlaces * N * int(sizeof(T)),
          kMask = kOperands + kPlaces * Operands_::template kPrefetchBytes<N>;
      return {prefetched_vector<kPlaces, T, N>(shared, place),
          prefetched_or_loaded<Operands_, N, kPlaces>(operands, shared + kOperands, place, col),
          prefetched_or_loaded<Mask_, N, kPlaces>(mask, shared + kMask, place, col)};
    }
    // The same where a thread keeps what all rows share of the operands, and there is no mask. What came may be
    // converted several times.
    template <int N, class As, typename Index>
    Kept<N, As> keep(Index col) const {
      return operands.template keep<N, As>(col);
    }
    template <int N, int kPlaces, typename Index>
    void prefetch_row(unsigned char* shared, int place, Index col) const {
      prefetch_vector<kPlaces, 16, N>(shared, place, pointer + col);
      operands.template prefetch_row<N, kPlaces>(shared + kPlaces * N * int(sizeof(T)), place, col);
    }
    template <int kMore, int kPlaces, int N, class As, typename Element, typename Index, class Take>
    void unpack_row(const Kept<N, As>& kept, const unsigned char* shared, int place, Element* x, Index col,
        Take take) const {
      typename ElementTraits<Element>::Number in[1 + Operands_::kCount][N];
      cupynorm::unpack<N>(prefetched_vector<kPlaces, T, N>(shared, place), in[0]);
      operands.template unpack_row<N, kPlaces, As>(kept, shared + kPlaces * N * int(sizeof(T)), place, in + 1, col);
      compute_further<kMore, N>(in, x, take);
    }
    template <int N, typename Element, typename Index>
    unsigned unpack(const Loaded<N>& loaded, Element* x, Index col, Element padding) const {
      unpack_kept<N>(loaded, x, col);
      if constexpr (kDrops) {
        const unsigned bits = mask.template bits<N>(loaded.mask, col);
        if (Mask_::kWhole || bits != ~0u >> (32 - N)) {  // most vectors lie within the interval
#pragma unroll
          for (int i = 0; i < N; ++i) x[i] = bits >> i & 1 ? x[i] : padding;
        }
        return bits;
      } else {
        return ~0u;
      }
    }

    // The same without a look at the interval; and which elements are kept.
    template <int N, typename Index>
    Loaded<N> load_kept(Index col) const {
      if constexpr (kDrops)
        return {load_vector<T, N>(pointer + this->offset(col)), operands.template load<N>(col),
            mask.template load<N>(col)};
      else return {load_vector<T, N>(pointer + this->offset(col)), operands.template load<N>(col), {}};
    }
    template <int N, typename Element, typename Index>
    void unpack_kept(const Loaded<N>& loaded, Element* x, Index col) const {
      using Traits = ElementTraits<Element>;
      typename Traits::Number in[1 + Operands_::kCount][N], out[Traits::kFields][N];
      cupynorm::unpack<N>(loaded.x, in[0]);
      operands.template unpack<N>(loaded.operands, in + 1, col);
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = Traits::of(out, i);
    }
    // The same where the function gives kMore numbers behind an element's: take(k, i, number) gets those of element i.
    template <int kMore, int N, typename Element, typename Index, class Take>
    void unpack_further(const Loaded<N>& loaded, Element* x, Index col, Take take) const {
      typename ElementTraits<Element>::Number in[1 + Operands_::kCount][N];
      cupynorm::unpack<N>(loaded.x, in[0]);
      operands.template unpack<N>(loaded.operands, in + 1, col);
      compute_further<kMore, N>(in, x, take);
    }
    template <int kMore, int N, typename Number, typename Element, class Take>
    static void compute_further(const Number (&in)[1 + Operands_::kCount][N], Element* x, Take take) {
      using Traits = ElementTraits<Element>;
      constexpr int kFields = Traits::kFields;
      Number out[kFields + kMore][N], own[kFields][N];
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int k = 0; k < kFields; ++k) own[k][i] = out[k][i];
#pragma unroll
        for (int k = 0; k < kMore; ++k) take(k, i, out[kFields + k][i]);
        x[i] = Traits::of(own, i);
      }
    }
    // Computes elements again from x, which has waited as it was loaded: as unpack, for elements that the mask keeps.
    template <int N, typename Element>
    void compute_again(const Vector<T, N>& x, Element* y) const {
      static_assert(kWaitsAsLoaded, "an operand of each element is loaded with it");
      unpack_kept<N>(Loaded<N>{x, {}, {}}, y, 0);
    }
    template <int N, typename Index>
    unsigned bits(const Loaded<N>& loaded, Index col) const {
      return mask.template bits<N>(loaded.mask, col);
    }
    // The first of several fields is stored.
    template <int N, bool kWhole = false, typename Element, typename Index>
    void store_computed(const Element* x, Index col) const {
      typename ElementTraits<Element>::Number own[N];
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] = field(x[i], 0);
      keeping.template store<N, kWhole>(own, NoColumns{}, col);
    }
    template <typename Index>
    const void* address(Index col) const {
      return pointer + this->offset(col);
    }
  };
  int most_kept(int cols) const { return mask.structure.most_kept(cols); }

  // For row/apart.cuh, where neighbouring rows are loaded together: what is loaded beside an element of x, that element
  // of each row, and what becomes of them.
  template <int kRows>
  struct Beside {
    OfRows<Operands_, kRows> operands;
    OfRows<Mask_, kRows> mask;
  };
  template <int kRows, class Row, typename Index>
  static Vector<T, kRows> load_across(const Row (&rows)[kRows], Index col, Beside<kRows>& beside) {
    bool any = !kInterval;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= rows[r].template reads<1>(col);
    if (!any) {
      beside = {};
      return {};
    }
    beside.operands.load([&](int r) -> const auto& { return rows[r].operands; }, col);
    beside.mask.load([&](int r) -> const auto& { return rows[r].mask; }, col);
    return load_vector<T, kRows>(rows[0].pointer + rows[0].offset(col));
  }
  template <int kRows, class Row, typename Element, typename Index>
  static unsigned unpack_across(const Row (&rows)[kRows], const Vector<T, kRows>& x,
      const Beside<kRows>& beside, Element (&elements)[kRows], Index col, Element padding) {
    using Traits = ElementTraits<Element>;
    using Number = typename Traits::Number;
    Number from_x[kRows];
    cupynorm::unpack<kRows>(x, from_x);
    unsigned bits = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Number in[1 + Operands_::kCount][1], out[Traits::kFields][1];
      in[0][0] = from_x[r];
      rows[r].operands.template unpack<1>(beside.operands.of(r), in + 1, col);
      apply_to_each<Function>(in, out);
      elements[r] = Traits::of(out, 0);
      if constexpr (kDrops) {
        const bool kept = rows[r].mask.template bits<1>(beside.mask.of(r), col) & 1;
        elements[r] = kept ? elements[r] : padding;
        bits |= unsigned(kept) << r;
      }
    }
    return bits;
  }
  // Computes elements again from x, which has waited as it was loaded: as unpack_across, for those that the mask keeps.
  template <int kRows, class Row, typename Element>
  static void compute_again_across(const Row (&rows)[kRows], const Vector<T, kRows>& x, Element (&elements)[kRows]) {
    static_assert(kWaitsAsLoaded, "an operand of each element is loaded with it");
    using Traits = ElementTraits<Element>;
    using Number = typename Traits::Number;
    Number from_x[kRows];
    cupynorm::unpack<kRows>(x, from_x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Number in[1 + Operands_::kCount][1], out[Traits::kFields][1];
      in[0][0] = from_x[r];
      rows[r].operands.template unpack<1>(typename Operands_::template Packed<1>{}, in + 1, 0);
      apply_to_each<Function>(in, out);
      elements[r] = Traits::of(out, 0);
    }
  }
  template <int kRows, class Row, typename Element, typename Index>
  static void store_computed_across(const Row (&rows)[kRows], const Element (&elements)[kRows], Index col) {
    typename ElementTraits<Element>::Number own[kRows];
    typename Keep::RowPointer to[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) own[r] = field(elements[r], 0), to[r] = rows[r].keeping;
    Keep::template store_across<kRows>(to, own, col);
  }

  RowPointer at(int64 row) const {
    return {static_cast<const Cols&>(*this), pointer + rows.offset(row), mask.at(row), keeping.at(row),
        operands.at(row)};
  }
};

// Where results go, one behind another.
template <class... Stores>
struct Outputs {
  static constexpr int kCount = 0, kBytes = 1;
  static constexpr bool kInSteps = true;
  struct RowPointer {
    void make_opaque() {}
    void begin_at(int) {}
    template <int N, bool kWhole, typename Compute, typename Index>
    static void store(const Compute (*)[N], Index) {}
  };
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&)[kRows], const Compute (*)[kRows], Index) {}
  RowPointer at(int64) const { return {}; }
};
template <class First, class... Rest>
struct Outputs<First, Rest...> {
  using Others = Outputs<Rest...>;
  using Type = typename First::Type;
  static constexpr int kCount = 1 + Others::kCount,
      kBytes = First::kBytes > Others::kBytes ? First::kBytes : Others::kBytes;
  static constexpr bool kInSteps = kStoresInSteps<First> && Others::kInSteps;
  First first;
  Others rest;

  struct RowPointer {
    typename First::RowPointer first;
    typename Others::RowPointer rest;
    void make_opaque() { first.make_opaque(), rest.make_opaque(); }
    void begin_at(int col) { first.begin_at(col), rest.begin_at(col); }
    template <int N, bool kWhole, typename Compute, typename Index>
    void store(const Compute (*y)[N], Index col) const {
      first.template store<N, kWhole>(y[0], NoColumns{}, col);
      rest.template store<N, kWhole>(y + 1, col);
    }
  };
  // One element of each of some neighbouring rows.
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (*y)[kRows], Index col) {
    typename First::RowPointer to[kRows];
    typename Others::RowPointer others[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) to[r] = rows[r].first, others[r] = rows[r].rest;
    First::template store_across<kRows>(to, y[0], col);
    Others::template store_across<kRows>(others, y + 1, col);
  }
  RowPointer at(int64 row) const { return {first.at(row), rest.at(row)}; }
};

// Function(y * gamma + beta, operands), each result rounded once.
template <class Function, class Gamma, class Beta, class Outputs_, class Operands_>
struct FusedStore : ColumnsOf<FusedStore<Function, Gamma, Beta, Outputs_, Operands_>, Gamma, Beta> {
  using Type = typename Outputs_::Type;
  using Affines = AffineColumns<Gamma, Beta>;
  static constexpr int kBytes = Outputs_::kBytes;
  static constexpr bool kHasEpilogueOperands = true, kScales = false,
      kInSteps = Outputs_::kInSteps && Operands_::kPerRow;
  Outputs_ to;
  Affines affine;
  Operands_ operands;

  template <int N>
  using EpilogueOperands = typename Operands_::template Packed<N>;
  template <int N, class As>
  using Kept = typename Operands_::template Kept<N, As>;
  template <int N>
  static constexpr int kRowBytes = Operands_::template kRowBytes<N>;

  struct RowPointer {
    typename Outputs_::RowPointer to;
    typename Operands_::RowPointer operands;
    Type* address() const { return to.first.address(); }
    void make_opaque() { to.make_opaque(), operands.make_opaque(); }
    void begin_at(int col) { to.begin_at(col); }
    template <int N>
    int head() const {
      return to.first.template head<N>();
    }
    template <int N, typename Index>
    EpilogueOperands<N> epilogue_operands(Index col) const {
      return operands.template load<N>(col);
    }
    // columns: as they were loaded, or numbers
    template <int N, bool kWhole = false, typename Compute, class Columns, typename Index>
    void store(const Compute (&y)[N], const Columns& columns, const EpilogueOperands<N>& epilogue_operands,
        Index col) const {
      store_further<0, N, kWhole>(y, columns, epilogue_operands, col, [](int, int, Compute) {});
    }
    // The same where the function gives kMore numbers behind the results: take(k, i, number) gets those of element i.
    template <int kMore, int N, bool kWhole, typename Compute, class Columns, typename Index, class Take>
    void store_further(const Compute (&y)[N], const Columns& columns, const EpilogueOperands<N>& epilogue_operands,
        Index col, Take take) const {
      Compute in[1 + Operands_::kCount][N];
      operands.template unpack<N>(epilogue_operands, in + 1, col);
      store_computed<kMore, N, kWhole>(in, y, columns, col, take);
    }
    // The same with operands as FusedLoad's that a thread keeps, or whose rows were copied to shared memory.
    template <int N, class As, typename Index>
    Kept<N, As> keep(Index col) const {
      return operands.template keep<N, As>(col);
    }
    template <int N, int kPlaces, typename Index>
    void prefetch_row(unsigned char* shared, int place, Index col) const {
      operands.template prefetch_row<N, kPlaces>(shared, place, col);
    }
    template <int kMore, int kPlaces, int N, bool kWhole, class As, typename Compute, class Columns, typename Index,
        class Take>
    void store_row(const Compute (&y)[N], const Columns& columns, const Kept<N, As>& kept, const unsigned char* shared,
        int place, Index col, Take take) const {
      Compute in[1 + Operands_::kCount][N];
      operands.template unpack_row<N, kPlaces, As>(kept, shared, place, in + 1, col);
      store_computed<kMore, N, kWhole>(in, y, columns, col, take);
    }
    template <int kMore, int N, bool kWhole, typename Compute, class Columns, typename Index, class Take>
    void store_computed(Compute (&in)[1 + Operands_::kCount][N], const Compute (&y)[N], const Columns& columns,
        Index col, Take take) const {
      Compute out[Outputs_::kCount + kMore][N];
      Affines::template apply<N>(y, columns, in[0]);
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int k = 0; k < kMore; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) take(k, i, out[Outputs_::kCount + k][i]);
      }
      to.template store<N, kWhole>(out, col);
    }
  };
  // The results of one element of each of some neighbouring rows.
  template <int kRows, class Row, typename Compute, class Columns, typename Index>
  static void store_across(const Row (&rows)[kRows], const Compute (&y)[kRows], const Columns& columns,
      const EpilogueOperands<1> (&epilogue_operands)[kRows], Index col) {
    Compute all[Outputs_::kCount][kRows];
    typename Outputs_::RowPointer to[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Compute own[1] = {y[r]};
      Compute in[1 + Operands_::kCount][1], out[Outputs_::kCount][1];
      Affines::template apply<1>(own, columns, in[0]);
      rows[r].operands.template unpack<1>(epilogue_operands[r], in + 1, col);
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int k = 0; k < Outputs_::kCount; ++k) all[k][r] = out[k][0];
      to[r] = rows[r].to;
    }
    Outputs_::template store_across<kRows>(to, all, col);
  }
  RowPointer at(int64 row) const { return {to.at(row), operands.at(row)}; }
};

// A row's label. Rows: as of PerRow. kIgnores: rows of the label `ignored` do not count.
template <typename T, class Rows, bool kIgnores>
struct RowLabel {
  const T* pointer;
  Rows rows;
  T ignored;
  int64 cols;  // 2^24 at most

  struct RowPointer {
    T label;
    T ignored;
    int64 cols;
    bool is_ignored() const { return kIgnores && label == ignored; }
    // its column; -1: it has none, because it is ignored, or outside 0 .. cols - 1
    int column() const {
      const auto wide = static_cast<unsigned long long>(static_cast<int64>(label));  // large if it is negative
      return !is_ignored() && wide < static_cast<unsigned long long>(cols) ? int(wide) : -1;
    }
    static int share() { return 1; }  // of the target, that it has
  };
  RowPointer at(int64 row) const { return {pointer[rows.offset(row)], ignored, cols}; }
};

// The same of a label that has a part of the target.
template <typename Compute, class Label>
struct PartLabel : Label {
  Compute part;

  struct RowPointer : Label::RowPointer {
    Compute part;
    Compute share() const { return part; }
  };
  RowPointer at(int64 row) const { return {Label::at(row), part}; }
};

// The elements of Inner, and of each row the one in its label's column as the row's own number. That is +inf for a row
// whose label is ignored, which Inner's mask drops; nan for a label that is no column.
template <class Inner, class Label>
struct LabelledLoad : Inner {
  Label label;

  struct RowPointer : Inner::RowPointer {
    typename Label::RowPointer label;
    auto own_number() const { return own_number_between(0, label.cols); }
    // -inf for another column
    auto own_number_between(int64 begin, int64 end) const {
      using Compute = typename Conditional<kWideDigits<typename Inner::Type>, double, float>::Type;
      const int column = label.column();
      const bool here = column >= begin && column < end;
      Compute number[1];
      const auto* const place = static_cast<const typename Inner::Type*>(this->address(here ? column : 0));
      cupynorm::unpack<1>(load_vector<typename Inner::Type, 1>(place), number);
      const Compute other = label.is_ignored() ? infinity<Compute>() : column < 0 ? Compute(as_float(0x7fc00000u))
          : -infinity<Compute>();
      return here ? number[0] : other;
    }
  };
  RowPointer at(int64 row) const { return {Inner::at(row), label.at(row)}; }
};

// What Inner makes of the results, from which the label's share is taken away in the column of a row's label before.
template <class Inner, class Label>
struct LabelledStore : Inner {
  static constexpr bool kInSteps = false;
  Label label;

  struct RowPointer : Inner::RowPointer {
    typename Label::RowPointer label;
    template <int N, bool kWhole = false, typename Compute, class Columns, class Operands, typename Index>
    void store(const Compute (&y)[N], const Columns& columns, const Operands& operands, Index col) const {
      Compute less[N];
#pragma unroll
      for (int i = 0; i < N; ++i) less[i] = y[i];
      const unsigned from_here = unsigned(label.column()) - unsigned(col);
      if (from_here < unsigned(N)) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (from_here == unsigned(i)) less[i] -= label.share();
        }
      }
      Inner::RowPointer::template store<N, kWhole>(less, columns, operands, col);
    }
  };
  template <int kRows, typename Compute, class Columns, class Operands, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (&y)[kRows], const Columns& columns,
      const Operands (&operands)[kRows], Index col) {
    Compute less[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      less[r] = Index(rows[r].label.column()) == col ? y[r] - rows[r].label.share() : y[r];
    Inner::template store_across<kRows>(rows, less, columns, operands, col);
  }
  RowPointer at(int64 row) const { return {Inner::at(row), label.at(row)}; }
};

template <typename T>
constexpr bool kIsInt8 = false;
template <>
constexpr bool kIsInt8<signed char> = true;

// (y * gamma + beta) / scale, where scale takes the largest of a row to the largest number that is stored, and is
// written.
template <typename Compute, class To, class Gamma, class Beta>
struct ScaledStore : ColumnsOf<ScaledStore<Compute, To, Gamma, Beta>, Gamma, Beta> {
  using T = typename To::Type;
  using Type = T;
  using Affines = AffineColumns<Gamma, Beta>;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kHasEpilogueOperands = false, kScales = true;
  // int8 of a row's own scale: nothing is beyond the limit
  static constexpr bool kInRange = kIsInt8<T> && sizeof(Compute) == 4;
  To to;
  Affines affine;
  Compute* scales;
  Compute limit;  // the largest number that is stored

  template <int N>
  using EpilogueOperands = NoColumns;
  template <int N, class Columns>
  static void finish(const Compute (&y)[N], const Columns& columns, Compute (&z)[N]) {
    Affines::template apply<N>(y, columns, z);
  }

  // lift: 1, or for a scale of a double that is too small to have an inverse a power of two, which elements are
  // multiplied by first.
  struct Scale {
    Compute scale, inverse, lift;
    unsigned what;  // bytes_of: 0 for an int8 of a row that has nan or inf
  };
  // in float a scale without an inverse is subnormal, and flushed to zero
  static constexpr bool kLifts = sizeof(Compute) == 8;
  Scale scale_of(Compute largest) const {
    const Compute scale = largest * reciprocal(limit);
    const bool zero = scale == 0 || scale == infinity<Compute>();
    Compute lift = 1;
    if constexpr (kLifts) lift = scale < 0x1p-1000 ? 0x1p+100 : 1.0;
    const Compute inverse = zero ? Compute(0) : reciprocal(scale * lift);
    const Compute finite = !kLifts && inverse == infinity<Compute>() ? Compute(3.0e38f) : inverse;  // nan stays
    return {scale, finite, lift, scale < infinity<Compute>() ? kLowBytes : kTopSigns};
  }
  void save(int64 row, Scale scale) const { scales[row] = scale.scale; }

  struct RowPointer {
    typename To::RowPointer to;
    void make_opaque() { to.make_opaque(); }
    Type* address() const { return to.address(); }
    template <int N>
    int head() const {
      return to.template head<N>();
    }
    template <int N, bool kWhole = false, typename Index>
    void store_scaled(const Compute (&z)[N], Scale scale, Index col) const {
      Compute q[N];
      if constexpr (kInRange) {
        Vector<T, N> vector;
        float sum[N < 4 ? 4 : N] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = multiply_add(z[i], scale.inverse, kLastPlaceIsOne);
#pragma unroll
        for (int i = 0; i < N; i += 4)
          vector.word[i / 4] = bytes_of(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], scale.what);
        to.template put<kWhole>(vector, col);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) q[i] = (kLifts ? z[i] * scale.lift : z[i]) * scale.inverse;
        to.template store<N, kWhole>(q, NoColumns{}, col);
      }
    }
  };
  RowPointer at(int64 row) const { return {to.at(row)}; }
};

}  // namespace cupynorm
