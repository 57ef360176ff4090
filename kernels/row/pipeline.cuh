// Rows that are prefetched while others are computed: copied to shared memory asynchronously, each thread's vectors by
// itself.
#pragma once
#include <base/async_copy.cuh>
#include <io/affine.cuh>
#include <row/layout.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// Where vector p of row r waits: this thread's, or, with what is loaded with x, where those of all threads begin.
template <class Load, class Shape>
inline unsigned char* prefetched(int stage, int r, int p) {
  return shared_memory +
      int64((stage * Shape::kRows + r) * Shape::kVectors + p) * (Shape::kBlock * staged_bytes<Load, Shape>()) +
      (Load::kDirect ? threadIdx.x * 16 : 0);
}

// What was prefetched of vector p of row r, with operands and masks.
template <class Load, class Shape, class RowPointer, class Tile>
inline auto prefetched_of(const RowPointer& source, int stage, int r, int p, const Tile& tile) {
  return source.template prefetched<Shape::kVector,
      Shape::kBlock>(prefetched<Load, Shape>(stage, r, p), threadIdx.x, tile.col(p));
}

// Begins to copy this thread's vectors of kRows rows. row(r): the number of one of them.
template <class Load, class Shape, bool kOneAddress, class Arguments, class Row, class Tile>
inline void prefetch_rows(const Arguments& a, int stage, const Row& row, const Tile& tile) {
  constexpr int kVectorBytes = 16;
#pragma unroll
  for (int r = 0; r < Shape::kRows; ++r) {
    const int64 number = row(r);
    if (number < a.rows) {
      auto source = a.load.at(number);
      if constexpr (kOneAddress) source.make_opaque();
      if constexpr (Load::kInterval && Shape::kEdge == 0) source.count_kept_from(tile.col(0));
      const char* const from = static_cast<const char*>(source.address(tile.col(0)));
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
        if constexpr (Load::kInterval) {
          if (!source.template reads<Shape::kVector>(tile.masked_from(p))) continue;
        }
        unsigned char* const to = prefetched<Load, Shape>(stage, r, p);
        if constexpr (Shape::kStages == 0) continue;
        else if constexpr (!Load::kDirect)
          source.template prefetch<Shape::kVector, Shape::kBlock>(to, threadIdx.x, tile.col(p));
        else if constexpr (Shape::kCtasPerRow > 1 && Load::kAdjacent)
          copy_async<16>(to, from + p * (Shape::kGroup * kVectorBytes));
        else copy_async<16>(to, source.address(tile.col(p)));
      }
    }
  }
  commit_copies();  // an empty group too: wait counts groups
}

// Loads the elements of kRows rows that this thread has besides its vectors, where that is not done with the row.
template <class Op, class Load, class Shape, class Arguments, class Around, class Row, class Tile>
inline void load_edges(const Arguments& a, Around (&around)[Shape::kRows], const Row& row, const Tile& tile) {
#pragma unroll
  for (int r = 0; r < Shape::kRows; ++r) {
    const int64 number = row(r);
    if constexpr (Shape::kEdge > 0 && (Load::kDirect || Shape::kStages > 0)) {
      const bool here = number < a.rows && tile.has_edge();
      around[r] = here ? a.load.at(number).template load<1>(tile.edge_col())
          : Load::template absent<1>(Op::padding());
    }
  }
}

}  // namespace cupynorm
