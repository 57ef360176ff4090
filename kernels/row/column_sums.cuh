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
#include <row/sum_places.cuh>

namespace cupynorm {

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

// Blocks that a multiprocessor must hold at once; 0: as the compiler sees fit. From compute capability 10.0 on it is
// told, since it spills registers for more of them (docs/notes/054).
#if __CUDA_ARCH__ >= 1000
constexpr int kBlocksOfSums = 2;
#else
constexpr int kBlocksOfSums = 0;
#endif

// blockIdx.x: tile of kLanes * kVector columns. blockIdx.y: group of rows. A lane has kVector columns of every
// kThreads / kLanes-th row of its group, kAtOnce of them in flight. kWidth: elements of one store of `elements`.
template <typename Compute, class Function, int kSums, class Operands_, class Elements_, class Targets, int kThreads,
    int kLanes, int kVector, int kWidth, int kAtOnce>
__global__ void __launch_bounds__(kThreads, kBlocksOfSums)
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
