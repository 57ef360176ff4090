// What sums over rows (column_sums.cuh) are taken of, and where they go: operands that lie in pieces or behind others,
// results, and elements that are written in the same pass. Host mirrors: lower/sums.py.
#pragma once
#include <io/fused.cuh>

namespace cupynorm {

// Where a sum goes: to a row of partial sums, one for each group.
template <typename Compute>
struct PartialSum {
  Compute* pointer;  // [groups, cols]
  void put(int64 group, int64 col, int64 cols, Compute sum) const { pointer[group * cols + col] = sum; }
};
// Or to a result, rounded once. kAdds: what is there is added to, not replaced.
template <typename T, int kAxes, bool kAdds>
struct FinalSum {
  T* pointer;
  Strided<kAxes> cols;
  int64 first;  // where column 0 goes

  template <typename Compute>
  void put(int64, int64 col, int64, Compute sum) const {
    T* const place = pointer + cols.offset(first + col);
    if constexpr (kAdds) {
      Compute before[1];
      unpack<1>(load_vector<T, 1>(place), before);
      sum += before[0];
    }
    const Compute total[1] = {sum};
    store_vector(place, vector_from<T, 1>(total));
  }
};
// Or nowhere: nobody asked for it.
struct NoSum {
  template <typename Compute>
  static void put(int64, int64, int64, Compute) {}
};
// The places of several sums.
template <class... Sums>
struct SumTargets {};
template <class First, class... Rest>
struct SumTargets<First, Rest...> {
  First first;
  SumTargets<Rest...> rest;

  template <int kSum, typename Compute>
  void put(int64 group, int64 col, int64 cols, Compute sum) const {
    if constexpr (kSum == 0) first.put(group, col, cols, sum);
    else rest.template put<kSum - 1>(group, col, cols, sum);
  }
};

// An operand whose column 0 lies `first` columns behind the array's, as that of a gate's other half does.
template <class Operand>
struct Further {
  static constexpr int kBytes = Operand::kBytes;
  static constexpr bool kPerRow = false;
  Operand operand;
  int64 first;

  template <int N>
  using Packed = typename Operand::template Packed<N>;
  struct RowPointer {
    typename Operand::RowPointer pointer;
    int64 first;
    template <int N>
    Packed<N> load(int64 col) const {
      return pointer.template load<N>(first + col);
    }
    template <int N>
    Packed<N> load_part(int64 col, int begin, int end) const {
      return pointer.template load_part<N>(first + col, begin, end);
    }
    template <int N, typename Compute>
    void unpack(const Packed<N>& packed, Compute* x, int64 col) const {
      pointer.template unpack<N>(packed, x, first + col);
    }
  };
  RowPointer at(int64 row) const { return {operand.at(row), first}; }
};

// The same of an operand whose elements lie anywhere: `first` elements behind its own.
template <class Operand>
struct Moved {
  static constexpr int kBytes = Operand::kBytes;
  static constexpr bool kPerRow = Operand::kPerRow;
  Operand operand;
  int64 first;

  template <int N>
  using Packed = typename Operand::template Packed<N>;
  using RowPointer = typename Operand::RowPointer;
  RowPointer at(int64 row) const {
    Operand moved = operand;
    moved.pointer += first;
    return moved.at(row);
  }
};

// An array whose columns lie in pieces: those of a vector next to one another, and the vectors anywhere. kWidth:
// elements of an access; 0: all columns of a vector have one element. kSame: rows have the same elements.
template <typename T, class Rows, class Cols, int kWidth, bool kSame>
struct InPieces {
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kPerRow = false;
  const T* pointer;
  int64 first;
  Rows rows;
  Cols cols;

  template <int N>
  using Packed = Vector<T, kWidth == 0 ? 1 : N>;
  struct RowPointer {
    const T* pointer;
    Cols cols;
    template <int N>
    Packed<N> load(int64 col) const {
      const T* const place = pointer + cols.offset(col);
      if constexpr (kWidth == 0) return load_vector<T, 1>(place);
      else return load_vector<T, N, (kWidth < N ? kWidth : N)>(place);
    }
    template <int N, typename Compute>
    static void unpack(const Packed<N>& packed, Compute* x, int64) {
      cupynorm::unpack<(kWidth == 0 ? 1 : N)>(packed, x);
      if constexpr (kWidth == 0) {
#pragma unroll
        for (int i = 1; i < N; ++i) x[i] = x[0];
      }
    }
  };
  RowPointer at(int64 row) const { return {pointer + (first + rows.offset(row)), cols}; }
};
// Where such an array is written.
template <typename T, class Rows, class Cols>
struct PieceStore {
  using Type = T;
  T* pointer;
  int64 first;
  Rows rows;
  Cols cols;

  struct RowPointer {
    T* pointer;
    Cols cols;
    template <int N, bool kWhole = false, typename Compute>
    void store(const Compute (&x)[N], NoColumns, int64 col) const {
      store_vector<kWhole>(pointer + cols.offset(col), vector_from<T, N>(x));
    }
  };
  RowPointer at(int64 row) const { return {pointer + (first + rows.offset(row)), cols}; }
};

// A lane of a warp whose lanes have neighbouring vectors of one row: the first `whole` of them. from: the column that
// it loads, of a lane that has a vector if it has none itself, so that loads need no branch.
struct Place {
  int lane, whole;
  int64 from;
  bool has() const { return lane < whole; }
  template <int N, class Source>
  auto load(const Source& source) const {
    return source.template load<N>(from);
  }
};

// Stores the warp's vectors of 16 bytes, which begin at any element, in aligned accesses: each lane takes what its
// access misses from the next lane. What is before the first access and behind the last is stored one by one. All lanes
// must call.
template <typename T, int N>
inline void store_vectors_moved(T* p, const Vector<T, N>& own, Place place) {
  constexpr int kWords = Vector<T, N>::kWords;
  static_assert(Vector<T, N>::kBytes == 16, "one access of a lane");
  const int head = int(-(reinterpret_cast<unsigned long long>(p) / sizeof(T)) % N);
  SplitVector<T, N, 16> split;
  split.off = unsigned(head * int(sizeof(T)));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    split.word[i] = own.word[i];
    split.word[kWords + i] = __shfl_down_sync(kAllLanes, own.word[i], 1);
  }
  const Vector<T, N> moved = realign(split);
  const int last = place.whole - 1;
  if (place.lane < last || (head == 0 && place.lane == last)) store_vector<true>(p + head, moved);
  const int begin = place.lane == last ? head : N, end = place.lane == 0 && last >= 0 ? head : 0;
  if (head == 0 || (begin == N && end == 0)) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < begin && i >= end) continue;
    Vector<T, 1> one;
    one.word[0] = sizeof(T) == 2 ? own.word[i / 2] >> 16 * (i % 2) : own.word[i % kWords];
    store_vector(p + i, one);
  }
}

// Where the elements themselves are written: each of the first numbers of the function to an array of its own.
template <class... Stores>
struct Elements {
  static constexpr bool kStoresNothing = true;
  template <int, int, int kSum = 0, typename X>
  static void store(const X&, int64, int64) {}
  template <int, int kSum = 0, typename X>
  static void store_moved(const X&, int64, int64, Place) {}
};
template <class First, class... Rest>
struct Elements<First, Rest...> {
  static constexpr bool kStoresNothing = false;
  First to;
  int64 first;  // the column of `to` where column 0 goes
  Elements<Rest...> rest;

  // In accesses of kWidth elements.
  template <int N, int kWidth, int kSum = 0, int kSums, typename Compute>
  void store(const Compute (&x)[kSums][N], int64 row, int64 col) const {
    const auto target = to.at(row);
#pragma unroll
    for (int i = 0; i < N; i += kWidth) {
      Compute piece[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) piece[j] = x[kSum][i + j];
      target.template store<kWidth, true>(piece, NoColumns{}, first + col + i);
    }
    rest.template store<N, kWidth, kSum + 1>(x, row, col);
  }
  // The same of all lanes of a warp, which have a row's vectors of N elements that begin anywhere.
  template <int N, int kSum = 0, int kSums, typename Compute>
  void store_moved(const Compute (&x)[kSums][N], int64 row, int64 col, Place place) const {
    using Type = typename First::Type;
    const auto target = to.at(row);
    if constexpr (N * sizeof(Type) == 16 && sizeof(Type) <= 4) {
      store_vectors_moved(target.pointer + first + col, vector_from<Type, N>(x[kSum]), place);
    } else if (place.has()) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Compute one[1] = {x[kSum][i]};
        target.store(one, NoColumns{}, first + col + i);
      }
    }
    rest.template store_moved<N, kSum + 1>(x, row, col, place);
  }
};

// Whether an operand has the same elements for every row.
template <class Operand>
constexpr bool kSameForAllRows = false;
template <typename T, int kWidth, bool kConstant>
constexpr bool kSameForAllRows<AlongColumns<T, kWidth, kConstant>> = true;
template <class Operand>
constexpr bool kSameForAllRows<Moved<Operand>> = kSameForAllRows<Operand>;
template <class Operand>
constexpr bool kSameForAllRows<Further<Operand>> = kSameForAllRows<Operand>;
template <typename T, class Rows, class Cols, int kWidth>
constexpr bool kSameForAllRows<InPieces<T, Rows, Cols, kWidth, true>> = true;

}  // namespace cupynorm
