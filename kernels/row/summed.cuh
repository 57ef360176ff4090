// Rows with sums over rows beside them: of the further numbers that the functions of Load and Store give for each
// element. Of a norm's gradient they are dy * xhat and dy, whose sums are the gradients of gamma and beta, and dx,
// whose sum is a bias's. Each array is read once.
//
// A row waits for its numbers in registers, as in row_registers, with the next one on its way there, or with kStages
// more on their way in shared memory (StagedRegisters). Or it waits in shared memory as it was loaded, while the next
// row is summarised: what warps and blocks tell one another has a row's time to arrive, but the row is converted twice.
//
// Rows are cut into groups, whose number follows from rows and columns alone (cupynorm/lower/row_groups.py). A block,
// or a cluster, goes through whole groups: its threads add up what they have of each column in registers, and write the
// group's sums when it ends. sum_columns adds those of all groups. So the same bits come from any number of blocks.
// Groups lie interleaved: blocks are near one another in memory. Rows of a group have one alignment, and a thread has
// the same columns of each: the number of groups is a multiple of 8, or all rows begin at vectors.
#pragma once
#include <base/async_copy.cuh>
#include <base/cluster.cuh>
#include <base/pdl.cuh>
#include <io/fused.cuh>
#include <row/epilogue.cuh>
#include <row/group_sums.cuh>
#include <row/registers.cuh>
#include <row/row_copies.cuh>
#include <row/summed_arguments.cuh>

namespace cupynorm {

// Either all groups lie interleaved, or so many at a time: INTERLEAVED of cupynorm/lower/row_groups.py. To divide by a
// number that the compiler does not know would take a register more.
constexpr int kInterleaved = 8;

// Registers of a thread beside the sums of its columns and what it keeps of these; and beside these and a row.
constexpr int kRegistersBeside = 72, kRegistersBesideRow = 48;

// kLoadSums, kStoreSums: further numbers of the functions of Load and Store. The loop holds its arrays in its own body,
// as that of row_registers does.
template <class Op, class Load, class Store, int kLoadSums, int kStoreSums, class Shape_>
__global__ void __launch_bounds__(Shape_::kBlock, Shape_::kMinBlocks)
    row_summed(const __grid_constant__ SummedArguments<Op, Load, Store, kLoadSums + kStoreSums> all) {
  using Shape = typename CutIf<Shape_,
      Load::template kCut<Shape_::kVector> && Store::template kCut<Shape_::kVector>>::Type;
  using Compute = typename Op::Compute;
  constexpr int kVector = Shape::kVector, kGroup = Shape::kGroup, kCtasPerRow = Shape::kCtasPerRow;
  constexpr int kWarps = Shape::kWarps, kEdge = Shape::kEdge, kStages = Shape::kStages, kVectors = Shape::kVectors;
  constexpr int kSums = kLoadSums + kStoreSums;
  constexpr bool kTakes = kTakesRows<Shape>, kStaged = kStages > 0;
  // Whether a row's numbers are asked for two rows early: where a row takes little time, and has several of them, their
  // loads are what it waits for (docs/notes/085).
  constexpr bool kAsks = kCtasPerRow == 1 && decltype(Load::operands)::kNumbers > 1 && sizeof(typename Load::Type) == 2;
  constexpr bool kEqual = Shape::kFull && slots_for(kWarps) == kWarps;
  using Valid = Predicate<Shape::kAlwaysValid * kVector, kEdge, (kCtasPerRow > 1 ? 2 : 1)>;
  using OfVector = Predicate<0, 0, 2>;
  // Each scheduler of a multiprocessor has a fourth of the registers, for whole warps.
  constexpr int kSchedulers = 4, kFilled = kSchedulers * kWarp;  // threads
  constexpr int kRegisters = 65536 / ((Shape::kBlock * Shape::kMinBlocks + kFilled - 1) / kFilled * kFilled);
  constexpr int kKept = Load::kKeptColumns;
  constexpr int kNumbers = kSums + kKept + (kKept > 1) + kTakes * ElementTraits<ElementOf<Op>>::kFields;
  constexpr int kBeside = kTakes ? kRegistersBesideRow : kRegistersBeside;
  // What threads keep of columns is converted once where they have registers for that.
  constexpr bool kConverted = kBeside + Shape::kInVectors * kNumbers * int(sizeof(Compute)) / 4 <= kRegisters;
  using As = typename Conditional<kConverted, Compute, void>::Type;
  static_assert(Shape::kRows == 1 && Shape::kParameterMode == 0 && !Load::kDirect &&
                !Load::kDrops && !Load::kStoresComputed && Store::kHasEpilogueOperands,
                "rows are held one by one, and none has a mask");
  const Arguments<Op, Load, Store>& a = all.of;
  const int lane = threadIdx.x % kGroup, slot = threadIdx.x / kGroup;
  const int part = kCtasPerRow > 1 ? cluster_rank() : 0;
  const auto cols = [&] {
    if constexpr (Shape::kFull && kCtasPerRow == 1) return Constant<kGroup * Shape::kInVectors>();
    else return int(a.cols);
  }();

  // Two sets of slots are enough, because a barrier stands between two uses of one. A block may send the numbers of its
  // next row but two before another has read those of this one.
  constexpr int kSlots = slots_for(kWarps), kMailboxes = kCtasPerRow == 1 ? 1 : kStaged ? 4 : 2;
  __shared__ Slot<Op> slots[kWarps > 1 ? 2 : 1][1][Shape::kGroups][kSlots];
  __shared__ ClusterMailbox<Op, kCtasPerRow> cluster_mailboxes[kMailboxes];
  unsigned no_rows[1];
  Slot<Magnitude<Compute>> no_slots[1][1][1];
  ClusterMailbox<Magnitude<Compute>, 1> no_mailbox;
  begin_exchange<Shape, (kWarps > 1), false, false>(slots, cluster_mailboxes, no_rows, no_slots, no_mailbox);
  pdl_wait();

  const auto share_at = [&](int64 row) {
    return share_of<Shape>(cols, a.store.at(row < a.rows ? row : 0).template head<Shape::kAligned>(), part);
  };
  constexpr bool kCut = Shape::kCut, kUnaligned = Shape::kUnaligned > 0;
  Share share = kUnaligned ? Share() : share_of<Shape>(cols, 0, part);
  auto has = [&](int p) { return p < Shape::kAlwaysValid || p * kGroup + lane < share.vectors; };
  auto col = [&](int p) { return share.head + (share.before + p * kGroup + lane) * kVector; };
  auto masked_from = [&](int p) { return p * (kGroup * kVector); };
  auto edge_col = [&] { return lane < share.heads ? lane : lane - share.heads + share.tail; };
  auto has_edge = [&] { return kEdge > 0 && lane < share.heads + share.tails; };
  const ThreadTile tile = {has, col, edge_col, has_edge, masked_from, lane};
  ParametersAtUse<Store, Shape> parameters;

  typename Load::template Loaded<kVector> loaded[1][kVectors];
  typename Load::template Loaded<1> around[1];
  typename Load::RowPointer sources[1];
  typename Store::RowPointer targets[1];
  typename Store::template EpilogueOperands<kVector> epilogue_operands[1][kVectors];
  typename Store::template EpilogueOperands<1> epilogue_operands_edge[1];
  bool keeps_edge[1], some[1][kVectors], there[1];
  unsigned keeps[1];
  Compute pivot[1] = {0};
  ElementOf<Op> x[1][Shape::kElements];
  typename Op::State mine[1], total[1];
  ThreadRows<Op, Load, Store, Shape> rows =
      {loaded, sources, targets, epilogue_operands, epilogue_operands_edge, keeps_edge, keeps,
       some, there, pivot, x, mine, total};
  // with stages: what all rows share of this thread's columns
  typename Load::template Kept<kVector, As> kept[kVectors];
  typename Store::template Kept<kVector, As> kept_of_results[kVectors];
  typename Load::RowPointer waiting;
  unsigned turn = 0;  // rows of this block so far: of slots and mailboxes

  const bool together = all.interleaved == all.groups;
  const int64 step = Shape::kGroups * all.interleaved, rows_together = all.rows_of_group * all.interleaved;
  for (int64 group = blockIdx.x / kCtasPerRow; group < all.groups; group += gridDim.x / kCtasPerRow) {
    const int64 begin = together ? 0 : group / kInterleaved * rows_together;
    const int64 end = begin + rows_together < a.rows ? begin + rows_together : a.rows;
    int64 base = begin + (together ? group : group % kInterleaved) * Shape::kGroups;
    if constexpr (kUnaligned) share = share_at(base + slot);
    bool cut = false;  // whether a vector of this thread is
    if constexpr (kCut) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) cut |= tile.has(p) && (tile.col(p) < 0 || tile.col(p) + kVector > cols);
    }
    auto number = [&](int64 from) { return from + slot < end ? from + slot : a.rows; };
    Compute sums[kSums][Shape::kElements] = {};

    // Add up the columns of what is loaded.
    auto add_loaded = [&](int first) {
      return [&, first](int k, int i, Compute more) { sums[k][first + i] += more; };
    };
    auto unpack_edge = [&](const auto& source, const auto& element, bool here) {
      ElementOf<Op> value[1] = {Op::padding()};
      if constexpr (kEdge > 0) {
        if (here && tile.has_edge())
          source.template unpack_further<kLoadSums>(element, value, tile.edge_col(), add_loaded(Shape::kInVectors));
      }
      return value[0];
    };
    // Adds up the columns of the results.
    auto add_results = [&](int first) {
      return [&, first](int k, int i, Compute more) { sums[kLoadSums + k][first + i] += more; };
    };
    auto finish_edge = [&](const auto& target, const auto& operands, ElementOf<Op> element, const auto& whole) {
      if constexpr (kEdge > 0) {
        if (!tile.has_edge()) return;
        const Compute y[1] = {Op::map(element, whole)};
        target.template store_further<kStoreSums, 1, false>(y, parameters.edge(a.store, tile), operands,
            tile.edge_col(), add_results(Shape::kInVectors));
      }
    };

    if constexpr (kStaged && !kTakes) {
      // of this group of threads; all of a block go through as many as the first has
      const auto rows_from = [&](int64 from) { return from < end ? int((end - from + step - 1) / step) : 0; };
      const int all_rows = rows_from(base), own_rows = rows_from(base + slot);
      const int64 first = own_rows > 0 ? base + slot : 0;
      auto row_at = [&](int j) { return first + (j < own_rows ? j : 0) * step; };
      auto prefetch = [&](int j, int place) {
        if (j < own_rows) prefetch_row<Shape>(a, first + j * step, place, tile);
        commit_copies();  // an empty group too: wait counts groups
      };
#pragma unroll
      for (int s = 0; s < kStages; ++s) prefetch(s, s);
      keep_columns<Shape, As>(a, kept, kept_of_results, cols, tile);
      // What is not copied: numbers of the row, and the element that is in no vector.
      auto load_besides = [&](int j) {
        sources[0] = a.load.at(row_at(j));
        if constexpr (kEdge > 0) {
          if (j < own_rows && tile.has_edge()) around[0] = sources[0].template load<1>(tile.edge_col());
        }
      };
      load_besides(0);
      int place = 0, place_of_waiting = kStages;
      for (int j = 0;; ++j) {
        const bool waits = j > 0 && j <= own_rows;
        const typename Op::State own = mine[0], of_lanes = total[0];
        const ElementOf<Op> edge = x[0][Shape::kElements - 1];
        const typename Load::RowPointer source = sources[0];
        const typename Load::template Loaded<1> own_around = around[0];
        if (j < all_rows) {
          if (j + 1 < all_rows) load_besides(j + 1);
          if constexpr (kAsks) {
            if (lane == 0 && j + 2 < own_rows) a.load.operands.prefetch_numbers(row_at(j + 2));
          }
          wait_for_copies<(kStages > 0 ? kStages - 1 : 0)>();
          typename Op::State of_thread = Op::identity();  // vector by vector: their numbers take no registers meanwhile
          const bool here = j < own_rows;
#pragma unroll
          for (int p = 0; p < kVectors; ++p) {
            if (!here || !tile.has(p)) continue;
            ElementOf<Op> values[kVector];
            kept[p].make_opaque();
            source.template unpack_row<kLoadSums, Shape::kBlock, kVector, As>(kept[p],
                row_place<Load, Store, Shape>(place, p), threadIdx.x, values, tile.col(p), add_loaded(p * kVector));
            of_thread = Op::template merge<false>(of_thread,
                Op::summarize(values, OfVector{kVector, false}, Compute(0)));
          }
          if constexpr (kEdge > 0) {
            ElementOf<Op> value[1] = {unpack_edge(source, own_around, here)};
            of_thread = Op::template merge<false>(of_thread, Op::summarize(value, OfVector{1, false}, Compute(0)));
            x[0][Shape::kElements - 1] = value[0];
          }
          mine[0] = of_thread;
          total[0] = reduce_lanes<Op, false, Shape::kLanes>(of_thread);
          tell_warps<Op, Shape>(total[0], slots[kWarps > 1 ? turn % 2 : 0][0][slot], lane / kWarp);
          if constexpr (kCtasPerRow > 1) {
            __syncthreads();
            if (threadIdx.x < kWarp)
              send_to_blocks<Op>(told_by_warps<Op, kEqual>(slots[turn % 2][0][slot]), Compute(0),
                  cluster_mailboxes[turn % 4], part);
          }
        }
        if (j > 0) {
          typename Op::State of_row = of_lanes;
          if constexpr (kCtasPerRow > 1)
            of_row = await_blocks<Op, Shape::kFull>(cluster_mailboxes[(turn + 3) % 4], Compute(0), (turn - 1) / 4 % 2);
          else if constexpr (kWarps > 1)
            of_row = told_by_warps<Op, kEqual>(slots[(turn + 1) % 2][0][slot]);
          if (waits) {
            const typename Op::Row whole = a.op.finish(own, of_row, cols, pivot[0]);
#pragma unroll
            for (int p = 0; p < kVectors; ++p) {
              if (!tile.has(p)) continue;
              const unsigned char* const from = row_place<Load, Store, Shape>(place_of_waiting, p);
              ElementOf<Op> again[kVector];
              Compute y[kVector];
              kept[p].make_opaque(), kept_of_results[p].make_opaque();
              waiting.template unpack_row<kLoadSums, Shape::kBlock, kVector, As>(kept[p], from, threadIdx.x, again,
                  tile.col(p), [](int, int, Compute) {});
#pragma unroll
              for (int i = 0; i < kVector; ++i) y[i] = Op::map(again[i], whole);
              targets[0].template store_row<kStoreSums, Shape::kBlock, kVector, (kEdge > 0), As>(y,
                  parameters.get(a.store, p, tile), kept_of_results[p], from + kBehindRow<Load, Shape>, threadIdx.x,
                  tile.col(p), add_results(p * kVector));
            }
            finish_edge(targets[0], epilogue_operands_edge[0], edge, whole);
          }
        }
        if (j >= all_rows) break;
        prefetch(j + kStages, place_of_waiting);  // the row has been read from shared memory: its place is free
        if constexpr (kWarps > 1 && kCtasPerRow == 1) __syncthreads();
        waiting = source;
        targets[0] = a.store.at(row_at(j));
        if constexpr (kEdge > 0) {
          if (j < own_rows && tile.has_edge())
            epilogue_operands_edge[0] = targets[0].template epilogue_operands<1>(tile.edge_col());
        }
        if (j + 1 >= all_rows) pdl_trigger_late();
        place_of_waiting = place, place = place == kStages ? 0 : place + 1;
        ++turn;
      }
    } else {
      auto prefetch = [&](int64 from, int place) {
        if constexpr (kTakes) {  // else there may be vectors of fewer bytes than a copy has
          if (from + slot < end) prefetch_row<Shape>(a, from + slot, place, tile);
          commit_copies();  // an empty group too: wait counts groups
        }
      };
      auto load = [&](int64 from) {
        if constexpr (kTakes) {
          there[0] = from + slot < end;
          if (Shape::kGroups == 1 || there[0]) load_uncopied(a, rows, around[0], from + slot, tile);
        } else {
          load_rows(a, rows, around, 0, [&](int) { return number(from); }, tile);
        }
      };
      if constexpr (kTakes) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) prefetch(base + s * step, s);
        keep_columns<Shape, As>(a, kept, kept_of_results, cols, tile);
      }
      int place = 0, place_before = kStages;
      if (base < end) load(base);
      for (; base < end; base += step) {
        const bool here = (kTakes && Shape::kGroups == 1) || there[0];
        if constexpr (kAsks) {
          if (lane == 0 && base + slot + 2 * step < end) a.load.operands.prefetch_numbers(base + slot + 2 * step);
        }
        if constexpr (kTakes) {  // what was there has been written
          prefetch(base + kStages * step, place_before);
          wait_for_copies<kStages>();
        }
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          ElementOf<Op>* const values = x[0] + p * kVector;
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] = Op::padding();
          if (!here || !tile.has(p)) continue;
          if constexpr (kTakes) {
            kept[p].make_opaque();
            sources[0].template unpack_row<kLoadSums, Shape::kBlock, kVector, As>(kept[p],
                row_place<Load, Store, Shape>(place, p), threadIdx.x, values, tile.col(p), add_loaded(p * kVector));
            if (kCut && cut) {  // sums of columns that are not the row's are never written
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                if (!Cut<Shape>(tile.col(p), cols).has(i)) values[i] = Op::padding();
              }
            }
          } else {
            sources[0].template unpack_further<kLoadSums>(loaded[0][p], values, tile.col(p), add_loaded(p * kVector));
          }
        }
        if constexpr (kEdge > 0) x[0][Shape::kInVectors] = unpack_edge(sources[0], around[0], here);
        const auto target = targets[0];
        typename Store::template EpilogueOperands<kVector> operands[kVectors];
#pragma unroll
        for (int p = 0; p < kVectors; ++p) operands[p] = epilogue_operands[0][p];
        const auto operands_edge = epilogue_operands_edge[0];
        if (base + step < end) load(base + step);  // on its way while this row is computed
        else pdl_trigger_late();

        const Counts counts = count_elements<Shape>(share, tile);
        const Valid valid = {counts.thread, tile.has_edge()};
        total[0] = summarize_lanes<Op, Shape::kFull, false, (kCtasPerRow > 1), Shape::kLanes>(
            x[0], valid, counts.warp, pivot[0], mine[0]);
        if constexpr (kWarps > 1)
          reduce_warps<Op, kEqual, kSlots>(rows.total, rows.pivot, slots[turn % 2], slot,
              lane / kWarp);
        if constexpr (kCtasPerRow > 1)
          reduce_blocks<Op, Shape::kFull>(total[0], pivot[0], cluster_mailboxes[turn % 2], part, turn / 2 % 2);
        turn = (turn + 1) % 4;

        if (here) {
          const typename Op::Row whole = a.op.finish(mine[0], total[0], cols, pivot[0]);
#pragma unroll
          for (int p = 0; p < kVectors; ++p) {
            if (!tile.has(p)) continue;
            Compute y[kVector];
            map_vector(rows, 0, p, whole, y);
            if constexpr (kTakes) {
              kept_of_results[p].make_opaque();
              target.template store_row<kStoreSums, Shape::kBlock, kVector, kUnaligned, As>(y,
                  parameters.get(a.store, p, tile), kept_of_results[p],
                  row_place<Load, Store, Shape>(place, p) + kBehindRow<Load, Shape>, threadIdx.x, tile.col(p),
                  add_results(p * kVector), kCut && cut ? Cut<Shape>(tile.col(p), cols).own() : all_of<kVector>());
            } else {
              target.template store_further<kStoreSums, kVector, (kEdge > 0)>(y, parameters.get(a.store, p, tile),
                  operands[p], tile.col(p), add_results(p * kVector));
            }
          }
          finish_edge(target, operands_edge, x[0][Shape::kElements - 1], whole);
        }
        place_before = place, place = place == kStages ? 0 : place + 1;
      }
    }
    write_sums<Shape>(sums, all.partial, group * a.cols, slot, cols, share.vectors, tile);
  }
}

}  // namespace cupynorm
