// shared, of rows whose elements lie apart, but that with all of their neighbours are one stretch of memory, as the
// columns of each table of a stack of tables. The stretch comes and goes in accesses of 16 bytes by way of shared
// memory, wherever it begins and however many neighbours there are, and rows wait there as they were loaded. So do
// operands of each element and a mask's bytes, each a stretch of its own; what is the same for all rows, or for all of
// a row, is loaded when it is used.
#pragma once
#include <base/async_copy.cuh>
#include <base/pdl.cuh>
#include <io/fused.cuh>
#include <row/apart.cuh>
#include <row/running.cuh>
#include <row/tiles.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// kNeighbours rows are a table, and a block has kTables of these: a thread for each row, and kDown that share it. They
// take kElements of its elements at a time. kConverts: gamma and beta wait in shared memory, in the compute type. The
// other names are those that reductions ask for (apart.cuh).
template <int Elements, int Neighbours, int Tables, bool Converts, int Block, int MinBlocks>
struct Stretch {
  static constexpr bool kConverts = Converts;
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

// Bytes of shared memory in which a stretch of so many has room, wherever it begins.
inline int stretch_bytes(int bytes) { return (bytes / 16 + 2) * 16; }
// How many elements behind a multiple of 16 bytes a stretch begins. It begins so in shared memory, too.
template <typename T>
inline int shift_of(const T* place) {
  return int(reinterpret_cast<unsigned long long>(place) % 16 / sizeof(T));
}
template <typename T>
inline T* place_like(unsigned char* place, const T* in_memory) {
  return reinterpret_cast<T*>(place) + shift_of(in_memory);
}

constexpr int kCopiesAtOnce = 4;
// Begins to copy a stretch to shared memory, with what else its first and last 16 bytes hold, and says where its first
// element will be.
template <int kBlock, typename T>
inline const T* begin_stretch(unsigned char* place, const T* from, int held) {
  constexpr int kAccess = 16 / int(sizeof(T));
  const int shift = shift_of(from), end = held > 0 ? shift + held : 0;
#pragma unroll kCopiesAtOnce
  for (int at = int(threadIdx.x) * kAccess; at < end; at += kBlock * kAccess)
    copy_async<16>(place + at * int(sizeof(T)), from - shift + at);
  return place_like(place, from);
}
// Copies a stretch from shared memory, where it may have another place in 16 bytes. What lies before the first whole
// access and behind the last one goes one by one.
template <int kBlock, typename T>
inline void end_stretch(T* to, const T* from, int held) {
  constexpr int kAccess = 16 / int(sizeof(T));
  const int before = (kAccess - shift_of(to)) % kAccess, head = before < held ? before : held,
            whole_end = head + (held - head) / kAccess * kAccess, thread = threadIdx.x;
  if (shift_of(to) != shift_of(from)) {
    for (int at = thread; at < held; at += kBlock) to[at] = from[at];
    return;
  }
#pragma unroll kCopiesAtOnce
  for (int at = head + thread * kAccess; at < whole_end; at += kBlock * kAccess)
    store_vector<true>(to + at, load_vector<T, kAccess>(from + at));
  if (thread < head) to[thread] = from[thread];
  if (whole_end + thread < held) to[whole_end + thread] = from[whole_end + thread];
}

// A thread's columns: every kDown-th from `own` on. A mask's interval keeps those from `first` on, before `end`.
template <class Shape>
struct ColumnsOfThread {
  static constexpr int kDown = Shape::kDown, kElements = Shape::kElements, kRound = kElements * kDown;
  int own, first, end;

  static int whole(int columns) { return (columns + (kDown - 1)) / kDown * kDown; }
  void keep(const Bounds<int>& kept) {
    first += kept.begin > first ? whole(kept.begin - first) : 0;
    end = kept.end < end ? kept.end : end;
  }
  // Calls body(column, how many there are) for each round of those that are kept.
  template <class Body>
  void each_round(Body body) const {
    int col = first;
#pragma unroll 1
    for (; col + (kRound - kDown) < end; col += kRound) body(col, Predicate<kElements>{kElements, false});
    if (col < end) body(col, Predicate<0>{(end - col + (kDown - 1)) / kDown, false});
  }
  // Calls body(column) for each of the others, of `cols`.
  template <class Body>
  void each_other(int cols, Body body) const {
    const int behind = end > first ? first + whole(end - first) : first;
#pragma unroll 4
    for (int col = own; col < first && col < cols; col += kDown) body(col);
#pragma unroll 4
    for (int col = behind; col < cols; col += kDown) body(col);
  }
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_stretch(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  using Result = typename Store::Type;
  constexpr int kElements = Shape::kElements, kNeighbours = Shape::kNeighbours, kRows = Shape::kRows,
      kDown = Shape::kDown;
  constexpr bool kStores = !kStoresNothing<Store>, kInPlace = sizeof(Type) == sizeof(Result);
  static_assert(!Op::kRounds && !Op::kOwnNumber && Load::kDrawn == 0 && !Store::kScales);
  static_assert(kStores || !Load::kStoresComputed, "all meet once more before either is copied");
  using Places = ReductionPlaces<Op, Shape, false>;
  using Number = typename Store::Affines::template Number<Compute>;
  constexpr bool kAffine = Store::Affines::kPresent && Shape::kConverts;

  pdl_wait_and_trigger();
  if (has_ended(a.op, a.rows)) return;
  const int cols = int(a.cols), thread = threadIdx.x;
  const int64 first_row = int64(blockIdx.x) * kRows;
  const int rows = a.rows - first_row < kRows ? int(a.rows - first_row) : kRows, held = rows * cols;

  // reductions, then columns' parameters, x and what is loaded beside it, and results that have no place among x
  Number* const numbers = reinterpret_cast<Number*>(shared_memory + Places::kBytes);
  unsigned char* place = shared_memory + Places::kBytes + (kAffine ? (cols * int(sizeof(Number)) + 15) / 16 * 16 : 0);
  const void* begins[2 + Load::kOperandCount];  // x, operands and a mask
  int number = 0;
  typename Load::RowPointer sources[1];
  a.load.each_scattered(first_row, sources[0], [&](auto from, auto&, auto&) {
    begins[number++] = begin_stretch<Shape::kBlock>(place, from, held);
    place += stretch_bytes(kRows * cols * int(sizeof(*from)));
  });
  commit_copies();

  // ---- while they are on their way
  if constexpr (kAffine) convert_columns<Shape::kBlock>(a.store, numbers, 0, cols);
  const auto own = RowOfTable<Shape>::of(thread < Shape::kThreads ? thread : 0);
  const bool here = thread < Shape::kThreads && own.slot(0) < rows;
  const int64 row = first_row + (here ? own.slot(0) : 0);
  const int begin = here ? own.table * cols * kNeighbours + own.row : 0;
  sources[0] = a.load.at(row);
  number = 0;
  a.load.each_scattered(first_row, sources[0], [&](auto from, auto& pointer, auto& apart) {
    pointer = static_cast<decltype(from)>(begins[number++]) + begin, apart.stride[0] = kNeighbours;
  });
  if constexpr (Load::kStoresComputed) {
    auto* const computed = place_like(place, a.load.keeping.at(first_row).pointer);
    sources[0].keeping.pointer = computed + begin, sources[0].keeping.stride[0] = kNeighbours;
    place += stretch_bytes(kRows * cols * int(sizeof(*computed)));
  }
  ColumnsOfThread<Shape> columns = {own.down, own.down, here ? cols : 0};
  if constexpr (Load::kInterval) columns.keep(sources[0].interval());
  wait_for_copies<0>();
  __syncthreads();

  // Computes elements from column `col` on, and says which of them a mask's bytes keep; pads: with padding for others.
  auto take = [&](int col, int count, ElementOf<Op> (&x)[1][kElements], bool (&kept)[kElements], bool pads) {
    typename Load::RowPointer from[1] = {sources[0]};
    from[0].begin_at(col);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      x[0][j] = Op::kHasPivot && j > 0 ? x[0][0] : Op::padding(), kept[j] = true;
      if (j >= count) continue;
      typename Load::template Beside<1> beside;  // of columns, not Steps, of which addresses are global ones
      const auto loaded = Load::template load_across<1, true>(from, j * kDown, beside);
      ElementOf<Op> computed[1];
      Load::template compute_across<1>(from, loaded, beside.operands, computed, j * kDown);
      x[0][j] = computed[0];
      if constexpr (Load::kMaskBytes) kept[j] = from[0].mask.template bits<1, true>(beside.mask.of(0), j * kDown) & 1;
      if (pads && !kept[j]) x[0][j] = Op::padding();
    }
  };

  RunningRows<Op, 1, typename Load::Precision> running;
  columns.each_round([&](int col, auto valid) {
    ElementOf<Op> x[1][kElements];
    bool kept[kElements];
    take(col, valid.total(), x, kept, true);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const ElementOf<Op> computed[1] = {x[0][j]};
      if constexpr (Load::kStoresComputed) {
        if (j < valid.total()) Load::template store_computed_across<1>(sources, computed, col + j * kDown);
      }
    }
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
    const Type* const elements = sources[0].pointer - begin;
    Result* const results =
        kInPlace ? reinterpret_cast<Result*>(const_cast<Type*>(elements)) : place_like(place, to);
    typename Store::RowPointer targets[1] = {a.store.at(row)};
    targets[0].to.first.stride[0] = kNeighbours;
    const typename Store::template EpilogueOperands<1> kNoOperands[1] = {};
    // A result for a column, and for the j-th of the thread's behind it.
    auto put = [&](int col, int j, Compute result) {
      const Compute y[1] = {result};
      targets[0].to.first.pointer = results + begin + col * kNeighbours;
      const auto store = [&](const auto& parameters) {
        Store::template store_across<1>(targets, y, parameters, kNoOperands, j * kDown);
      };
      if constexpr (kAffine) store(Scalings<Number, 1>{{numbers[col + j * kDown]}});
      else store(a.store.template columns<1>(col + j * kDown));
    };
    columns.each_round([&](int col, auto valid) {
      ElementOf<Op> x[1][kElements];
      bool kept[kElements];
      take(col, valid.total(), x, kept, false);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (j >= valid.total()) continue;
        Compute y = Op::map_raw(x[0][j], whole);
        if constexpr (Load::kMaskBytes) y = kept[j] ? y : Op::dropped();
        put(col, j, y);
      }
    });
    if constexpr (Load::kInterval) {
      if (here) columns.each_other(cols, [&](int col) { put(col, 0, Op::dropped()); });
    }
    __syncthreads();
    end_stretch<Shape::kBlock>(to, results, held);
  }
  if constexpr (Load::kStoresComputed) {  // all have met since
    auto* const computed_to = a.load.keeping.at(first_row).pointer;
    end_stretch<Shape::kBlock>(computed_to, sources[0].keeping.pointer - begin, held);
  }
}

}  // namespace cupynorm
