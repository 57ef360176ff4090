// Which rows a block computes. Most take rows that lie a grid apart, which needs nothing of its own: registers.cuh.
// Here is the dynamic scheduler.
#pragma once
#include <base/grid.cuh>
#include <row/layout.cuh>

namespace cupynorm {

constexpr unsigned kNoRow = 0x7fffffff;  // past the last

// The dynamic scheduler, for clusters. The first kStages + 1 rows of a cluster are static. Thread 0 of block 0 then
// claims one row in each iteration, and broadcasts it with the reduction over the cluster.
template <class Shape>
struct DynamicRows {
  unsigned clusters, given;  // of the grid; rows that are static
  bool claims;               // whether this thread claims
  unsigned claimed;

  static DynamicRows of(int part) {
    const unsigned clusters = gridDim.x / Shape::kCtasPerRow, given = (Shape::kStages + 1) * clusters;
    DynamicRows rows = {clusters, given, Shape::kDynamic && part == 0 && threadIdx.x == 0,
        blockIdx.x / Shape::kCtasPerRow - clusters};
    if (rows.claims) rows.claimed = next_dynamic_row(rows.claimed, clusters);
    return rows;
  }
  unsigned next() const { return given + claimed; }
  void claim(int64 all_rows) {
    if (!claims) return;
    // each claims until it finds none
    const unsigned rows = unsigned(all_rows), all = (rows > given ? rows - given : 0) + clusters;
    if (given + claimed < rows) {
      claimed = next_dynamic_row(claimed, clusters);
    } else {
      if (claimed + 1 == all) reset_dynamic_rows(all);
      claimed = kNoRow;
    }
  }
};

}  // namespace cupynorm
