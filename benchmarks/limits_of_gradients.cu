// Kernels that move the rows of a gradient or a loss, and compute nothing: the loads and stores of the package's, in
// their order. limits_of_gradients.py times them.
#pragma once
#include <base/pdl.cuh>

namespace cupynorm {

// Rows of row_bytes bytes, `pitch` apart in each array. The threads of `group` share a row, or one of `tiles` parts of
// it of tile_vectors vectors of 16 bytes, counted from the last multiple of `unit` bytes (a power of two) before the
// row. Rows are cut into groups of rows_of_group, `interleaved` of which lie interleaved.
struct RowsMoved {
  const unsigned char* read[3];
  unsigned char* written[2];
  const float* numbers[2];     // of each row, read
  float* result;               // of each row, written
  uint4 *partial, *sums;       // [sums, groups, words of a row], [sums, words of a row]
  unsigned* ended;             // blocks that have
  unsigned long long* ends;    // when each did, in nanoseconds; null: nobody asks
  long long read_pitch[3], written_pitch[2], rows;
  int row_bytes, group, tiles, tile_vectors, row_vectors, unit, rows_of_group, groups, interleaved;
  unsigned zero;
};

// kWide: words of the sums of a vector's columns. kLast: the last block to end adds up the groups' sums.
template <int Read, int Written, int Sums, int Numbers, bool Result, int Vectors, int Ahead, int Block, int MinBlocks,
    bool Meets, bool Aligned, int Wide, bool Last>
struct Moving {
  static constexpr int kRead = Read, kWritten = Written, kSums = Sums, kNumbers = Numbers, kVectors = Vectors,
      kAhead = Ahead, kBlock = Block, kMinBlocks = MinBlocks, kWide = Wide;
  static constexpr bool kResult = Result, kMeets = Meets, kAligned = Aligned, kLast = Last;
};

inline unsigned any_word(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }
inline void add_words(uint4& to, uint4 v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// A word of all threads that share a row. Needs whole warps of a row, or a power of two of its threads in a warp.
template <class Shape>
inline unsigned meet_in_group(unsigned word, int group, int turn) {
  constexpr int kWarps = Shape::kBlock / 32;
  __shared__ unsigned words[2][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 1; distance < group && distance < 32; distance *= 2)
    word += __shfl_xor_sync(~0u, word, distance);
  if (group <= 32) return word;
  if (lane == 0) words[turn % 2][warp] = word;
  __syncthreads();
  const int own = group / 32, first = warp / own * own;
  word = lane < own && first + lane < kWarps ? words[turn % 2][first + lane] : 0;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) word += __shfl_xor_sync(~0u, word, distance);
  return word;
}

// Adds up the partial sums of all groups of one sum: columns of 4 words each, `turns` threads side by side at one.
template <int kBlock>
inline void add_groups(const uint4* from, uint4* to, int groups, int row_words, int first, int lanes) {
  __shared__ uint4 parts[kBlock];
  const int lane = threadIdx.x % lanes, turn = threadIdx.x / lanes, turns = kBlock / lanes;
  uint4 total = {0, 0, 0, 0};
  if (first + lane < row_words) {
#pragma unroll 16
    for (int g = turn; g < groups; g += turns) add_words(total, from[(long long)g * row_words + first + lane]);
  }
  parts[threadIdx.x] = total;
  __syncthreads();
  for (int half = turns / 2; half > 0; half /= 2) {
    if (turn < half) add_words(parts[threadIdx.x], parts[threadIdx.x + half * lanes]);
    __syncthreads();
  }
  if (turn == 0 && first + lane < row_words) to[first + lane] = parts[threadIdx.x];
  __syncthreads();
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks) move_rows(const __grid_constant__ RowsMoved a) {
  constexpr int kRead = Shape::kRead, kWritten = Shape::kWritten, kSums = Shape::kSums, kVectors = Shape::kVectors,
      kAhead = Shape::kAhead, kBlock = Shape::kBlock, kWide = Shape::kWide, kQuads = kWide / 4;
  const int lane = threadIdx.x % a.group, slot = threadIdx.x / a.group, side = kBlock / a.group;
  const int tile = blockIdx.x % a.tiles;
  const int first_vector = tile * a.tile_vectors, behind = first_vector + a.tile_vectors;
  const int last_vector = behind < a.row_vectors ? behind : a.row_vectors;
  __shared__ uint4 columns[kSums > 0 ? kBlock * kVectors * kQuads : 1];
  pdl_wait_and_trigger();
  int turn = 0;
  for (int group = blockIdx.x / a.tiles; group < a.groups; group += gridDim.x / a.tiles) {
    const long long together = (long long)a.rows_of_group * a.interleaved, begin = group / a.interleaved * together;
    const long long end = begin + together < a.rows ? begin + together : a.rows;
    const long long step = (long long)side * a.interleaved;
    const long long first = begin + group % a.interleaved * side;
    uint4 held[kAhead][kRead][kVectors], sums[kSums > 0 ? kSums : 1][kVectors][kQuads] = {};
    float numbers[kAhead][Shape::kNumbers > 0 ? Shape::kNumbers : 1] = {};

    // how many bytes before a row its vector 0 begins, and whether the row has vector v
    auto before = [&](const unsigned char* row_begin) {
      if constexpr (Shape::kAligned) return 0;
      else return int(reinterpret_cast<unsigned long long>(row_begin) & (a.unit - 1));
    };
    auto has = [&](int v, int bytes_before, int least) {
      if (v >= last_vector) return false;
      return Shape::kAligned || (v * 16 - bytes_before >= least && v * 16 - bytes_before < a.row_bytes);
    };
    auto load = [&](int s, long long row) {
      if (row >= end || slot >= side) return;
#pragma unroll
      for (int k = 0; k < kRead; ++k) {
        const unsigned char* const row_begin = a.read[k] + row * a.read_pitch[k];
        const int bytes = before(row_begin);
        const unsigned char* const base = row_begin - bytes + (first_vector + lane) * 16;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          const int v = first_vector + p * a.group + lane;
          if (has(v, bytes, -15)) held[s][k][p] = *reinterpret_cast<const uint4*>(base + p * a.group * 16);
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::kNumbers; ++n) numbers[s][n] = a.numbers[n][row];
    };
#pragma unroll
    for (int s = 0; s < kAhead; ++s) load(s, first + s * step + slot);
    for (long long row = first; row < end; row += kAhead * step) {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        const long long own = row + s * step + slot;
        if (row + s * step >= end) break;
        uint4 now[kRead][kVectors];
        unsigned word = 0;
#pragma unroll
        for (int k = 0; k < kRead; ++k) {
#pragma unroll
          for (int p = 0; p < kVectors; ++p) now[k][p] = held[s][k][p], word ^= any_word(now[k][p]);
        }
#pragma unroll
        for (int n = 0; n < Shape::kNumbers; ++n) word ^= __float_as_uint(numbers[s][n]);
        load(s, own + kAhead * step);
        if constexpr (Shape::kMeets) word = meet_in_group<Shape>(word, a.group, turn++);
        if (own >= end || slot >= side) continue;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          const int v = first_vector + p * a.group + lane;
#pragma unroll
          for (int k = 0; k < kSums; ++k) {
#pragma unroll
            for (int q = 0; q < kQuads; ++q) add_words(sums[k][p][q], now[(k + q) % kRead][p]);
          }
#pragma unroll
          for (int k = 0; k < kWritten; ++k) {
            uint4 stored = now[k][p];
            stored.x ^= word & a.zero;
#pragma unroll
            for (int i = kWritten + k; i < kRead; i += kWritten) stored.y ^= any_word(now[i][p]);
            unsigned char* const row_begin = a.written[k] + own * a.written_pitch[k];
            const int bytes = before(row_begin);
            if (has(v, bytes, 0)) *reinterpret_cast<uint4*>(row_begin - bytes + v * 16) = stored;
          }
        }
        if constexpr (Shape::kResult) {
          if (lane == 0 && tile == 0) a.result[own] = __uint_as_float(word);
        } else if (kWritten == 0 && (word & a.zero)) {
          a.result[own] = 0;
        }
      }
    }
    if constexpr (kSums > 0) {
      const int row_words = a.row_vectors * kQuads;
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        uint4* const to = a.partial + ((long long)k * a.groups + group) * row_words;
        if (side == 1) {
#pragma unroll
          for (int p = 0; p < kVectors; ++p) {
            const int v = first_vector + p * a.group + lane;
#pragma unroll
            for (int q = 0; q < kQuads; ++q)
              if (slot == 0 && v < last_vector) to[v * kQuads + q] = sums[k][p][q];
          }
          continue;
        }
        const int width = a.group * kVectors * kQuads;
        __syncthreads();
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
#pragma unroll
          for (int q = 0; q < kQuads; ++q)
            if (slot < side) columns[slot * width + (p * a.group + lane) * kQuads + q] = sums[k][p][q];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < (last_vector - first_vector) * kQuads; i += kBlock) {
          uint4 total = columns[i];
#pragma unroll 4
          for (int each = 1; each < side; ++each) add_words(total, columns[each * width + i]);
          to[first_vector * kQuads + i] = total;
        }
      }
    }
  }
  if constexpr (Shape::kLast) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(a.ended, 1u) == gridDim.x - 1;
    __syncthreads();
    if (last) {
      __threadfence();
      const int row_words = a.row_vectors * kQuads, lanes = row_words < kBlock ? row_words : kBlock;
      for (int k = 0; k < kSums; ++k) {
        for (int i = 0; i < row_words; i += lanes)
          add_groups<kBlock>(a.partial + (long long)k * a.groups * row_words, a.sums + k * row_words, a.groups,
              row_words, i, lanes);
      }
      if (threadIdx.x == 0) *a.ended = 0;
    }
  }
  if (a.ends && threadIdx.x == 0) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    a.ends[blockIdx.x] = now;
  }
}

// Adds up the partial sums of all groups: a second launch.
template <int kLanes>
__global__ void __launch_bounds__(256) add_partial_sums(const __grid_constant__ RowsMoved a, int row_words) {
  pdl_wait_and_trigger();
  add_groups<256>(a.partial + (long long)blockIdx.y * a.groups * row_words, a.sums + blockIdx.y * row_words, a.groups,
      row_words, blockIdx.x * kLanes, kLanes);
}

// The same arrays as a stream: a block has kVectors * kBlock neighbouring vectors of each.
template <int kRead, int kWritten, int kVectors, int kBlock>
__global__ void __launch_bounds__(kBlock) move_stream(const __grid_constant__ RowsMoved a, long long vectors) {
  const long long base = (long long)blockIdx.x * (kBlock * kVectors) + threadIdx.x;
  pdl_wait_and_trigger();
  uint4 held[kRead][kVectors] = {};
#pragma unroll
  for (int k = 0; k < kRead; ++k) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (base + p * kBlock < vectors) held[k][p] = reinterpret_cast<const uint4*>(a.read[k])[base + p * kBlock];
    }
  }
  unsigned word = 0;
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
#pragma unroll
    for (int k = 0; k < kRead; ++k) word ^= any_word(held[k][p]);
#pragma unroll
    for (int k = 0; k < kWritten; ++k) {
      uint4 stored = held[k][p];
#pragma unroll
      for (int i = kWritten + k; i < kRead; i += kWritten) stored.y ^= any_word(held[i][p]);
      if (base + p * kBlock < vectors) reinterpret_cast<uint4*>(a.written[k])[base + p * kBlock] = stored;
    }
  }
  if (kWritten == 0 && (word & a.zero)) a.result[0] = 0;
}

}  // namespace cupynorm
