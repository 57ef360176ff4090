// Rows whose elements lie apart, with sums over rows beside them, as summed.cuh has both of contiguous rows: dx and the
// gradients of gamma and beta in one pass over dy and x.
//
// A tile's rows wait in registers as they were loaded (apart.cuh says who has which), and are computed twice: for their
// State, when the further numbers are added up, and for the results. The next tile's take their places as soon as these
// are stored. A thread has the same columns of every tile, so that it adds up what it has of them: in shared memory, as
// registers are for what waits. Its lanes' sums meet when a group of tiles ends. Groups, whose number follows from rows
// and columns alone (cupynorm/lower/row_groups.py), go to a block, a cluster, or some blocks of the grid each, and
// sum_columns adds what they have: the same bits from any number of blocks.
#pragma once
#include <io/fused.cuh>
#include <row/drawn.cuh>
#include <row/summed_arguments.cuh>
#include <row/tiles.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

constexpr int kLineBytes = 128;

// A block's sums, of each thread's own elements: [sum][element][thread]. A word behind each warp's spreads those of the
// lanes that have one column over all banks.
template <typename Compute, int kSums, class Shape>
struct ThreadSums {
  static constexpr int kElements = Shape::kElements, kLanes = Shape::kLanes, kDown = Shape::kDown,
      kRow = Shape::kBlock + Shape::kWarps, kAtOnce = kLanes < kWarp ? kLanes : kWarp;
  Compute* place;

  static int slot(int thread) { return thread + thread / kWarp; }
  Compute& of(int k, int j) const { return place[(k * kElements + j) * kRow + slot(threadIdx.x)]; }
  // kCount sums from kFirst on, of a part of the elements.
  template <int kFirst, int kCount, int kRows, int kPart>
  void get(int from, Compute (&part)[kRows][kPart]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) part[k][j] = of(kFirst + k, from + j);
    }
  }
  template <int kFirst, int kCount, int kRows, int kPart>
  void put(int from, const Compute (&part)[kRows][kPart]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) of(kFirst + k, from + j) = part[k][j];
    }
  }
  void clear() const {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) of(k, j) = 0;
    }
  }
  // Calls give(k, column, sum) for each sum of each of the block's first `held` columns. All threads must call.
  template <class Give>
  void give_all(int held, Give give) const {
    __syncthreads();
#pragma unroll 1
    for (int column = threadIdx.x; column < held; column += Shape::kBlock) {
      const Compute* const first = place + column / kDown * kRow;
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        Compute sum = 0;
#pragma unroll 1
        for (int lane = 0; lane < kLanes; lane += kAtOnce) {
          Compute some[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            some[i] = first[k * kElements * kRow + slot(column % kDown * kLanes + lane + i)];
#pragma unroll
          for (int apart = 1; apart < kAtOnce; apart *= 2) {
#pragma unroll
            for (int i = 0; i < kAtOnce; i += 2 * apart) some[i] += some[i + apart];
          }
          sum = lane > 0 ? sum + some[0] : some[0];
        }
        give(k, column, sum);
      }
    }
    __syncthreads();
  }
};

// A thread's part of one tile at a time, and the sums of its columns. All threads must call load of the first tile,
// summarize and store of each, in this order, and write_sums behind the last one of a group.
template <class Op, class Load, class Store, int kLoadSums, int kStoreSums, class Shape>
struct SummedTiles {
  static constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes,
      kDown = Shape::kDown, kRound = kElements * kDown, kSure = Shape::kSure,
      kPart = part_of_elements(kElements, 8 / kVector), kSums = kLoadSums + kStoreSums;
  // So many blocks take long to meet; others lose by it (docs/notes/077, "What did not help").
  static constexpr bool kPrefetches = Shape::kCtasPerRow >= 4 || Shape::kOfGrid;
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Places = ReductionPlaces<Op, Shape, (Shape::kCtasPerRow > 1)>;
  using Sources = typename Load::RowPointer[kVector];

  const Arguments<Op, Load, Store>& a;
  const Places places;
  const ThreadSums<Compute, kSums, Shape> sums;
  int part, lane, down, begin, held, first;  // as in WholeRows (whole_tile.cuh)
  bool here;
  Sources sources, next_sources;
  typename Store::RowPointer targets[kVector];
  Vector<typename Load::Type, kVector> loaded[kElements];
  typename Load::template OperandsBeside<kVector> operands[kElements];
  typename Store::template OperandsBeside<kVector> operands_of_results[kElements];
  Element x[kVector][kPart];  // a part of what was loaded
  typename Op::Row whole[kVector];

  // Some sums of a part's columns.
  template <int kCount>
  struct OfPart {
    static constexpr int kRows = kCount > 0 ? kCount : 1;
    Compute sum[kRows][kPart];
  };

  SummedTiles(const Arguments<Op, Load, Store>& a, const Places& places, int part, int parts)
      : a(a), places(places), sums{reinterpret_cast<Compute*>(places.place + Places::kBytes)}, part(part) {
    lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
    const Shares shares = Shape::kFull ? Shares{kRound, 0} : Shares::of(a.cols, parts);
    begin = int(shares.begin(part)), held = Shape::kFull ? kRound : int(shares.held(part)), first = begin + down;
  }

  int64 row_of(int64 tile) const { return (tile * kLanes + lane) * kVector; }
  bool has(int j) const { return j < kSure || j * kDown < held - down; }
  // asked before each part, as in WholeRows
  bool there(int from) const { return first + from * kDown < (here ? begin + held : 0); }

  void go_to(Sources& sources, int64 row) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v] = a.load.at(row < a.rows ? row + v : 0), sources[v].begin_at(first);
  }
  // The first tile.
  void load(int64 tile) {
    go_to(sources, row_of(tile));
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const Step<kDown> step = {has(j) ? j : 0};
      loaded[j] = Load::template load_x_across<kVector>(sources, step);
      Load::template load_operands_across<kVector>(sources, step, operands[j]);
    }
    sums.clear();
  }
  // Computes a part of what was loaded, from element `from` on, and adds further numbers to the sums of their columns.
  void take(int from, Compute (&further)[OfPart<kLoadSums>::kRows][kPart]) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      Element own[kVector];
      Load::template compute_further_across<kLoadSums, kVector>(sources, loaded[from + j], operands[from + j], own,
          Step<kDown>{from + j}, [&](int k, int, Compute number) { further[k][j] += number; });
#pragma unroll
      for (int v = 0; v < kVector; ++v) x[v][j] = has(from + j) ? own[v] : Op::padding();
    }
  }
  // The next tile's lines on their way to the L2 cache, of which each lane asks for others: what takes the places of
  // this tile's numbers is loaded late.
  void prefetch() const {
    constexpr int kOfLine = kLineBytes / (kVector * int(sizeof(typename Load::Type))),
        kLanesOfLine = kOfLine < kLanes ? kOfLine : kLanes;
#pragma unroll
    for (int from = 0; from < kElements; from += kLanesOfLine) {
      const int j = from + lane % kLanesOfLine;
      if (j < kElements && has(j)) next_sources[0].prefetch_across(Step<kDown>{j});
    }
  }
  // turn: counts the tiles of this block. next: its next tile; none if that has no rows.
  void summarize(int64 tile, int turn, int64 next) {
    const int64 row = row_of(tile);
    go_to(next_sources, row_of(next));
    if (kPrefetches && row_of(next) < a.rows) prefetch();
    here = row < a.rows;
    go_to(sources, row);
#pragma unroll
    for (int v = 0; v < kVector; ++v) targets[v] = a.store.at(here ? row + v : 0), targets[v].begin_at(first);
    if constexpr (kDraws<Store>) draw_across<Shape>(targets, lane, down, held);
    RunningRows<Op, kVector, typename Load::Precision> running;
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      OfPart<kLoadSums> further;
      sums.template get<0, kLoadSums>(from, further.sum);
      take(from, further.sum);  // of columns that are not there, too
      sums.template put<0, kLoadSums>(from, further.sum);
      running.add(x, Predicate<kPart>{kPart, false});
    }
    // on their way while all meet
#pragma unroll
    for (int j = 0; j < kElements; ++j)
      Store::template load_operands_across<kVector>(targets, Step<kDown>{has(j) ? j : 0}, operands_of_results[j]);
    Compute pivot[kVector] = {};
    typename Op::State mine[kVector], total[kVector];
    take_states<Shape>(running, mine, pivot);
#pragma unroll
    for (int v = 0; v < kVector; ++v) total[v] = mine[v];
    reduce_apart<Op, Shape>(total, pivot, places, part, turn);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      whole[v] = a.op.finish(total[v], total[v], a.cols, pivot[v]);
      if (here && part == 0 && int(threadIdx.x) < kLanes) a.op.save(row + v, whole[v]);
    }
    // or all that was computed would wait in registers from here to the results
#pragma unroll
    for (int j = 0; j < kElements; ++j) loaded[j].make_opaque(), operands[j].make_opaque();
  }
  // The numbers of the next tile, if there is one, take this one's places.
  void store(bool more) {
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;  // no tile follows one that lacks rows
      OfPart<kLoadSums> unused;
      OfPart<kStoreSums> further;
      sums.template get<kLoadSums, kStoreSums>(from, further.sum);
      take(from, unused.sum);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const Step<kDown> step = {from + j};
        if (!has(from + j)) continue;
        Compute y[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) y[v] = Op::map_raw(x[v][j], whole[v]);
        const auto columns = a.store.template columns<1>(first + (from + j) * kDown);
        Store::template store_further_across<kStoreSums, kVector>(targets, y, columns, operands_of_results[from + j],
            step, [&](int k, int, Compute number) { further.sum[k][j] += number; });
        if (!more) continue;
        loaded[from + j] = Load::template load_x_across<kVector>(next_sources, step);
        Load::template load_rows_operands_across<kVector>(next_sources, step, operands[from + j]);
      }
      sums.template put<kLoadSums, kStoreSums>(from, further.sum);
    }
  }
  void write_sums(int64 group, Compute* const (&partial)[kSums]) {
    sums.give_all(held,
        [&](int k, int column, Compute sum) { partial[k][group * a.cols + begin + column] = sum; });
    sums.clear();
  }
};

// kLoadSums, kStoreSums: further numbers of the functions of Load and Store, as in row_summed.
template <class Op, class Load, class Store, int kLoadSums, int kStoreSums, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_summed_apart(const __grid_constant__ SummedArguments<Op, Load, Store, kLoadSums + kStoreSums> all) {
  static_assert(Shape::kEven && Load::kInSteps && Store::kOperandsInSteps && !Op::kRounds && !Op::kOwnNumber &&
                !Op::kHasPivot && !Load::kDrops && !Load::kStoresComputed,
                "rows are whole, are computed from what lies at even distances, and none has a mask");
  using Tiles = SummedTiles<Op, Load, Store, kLoadSums, kStoreSums, Shape>;
  __shared__ Mbarrier mbarriers[4];
  begin_together<Shape>(mbarriers);
  GridMeeting meeting;
  const Sharing sharing = begin_sharing<Op, Shape>(all.of.store, meeting);
  const Shares groups = Shares::of((all.of.rows + Shape::kRows - 1) / Shape::kRows, int(all.groups));
  const auto end_of = [&](int group) {  // of a group without tiles, that of one without rows
    const int64 held = groups.held(group);
    return groups.begin(group) + (held > 0 ? held : 1);
  };
  int group = sharing.group, turn = 0;
  if (group >= int(all.groups)) return;
  int64 tile = groups.begin(group), end = end_of(group);
  Tiles tiles(all.of, {shared_memory, mbarriers, &meeting}, sharing.part, sharing.parts);
  tiles.load(tile);
#pragma unroll 1
  while (true) {
    const bool last = tile + 1 == end;  // of its group
    const int later = last ? group + sharing.groups : group;
    const bool more = later < int(all.groups);
    const int64 next = !last ? tile + 1 : more ? groups.begin(later) : all.of.rows;
    tiles.summarize(tile, turn, next);
    tiles.store(more);
    turn = (turn + 1) % 4;
    if (last) tiles.write_sums(group, all.partial);
    if (!more) break;
    tile = next;
    if (last) group = later, end = end_of(group);
  }
}

}  // namespace cupynorm
