// Sums over rows: the gradients of parameters and of whatever was broadcast along rows, where they are not taken in the
// pass over rows (summed.cuh), and the sums of what that pass gives. Function(operands) gives kSums numbers for each
// element; each is added up over the rows of its column. Host mirrors and the launch: lower/sums.py.
//
// Rows are cut into groups of rows_of_group, whose number follows from the rows and columns alone, and a group's sums
// go to one block for each tile of columns. Where there are several groups, their partial sums are added up by a second
// launch of the same kernel. Nothing is atomic, and no order depends on the device: the same bits from run to run, on
// every device.
#pragma once
#include <base/pdl.cuh>
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

// A bit or more of each access that a vector came in; and what makes a vector depend on `zero`, which is 0: its
// elements are there no sooner than that.
template <typename T, int N>
inline unsigned bits_of(const Vector<T, N>& vector) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < vector.kWords; i += 4) bits |= vector.word[i];
  return bits;
}
template <typename T, int N>
inline unsigned bits_of(const InTwo<T, N>& vector) {
  return vector.split.word[0] | vector.split.word[4];
}
template <class Packed>
inline unsigned bits_of(const Packed&) {
  return 0;
}
template <typename T, int N>
inline void wait_for(Vector<T, N>& vector, unsigned zero) {
#pragma unroll
  for (unsigned& word : vector.word) word |= zero;
}
template <typename T, int N>
inline void wait_for(InTwo<T, N>& vector, unsigned zero) {
  vector.split.off |= zero;  // by which all elements are put together
}
template <class Packed>
inline void wait_for(Packed&, unsigned) {}

// Puts what came in two accesses together, where it was loaded once for all rows.
template <typename T, int N>
inline void settle(InTwo<T, N>& vector) {
  const Vector<T, N> whole = realign(vector.split);
  vector.split = {};
#pragma unroll
  for (int i = 0; i < whole.kWords; ++i) {
    vector.split.word[i] = whole.word[i];
    make_opaque(vector.split.word[i]);
  }
}
template <class Packed>
inline void settle(Packed&) {}

// Loads of several operands: of those that have the same elements for every row (kSame), or of the others.
template <class Operands_>
struct LoadsOf {
  template <bool kSame, int N, class Source, class Lane, class Packed>
  static void load(const Source&, const Lane&, Packed&) {}
  template <class Packed>
  static void make_opaque(Packed&) {}
  template <class Packed>
  static unsigned bits(const Packed&) {
    return 0;
  }
  template <class Packed>
  static void wait(Packed&, unsigned) {}
  template <class Packed>
  static void settle_same(Packed&) {}
};
template <class First, class... Rest>
struct LoadsOf<Operands<First, Rest...>> {
  using Others = LoadsOf<Operands<Rest...>>;
  template <bool kSame, int N, class Source, class Lane, class Packed>
  static void load(const Source& source, const Lane& place, Packed& packed) {
    if constexpr (kSameForAllRows<First> == kSame) packed.first = place.template load<N>(source.first);
    Others::template load<kSame, N>(source.rest, place, packed.rest);
  }
  template <class Packed>
  static void make_opaque(Packed& packed) {
    if constexpr (!kSameForAllRows<First>) packed.first.make_opaque();
    Others::make_opaque(packed.rest);
  }
  // As bits_of and wait_for, of all operands that are not the same for every row.
  template <class Packed>
  static unsigned bits(const Packed& packed) {
    return (kSameForAllRows<First> ? 0 : bits_of(packed.first)) | Others::bits(packed.rest);
  }
  template <class Packed>
  static void wait(Packed& packed, unsigned zero) {
    if constexpr (!kSameForAllRows<First>) wait_for(packed.first, zero);
    Others::wait(packed.rest, zero);
  }
  template <class Packed>
  static void settle_same(Packed& packed) {
    if constexpr (kSameForAllRows<First>) settle(packed.first);
    Others::settle_same(packed.rest);
  }
};

// Issues the loads of several rows before any arithmetic: the compiler would issue the last of these behind the first
// row's arithmetic, and so would ptxas. zero: a number that is 0, which the compiler does not know. kTogether: all
// lanes of a warp call.
template <class Operands_, bool kTogether, class Packed, int kCount>
inline void issue_all(Packed (&packed)[kCount], unsigned zero) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) LoadsOf<Operands_>::make_opaque(packed[r]);
  if constexpr (kTogether && kCount > 1) {
    unsigned bits = 0;
#pragma unroll
    for (int r = 0; r < kCount; ++r) bits |= LoadsOf<Operands_>::bits(packed[r]);
    LoadsOf<Operands_>::wait(packed[0], bits & zero);
    __syncwarp();
  }
}

template <class Operands_, class Elements_, class Targets>
struct SumArguments {
  Operands_ operands;
  Elements_ elements;
  Targets targets;
  int64 rows, cols, rows_of_group;
};

// Adds N columns of rows first, first + kApart ... to the sums, kCount of them, whose loads are all in flight at once.
// kTogether: all lanes of a warp call, also those that have no place. kMoved: these store what they have in accesses
// that are aligned otherwise than their vectors. same: what is loaded already, of operands that are so for every row.
// kPartly: rows from `end` on do not count; row begin is loaded for them.
template <class Function, int kSums, int N, int kWidth, int kCount, int kApart, bool kTogether, bool kMoved,
    bool kPartly = false, class Packed, typename Compute, class A>
inline void add_some_rows(const A& a, int64 first, int64 col, Place place, const Packed& same,
    Compute (&sum)[kSums][N], int64 begin = 0, int64 end = 0) {
  using Operands_ = decltype(a.operands);
  typename Operands_::RowPointer sources[kCount];
  Packed packed[kCount];
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    if constexpr (kPartly) sources[r] = a.operands.at(first + r * kApart < end ? first + r * kApart : begin);
    else sources[r] = a.operands.at(first + r * kApart);
    packed[r] = same;
    LoadsOf<Operands_>::template load<false, N>(sources[r], place, packed[r]);
  }
  issue_all<Operands_, kTogether>(packed, unsigned(a.rows >> 62));
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    Compute in[Operands_::kCount][N], out[kSums][N];
    sources[r].template unpack<N>(packed[r], in, col);
    apply_to_each<Function>(in, out);
    if constexpr (kMoved) a.elements.template store_moved<N>(out, first + r * kApart, col, place);
    else if (!kTogether || place.has())
      a.elements.template store<N, (kWidth < N ? kWidth : N)>(out, first + r * kApart, col);
    if constexpr (kPartly) {
      if (first + r * kApart >= end) continue;
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum[k][i] += out[k][i];
    }
  }
}

// The same of the rows of a turn up to end, kAtOnce rows in flight at a time, and what is left at once if nothing else
// is stored, or one by one. All turns of a block have the same number of the former, so that lanes of a warp that have
// different turns go together.
template <class Function, int kSums, int N, int kWidth, int kAtOnce, int kApart, bool kTogether, bool kMoved,
    typename Compute, class A>
inline void add_rows(
    const A& a, int64 begin, int turn, int64 end, int64 col, Place place, Compute (&sum)[kSums][N]) {
  using Operands_ = decltype(a.operands);
  typename Operands_::template Packed<N> same = {};
  LoadsOf<Operands_>::template load<true, N>(a.operands.at(begin), place, same);
  int64 row = begin;
#pragma unroll 1
  for (; row + kAtOnce * kApart <= end; row += kAtOnce * kApart)
    add_some_rows<Function, kSums, N, kWidth, kAtOnce, kApart, kTogether, kMoved>(
        a, row + turn, col, place, same, sum);
  if constexpr (decltype(a.elements)::kStoresNothing) {
    if (row < end)
      add_some_rows<Function, kSums, N, kWidth, kAtOnce, kApart, kTogether, kMoved, true>(
          a, row + turn, col, place, same, sum, row, end);
    return;
  }
#pragma unroll 1
  for (row += turn; row < end; row += kApart)
    add_some_rows<Function, kSums, N, kWidth, 1, kApart, kTogether, kMoved>(a, row, col, place, same, sum);
}

// Adds up what all warps have of each column of a tile, in their order, and hands it on. Each sum has threads of its
// own where they are enough. kLeads: the tile may begin before the first column.
template <int kSum, int kThreads, bool kLeads, int kSums, int kWarps, int kTile, typename Compute, class A>
inline void put_sums(const Compute (&sums)[kSums][kWarps][kTile], const A& a, int64 tile) {
  constexpr int kFirst = kSums * kTile <= kThreads ? kSum * kTile : 0;  // thread
  for (int c = int(threadIdx.x) - kFirst; c < kTile && tile + c < a.cols; c += kThreads) {
    if (kFirst > 0 && c < 0) break;
    if (kLeads && tile + c < 0) continue;
    Compute total = sums[kSum][0][c];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[kSum][w][c];
    a.targets.template put<kSum>(blockIdx.y, tile + c, a.cols, total);
  }
  if constexpr (kSum + 1 < kSums) put_sums<kSum + 1, kThreads, kLeads>(sums, a, tile);
}

// Adds up a block's sums of each column of a tile, over the turns of a warp first, and then over all others, and hands
// them on. All threads must call.
template <int kThreads, int kLanes, bool kLeads, int kSums, int kVector, typename Compute, class A>
inline void put_block_sums(Compute (&sum)[kSums][kVector], const A& a, int64 tile) {
  constexpr int kApart = kLanes < kWarp ? kWarp : kLanes;  // threads that have one turn, or the turns of one warp
  __shared__ Compute sums[kSums][kThreads / kApart][kLanes * kVector];
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int distance = kLanes; distance < kWarp; distance *= 2)
        sum[k][i] += __shfl_xor_sync(kAllLanes, sum[k][i], distance);
      if (threadIdx.x % kWarp < kLanes)
        sums[k][threadIdx.x / kApart][threadIdx.x % kLanes * kVector + i] = sum[k][i];
    }
  }
  __syncthreads();
  put_sums<0, kThreads, kLeads>(sums, a, tile);
}

// blockIdx.x: tile of kLanes * kVector columns. blockIdx.y: group of rows. A lane has kVector columns of every
// kThreads / kLanes-th row of its group, kAtOnce of them in flight. kWidth: elements of one store of `elements`.
template <typename Compute, class Function, int kSums, class Operands_, class Elements_, class Targets, int kThreads,
    int kLanes, int kVector, int kWidth, int kAtOnce>
__global__ void __launch_bounds__(kThreads)
    sum_columns(const __grid_constant__ SumArguments<Operands_, Elements_, Targets> a) {
  constexpr int kApart = kThreads / kLanes, kTile = kLanes * kVector;
  const int lane = threadIdx.x % kLanes, turn = threadIdx.x / kLanes;
  const int64 tile = int64(blockIdx.x) * kTile, col = tile + lane * kVector;
  const int64 begin = int64(blockIdx.y) * a.rows_of_group, behind = begin + a.rows_of_group;
  const int64 end = behind < a.rows ? behind : a.rows;
  Compute sum[kSums][kVector] = {};
  pdl_wait_and_trigger((gridDim.y - blockIdx.y) * gridDim.x);
  constexpr bool kMoved = kLanes == kWarp && kWidth < kVector && !Elements_::kStoresNothing;
  const int64 left = (a.cols - tile) / kVector;
  const int whole = left < kLanes ? int(left) : kLanes;
  const Place place = {lane, whole, lane < whole ? col : tile};
  if (whole > 0)
    add_rows<Function, kSums, kVector, kWidth, kAtOnce, kApart, true, kMoved>(a, begin, turn, end, col, place, sum);
  if (!place.has()) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (col + i >= a.cols) continue;
      const Place alone = {lane, whole, col + i};
      Compute one[kSums][1] = {};
      add_rows<Function, kSums, 1, 1, kAtOnce, kApart, false, false>(a, begin, turn, end, col + i, alone, one);
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum[k][i] = one[k][0];
    }
  }
  put_block_sums<kThreads, kLanes, false>(sum, a, tile);
}

}  // namespace cupynorm
