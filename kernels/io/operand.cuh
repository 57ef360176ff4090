// What is loaded beside x or an op's result, and numbers that come with the launch; operands.cuh has several of them.
// Host mirrors: in cupynorm/lower/mirrors.py.
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

// Whether what steps of columns are given is drawn by all threads of a tile together (row/drawn.cuh).
template <class Operand, class = void>
inline constexpr bool kIsDrawn = false;
template <class Operand>
inline constexpr bool kIsDrawn<Operand, decltype(void(Operand::kDrawn))> = Operand::kDrawn;

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

// Whether vectors of N elements may begin before a row, or end behind it: copied in one access, they come with what is
// beside the row in memory; elements of columns are loaded so that nothing far from their array is read.
template <class Operand, int N, class = void>
inline constexpr bool kMayBeCut = Operand::kPerRow;
template <class Operand, int N>
inline constexpr bool kMayBeCut<Operand, N, decltype(void(Operand::template kCut<N>))> = Operand::template kCut<N>;

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
// vectors begin anywhere, and are put together from two accesses. Cols: how far columns lie from the first of their
// row; those of an access are neighbours.
// kConstant: nothing writes there while the kernel runs.
template <typename T, class Rows, int kWidth, bool kConstant, class Cols = Adjacent>
struct AlongRows : Cols {
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kPerRow = false, kInSteps = kIsAdjacent<Cols>;
  const T* pointer;
  Rows rows;

  template <int N>
  using Packed = typename Conditional<kWidth == 0 && (N > 1), InTwo<T, N>, Vector<T, N>>::Type;
  template <int N>
  static constexpr int kAccess = (kWidth < N ? kWidth : N) * kBytes;  // bytes
  template <int N>
  static constexpr int kPrefetchBytes = kAccess<N> >= 4 ? N * kBytes : 0;
  template <int N>
  static constexpr bool kCut = kAccess<N> == N * kBytes && kIsAdjacent<Cols>;
  struct RowPointer : Cols {
    const T* pointer;
    void make_opaque() { cupynorm::make_opaque(pointer); }
    bool begins_at(const void* place) const { return pointer == place; }
    void begin_at(int col) { pointer += col; }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      const T* const place = pointer + this->offset(col);
      if constexpr (kWidth == 0 && N > 1) return load_in_two<kConstant, N>(place);
      else return load_vector<T, N, (kWidth > 0 && kWidth < N ? kWidth : N), kConstant>(place);
    }
    template <typename Index>
    void prefetch_across(Index col) const {
      prefetch_to_l2(pointer + this->offset(col));
    }
    // The same where only elements `begin` up to `end` are the row's: what is loaded beside them is in memory, too.
    template <int N>
    Packed<N> load_part(int64 col, int begin, int end) const {
      if constexpr (kWidth == 0 && N > 1) return load_in_two<kConstant, N>(pointer + col, begin, end);
      else return load<N>(col);
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      prefetch_vector<kPlaces, kAccess<N>, N>(shared, place, pointer + this->offset(col));
    }
    template <int N, int kPlaces, typename Index>
    static Vector<T, N> prefetched(const unsigned char* shared, int place, Index) {
      return prefetched_vector<kPlaces, T, N>(shared, place);
    }
    // The elements themselves, with vectors that begin anywhere put together. begin, end: as for load_part.
    template <int N>
    Vector<T, N> whole(int64 col, int begin, int end) const {
      const Packed<N> packed = load_part<N>(col, begin, end);
      if constexpr (kWidth == 0 && N > 1) return realign(packed.split);
      else return packed;
    }
    template <int N, typename Compute, typename Index>
    static void unpack(const Packed<N>& packed, Compute* x, Index) {
      cupynorm::unpack<N>(packed, x);
    }
  };
  RowPointer at(int64 row) const { return {static_cast<const Cols&>(*this), pointer + rows.offset(row)}; }
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
  template <int N>
  static constexpr bool kCut = kWidth == 0;
  using RowPointer = typename Rows::RowPointer;
  RowPointer at(int64 row) const { return {{}, pointer + (row >> 62)}; }
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
// kAcross_ neighbouring rows, lie next to one another; 0: those of two rows do, wherever x's are aligned to two.
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

// Calls visit(from, pointer, cols) if an operand's elements lie anywhere: where its `row` begins, and what the pointer
// to another of its rows has.
template <class Operand, class RowPointer, class Visit>
inline void visit_if_scattered(const Operand&, int64, RowPointer&, Visit) {}
template <typename T, int kAxes, class Cols, int kAcross, class RowPointer, class Visit>
inline void visit_if_scattered(const Scattered<T, kAxes, Cols, kAcross>& operand, int64 row, RowPointer& own,
    Visit visit) {
  visit(operand.pointer + operand.rows.offset(row), own.pointer, own.cols);
}

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

}  // namespace cupynorm
