// block, cluster, split, uncached of rows whose elements lie apart from one another in memory, as along an axis that is
// not the last: they wait in registers, or are read twice.
#pragma once
#include <row/any_rows.cuh>
#include <row/rounds.cuh>
#include <row/tiles.cuh>
#include <row/whole.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_across(const __grid_constant__ Arguments<Op, Load, Store> a) {
  __shared__ Mbarrier mbarriers[4];
  begin_together<Shape>(mbarriers);
  if (has_ended(a.op, a.rows)) return;
  if constexpr (are_whole<Op, Load, Store, Shape>()) {
    HeldRows<Load, Shape> loaded;
    HeldOperands<Op, Load, Shape> operands;
    go_through_tiles<Op, Shape>(a.store, a.rows, [&](const TilePart& at, GridMeeting* meeting) {
      return go_through_whole_rows<Op, Load, Store, Shape>(
          a, shared_memory, mbarriers, at, meeting, loaded, operands);
    });
  } else {
    go_through_tiles<Op, Shape>(a.store, a.rows, [&](const TilePart& at, GridMeeting* meeting) {
      return go_through_any_rows<Op, Load, Store, Shape>(a, mbarriers, at, meeting);
    });
  }
}

}  // namespace cupynorm
