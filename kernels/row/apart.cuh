// What the kernels of rows whose elements lie apart from one another have in common (across.cuh, tiles.cuh). A thread
// has some rows that are neighbours in memory, and accesses one element of all of them at once; neighbouring threads
// have the next rows, so that a warp accesses whole lines. Rows are reduced over the threads in between.
#pragma once
#include <base/reduce.cuh>

namespace cupynorm {

// Sums and maxima over the lanes of a warp that are kLanes apart, as Lanes has them over neighbouring ones.
template <int kLanes>
struct LanesApart {
  template <typename T>
  static T sum(T value) {
#pragma unroll
    for (int distance = kLanes; distance < kWarp; distance *= 2)
      value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
  }
  template <typename T>
  static T first(T value) {
    return __shfl_sync(kAllLanes, value, threadIdx.x % kLanes);
  }
  template <typename T>
  static T max(T value) {
#pragma unroll
    for (int distance = kLanes; distance < kWarp; distance *= 2)
      value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
    return value;
  }
};

// What a cluster's blocks tell one another of a row: a Slot from every block, in words of 16 bytes.
template <class Op>
struct SlotWords {
  static constexpr int kQuads = int((sizeof(Slot<Op>) + 15) / 16);
  union {
    uint4 words[kQuads];
    Slot<Op> slot;
  };
};

// The largest divisor of kElements that is no more than `most`.
constexpr int part_of_elements(int elements, int most) {
  int part = elements < most ? elements : most;
  while (elements % part) --part;
  return part;
}

}  // namespace cupynorm
