// What a kernel is given that takes sums over rows in its pass over them: summed.cuh, and summed_apart.cuh.
#pragma once
#include <io/load_store.cuh>

namespace cupynorm {

// partial: of each sum, [groups, cols]. rows_of_group: of contiguous rows, whose groups lie interleaved, so many at a
// time. Of other rows a group has as many tiles as any other, or one more.
template <class Op, class Load, class Store, int kSums>
struct SummedArguments {
  Arguments<Op, Load, Store> of;
  int64 rows_of_group, groups, interleaved;
  typename Op::Compute* partial[kSums];
};

}  // namespace cupynorm
