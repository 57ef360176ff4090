// Rows that are prefetched while others are computed: copied to shared memory asynchronously, each thread's vectors by
// itself.
#pragma once
#include <io/affine.cuh>
#include <row/layout.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// Where vector p of row r of this thread waits.
template <class Shape>
inline unsigned char* prefetched(int stage, int r, int p) {
  return shared_memory + int64((stage * Shape::kRows + r) * Shape::kVectors + p) * (Shape::kBlock * 16) + threadIdx.x
      * 16;
}

// Begins to copy this thread's vectors of kRows rows. row(r): the number of one of them.
template <class Shape, bool kOneAddress, class Arguments, class Row, class Tile>
inline void prefetch_rows(const Arguments& a, int stage, const Row& row, const Tile& tile) {
  constexpr int kVectorBytes = 16;
#pragma unroll
  for (int r = 0; r < Shape::kRows; ++r) {
    const int64 number = row(r);
    if (number < a.rows) {
      auto line = a.load.at(number);
      if constexpr (kOneAddress) line.make_opaque();
      const char* const from = static_cast<const char*>(line.address(tile.col(0)));
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
        unsigned char* const to = prefetched<Shape>(stage, r, p);
        if constexpr (Shape::kCtasPerRow > 1) copy_async<16>(to, from + p * (Shape::kGroup * kVectorBytes));
        else copy_async<16>(to, line.address(tile.col(p)));
      }
    }
  }
  commit_copies();  // an empty group too: wait counts groups
}

// Loads the elements of kRows rows that this thread has besides its vectors. Only where x is loaded as it is.
template <class Op, class Load, class Shape, class Arguments, class Around, class Row, class Tile>
inline void load_edges(const Arguments& a, Around (&around)[Shape::kRows], const Row& row, const Tile& tile) {
#pragma unroll
  for (int r = 0; r < Shape::kRows; ++r) {
    const int64 number = row(r);
    if constexpr (Shape::kEdge > 0 && Load::kDirect) {
      const bool here = number < a.rows && tile.has_edge();
      around[r] = here ? a.load.at(number).template load<1>(tile.edge_col()) : vector_filled<typename Load::Type,
          1>(Op::padding());
    }
  }
}

}  // namespace cupynorm
