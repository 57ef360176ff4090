// How blocks begin, and which tiles of rows whose elements lie apart (apart.cuh) each works on.
#pragma once
#include <base/pdl.cuh>
#include <io/load_store.cuh>
#include <row/apart.cuh>

namespace cupynorm {

// Before the blocks of a cluster write into one another, and before any load.
template <class Shape>
inline void begin_together(Mbarrier (&mbarriers)[4]) {
  if constexpr (Shape::kCtasPerRow > 1) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) init_mbarrier(&mbarriers[i]);
    }
    cluster_sync();  // all blocks have begun
  }
  pdl_wait_and_trigger();
}

// Says which blocks share rows. Those of the grid then can meet: their room holds a counter of each group of blocks,
// and behind these their messages. Before any load.
template <class Op, class Shape, class Store>
inline Sharing begin_sharing(const Store& store, GridMeeting& meeting) {
  if constexpr (!Shape::kOfGrid) {
    constexpr int kCtas = Shape::kCtasPerRow;
    return {int(blockIdx.x) / kCtas, int(gridDim.x) / kCtas, kCtas > 1 ? int(cluster_rank()) : 0, kCtas};
  } else {
    const Sharing sharing = Sharing::of_grid();
    meeting = {store.room, sharing.group, sharing.part, 0, 0, sizeof(SlotWords<Op>)};
    meeting.begin();
    if constexpr (Shape::kHolds) grid_wait(meeting.begun);  // else before the first meeting: they have the registers
    return sharing;
  }
}

// Calls go(tile, meeting) for each tile that this block works on, of as many as hold all rows: for one, or, where
// blocks share rows over the grid, for one after the other. Before any load.
template <class Op, class Shape, class Store, class Go>
inline void go_through_tiles(const Store& store, int64 rows, Go go) {
  if constexpr (!Shape::kOfGrid) {
    const int part = Shape::kCtasPerRow > 1 ? cluster_rank() : 0;
    go(TilePart{blockIdx.x / Shape::kCtasPerRow, part, Shape::kCtasPerRow, rows}, nullptr);
  } else if constexpr (kIsRoomy<Store>) {
    GridMeeting meeting;
    const Sharing sharing = begin_sharing<Op, Shape>(store, meeting);
    int64 tile = sharing.group;
    while (go(TilePart{tile, sharing.part, sharing.parts, tile + sharing.groups}, &meeting)) {
      tile += sharing.groups;
      // or what is computed from these would wait in registers from one tile to the next
      make_opaque(meeting.group), make_opaque(meeting.part), make_opaque(meeting.room);
    }
  }
}

// Parameters of the `count` columns from `first` on, converted, to shared memory. A barrier comes before they are used.
template <int kBlock, class Store, class Number>
inline void convert_columns(const Store& store, Number* numbers, int first, int count) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kBlock) {
    Number own[1];
    Store::Affines::template convert<1>(store.template columns<1>(first + i), own);
    numbers[i] = own[0];
  }
}

}  // namespace cupynorm
