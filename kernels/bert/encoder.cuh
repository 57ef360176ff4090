// look_up and pool: tokens to the sum of their embeddings, and sequences of hidden states to one row each. differ: of
// bits.
#pragma once
#include <base/pdl.cuh>
#include <io/affine.cuh>

namespace cupynorm {

constexpr int kEncoderBlock = 256;

// y[i] = words[token[i]] + places[place[i]] + types[type[i]], each a row of `vectors` vectors. All row numbers are in
// range.
template <typename T, typename Compute>
struct LookUp {
  const T *words, *places, *types;
  const int *token, *place, *type;
  Compute* y;
  int64 tokens, vectors;
};

template <int kVector, typename T, typename Compute>
__global__ void __launch_bounds__(kEncoderBlock) look_up(const __grid_constant__ LookUp<T, Compute> a) {
  const int64 thread = int64(blockIdx.x) * kEncoderBlock + threadIdx.x, i = thread / a.vectors,
      col = (thread - i * a.vectors) * kVector;
  if (i >= a.tokens) return;
  pdl_wait_and_trigger();
  const int64 cols = a.vectors * kVector;
  const auto word = load_vector<T, kVector, kVector, true>(a.words + a.token[i] * cols + col);
  const auto place = load_vector<T, kVector, kVector, true>(a.places + a.place[i] * cols + col);
  const auto type = load_vector<T, kVector, kVector, true>(a.types + a.type[i] * cols + col);
  Compute sum[kVector], more[kVector], most[kVector];
  unpack<kVector>(word, sum), unpack<kVector>(place, more), unpack<kVector>(type, most);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum[j] = sum[j] + more[j] + most[j];
  store_vector<true>(a.y + i * cols + col, vector_from<Compute, kVector>(sum));
}

// y[b]: the mean of rows start[b] .. start[b] + count[b] of x; 0 where the count is. kNormalize: divided by the larger
// of its Euclidean norm and 1 / most.
template <typename T, typename Compute>
struct Pool {
  const T* x;
  Compute* y;
  const int *start, *count;
  int64 vectors;
  Compute most;
};

// A block has one sequence. Threads with the same vector of columns share the tokens, in groups, and the first group
// adds up.
template <int kVector, bool kNormalize, typename T, typename Compute>
__global__ void __launch_bounds__(kEncoderBlock) pool(const __grid_constant__ Pool<T, Compute> a) {
  __shared__ Compute sums[kVector][kEncoderBlock];
  pdl_wait_and_trigger();
  const int vectors = int(a.vectors), lanes = vectors < kEncoderBlock ? vectors : kEncoderBlock,
      groups = kEncoderBlock / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x - group * lanes, count = a.count[blockIdx.x];
  const int64 cols = a.vectors * kVector;
  const T* const x = a.x + a.start[blockIdx.x] * cols;
  Compute* const y = a.y + blockIdx.x * cols;
  const Compute share = Compute(1) / (count > 0 ? Compute(count) : Compute(1));
  Compute squares = 0;
  for (int base = 0; base < vectors; base += lanes) {
    const int vector = base + lane;
    Compute sum[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = 0;
    if (group < groups && vector < vectors) {
#pragma unroll 4
      for (int token = group; token < count; token += groups) {
        Compute value[kVector];
        unpack<kVector>(load_vector<T, kVector, kVector, true>(x + token * cols + vector * kVector), value);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[j] += value[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[j][threadIdx.x] = sum[j];
    __syncthreads();
    if (group == 0 && vector < vectors) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        for (int other = 1; other < groups; ++other) sum[j] += sums[j][other * lanes + lane];
        sum[j] *= share;
        squares += sum[j] * sum[j];
      }
      store_vector<true>(y + vector * kVector, vector_from<Compute, kVector>(sum));
    }
    __syncthreads();
  }
  if constexpr (kNormalize) {
    sums[0][threadIdx.x] = squares;
    __syncthreads();
#pragma unroll
    for (int half = kEncoderBlock / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) sums[0][threadIdx.x] += sums[0][threadIdx.x + half];
      __syncthreads();
    }
    const Compute factor = smaller(reciprocal_root(sums[0][0]), a.most);  // of 0 the first is inf
    if (group != 0) return;
    for (int vector = lane; vector < vectors; vector += lanes) {  // each thread's own
      Compute value[kVector];
      unpack<kVector>(load_vector<Compute, kVector>(y + vector * kVector), value);
#pragma unroll
      for (int j = 0; j < kVector; ++j) value[j] *= factor;
      store_vector<true>(y + vector * kVector, vector_from<Compute, kVector>(value));
    }
  }
}

// *found becomes 1 where two arrays of `vectors` times 16 bytes differ in a bit, and is left alone where they do not.
struct Differ {
  const unsigned *x, *y;
  int* found;
  int64 vectors;
};

template <int kVector>
__global__ void __launch_bounds__(kEncoderBlock) differ(const __grid_constant__ Differ a) {
  pdl_wait_and_trigger();
  const int64 step = int64(gridDim.x) * kEncoderBlock;
  unsigned apart = 0;
  for (int64 i = int64(blockIdx.x) * kEncoderBlock + threadIdx.x; i < a.vectors; i += step) {
    const auto x = load_vector<unsigned, kVector>(a.x + i * kVector),
        y = load_vector<unsigned, kVector>(a.y + i * kVector);
#pragma unroll
    for (int j = 0; j < kVector; ++j) apart |= x.word[j] ^ y.word[j];
  }
  if (apart != 0) *a.found = 1;
}

}  // namespace cupynorm
