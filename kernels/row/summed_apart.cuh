// Rows whose elements lie apart, with sums over rows beside them, as summed.cuh has both of contiguous rows: dx and the
// gradients of gamma and beta in one pass over dy and x.
//
// A tile's rows wait in registers as they were loaded (apart.cuh says who has which), and are computed twice: for their
// State, when the further numbers are added up, and for the results. The next tile's take their places as soon as these
// are stored. A thread has the same columns of every tile, so that it adds up what it has of them, and its lanes' sums
// meet when a group of tiles ends. Groups, whose number follows from rows and columns alone (cupynorm/lower/sums.py),
// go to one block or cluster each, and sum_columns adds what they have: the same bits from any number of blocks.
#pragma once
#include <io/fused.cuh>
#include <row/across.cuh>
#include <row/summed_arguments.cuh>

namespace cupynorm {

constexpr int kLineBytes = 128;

// A thread's part of one tile at a time, and the sums of its columns. All threads must call load of a group's first
// tile, summarize and store of each, in this order, and write_sums behind the last one.
template <class Op, class Load, class Store, int kLoadSums, int kStoreSums, class Shape>
struct SummedTiles {
  static constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes,
      kDown = Shape::kDown, kRound = kElements * kDown, kSure = Shape::kSure,
      kPart = part_of_elements(kElements, 8 / kVector), kSums = kLoadSums + kStoreSums;
  // So many blocks take long to meet; others lose by it (docs/notes/077, "What did not help").
  static constexpr bool kPrefetches = Shape::kCtasPerRow >= 4;
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Places = ReductionPlaces<Op, Shape, (Shape::kCtasPerRow > 1)>;
  using Sources = typename Load::RowPointer[kVector];

  const Arguments<Op, Load, Store>& a;
  const Places places;
  int part, lane, down, begin, held, first;  // as in WholeRows (whole.cuh)
  bool here;
  Sources sources, next_sources;
  typename Store::RowPointer targets[kVector];
  Vector<typename Load::Type, kVector> loaded[kElements];
  typename Load::template OperandsBeside<kVector> operands[kElements];
  typename Store::template OperandsBeside<kVector> operands_of_results[kElements];
  Element x[kVector][kPart];  // a part of what was loaded
  typename Op::Row whole[kVector];
  Compute sums[kSums][kElements];

  SummedTiles(const Arguments<Op, Load, Store>& a, const Places& places) : a(a), places(places) {
    constexpr int kCtas = Shape::kCtasPerRow;
    part = kCtas > 1 ? cluster_rank() : 0;
    lane = threadIdx.x % kLanes, down = threadIdx.x / kLanes;
    const Shares shares = Shape::kFull ? Shares{kRound, 0} : Shares::of(a.cols, kCtas);
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
  // A group's first tile.
  void load(int64 tile) {
    go_to(sources, row_of(tile));
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const Step<kDown> step = {has(j) ? j : 0};
      loaded[j] = Load::template load_x_across<kVector>(sources, step);
      Load::template load_operands_across<kVector>(sources, step, operands[j]);
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[k][j] = 0;
    }
  }
  template <class Take>
  void take(int from, Take more) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      Element own[kVector];
      Load::template compute_further_across<kLoadSums, kVector>(sources, loaded[from + j], operands[from + j], own,
          Step<kDown>{from + j}, [&](int k, int, Compute number) { more(k, from + j, number); });
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
  // turn: counts the tiles of this block. more: whether the group has a next tile.
  void summarize(int64 tile, int turn, bool more) {
    const int64 row = row_of(tile);
    go_to(next_sources, row_of(more ? tile + 1 : 0));
    if (kPrefetches && more) prefetch();
    here = row < a.rows;
    go_to(sources, row);
#pragma unroll
    for (int v = 0; v < kVector; ++v) targets[v] = a.store.at(here ? row + v : 0), targets[v].begin_at(first);
    RunningRows<Op, kVector, typename Load::Precision> running;
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      take(from, [&](int k, int j, Compute number) { sums[k][j] += number; });  // of columns that are not there, too
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
  // The numbers of the next tile, if there are `more`, take this one's places.
  void store(bool more) {
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;  // no tile follows one that lacks rows
      take(from, [](int, int, Compute) {});
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const Step<kDown> step = {from + j};
        if (!has(from + j)) continue;
        Compute y[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) y[v] = Op::map_raw(x[v][j], whole[v]);
        const auto columns = a.store.template columns<1>(first + (from + j) * kDown);
        Store::template store_further_across<kStoreSums, kVector>(targets, y, columns, operands_of_results[from + j],
            step, [&](int k, int, Compute number) { sums[kLoadSums + k][from + j] += number; });
        if (!more) continue;
        loaded[from + j] = Load::template load_x_across<kVector>(next_sources, step);
        Load::template load_rows_operands_across<kVector>(next_sources, step, operands[from + j]);
      }
    }
  }
  void write_sums(int64 group, Compute* const (&partial)[kSums]) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        Compute sum = sums[k][j];
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        if (lane == 0 && has(j)) partial[k][group * a.cols + first + j * kDown] = sum;
      }
    }
  }
};

// kLoadSums, kStoreSums: further numbers of the functions of Load and Store, as in row_summed.
template <class Op, class Load, class Store, int kLoadSums, int kStoreSums, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_summed_apart(const __grid_constant__ SummedArguments<Op, Load, Store, kLoadSums + kStoreSums> all) {
  static_assert(Shape::kEven && Load::kInSteps && Store::kOperandsInSteps && Shape::kCtasPerRow > 0 &&
                !Op::kRounds && !Op::kOwnNumber && !Op::kHasPivot && !Load::kDrops && !Load::kStoresComputed,
                "rows are whole, are computed from what lies at even distances, and none has a mask");
  constexpr int kCtas = Shape::kCtasPerRow;
  using Tiles = SummedTiles<Op, Load, Store, kLoadSums, kStoreSums, Shape>;
  __shared__ Mbarrier mbarriers[4];
  begin_together<Shape>(mbarriers);
  Tiles tiles(all.of, {shared_memory, mbarriers, nullptr});
  const Shares groups = Shares::of((all.of.rows + Shape::kRows - 1) / Shape::kRows, int(all.groups));
  int turn = 0;
#pragma unroll 1
  for (int group = int(blockIdx.x) / kCtas; group < int(all.groups); group += int(gridDim.x) / kCtas) {
    const int64 begin = groups.begin(group), end = begin + groups.held(group);
    tiles.load(begin);
#pragma unroll 1
    for (int64 tile = begin; tile < end; ++tile) {
      const bool more = tile + 1 < end;
      tiles.summarize(tile, turn, more);
      tiles.store(more);
      turn = (turn + 1) % 4;
    }
    tiles.write_sums(group, all.partial);
  }
}

}  // namespace cupynorm
