// Rows in registers, as in row_registers, with sums over rows beside them: of the further numbers that the functions of
// Load and Store give for each element. Of a norm's gradient they are dy * xhat and dy, whose sums are the gradients of
// gamma and beta, and dx, whose sum is a bias's. Each array is read once.
//
// Rows are cut into groups, whose number follows from rows and columns alone (cupynorm/lower/sums.py). A block, or a
// cluster, goes through whole groups: its threads add up what they have of each column in registers, and write the
// group's sums when it ends. sum_columns adds those of all groups. So the same bits come from any number of blocks.
#pragma once
#include <io/fused.cuh>
#include <row/epilogue.cuh>
#include <row/registers.cuh>

namespace cupynorm {

// So many groups lie interleaved, because the rows of a group must have the same alignment: a thread then has the same
// columns of all of them.
constexpr int kInterleaved = 8;

// partial: of each sum, [groups, cols].
template <class Op, class Load, class Store, int kSums>
struct SummedArguments {
  Arguments<Op, Load, Store> of;
  int64 rows_of_group, groups;
  typename Op::Compute* partial[kSums];
};

// Writes what the threads of a block have added up of their columns, each sum from to[k] + first on. Several rows of a
// block are added in their order.
template <class Shape, int kSums, typename Compute, class Tile>
inline void write_sums(const Compute (&sums)[kSums][Shape::kElements], Compute* const (&to)[kSums], int64 first,
    int slot, int cols, const Tile& tile) {
  constexpr int kVector = Shape::kVector;
  if constexpr (Shape::kGroups == 1) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
        Compute* const place = to[k] + first + tile.col(p);
        if constexpr (Shape::kEdge == 0) {
          store_vector(place, vector_from<Compute, kVector>(sums[k] + p * kVector));
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) place[i] = sums[k][p * kVector + i];
        }
      }
      if constexpr (Shape::kEdge > 0) {
        if (tile.has_edge()) to[k][first + tile.edge_col()] = sums[k][Shape::kInVectors];
      }
    }
  } else {
    constexpr int kPitch = Shape::kGroup * Shape::kElements;
    // with stages they lie where rows were on their way: all of them have been read
    constexpr bool kInStages = Shape::kStages > 0;
    __shared__ Compute own[kInStages ? 1 : Shape::kGroups][kInStages ? 1 : kPitch];
    auto* const columns = reinterpret_cast<Compute (*)[kPitch]>(kInStages ? shared_memory : reinterpret_cast<unsigned char*>(own));
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      __syncthreads();  // what was there has been read
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) columns[slot][tile.col(p) + i] = sums[k][p * kVector + i];
      }
      if constexpr (Shape::kEdge > 0) {
        if (tile.has_edge()) columns[slot][tile.edge_col()] = sums[k][Shape::kInVectors];
      }
      __syncthreads();
      for (int col = threadIdx.x; col < cols; col += Shape::kBlock) {
        Compute total = columns[0][col];
#pragma unroll 4
        for (int each = 1; each < Shape::kGroups; ++each) total += columns[each][col];
        to[k][first + col] = total;
      }
    }
    if constexpr (kInStages) __syncthreads();  // before the next rows are copied there
  }
}

// Where a thread's vector p of a row waits, with those of its neighbours.
template <class Load, class Shape>
inline unsigned char* row_place(int stage, int p) {
  return shared_memory + (stage * Shape::kVectors + p) * (Shape::kBlock * Load::template kRowBytes<Shape::kVector>);
}

// Begins to copy this thread's vectors of a row, without what all rows share; of none from `rows` on.
template <class Load, class Shape, class Tile>
inline void prefetch_row(const Load& load, int64 row, int64 rows, int stage, const Tile& tile) {
  if (row < rows) {
    auto source = load.at(row);
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) {
      if (tile.has(p))
        source.template prefetch_row<Shape::kVector, Shape::kBlock>(
            row_place<Load, Shape>(stage, p), threadIdx.x, tile.col(p));
    }
  }
  commit_copies();  // an empty group too: wait counts groups
}

// Loads what all rows share of this thread's columns.
template <class Shape, class RowPointer, class Loaded, class Tile>
inline void load_columns(const RowPointer& source, Loaded (&loaded)[Shape::kVectors], const Tile& tile) {
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    if (tile.has(p)) source.template load_columns<Shape::kVector>(loaded[p], tile.col(p));
  }
}

// Loads of a row what is not copied ahead: numbers of the row, what its results are computed from, and the element that
// is in no vector.
template <class Op, class Load, class Store, class Shape, class Around, class Tile>
inline void load_besides(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
    Around& around, int64 row, const Tile& tile) {
  const bool here = row < a.rows;
  rows.sources[0] = a.load.at(here ? row : 0);
  rows.targets[0] = a.store.at(here ? row : 0);
  rows.there[0] = here;
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    if (here && tile.has(p))
      rows.epilogue_operands[0][p] = rows.targets[0].template epilogue_operands<Shape::kVector>(tile.col(p));
  }
  if constexpr (Shape::kEdge > 0) {
    if (here && tile.has_edge()) {
      around = rows.sources[0].template load<1>(tile.edge_col());
      rows.epilogue_operands_edge[0] = rows.targets[0].template epilogue_operands<1>(tile.edge_col());
    }
  }
}

// kLoadSums, kStoreSums: further numbers of the functions of Load and Store.
template <class Op, class Load, class Store, int kLoadSums, int kStoreSums, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_summed(const __grid_constant__ SummedArguments<Op, Load, Store, kLoadSums + kStoreSums> all) {
  using Compute = typename Op::Compute;
  constexpr int kVector = Shape::kVector, kGroup = Shape::kGroup, kCtasPerRow = Shape::kCtasPerRow;
  constexpr int kWarps = Shape::kWarps, kEdge = Shape::kEdge, kStages = Shape::kStages;
  constexpr int kSums = kLoadSums + kStoreSums;
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

  constexpr int kSlots = slots_for(kWarps);
  __shared__ Slot<Op> slots[kWarps > 1 ? 2 : 1][1][Shape::kGroups][kSlots];
  __shared__ ClusterMailbox<Op, kCtasPerRow> cluster_mailboxes[kCtasPerRow > 1 ? 2 : 1];
  unsigned no_rows[1];
  Slot<Magnitude<Compute>> no_slots[1][1][1];
  ClusterMailbox<Magnitude<Compute>, 1> no_mailbox;
  begin_exchange<Shape, (kWarps > 1), false, false>(slots, cluster_mailboxes, no_rows, no_slots, no_mailbox);
  unsigned set = 0;  // of two sets of slots and mailboxes; in clusters more: a signal's parity changes every other time
  pdl_wait();

  const auto share_at = [&](int64 row) {
    return share_of<Shape>(cols, a.store.at(row < a.rows ? row : 0).template head<Shape::kAligned>(), part);
  };
  Share share = kEdge > 0 ? Share() : share_of<Shape>(cols, 0, part);
  auto has = [&](int p) { return p < Shape::kAlwaysValid || p * kGroup + lane < share.vectors; };
  auto col = [&](int p) { return share.head + (share.before + p * kGroup + lane) * kVector; };
  auto masked_from = [&](int p) { return p * (kGroup * kVector); };
  auto edge_col = [&] { return lane < share.heads ? lane : lane - share.heads + share.tail; };
  auto has_edge = [&] { return kEdge > 0 && lane < share.heads + share.tails; };
  const ThreadTile tile = {has, col, edge_col, has_edge, masked_from, lane};
  ParametersAtUse<Store, Shape> parameters;

  typename Load::template Loaded<kVector> loaded[1][Shape::kVectors];
  typename Load::template Loaded<1> around[1];
  typename Load::RowPointer sources[1];
  typename Store::RowPointer targets[1];
  typename Store::template EpilogueOperands<kVector> epilogue_operands[1][Shape::kVectors];
  typename Store::template EpilogueOperands<1> epilogue_operands_edge[1];
  bool keeps_edge[1], some[1][Shape::kVectors], there[1];
  unsigned keeps[1];
  Compute pivot[1] = {0};
  ElementOf<Op> x[1][Shape::kElements];
  typename Op::State mine[1], total[1];
  ThreadRows<Op, Load, Store, Shape> rows =
      {loaded, sources, targets, epilogue_operands, epilogue_operands_edge, keeps_edge, keeps,
       some, there, pivot, x, mine, total};

  const int64 step = int64(Shape::kGroups) * kInterleaved, rows_together = all.rows_of_group * kInterleaved;
  for (int64 group = blockIdx.x / kCtasPerRow; group < all.groups; group += gridDim.x / kCtasPerRow) {
    const int64 begin = group / kInterleaved * rows_together;
    const int64 end = begin + rows_together < a.rows ? begin + rows_together : a.rows;
    int64 base = begin + group % kInterleaved * Shape::kGroups;
    if constexpr (kEdge > 0) share = share_at(base + slot);
    auto number = [&](int64 from) { return from + slot < end ? from + slot : a.rows; };
    // the next row is on its way while this one is computed; with stages its vectors are, for longer than the rest of it
    auto load = [&](int64 from) {
      if constexpr (kStages > 0) load_besides(a, rows, around[0], number(from), tile);
      else load_rows(a, rows, around, 0, [&](int) { return number(from); }, tile);
    };
    int stage = 0;
    if constexpr (kStages > 0) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) prefetch_row<Load, Shape>(a.load, number(base + s * step), a.rows, s, tile);
      load_columns<Shape>(a.load.at(0), loaded[0], tile);
    }
    Compute sums[kSums][Shape::kElements] = {};
    if (base < end) load(base);
    for (; base < end; base += step) {
      const bool here = there[0];
      if constexpr (kStages > 0) wait_for_copies<(kStages > 0 ? kStages - 1 : 0)>();
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if constexpr (kStages > 0) {
          if (here && tile.has(p))
            sources[0].template take_row<kVector, Shape::kBlock>(loaded[0][p],
                row_place<Load, Shape>(stage, p), threadIdx.x, tile.col(p));
        }
        ElementOf<Op>* const values = x[0] + p * kVector;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = Op::padding();
        if (here && tile.has(p))
          sources[0].template unpack_further<kLoadSums>(loaded[0][p], values, tile.col(p),
              [&](int k, int i, Compute more) { sums[k][p * kVector + i] += more; });
      }
      if constexpr (kEdge > 0) {
        ElementOf<Op>* const value = x[0] + Shape::kInVectors;
        *value = Op::padding();
        if (here && tile.has_edge())
          sources[0].template unpack_further<kLoadSums>(around[0], value, tile.edge_col(),
              [&](int k, int, Compute more) { sums[k][Shape::kInVectors] += more; });
      }
      const auto target = targets[0];
      typename Store::template EpilogueOperands<kVector> operands[Shape::kVectors];
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) operands[p] = epilogue_operands[0][p];
      const auto operands_edge = epilogue_operands_edge[0];
      if constexpr (kStages > 0) {  // the row has been read from shared memory: its place is free
        prefetch_row<Load, Shape>(a.load, number(base + kStages * step), a.rows, stage, tile);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      if (base + step < end) load(base + step);
      else pdl_trigger_late();

      const Counts counts = count_elements<Shape>(share, tile);
      const Predicate<Shape::kAlwaysValid * kVector, kEdge, (kCtasPerRow > 1 ? 2 : 1)> valid =
          {counts.thread, tile.has_edge()};
      total[0] = summarize_lanes<Op, Shape::kFull, false, (kCtasPerRow > 1), Shape::kLanes>(
          x[0], valid, counts.warp, pivot[0], mine[0]);
      if constexpr (kWarps > 1)
        reduce_warps<Op, (Shape::kFull && kSlots == kWarps), kSlots>(rows.total, rows.pivot, slots[set % 2], slot,
            lane / kWarp);
      if constexpr (kCtasPerRow > 1)
        reduce_blocks<Op, Shape::kFull>(total[0], pivot[0], cluster_mailboxes[set % 2], part, set / 2 % 2);
      set = (set + 1) % 4;

      if (here) {
        const typename Op::Row whole = a.op.finish(mine[0], total[0], cols, pivot[0]);
#pragma unroll
        for (int p = 0; p < Shape::kVectors; ++p) {
          if (!tile.has(p)) continue;
          Compute y[kVector];
          map_vector(rows, 0, p, whole, y);
          target.template store_further<kStoreSums, kVector, (kEdge > 0)>(y, parameters.get(a.store, p, tile),
              operands[p], tile.col(p),
              [&](int k, int i, Compute more) { sums[kLoadSums + k][p * kVector + i] += more; });
        }
        if constexpr (kEdge > 0) {
          if (tile.has_edge()) {
            Compute y[1];
            map_edge(rows, 0, whole, y);
            target.template store_further<kStoreSums, 1, false>(y, parameters.edge(a.store, tile), operands_edge,
                tile.edge_col(), [&](int k, int, Compute more) { sums[kLoadSums + k][Shape::kInVectors] += more; });
          }
        }
      }
    }
    write_sums<Shape>(sums, all.partial, group * a.cols, slot, cols, tile);
  }
}

}  // namespace cupynorm
