// How rows of row_summed are copied to shared memory while others are computed, and what is loaded beside them.
#pragma once
#include <base/async_copy.cuh>
#include <io/fused.cuh>
#include <row/load.cuh>
#include <row/summed_shapes.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// The place in shared memory of the thread's vector p of a row; vectors of neighbouring threads lie beside it.
template <class Load, class Store, class Shape>
inline unsigned char* row_place(int stage, int p) {
  constexpr int kBytes = Load::template kRowBytes<Shape::kVector> + Store::template kRowBytes<Shape::kVector>;
  return shared_memory + (stage * Shape::kVectors + p) * (Shape::kBlock * kBytes);
}
// What the results are computed from lies behind what the row is.
template <class Load, class Shape>
constexpr int kBehindRow = Shape::kBlock * Load::template kRowBytes<Shape::kVector>;

// Begins to copy this thread's vectors of a row, without what all rows share.
template <class Shape, class Op, class Load, class Store, class Tile>
inline void prefetch_row(const Arguments<Op, Load, Store>& a, int64 row, int place, const Tile& tile) {
  const auto source = a.load.at(row);
  const auto target = a.store.at(row);
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    if (!tile.has(p)) continue;
    unsigned char* const to = row_place<Load, Store, Shape>(place, p);
    source.template prefetch_row<Shape::kVector, Shape::kBlock>(to, threadIdx.x, tile.col(p));
    target.template prefetch_row<Shape::kVector, Shape::kBlock>(to + kBehindRow<Load, Shape>, threadIdx.x, tile.col(p));
  }
}

// Loads what all rows share of this thread's columns.
template <class Shape, class As, class Op, class Load, class Store, class Kept, class KeptOfResults, int kVectors,
    class Tile>
inline void keep_columns(const Arguments<Op, Load, Store>& a, Kept (&kept)[kVectors],
    KeptOfResults (&kept_of_results)[kVectors], int cols, const Tile& tile) {
  constexpr int kVector = Shape::kVector;
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    if (!tile.has(p)) continue;
    const Cut<Shape> part(tile.col(p), cols);
    kept[p] = a.load.at(0).template keep<kVector, As>(tile.col(p), part.begin, part.end);
    kept_of_results[p] = a.store.at(0).template keep<kVector, As>(tile.col(p), part.begin, part.end);
  }
}

// Loads of a row what is not copied: its numbers, and the element that is in no vector.
template <class Op, class Load, class Store, class Shape, class Around, class Tile>
inline void load_uncopied(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
    Around& around, int64 row, const Tile& tile) {
  rows.sources[0] = a.load.at(row);
  rows.targets[0] = a.store.at(row);
  if constexpr (Shape::kEdge > 0) {
    if (!tile.has_edge()) return;
    around = rows.sources[0].template load<1>(tile.edge_col());
    rows.epilogue_operands_edge[0] = rows.targets[0].template epilogue_operands<1>(tile.edge_col());
  }
}

}  // namespace cupynorm
