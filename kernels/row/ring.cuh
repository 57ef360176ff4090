// shared, cluster of rows whose elements lie apart: tiles of them come through a ring of places in shared memory, of
// one block or of those of a cluster. A block goes through tiles, and copies of the next ones are on their way while it
// reduces and stores this one, whose places they take as soon as results are stored (docs/notes/094).
#pragma once
#include <base/async_copy.cuh>
#include <io/fused.cuh>
#include <row/across_choices.cuh>
#include <row/layout.cuh>
#include <row/owned_rows.cuh>
#include <row/tiles.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// A thread has kVector neighbouring rows, as many as an access of 16 bytes moves, and kChunks times kElements elements
// of each at most, a chunk being what it takes at a time. The ring has kStages chunks, at least one more than a tile
// has. The other names are those that reductions ask for (apart.cuh).
template <int Vector_, int Elements, int Chunks, int Lanes_, int Stages, int CtasPerRow, int Block, int MinBlocks>
struct Ring {
  static constexpr int kVector = Vector_, kElements = Elements, kChunks = Chunks, kLanes = Lanes_, kStages = Stages,
      kCtasPerRow = CtasPerRow, kBlock = Block, kMinBlocks = MinBlocks;
  static constexpr int kDown = Block / Lanes_, kRows = Lanes_ * Vector_, kWarps = Block / kWarp, kThreads = Block,
      kSlots = Lanes_ <= kWarp ? kWarps : kDown;
  static constexpr bool kOfGrid = false, kHolds = true, kInWarps = Lanes_ <= kWarp;
  static_assert(Stages > Chunks && kDown * Lanes_ == Block && (Lanes_ & (Lanes_ - 1)) == 0);
};

// The places of one thread, which nobody else reads or writes: no barrier stands between a copy and its use.
template <typename T, class Shape>
struct OwnPlaces {
  static constexpr int kBytes = Shape::kStages * Shape::kElements * Shape::kBlock * Shape::kVector * int(sizeof(T));
  using Access = Vector<T, Shape::kVector>;
  T* first;
  static int next(int stage) { return stage + 1 == Shape::kStages ? 0 : stage + 1; }
  T* at(int stage, int j) const {
    return first + (stage * Shape::kElements + j) * (Shape::kBlock * Shape::kVector);
  }
  void read(int stage, Access (&loaded)[Shape::kElements]) const {
#pragma unroll
    for (int j = 0; j < Shape::kElements; ++j) loaded[j] = load_vector<T, Shape::kVector>(at(stage, j));
  }
};

// Copies chunk after chunk of the tiles that a block goes through.
template <class Load, class Shape>
struct ChunksAhead {
  using Type = typename Load::Type;
  const Load& load;
  int64 tile, tiles, groups, rows;
  int lane, first, count;  // the thread's first column, and how many elements it has
  int chunk, stage;
  bool here;
  typename Load::RowPointer source;

  void begin_tile() {
    const int64 row = (tile * Shape::kLanes + lane) * Shape::kVector;
    here = tile < tiles && row < rows;
    if (here) source = load.at(row), source.begin_at(first);
  }
  void copy(const OwnPlaces<Type, Shape>& places) {
    if (tile < tiles) {
      const bool whole = here && (chunk + 1) * Shape::kElements <= count;
#pragma unroll
      for (int j = 0; j < Shape::kElements; ++j) {
        if (whole || (here && chunk * Shape::kElements + j < count))
          copy_async<Shape::kVector * int(sizeof(Type))>(places.at(stage, j), source.address(Step<Shape::kDown>{j}));
      }
      stage = places.next(stage);
      if (++chunk < Shape::kChunks) source.begin_at(Shape::kElements * Shape::kDown);
      else chunk = 0, tile += groups, begin_tile();
    }
    commit_copies();
  }
};

// Waits for a chunk of a tile, behind which the ring's other chunks are on their way: all but those before it.
template <class Shape, int kChunk = 0>
inline void wait_for_chunk(int chunk) {
  if constexpr (kChunk + 1 < Shape::kChunks) {
    if (chunk > kChunk) return wait_for_chunk<Shape, kChunk + 1>(chunk);
  }
  wait_for_copies<Shape::kStages - 1 - kChunk>();
}

// A tile of rows, as one thread has it: a chunk after the other is read from its places.
template <class AnyOp, class Load, class Shape>
struct RingRows {
  static constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kDown = Shape::kDown;
  using Own = OpOfHalves<AnyOp, Load::kIdentity && kAreHalves<typename Load::Type>>;
  using Op = typename Own::Type;
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Places = OwnPlaces<typename Load::Type, Shape>;
  using Access = typename Places::Access;
  using State = typename Op::State;

  const Places& places;
  int stage, count;  // where the tile begins, and how many elements the thread has
  typename Load::RowPointer sources[kVector];

  // Calls body(place, at, there) for each chunk: the stage where it waits, the first element, and how many there are,
  // Predicate<kElements> if as many as a chunk has.
  template <class Body>
  void each_chunk(Body body) const {
    int place = stage;
#pragma unroll 1
    for (int at = 0; at < Shape::kChunks * kElements; at += kElements, place = places.next(place)) {
      if (count - at >= kElements) body(place, at, Predicate<kElements>{kElements, false});
      else body(place, at, Predicate<0>{count > at ? count - at : 0, false});
    }
  }
  template <class Valid>
  void take(int place, int at, Valid valid, Element (&x)[kVector][kElements]) const {
    Access loaded[kElements];
    places.read(place, loaded);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      Element computed[kVector];
      Load::template compute_across<kVector>(sources, loaded[j], {}, computed, Step<kDown>{at + j});
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        x[v][j] = valid.template has<kElements>(j) ? computed[v] : Op::kHasPivot && j > 0 ? x[v][0] : AnyOp::padding();
    }
  }
  // Waits for the tile, chunk after chunk, and summarises each as it comes.
  void summarize(State (&mine)[kVector], Compute (&pivot)[kVector]) const {
    Element x[kVector][kElements];
    const auto each_that_comes = [&](auto body) {
      each_chunk([&](int place, int at, auto valid) {
        wait_for_chunk<Shape>(at / kElements);
        if (valid.total() > 0) body(place, at, valid);
      });
    };
    if constexpr (Own::kAny) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) mine[v] = Op::identity(), pivot[v] = 0;
      each_that_comes([&](int place, int, auto valid) {
        Access loaded[kElements];
        places.read(place, loaded);
#pragma unroll
        for (int j = 1; j < kElements; ++j) loaded[j] = valid.template has<kElements>(j) ? loaded[j] : loaded[0];
        State begun[kVector];
        Op::begin(loaded, begun);
#pragma unroll
        for (int v = 0; v < kVector; ++v) mine[v].max = larger(mine[v].max, begun[v].max);
      });
      each_chunk([&](int place, int at, auto valid) {
        if (valid.total() == 0) return;
        take(place, at, valid, x);
#pragma unroll
        for (int v = 0; v < kVector; ++v) Op::add(mine[v], x[v]);
      });
    } else {
      RunningRows<Op, kVector, typename Load::Precision> running;
      each_that_comes([&](int place, int at, auto valid) { take(place, at, valid, x), running.add(x, valid); });
      take_states<Shape>(running, mine, pivot);
    }
  }
};

template <class AnyOp, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_ring(const __grid_constant__ Arguments<AnyOp, Load, Store> a) {
  using Rows = RingRows<AnyOp, Load, Shape>;
  using Op = typename Rows::Op;
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  using Reduced = OwnedPlaces<Op, Shape>;
  using Places = typename Rows::Places;
  using Number = typename Store::Affines::template Number<Compute>;
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kDown = Shape::kDown,
      kCtasPerRow = Shape::kCtasPerRow;
  static_assert(!AnyOp::kRounds && !AnyOp::kOwnNumber && !Load::kDrops && !Load::kStoresComputed && !Store::kScales &&
      Load::kOperandsPerRow && !kStoresNothing<Store>);

  __shared__ Mbarrier mbarriers[4];
  begin_together<Shape>(mbarriers);
  if (has_ended(a.op, a.rows)) return;
  const int thread = threadIdx.x, lane = thread % Shape::kLanes, down = thread / Shape::kLanes,
            part = kCtasPerRow > 1 ? cluster_rank() : 0;
  const int64 tiles = (a.rows + Shape::kRows - 1) / Shape::kRows, groups = gridDim.x / kCtasPerRow;
  int64 tile = blockIdx.x / kCtasPerRow;
  const Shares shares = Shares::of(a.cols, kCtasPerRow);
  const int begin = int(shares.begin(part)), held = int(shares.held(part)), first = begin + down,
            count = held > down ? (held - down + kDown - 1) / kDown : 0;

  // reductions, then the ring, then what is stored with a column
  const Reduced reduced = {reinterpret_cast<SlotWords<Op>*>(shared_memory), mbarriers};
  unsigned char* const ring = shared_memory + Reduced::kBytes;
  const Places places = {reinterpret_cast<Type*>(ring) + thread * kVector};
  Number* const numbers = reinterpret_cast<Number*>(ring + Places::kBytes);
  ChunksAhead<Load, Shape> ahead = {a.load, tile, tiles, groups, a.rows, lane, first, count, 0, 0, false, a.load.at(0)};
  ahead.begin_tile();
#pragma unroll 1
  for (int i = 0; i < Shape::kStages; ++i) ahead.copy(places);
  // a barrier comes before the numbers are used
  if constexpr (Store::Affines::kPresent) convert_columns<Shape::kBlock>(a.store, numbers, begin, held);
  const auto columns = [&](int at) {
    if constexpr (Store::Affines::kPresent) return Scalings<Number, 1>{{numbers[down + at * kDown]}};
    else return a.store.template columns<1>(first + at * kDown);
  };

  int stage = 0;
#pragma unroll 1
  for (int turn = 0; tile < tiles; tile += groups, ++turn, stage = (stage + Shape::kChunks) % Shape::kStages) {
    const int64 row = (tile * Shape::kLanes + lane) * kVector;
    const bool here = row < a.rows;
    Rows rows = {places, stage, here ? count : 0};
#pragma unroll
    for (int v = 0; v < kVector; ++v) rows.sources[v] = a.load.at(here ? row + v : 0);
    typename Op::State total[kVector];
    Compute pivot[kVector] = {};
    rows.summarize(total, pivot);
    reduce_owned<Op, Shape>(total, pivot, reduced, part, turn);
    const Op op = Rows::Own::of(a.op);
    typename Op::Row whole[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      whole[v] = op.finish(total[v], total[v], a.cols, pivot[v]);
      if (here && part == 0 && thread < Shape::kLanes) op.save(row + v, whole[v]);
    }
    typename Store::RowPointer targets[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) targets[v] = a.store.at(here ? row + v : 0), targets[v].begin_at(first);
    rows.each_chunk([&](int place, int at, auto valid) {
      if (valid.total() > 0) {
        constexpr typename Store::template EpilogueOperands<1> kNoOperands[kVector] = {};
        ElementOf<Op> x[kVector][kElements];
        rows.take(place, at, valid, x);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          if (!valid.template has<kElements>(j)) continue;
          Compute y[kVector];
#pragma unroll
          for (int v = 0; v < kVector; ++v) y[v] = Op::map_raw(x[v][j], whole[v]);
          Store::template store_across<kVector>(targets, y, columns(at + j), kNoOperands, Step<kDown>{j});
        }
#pragma unroll
        for (int v = 0; v < kVector; ++v) targets[v].begin_at(kElements * kDown);
      }
      ahead.copy(places);
    });
  }
}

}  // namespace cupynorm
