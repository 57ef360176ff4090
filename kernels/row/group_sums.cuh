// How a block writes the sums of a group of rows (summed.cuh).
#pragma once
#include <base/memory.cuh>
#include <row/summed_shapes.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// Writes what the threads of a block have added up of their columns, each sum from to[k] + first on. Several rows of a
// block are added in their order. vectors: of this block.
template <class Shape, int kSums, typename Compute, class Tile>
inline void write_sums(const Compute (&sums)[kSums][Shape::kElements], Compute* const (&to)[kSums], int64 first,
    int slot, int cols, int vectors, const Tile& tile) {
  constexpr int kVector = Shape::kVector;
  if constexpr (Shape::kCtasPerRow > 1 && Shape::kUnaligned > 0 && Shape::kStages > 0) {
    // Vectors that begin anywhere would be stored in single numbers, a vector's length apart from the next thread's. So
    // they go by way of the shared memory where rows were on their way, all of which have been read.
    auto* const columns = reinterpret_cast<Compute*>(shared_memory);
    const int begin = tile.col(0) - int(threadIdx.x) * kVector;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      __syncthreads();  // what was there has been read
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) columns[tile.col(p) - begin + i] = sums[k][p * kVector + i];
      }
      __syncthreads();
      for (int at = threadIdx.x; at < vectors * kVector; at += Shape::kBlock) {
        if (begin + at >= 0 && begin + at < cols) to[k][first + begin + at] = columns[at];
      }
      if constexpr (Shape::kEdge > 0) {
        if (tile.has_edge()) to[k][first + tile.edge_col()] = sums[k][Shape::kInVectors];
      }
    }
    __syncthreads();  // before the next rows are copied there
  } else if constexpr (Shape::kGroups == 1) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
        Compute* const place = to[k] + first + tile.col(p);
        if constexpr (Shape::kUnaligned == 0) {
          store_vector(place, vector_from<Compute, kVector>(sums[k] + p * kVector));
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            if (Cut<Shape>(tile.col(p), cols).has(i)) place[i] = sums[k][p * kVector + i];
          }
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
    auto* const place = kInStages ? shared_memory : reinterpret_cast<unsigned char*>(own);
    auto* const columns = reinterpret_cast<Compute (*)[kPitch]>(place);
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      __syncthreads();  // what was there has been read
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if (!tile.has(p)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (Cut<Shape>(tile.col(p), cols).has(i)) columns[slot][tile.col(p) + i] = sums[k][p * kVector + i];
        }
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

}  // namespace cupynorm
