// shared, of rows whose elements lie apart, but that with all of their neighbours are one stretch of memory, as the
// columns of each table of a stack of tables. The stretch comes and goes in accesses of 16 bytes by way of shared
// memory, wherever it begins and however many neighbours there are, and rows wait there as they were loaded.
#pragma once
#include <base/async_copy.cuh>
#include <base/pdl.cuh>
#include <io/fused.cuh>
#include <row/apart.cuh>
#include <row/running.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// kNeighbours rows are a table, and a block has kTables of these: a thread for each row, and kDown that share it. They
// take kElements of its elements at a time. The other names are those that reductions ask for (apart.cuh).
template <int Elements, int Neighbours, int Tables, int Block, int MinBlocks>
struct Stretch {
  static constexpr int kElements = Elements, kNeighbours = Neighbours, kTables = Tables, kBlock = Block,
      kMinBlocks = MinBlocks;
  static constexpr int kVector = 1, kRows = Neighbours * Tables, kLanes = kRows, kDown = Block / kRows,
      kSlots = kDown, kThreads = kDown * kRows, kOfTable = kDown * Neighbours, kWarps = Block / kWarp, kCtasPerRow = 1;
  static constexpr bool kInWarps = false, kOfGrid = false, kHolds = true;
  static_assert(kDown > 1 || kRows >= kWarp, "what is not reduced through shared memory is one thread's");
};

// Which row of the block's a thread has. Threads of a table lie side by side over all of its columns, so that what they
// access together is one piece of the stretch, too.
template <class Shape>
struct RowOfTable {
  int table, row, down;  // row: among the table's
  static RowOfTable of(int thread) {
    const int table = thread / Shape::kOfTable, within = thread - table * Shape::kOfTable,
              down = within / Shape::kNeighbours;
    return {table, within - down * Shape::kNeighbours, down};
  }
  static constexpr bool has(int) { return true; }
  int slot(int) const { return table * Shape::kNeighbours + row; }
  int place(int, int) const { return down * Shape::kRows + slot(0); }
};

// A stretch of elements of T in memory and in shared memory, where its first element has the same place in 16 bytes.
template <typename T, int kBlock>
struct CopiedStretch {
  static constexpr int kAccess = 16 / int(sizeof(T)), kAtOnce = 4;
  int held, head, whole_end;  // elements; those before the first whole access, and where the whole ones end

  static int shift_of(const void* place) { return int(reinterpret_cast<unsigned long long>(place) % 16 / sizeof(T)); }
  static CopiedStretch of(const T* place, int held) {
    const int before = (kAccess - shift_of(place)) % kAccess, head = before < held ? before : held;
    return {held, head, head + (held - head) / kAccess * kAccess};
  }
  // Calls act(element) with the first element of each access of this thread, and one(element) with what lies around.
  template <class Act, class One>
  void each(Act act, One one) const {
#pragma unroll kAtOnce
    for (int at = head + int(threadIdx.x) * kAccess; at < whole_end; at += kBlock * kAccess) act(at);
    if (int(threadIdx.x) < head) one(int(threadIdx.x));
    if (whole_end + int(threadIdx.x) < held) one(whole_end + int(threadIdx.x));
  }
  void load(T* shared, const T* from) const {
    each([&](int at) { copy_async<16>(shared + at, from + at); }, [&](int at) { shared[at] = from[at]; });
  }
  void store(T* to, const T* shared) const {
    each([&](int at) { store_vector<true>(to + at, load_vector<T, kAccess>(shared + at)); },
        [&](int at) { to[at] = shared[at]; });
  }
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_stretch(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  using Result = typename Store::Type;
  using Copied = CopiedStretch<Type, Shape::kBlock>;
  using Results = CopiedStretch<Result, Shape::kBlock>;
  constexpr int kElements = Shape::kElements, kNeighbours = Shape::kNeighbours, kRows = Shape::kRows,
      kDown = Shape::kDown, kRound = kElements * kDown, kStep = kDown * kNeighbours;
  constexpr bool kStores = !kStoresNothing<Store>, kInPlace = sizeof(Type) == sizeof(Result);
  static_assert(!Op::kRounds && !Op::kOwnNumber && !Load::kDrops && !Load::kStoresComputed && !Store::kScales);
  using Places = ReductionPlaces<Op, Shape, false>;

  pdl_wait_and_trigger();
  if (has_ended(a.op, a.rows)) return;
  const int cols = int(a.cols), thread = threadIdx.x;
  const int64 first_row = int64(blockIdx.x) * kRows;
  const int rows = a.rows - first_row < kRows ? int(a.rows - first_row) : kRows, held = rows * cols;
  // reductions, then x, then results that have no place among x's elements
  Type* const x_place = reinterpret_cast<Type*>(shared_memory + Places::kBytes);
  const Type* const from = a.load.at(first_row).pointer;
  Type* const elements = x_place + Copied::shift_of(from);
  const Copied copied = Copied::of(from, held);
  copied.load(elements, from);
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();

  const auto own = RowOfTable<Shape>::of(thread < Shape::kThreads ? thread : 0);
  const bool here = thread < Shape::kThreads && own.slot(0) < rows;
  const int64 row = first_row + (here ? own.slot(0) : 0);
  const int begin = here ? own.table * cols * kNeighbours + own.down * kNeighbours + own.row : 0;
  typename Load::RowPointer sources[1] = {a.load.at(row)};
  // Calls body(column, how many there are) for each round of what the thread has of its row.
  auto each_round = [&](auto body) {
    int col = own.down;
#pragma unroll 1
    for (; col + (kRound - kDown) < cols && here; col += kRound) body(col, Predicate<kElements>{kElements, false});
    if (col < cols && here) body(col, Predicate<0>{(cols - col + (kDown - 1)) / kDown, false});
  };
  auto take = [&](int col, int count, ElementOf<Op> (&x)[1][kElements]) {
    const Type* const place = elements + begin + (col - own.down) * kNeighbours;
    ElementOf<Op> first[1] = {Op::padding()};
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      x[0][j] = Op::kHasPivot ? first[0] : Op::padding();
      if (j >= count) continue;
      const auto loaded = load_vector<Type, 1>(place + j * kStep);
      ElementOf<Op> computed[1];
      Load::template compute_across<1>(sources, loaded, {}, computed, col + j * kDown);
      x[0][j] = computed[0];
      if (j == 0) first[0] = computed[0];
    }
  };

  RunningRows<Op, 1, typename Load::Precision> running;
  each_round([&](int col, auto valid) {
    ElementOf<Op> x[1][kElements];
    take(col, valid.total(), x);
    running.add(x, valid);
  });
  typename Op::State total[1];
  Compute pivot[1];
  total[0] = running.own_state(0, pivot[0]);
  reduce_apart<Op, Shape>(total, pivot, Places{shared_memory, nullptr, nullptr}, 0, 0, NothingMeanwhile(), own);
  const typename Op::Row whole = a.op.finish(total[0], total[0], a.cols, pivot[0]);
  if (here && own.down == 0) a.op.save(row, whole);
  if constexpr (kStores) {
    Result* const to = a.store.at(first_row).address();
    Result* const y_place = reinterpret_cast<Result*>(
        reinterpret_cast<unsigned char*>(x_place) + (kInPlace ? 0 : (kRows * cols * int(sizeof(Type)) / 16 + 2) * 16));
    Result* const results = y_place + (kInPlace ? Copied::shift_of(from) : Results::shift_of(to));
    typename Store::RowPointer targets[1] = {a.store.at(row)};
    targets[0].to.first.stride[0] = kNeighbours;
    const typename Store::template EpilogueOperands<1> kNoOperands[1] = {};
    each_round([&](int col, auto valid) {
      ElementOf<Op> x[1][kElements];
      take(col, valid.total(), x);
      targets[0].to.first.pointer = results + begin + (col - own.down) * kNeighbours;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (j >= valid.total()) continue;
        const Compute y[1] = {Op::map_raw(x[0][j], whole)};
        const auto columns = a.store.template columns<1>(col + j * kDown);
        Store::template store_across<1>(targets, y, columns, kNoOperands, j * kDown);
      }
    });
    __syncthreads();
    if (kInPlace && Results::shift_of(to) != Copied::shift_of(from)) {
      for (int at = thread; at < held; at += Shape::kBlock) to[at] = results[at];
    } else {
      Results::of(to, held).store(to, results);
    }
  }
}

}  // namespace cupynorm
