// multiply_few: the product of a few tokens with a matrix, with the LayerNorm before it and what follows it, in one
// launch.
#pragma once
#include <base/async_copy.cuh>
#include <base/cluster.cuh>
#include <base/pdl.cuh>
#include <base/reduce.cuh>
#include <elementwise/elementwise.cuh>
#include <bert/mma.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

constexpr int kFewWarps = 8, kFewBlock = kFewWarps * kWarp;

// y = finish(LayerNorm(x) weight^T). weight: [out, in], row-major, as x and y are.
template <typename T>
struct Few {
  const T *x, *weight;
  const float *bias, *gamma, *beta;  // gamma and beta where x is normalized
  const T* residual;                 // of y's shape
  T *normed, *y;                     // normed: where LayerNorm(x) is kept, null for nowhere
  int rows, in, out;
  float eps;
};

// What becomes of a sum: itself, GELU of it and the bias, or it and the bias and the residual.
constexpr int kAsItIs = 0, kGelu = 1, kGeluTanh = 2, kAddResidual = 3;

template <int kFinish, typename T>
inline void finish_few(const Few<T>& a, int row, int col, float (&value)[4]) {
  const int64 at = int64(row) * a.out + col;
  if constexpr (kFinish != kAsItIs) {
    float bias[4];
    unpack<4>(load_vector<float, 4, 4, true>(a.bias + col), bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[i] += bias[i];
      if constexpr (kFinish == kGelu) value[i] = Gelu<T, false>::apply(value[i]);
      if constexpr (kFinish == kGeluTanh) value[i] = GeluTanh::apply(value[i]);
    }
  }
  if constexpr (kFinish == kAddResidual) {
    float more[4];
    unpack<4>(load_vector<T, 4>(a.residual + at), more);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] += more[i];
  }
  store_vector<true>(a.y + at, vector_from<T, 4>(value));
}

// Writes LayerNorm of kRows rows to shared memory, `stride` elements apart, those behind the last one as 0. Each warp
// has every kFewWarps-th row, and reads up to four at a time, since one after the other each would take a trip to L2.
// affine: gamma, then beta.
template <int kRows, int kVectors, typename T>
inline void normalize_few(const Few<T>& a, unsigned short* x, int stride, const float* affine, int rows, int first) {
  constexpr int kOfWarp = kRows / kFewWarps, kMost = kVectors > 3 ? 2 : 4;  // longer rows would not fit the registers
  constexpr int kAhead = kOfWarp < kMost ? kOfWarp : kMost, kTogether = 2;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, vectors = a.in / 8;
  const float share = 1.0f / float(a.in);
#pragma unroll 1
  for (int begin = warp; begin < kRows; begin += kAhead * kFewWarps) {
    Vector<T, 8> held[kAhead][kVectors];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int row = begin + r * kFewWarps, vector = p * kWarp + lane;
        held[r][p] = Vector<T, 8>{};
        if (row < rows && vector < vectors)
          held[r][p] = load_vector<T, 8>(a.x + (int64(first + row) * a.in + vector * 8));
      }
    }
#pragma unroll
    for (int pair = 0; pair < kAhead; pair += kTogether) {
      float value[kTogether][kVectors][8], mean[kTogether], rstd[kTogether];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          unpack<8>(held[pair + r][p], value[r][p]);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += value[r][p][i];
        }
        mean[r] = Lanes<kWarp>::sum(sum) * share;
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        float squares = 0;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
          if (p * kWarp + lane >= vectors) continue;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            value[r][p][i] -= mean[r], squares = multiply_add(value[r][p][i], value[r][p][i], squares);
        }
        rstd[r] = reciprocal_root(Lanes<kWarp>::sum(squares) * share + a.eps);
      }
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int vector = p * kWarp + lane;
        if (vector >= vectors) continue;
        float gamma[8], beta[8];
        unpack<8>(load_vector<float, 8>(affine + vector * 8), gamma);
        unpack<8>(load_vector<float, 8>(affine + a.in + vector * 8), beta);
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          const int row = begin + (pair + r) * kFewWarps;
#pragma unroll
          for (int i = 0; i < 8; ++i) value[r][p][i] = multiply_add(value[r][p][i] * rstd[r], gamma[i], beta[i]);
          const auto made = row < rows ? vector_from<T, 8>(value[r][p]) : Vector<T, 8>{};
          store_vector(reinterpret_cast<T*>(x + row * stride + vector * 8), made);
          if (a.normed && row < rows && row % int(gridDim.x) == int(blockIdx.x))
            store_vector<true>(a.normed + (int64(first + row) * a.in + vector * 8), made);
        }
      }
    }
  }
}

// A block multiplies kRows tokens by kCols rows of the weight, or by a part of those: kCtasPerRow neighbouring blocks,
// a cluster, share the sums. weight, gamma and beta are read before the kernel before this one has ended (programmatic
// dependent launch). No kernel that may still run then may write them: neither that one nor, where it lets others begin
// before it waits itself, as this one and attend do, those before it. Copies may. x, bias and residual are read, and
// normed and y written, after the wait (tests/kernels/test_encoder_build.py looks at the machine code). All that is
// read is copied to shared memory at once, so that there is one wait for memory. A row, or its part, has kVectors * 256
// elements at most. The warps share the sums, too, step by step. No sum's order depends on other rows.
template <typename T, int kRows, int kCols, int kCtasPerRow, int kVectors, bool kNorm, int kFinish>
__global__ void __launch_bounds__(kFewBlock, 2) multiply_few(const __grid_constant__ Few<T> a) {
  constexpr int kTiles = kRows / 16, kGroups = kCols / 8, kQuads = kCols / 4, kOwn = kRows / kCtasPerRow;
  unsigned short* const shared = reinterpret_cast<unsigned short*>(shared_memory);
  __shared__ uint4 cluster_mailbox[kCtasPerRow > 1 ? kCtasPerRow : 1][kCtasPerRow > 1 ? kOwn * kQuads : 1];
  __shared__ Mbarrier mbarrier;
  const int deep = a.in / kCtasPerRow, stride = deep + 8, vectors = deep / 8;  // neighbouring rows begin 4 banks apart
  const int part = kCtasPerRow > 1 ? cluster_rank() : 0, col = int(blockIdx.x) / kCtasPerRow * kCols,
      first = int(blockIdx.y) * kRows;
  const int rows = a.rows - first < kRows ? a.rows - first : kRows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  unsigned short *const x = shared, *const weight = shared + kRows * stride;
  float* const affine = reinterpret_cast<float*>(weight + kCols * stride);

  pdl_trigger();
  if constexpr (kNorm) {
    for (int i = threadIdx.x; i < a.in / 4; i += kFewBlock) {
      copy_async<16>(affine + i * 4, a.gamma + i * 4);
      copy_async<16>(affine + a.in + i * 4, a.beta + i * 4);
    }
    commit_copies();
  }
#pragma unroll
  for (int i = 0; i < kCols / kFewWarps; ++i) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      const int row = i * kFewWarps + warp, vector = p * kWarp + lane;
      if (vector < vectors)
        copy_async<16>(weight + row * stride + vector * 8,
            a.weight + (int64(col + row) * a.in + part * deep + vector * 8));
    }
  }
  commit_copies();
  if constexpr (kCtasPerRow > 1) {
    if (threadIdx.x == 0) init_mbarrier(&mbarrier);
    cluster_sync();
  }
  pdl_wait();
  if constexpr (kNorm) {
    static_assert(kCtasPerRow == 1, "a part of a row has no mean");
    wait_for_copies<1>();
    __syncthreads();
    normalize_few<kRows, kVectors>(a, x, stride, affine, rows, first);
  } else {
#pragma unroll
    for (int i = 0; i < kRows / kFewWarps; ++i) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int row = i * kFewWarps + warp, there = row < rows ? row : 0, vector = p * kWarp + lane;
        const T* const from = a.x + (int64(first + there) * a.in + part * deep + vector * 8);
        if (vector < vectors) copy_async_or_zero(x + row * stride + vector * 8, from, row < rows);
      }
    }
    commit_copies();
  }
  wait_for_copies<0>();
  __syncthreads();

  float sum[kTiles][kGroups][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) sum[i][n][0] = sum[i][n][1] = sum[i][n][2] = sum[i][n][3] = 0;
  }
#pragma unroll 2
  for (int step = warp; step < deep / 16; step += kFewWarps) {
    unsigned left[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      load_matrices(x + (i * 16 + lane % 16) * stride + step * 16 + lane / 16 * 8, left[i]);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const unsigned short* const at = weight + (n * 8 + g) * stride + step * 16 + 2 * t;
      const unsigned b0 = *reinterpret_cast<const unsigned*>(at), b1 = *reinterpret_cast<const unsigned*>(at + 8);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) multiply_add_tile(T{}, sum[i][n], left[i], b0, b1);
    }
  }

  __syncthreads();  // the tokens have been read: their place is the sums'
  float(*const sums)[kRows][kCols] = reinterpret_cast<float(*)[kRows][kCols]>(shared);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const to = &sums[warp][i * 16 + r * 8 + g][n * 8 + 2 * t];
        to[0] = sum[i][n][2 * r], to[1] = sum[i][n][2 * r + 1];
      }
    }
  }
  __syncthreads();
  if constexpr (kCtasPerRow > 1) {
    if (threadIdx.x == 0) expect_bytes(&mbarrier, sizeof cluster_mailbox);
  }
  for (int i = threadIdx.x; i < kRows * kQuads; i += kFewBlock) {
    const int row = i / kQuads, quad = i % kQuads * 4;
    float value[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) {
      float more[4];
      unpack<4>(load_vector<float, 4>(&sums[w][row][quad]), more);
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] += more[j];
    }
    if constexpr (kCtasPerRow > 1) {
      const uint4 words = {as_bits(value[0]), as_bits(value[1]), as_bits(value[2]), as_bits(value[3])};
      send_words(&cluster_mailbox[part][row % kOwn * kQuads + quad / 4], &mbarrier, row / kOwn, words);
    } else {
      if (row < rows) finish_few<kFinish>(a, first + row, col + quad, value);
    }
  }
  if constexpr (kCtasPerRow > 1) {
    await_mbarrier(&mbarrier, 0);
    for (int i = threadIdx.x; i < kOwn * kQuads; i += kFewBlock) {
      const int row = part * kOwn + i / kQuads;
      float value[4] = {0, 0, 0, 0};
#pragma unroll
      for (int p = 0; p < kCtasPerRow; ++p) {
        const uint4 words = cluster_mailbox[p][i];
        value[0] += as_float(words.x), value[1] += as_float(words.y), value[2] += as_float(words.z),
            value[3] += as_float(words.w);
      }
      if (row < rows) finish_few<kFinish>(a, first + row, col + i % kQuads * 4, value);
    }
  }
}

}  // namespace cupynorm
