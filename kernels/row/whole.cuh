// Rows of row_across of which each thread has as many elements as any other, or a few less, and where all that they are
// computed from lies at even distances: whole rows. Nothing is asked of most elements then. What a thread has of them
// is in whole_tile.cuh; how it is loaded, summarised and stored has a file each.
#pragma once
#include <row/whole_load.cuh>
#include <row/whole_results.cuh>
#include <row/whole_states.cuh>

namespace cupynorm {

// Blocks of the grid go through tiles: as soon as an element's result is stored, an element of the next tile, and its
// operand, is loaded in its place. All threads must call, with the mbarriers that reduce_apart
// takes, and shared memory that the planner counts (cupynorm/plan/variants/across.py). Returns whether there is a next
// tile.
template <class AnyOp, class Load, class Store, class Shape>
inline bool go_through_whole_rows(const Arguments<AnyOp, Load, Store>& a, unsigned char* shared, Mbarrier* mbarriers,
    const TilePart& at, GridMeeting* meeting, HeldRows<Load, Shape>& loaded,
    HeldOperands<AnyOp, Load, Shape>& operands) {
  using Rows = WholeRows<AnyOp, Load, Store, Shape>;
  Rows rows(a, {shared, mbarriers, meeting}, at, loaded, operands);
  rows.load();
  rows.summarize();
  rows.finish();
  if constexpr (Store::kScales) rows.find_scales();
  typename Rows::Sources next;
  Bounds<int> read;
  if (Shape::kOfGrid && at.next * Shape::kRows < a.rows) {
    rows.go_to(next, rows.rows_of(at.next));
    if constexpr (Load::kInterval) read = Rows::interval_of(next);
    rows.template store<true>(next, read);
    rows.look_later();
    return true;
  }
  if constexpr (Shape::kOfGrid) rows.template store<false>(next, read);  // which has two copies already
  else rows.for_kept([&](auto) { rows.template store<false>(next, read); });
  rows.look_later();
  if constexpr (Shape::kOfGrid) exit_thread();  // `loaded` does not wait for a tile that is not there
  return false;
}

}  // namespace cupynorm
