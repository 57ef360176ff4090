// Sums over unaligned rows of numbers that are written as well: as column_sums.cuh for aligned ones. Host mirrors and
// the launch: lower/sums.py.
//
// The first array that is written is the anchor: its rows are cut into aligned vectors. Every period-th row begins
// equally far behind a multiple of `unit` elements, so a group has these rows, and a thread the same vector in each.
// Arrays that are aligned as the anchor are moved in whole vectors. Others are loaded in two accesses a vector, and
// stored in aligned ones: each thread gets what its access misses from the next thread, through shared memory. Elements
// are stored one by one only at the ends of a row or of a block's tile.
#pragma once
#include <base/pdl.cuh>
#include <row/column_sums.cuh>

namespace cupynorm {

// Where elements are written that are aligned otherwise than the anchor.
template <class Store>
struct AlignedOtherwise : Store {};
template <class Store>
inline constexpr bool kAlignedOtherwise = false;
template <class Store>
inline constexpr bool kAlignedOtherwise<AlignedOtherwise<Store>> = true;

template <class Operands_, class Elements_, class Targets>
struct UnalignedSumArguments {
  Operands_ operands;
  Elements_ elements;
  Targets targets;
  int64 rows, cols, rows_of_group, period, unit;
};

// The columns of a thread: N from `from` on, of which `begin` up to `end` are the row's. A thread that has none of the
// row has those of the nearest one that has, and only loads them.
template <int N>
struct Part {
  int64 from;
  int begin, end;
  int before, left;  // columns before this thread's and from these on: 2 N at most, which is as good as more
  unsigned own;      // a bit for each of the N that this thread stores

  Part(int64 col, int64 cols, int64 lead) {
    const int64 first = -(lead % N), last = (cols - 1 - first) / N * N + first, rest = cols - col;
    from = col < first ? first : col > last ? last : col;
    begin = from < 0 ? int(-from) : 0, end = cols - from < N ? int(cols - from) : N;
    before = int(col < -N ? -N : col > 2 * N ? 2 * N : col), left = int(rest < -N ? -N : rest > 2 * N ? 2 * N : rest);
    own = from == col ? (1u << end) - (1u << begin) : 0;
    make_opaque(before), make_opaque(left), make_opaque(own);
  }
  bool whole() const { return own == (1u << N) - 1; }
  template <int, class Source>
  auto load(const Source& source) const {
    return source.template load_part<N>(from, begin, end);
  }
};

// Stores those elements of a vector that have a bit in `which`, one by one: in a loop, as few threads come here, and
// all would keep registers for their elements (docs/notes/067).
template <typename T, int N>
inline void store_some(T* p, Vector<T, N> vector, unsigned which) {
  constexpr int kWords = Vector<T, N>::kWords;
#pragma unroll 1
  for (; which != 0; which >>= 1, ++p) {
    Vector<T, 1> first;
#pragma unroll
    for (int i = 0; i < first.kWords; ++i) first.word[i] = vector.word[i];
    if (which & 1) store_vector(p, first);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned next = i + first.kWords < kWords ? vector.word[i + first.kWords] : 0;
      vector.word[i] = sizeof(T) < 4 ? vector.word[i] >> 16 | next << 16 : next;
    }
  }
}

// How N numbers of each of Elements are stored. kept: vectors of all threads, for each row of a batch and each array
// that is aligned otherwise.
template <class Elements_, int N, int kThreads, int kLanes>
struct PartStores {
  static constexpr int kMoved = 0;
  template <int kSum, int kRows, typename X>
  static void put(const Elements_&, const X&, int64, const Part<N>&, bool, uint4*) {}
  template <int kRows>
  static void put_moved(const Elements_&, int64, const Part<N>&, bool, const uint4*) {}
};
template <class First, class... Rest, int N, int kThreads, int kLanes>
struct PartStores<Elements<First, Rest...>, N, kThreads, kLanes> {
  using Type = typename First::Type;
  using Others = PartStores<Elements<Rest...>, N, kThreads, kLanes>;
  static constexpr bool kOtherwise = kAlignedOtherwise<First>, kIsMoved = kOtherwise && N * sizeof(Type) == 16;
  static constexpr int kMoved = Others::kMoved + kIsMoved;

  // Stores a row, or keeps it for put_moved. stored: false if it is none.
  template <int kSum, int kRows, int kSums, typename Compute>
  static void put(const Elements<First, Rest...>& to, const Compute (&x)[kSums][N], int64 row, const Part<N>& part,
      bool stored, uint4* kept) {
    const Vector<Type, N> own = vector_from<Type, N>(x[kSum]);
    if constexpr (kIsMoved) {
      kept[threadIdx.x] = uint4{own.word[0], own.word[1], own.word[2], own.word[3]};
    } else if (stored) {
      Type* const place = to.to.at(row).pointer + to.first + part.from;
      if (!kOtherwise && part.whole()) store_vector<true>(place, own);
      else store_some(place, own, part.own);
    }
    Others::template put<kSum + 1, kRows>(to.rest, x, row, part, stored, kept + kIsMoved * kRows * kThreads);
  }
  template <int kRows>
  static void put_moved(const Elements<First, Rest...>& to, int64 row, const Part<N>& part, bool stored,
      const uint4* kept) {
    if constexpr (kIsMoved) {
      const bool last = threadIdx.x % kLanes == kLanes - 1;
      Type* const place = to.to.at(row).pointer + to.first + part.from;
      const int head = int(-(reinterpret_cast<unsigned long long>(place) / sizeof(Type)) % N);
      const uint4 mine = kept[threadIdx.x], next = kept[threadIdx.x + !last];
      const SplitVector<Type, N, 16> split = {
          {mine.x, mine.y, mine.z, mine.w, next.x, next.y, next.z, next.w}, unsigned(head * int(sizeof(Type)))};
      // whether this thread stores what is behind its head, and the one before it the head
      const bool behind = (head == 0 || !last) && part.before >= -head && part.left >= head + N;
      const bool before = threadIdx.x % kLanes > 0 && part.before >= N - head && part.left >= head;
      if (stored && behind) store_vector<true>(place + head, realign(split));
      const unsigned of_head = (1u << head) - 1, done = (before ? of_head : 0) | (behind ? ~of_head : 0);
      if (stored && part.own & ~done)
        store_some(place, Vector<Type, N>{{mine.x, mine.y, mine.z, mine.w}}, part.own & ~done);
    }
    Others::template put_moved<kRows>(to.rest, row, part, stored, kept + kIsMoved * kRows * kThreads);
  }
};

// Which rows a group has: those numbered `begin` up to `end` of the rows phase, phase + period ...
struct RowsApart {
  int begin, end, phase, period;
  int64 row(int number) const { return int64(number) * period + phase; }
};

// Adds rows number, number + kTurns ... to the sums, kAtOnce of them, whose loads are all in flight at once. All
// threads of the block call. kPartly: there are fewer.
template <class Function, class Stores, int kSums, int N, int kAtOnce, int kTurns, int kThreads, bool kPartly,
    class Packed, typename Compute, class A>
inline void add_rows_apart(const A& a, const RowsApart& rows, int number, const Part<N>& part, const Packed& same,
    Compute (&sum)[kSums][N], uint4* kept) {
  using Operands_ = decltype(a.operands);
  typename Operands_::RowPointer sources[kAtOnce];
  Packed packed[kAtOnce];
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    const int own = number + r * kTurns;
    sources[r] = a.operands.at(rows.row(kPartly && own >= rows.end ? rows.begin : own));
    packed[r] = same;
    LoadsOf<Operands_>::template load<false, N>(sources[r], part, packed[r]);
  }
  issue_all<Operands_, true>(packed, unsigned(a.rows >> 62));
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    Compute in[Operands_::kCount][N], out[kSums][N];
    sources[r].template unpack<N>(packed[r], in, part.from);
    apply_to_each<Function>(in, out);
    const bool stored = !kPartly || number + r * kTurns < rows.end;
    if constexpr (Stores::kMoved > 0) {
      if (r == 0) __syncthreads();  // all have read what was kept before
    }
    Stores::template put<0, kAtOnce>(a.elements, out, rows.row(number + r * kTurns), part, stored, kept + r * kThreads);
    if (!stored) continue;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum[k][i] += out[k][i];
    }
  }
  if constexpr (Stores::kMoved > 0) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int own = number + r * kTurns;
      Stores::template put_moved<kAtOnce>(a.elements, rows.row(own), part, !kPartly || own < rows.end,
          kept + r * kThreads);
    }
  }
}

// Whether the compiler is told how many blocks a multiprocessor shall hold: for other architectures it spills, and none
// was timed (docs/notes/085).
#if __CUDA_ARCH__ == 900
constexpr int kAsksForBlocks = 1;
#else
constexpr int kAsksForBlocks = 0;
#endif

// blockIdx.x: tile of kLanes * kVector columns; the first one begins up to unit - 1 columns before the row. blockIdx.y:
// group of rows, a group of each of `period` kinds after the other. A thread has every kThreads / kLanes-th row of its
// group, kAtOnce of them in flight. kBlocks: of a multiprocessor, for which the compiler leaves registers; 0: a thread
// takes as many as it wants.
template <typename Compute, class Function, int kSums, class Operands_, class Elements_, class Targets, int kThreads,
    int kLanes, int kVector, int kAtOnce, int kBlocks>
__global__ void __launch_bounds__(kThreads, kAsksForBlocks * kBlocks)
    sum_unaligned_columns(const __grid_constant__ UnalignedSumArguments<Operands_, Elements_, Targets> a) {
  using Stores = PartStores<Elements_, kVector, kThreads, kLanes>;
  constexpr int kTurns = kThreads / kLanes, kTile = kLanes * kVector, kBatch = kAtOnce * kTurns;
  __shared__ uint4 kept[Stores::kMoved > 0 ? Stores::kMoved * kAtOnce * kThreads : 1];
  const int lane = threadIdx.x % kLanes, turn = threadIdx.x / kLanes;
  const int period = int(a.period), phase = int(blockIdx.y) % period;
  const int begin = int(blockIdx.y) / period * int(a.rows_of_group), behind = begin + int(a.rows_of_group);
  const int there = int((a.rows - phase + period - 1) / period);
  const RowsApart rows = {begin, behind < there ? behind : there, phase, period};
  const auto* const anchor = a.elements.to.at(phase).pointer + a.elements.first;
  const int64 lead = int64(reinterpret_cast<unsigned long long>(anchor) / sizeof(*anchor) % unsigned(a.unit));
  const int64 tile = int64(blockIdx.x) * kTile - lead;
  const Part<kVector> part(tile + lane * kVector, a.cols, lead);
  Compute sum[kSums][kVector] = {};
  pdl_wait_and_trigger((gridDim.y - blockIdx.y) * gridDim.x);
  typename Operands_::template Packed<kVector> same = {};
  LoadsOf<Operands_>::template load<true, kVector>(a.operands.at(phase), part, same);
  LoadsOf<Operands_>::settle_same(same);
  // a warp without columns has nothing to do but to keep step with the others
  int number = Stores::kMoved > 0 || __any_sync(kAllLanes, part.own != 0) ? begin : rows.end;
#pragma unroll 1
  for (; number + kBatch <= rows.end; number += kBatch)
    add_rows_apart<Function, Stores, kSums, kVector, kAtOnce, kTurns, kThreads, false>(
        a, rows, number + turn, part, same, sum, kept);
  if (number < rows.end)
    add_rows_apart<Function, Stores, kSums, kVector, kAtOnce, kTurns, kThreads, true>(
        a, rows, number + turn, part, same, sum, kept);
  put_block_sums<kThreads, kLanes, true>(sum, a, tile);
}

}  // namespace cupynorm
