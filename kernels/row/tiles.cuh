// shared and cluster of rows whose elements lie apart from one another, where they wait in shared memory. A tile is
// some neighbouring rows, or a block's part of them. Blocks go through many tiles: where rows wait as they were loaded,
// each thread copies its vectors of the next tile to the places of those that it has just used, so that memory is busy
// while results are computed. No thread uses another's places.
#pragma once
#include <row/apart.cuh>
#include <row/running.cuh>
#include <row/waiting.cuh>

namespace cupynorm {

// A thread has kVector neighbouring rows, and computes kElements elements of each at a time. kLanes threads lie side by
// side, and kDown share each row, every kDown-th element of it. kCtasPerRow: blocks of a cluster that share rows.
// kBlock, kMinBlocks: as in Registers.
template <int Vector_, int Elements, int Lanes_, int CtasPerRow, int Block, int MinBlocks>
struct Tiles {
  static constexpr int kVector = Vector_, kElements = Elements, kLanes = Lanes_, kCtasPerRow = CtasPerRow,
      kBlock = Block, kMinBlocks = MinBlocks;
  static constexpr int kDown = Block / Lanes_, kRows = Lanes_ * Vector_, kWarps = Block / kWarp;
  static_assert(Lanes_ <= kWarp && (Lanes_ & (Lanes_ - 1)) == 0, "lanes of a warp that share rows are kLanes apart");
  static_assert((kWarps & (kWarps - 1)) == 0, "as many lanes reduce what the warps have");
};

// What all threads need of a row, in words of 16 bytes.
template <typename Row>
struct RowWords {
  union {
    uint4 words[(sizeof(Row) + 15) / 16];
    Row row;
  };
};

// A tile in shared memory: `places` vectors of kVector rows' elements, and of a mask a bit for each element behind
// them. They lie there as they were loaded, or as the fields of an element beside each other. Each access of 16 bytes
// of a vector has a region of its own, so that neighbouring threads meet no bank twice.
template <class Load, typename Element, int kVector>
struct WaitingTile {
  using Number = typename ElementTraits<Element>::Number;
  static constexpr bool kAsLoaded = Load::kWaitsAsLoaded;
  static constexpr int kNumbers = kAsLoaded ? kVector : kVector * ElementTraits<Element>::kFields;
  using Held = typename Conditional<kAsLoaded, typename Load::Type, Number>::Type;
  using Bits = typename Conditional<(kVector > 8), unsigned short, unsigned char>::Type;
  static constexpr int kBytes = kNumbers * int(sizeof(Held)), kPiece = kBytes < 16 ? kBytes : 16;
  int places;

  unsigned char* at(int number) const { return shared_memory + number * kPiece; }
  Vector<Held, kNumbers> get(int number) const {
    Vector<Held, kNumbers> vector;
#pragma unroll
    for (int i = 0; i < kBytes; i += kPiece) load_words<kPiece, false>(at(number) + i * places, vector.word + i / 4);
    return vector;
  }
  void put(int number, const Vector<typename Load::Type, kVector>& loaded, const Element (&x)[kVector],
      unsigned keeps) const {
    Vector<Held, kNumbers> vector;
    if constexpr (kAsLoaded) vector = loaded;
    else vector = vector_from<Held, kNumbers>(reinterpret_cast<const Number*>(x));
#pragma unroll
    for (int i = 0; i < kBytes; i += kPiece) store_words<kPiece, false>(at(number) + i * places, vector.word + i / 4);
    if constexpr (Load::kDrops) bits()[number] = Bits(keeps);
  }
  Bits* bits() const { return reinterpret_cast<Bits*>(shared_memory + places * kBytes); }
  int bytes() const { return places * (kBytes + (Load::kDrops ? int(sizeof(Bits)) : 0)); }
};

// Whether something is so, for the compiler.
template <bool kIs>
struct Whether {
  static constexpr bool kSo = kIs;
};

// A tile is waited for in so many parts: its first elements are used while the last are still on their way.
constexpr int kTileParts = 4;

// Waits until the first parts of a tile have come, `last` being the latest of them.
inline void wait_for_part(int last) {
  static_assert(kTileParts == 4, "a case for each");
  if (last == 0) wait_for_copies<3>();
  else if (last == 1) wait_for_copies<2>();
  else if (last == 2) wait_for_copies<1>();
  else wait_for_copies<0>();
}

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_tiles(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Largest = Magnitude<Compute>;
  using Waiting = WaitingTile<Load, Element, Shape::kVector>;
  using Loaded = Vector<typename Load::Type, Shape::kVector>;
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes, kDown = Shape::kDown,
      kRows = Shape::kRows, kCtasPerRow = Shape::kCtasPerRow, kRound = kElements * kDown;
  // Whether x is copied to where it waits: nothing else tells what becomes of it, and no copy is of fewer than 4 bytes.
  constexpr bool kCopies = Load::kWaitsAsLoaded && !Load::kDrops && !Load::kInterval && Loaded::kBytes >= 4;
  static_assert(sizeof(Slot<Op>) <= 8 * sizeof(Compute) && sizeof(typename Op::Row) <= 8 * sizeof(Compute),
      "shared memory is planned for so many numbers, or those that the op says (MOST_ROW_NUMBERS, RowOp.row_numbers)");
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || !Load::kStoresComputed, "nothing of what is dropped is kept");
  __shared__ Mbarrier mbarriers[4];

  // this block's columns, and this thread's: every kDown-th from `first` on, before `end`
  const int part = kCtasPerRow > 1 ? cluster_rank() : 0, lane = threadIdx.x % kLanes;
  const int cols = int(a.cols), each = (cols + (kCtasPerRow - 1)) / kCtasPerRow, begin = part * each,
      end = cols - begin < each ? cols : begin + each, first = begin + int(threadIdx.x) / kLanes;
  const int rounds = (end - begin + kRound - 1) / kRound, rounds_of_part = (rounds + kTileParts - 1) / kTileParts;
  // shared memory: what waits, then what reductions need and give
  const Waiting waiting = {(each + kDown - 1) / kDown * Shape::kBlock};
  unsigned char* const behind = shared_memory + (waiting.bytes() + 15) / 16 * 16;
  const TileReduction<Op, Shape> reduction = {reinterpret_cast<SlotWords<Op>*>(behind), mbarriers};
  auto* const rows = reinterpret_cast<RowWords<typename Op::Row>*>(behind + reduction.kBytes);
  const TileReduction<Largest, Shape> largest_reduction = {reinterpret_cast<SlotWords<Largest>*>(rows + kRows),
      mbarriers + 2};
  using Scale = typename ScaleOf<Store>::Type;
  auto* const row_scales =
      reinterpret_cast<RowWords<Scale>*>(reinterpret_cast<unsigned char*>(rows + kRows) + largest_reduction.kBytes);
  if constexpr (kCtasPerRow > 1) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) init_mbarrier(&mbarriers[i]);
    }
    cluster_sync();  // all blocks have begun: they may write into one another
  }
  pdl_wait_and_trigger();

  // Calls body(at, place, whole) for each batch of a thread's elements: its first column and where it waits. whole: all
  // threads have all kElements of it, in all rows. before(i), after(): around each part of the tile.
  auto walk = [&](bool all_rows, auto&& before, auto&& body, auto&& after) {
    int round = 0;
#pragma unroll 1
    for (int i = 0; i < kTileParts; ++i) {
      before(i);
      const int until = (i + 1) * rounds_of_part < rounds ? (i + 1) * rounds_of_part : rounds;
#pragma unroll 1
      for (; round < until; ++round) {
        const int at = first + round * kRound, place = round * (kElements * Shape::kBlock) + int(threadIdx.x);
        if (all_rows && (round + 1) * kRound <= end - begin) body(at, place, Whether<true>());
        else body(at, place, Whether<false>());
      }
      after();
    }
  };
  auto nothing = [](int = 0) {};
  // Calls body(j, col) for each element of a batch that is there; bound: the first column that the thread does not
  // have.
  auto each_element = [&](auto whole, int at, int bound, auto&& body) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      if (whole.kSo || at + j * kDown < bound) body(j, at + j * kDown);
    }
  };
  auto row_of = [&](int64 tile) { return (tile * kLanes + lane) * kVector; };
  auto copy = [&](const typename Load::RowPointer& source, int bound, int at, int place, auto whole) {
    each_element(whole, at, bound, [&](int j, int col) {
      if constexpr (kCopies) copy_async<Loaded::kBytes>(waiting.at(place + j * Shape::kBlock), source.address(col));
    });
  };

  const int64 tiles = (a.rows + (kRows - 1)) / kRows, step = gridDim.x / kCtasPerRow;
  int64 tile = blockIdx.x / kCtasPerRow;
  if constexpr (kCopies) {
    const int64 row = row_of(tile);
    const bool here = row < a.rows;
    auto source = a.load.at(here ? row : 0);
    source.make_opaque();
    walk((tile + 1) * kRows <= a.rows, nothing, [&](int at, int place, auto whole) {
      copy(source, here ? end : 0, at, place, whole);
    }, [] { commit_copies(); });
  }
#pragma unroll 1
  for (int turn = 0; tile < tiles; tile += step, ++turn) {
    const int64 row = row_of(tile);
    const bool here = row < a.rows, all_rows = (tile + 1) * kRows <= a.rows;  // all rows of a vector are, or none
    const int bound = here ? end : 0;
    typename Load::RowPointer sources[kVector];
    typename Store::RowPointer targets[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      sources[v] = a.load.at(here ? row + v : 0);
      targets[v] = a.store.at(here ? row + v : 0);
      sources[v].make_opaque(), targets[v].make_opaque();  // or each access would compute them again
    }

    // ---- the rows' States
    RunningRows<Op, kVector> running;
    walk(all_rows, [&](int i) {
      if constexpr (kCopies) wait_for_part(i);
    }, [&](int at, int place, auto whole) {
      Loaded loaded[kElements];
      typename Load::Beside beside[kElements][kVector];
      Element x[kVector][kElements];
      int there = 0;
      each_element(whole, at, bound, [&](int j, int col) {
        if constexpr (kCopies) loaded[j] = waiting.get(place + j * Shape::kBlock);
        else loaded[j] = Load::template load_across<kVector>(sources, col, beside[j]);
      });
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[v][j] = Op::padding();
      }
      each_element(whole, at, bound, [&](int j, int col) {
        Element own[kVector];
        const unsigned keeps = Load::template unpack_across<kVector>(sources, loaded[j], beside[j], own, col,
            Op::padding());
        if constexpr (Load::kStoresComputed) Load::template store_computed_across<kVector>(sources, own, col);
        if constexpr (!kCopies) waiting.put(place + j * Shape::kBlock, loaded[j], own, keeps);
#pragma unroll
        for (int v = 0; v < kVector; ++v) x[v][j] = own[v];
        ++there;
      });
      if constexpr (whole.kSo) {
        running.template add<Precision>(x, Predicate<kElements>{kElements, false});
      } else if (there > 0) {
        if constexpr (Op::kHasPivot) {  // the pivot is an element of the row, never padding
#pragma unroll
          for (int j = 1; j < kElements; ++j) {
            if (j < there) continue;
#pragma unroll
            for (int v = 0; v < kVector; ++v) x[v][j] = x[v][0];
          }
        }
        running.template add<Precision>(x, Predicate<0>{there, false});
      }
    }, [] {});
    Compute pivot[kVector] = {};
    typename Op::State states[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      Compute from;
      states[v] = running.own_state(v, from);
      if constexpr (Op::kHasPivot) {
        pivot[v] = LanesApart<kLanes>::first(from);
        states[v] = Op::rebase(states[v], from, pivot[v]);
      }
      if constexpr (Op::kOwnNumber) pivot[v] = sources[v].own_number();
      states[v] = with_own<Op>(states[v], pivot[v]);
    }
    reduce_tile<Op, Shape>(states, pivot, reduction, part, turn, [&](int number, const Slot<Op>& all) {
      const typename Op::Row whole = a.op.finish(all.state, all.state, a.cols, all.pivot);
      rows[number].row = whole;
      if (part == 0 && tile * kRows + number < a.rows) a.op.save(tile * kRows + number, whole);
    });
    typename Op::Row whole_rows[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) whole_rows[v] = rows[lane * kVector + v].row;

    // ---- their results
    using Waits = Vector<typename Waiting::Held, Waiting::kNumbers>;
    // What the op makes of the elements of a vector.
    auto results = [&](const Waits& waits, int place, Compute (&y)[kVector]) {
      Element x[kVector];
      if constexpr (Waiting::kAsLoaded) {
        Load::template compute_again_across<kVector>(sources, waits, x);
      } else {
        unpack<Waiting::kNumbers>(waits, reinterpret_cast<typename Waiting::Number*>(x));
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) y[v] = Op::map_raw(x[v], whole_rows[v]);
      if constexpr (Load::kDrops) {
        const unsigned keeps = waiting.bits()[place];
#pragma unroll
        for (int v = 0; v < kVector; ++v) y[v] = keeps >> v & 1 ? y[v] : Op::dropped();
      }
    };
    // a pointer: NVRTC 13.0 crashes on an array whose bound comes from outside of a generic lambda
    auto bring = [&](auto whole, int at, int place, Waits* waits) {
      each_element(whole, at, bound, [&](int j, int) { waits[j] = waiting.get(place + j * Shape::kBlock); });
    };
    const int64 next = tile + step, next_row = row_of(next);
    const bool any_next = next < tiles, next_all = (next + 1) * kRows <= a.rows;
    const int next_bound = any_next && next_row < a.rows ? end : 0;
    auto next_source = a.load.at(next_bound ? next_row : 0);
    next_source.make_opaque();
    // Copies what of the next tile waits where a batch has been used.
    auto copy_next = [&](int at, int place, auto whole) {
      if (!kCopies || !any_next) return;
      if (whole.kSo && next_all) copy(next_source, next_bound, at, place, whole);
      else copy(next_source, next_bound, at, place, Whether<false>());
    };
    auto close_part = [] {
      if constexpr (kCopies) commit_copies();
    };
    if constexpr (Store::kScales) {
      auto finish = [&](const Waits& waits, int place, int col, Compute (&z)[kVector]) {
        Compute y[kVector];
        results(waits, place, y);
        const auto columns = a.store.template columns<1>(col);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const Compute from[1] = {y[v]};
          Compute to[1];
          Store::template finish<1>(from, columns, to);
          z[v] = to[0];
        }
      };
      typename Largest::State largest[kVector];
      const Compute zero[kVector] = {};
#pragma unroll
      for (int v = 0; v < kVector; ++v) largest[v] = Largest::identity();
      walk(all_rows, nothing, [&](int at, int place, auto whole) {
        Waits waits[kElements];
        bring(whole, at, place, waits);
        each_element(whole, at, bound, [&](int j, int col) {
          Compute z[kVector];
          finish(waits[j], place + j * Shape::kBlock, col, z);
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            const Compute own[1] = {z[v]};
            largest[v] = Largest::template merge<false>(largest[v], Largest::of(own));
          }
        });
      }, [] {});
      reduce_tile<Largest, Shape>(largest, zero, largest_reduction, part, turn,
          [&](int number, const Slot<Largest>& all) {
            const Scale scale = a.store.scale_of(all.state.max);
            row_scales[number].row = scale;
            if (part == 0 && tile * kRows + number < a.rows) a.store.save(tile * kRows + number, scale);
          });
      Scale scales[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) scales[v] = row_scales[lane * kVector + v].row;
      walk(all_rows, nothing, [&](int at, int place, auto whole) {
        Waits waits[kElements];
        bring(whole, at, place, waits);
        each_element(whole, at, bound, [&](int j, int col) {
          Compute z[kVector];
          finish(waits[j], place + j * Shape::kBlock, col, z);
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            const Compute own[1] = {z[v]};
            targets[v].template store_scaled<1>(own, scales[v], col);
          }
        });
        copy_next(at, place, whole);
      }, close_part);
    } else {
      walk(all_rows, nothing, [&](int at, int place, auto whole) {
        Waits waits[kElements];
        typename Store::template Columns<1> columns[kElements];
        typename Store::template EpilogueOperands<1> operands[kElements][kVector];
        each_element(whole, at, bound, [&](int j, int col) {
          columns[j] = a.store.template columns<1>(col);
          if constexpr (Store::kHasEpilogueOperands) {
#pragma unroll
            for (int v = 0; v < kVector; ++v) operands[j][v] = targets[v].template epilogue_operands<1>(col);
          }
        });
        bring(whole, at, place, waits);
        each_element(whole, at, bound, [&](int j, int col) {
          Compute y[kVector];
          results(waits[j], place + j * Shape::kBlock, y);
          Store::template store_across<kVector>(targets, y, columns[j], operands[j], col);
        });
        copy_next(at, place, whole);
      }, close_part);
    }
  }
}

}  // namespace cupynorm
