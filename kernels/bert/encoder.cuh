// look_up and pool: tokens to the sum of their embeddings, and sequences of hidden states to one row each. differ: of bits.
#pragma once
#include <io/affine.cuh>

namespace cupynorm {

constexpr int kEncoderBlock = 256;

// y[i] = words[token[i]] + places[place[i]] + types[type[i]], each a row of `packs` packs. All row numbers are in range.
template <typename T, typename Compute>
struct LookUp {
  const T *words, *places, *types;
  const int *token, *place, *type;
  Compute* y;
  int64 tokens, packs;
};

template <int kPack, typename T, typename Compute>
__global__ void __launch_bounds__(kEncoderBlock) look_up(const __grid_constant__ LookUp<T, Compute> a) {
  const int64 thread = int64(blockIdx.x) * kEncoderBlock + threadIdx.x, i = thread / a.packs, col = (thread - i * a.packs) * kPack;
  if (i >= a.tokens) return;
  take_turn();
  const int64 cols = a.packs * kPack;
  const auto word = load_pack<T, kPack, kPack, true>(a.words + a.token[i] * cols + col);
  const auto place = load_pack<T, kPack, kPack, true>(a.places + a.place[i] * cols + col);
  const auto type = load_pack<T, kPack, kPack, true>(a.types + a.type[i] * cols + col);
  Compute sum[kPack], more[kPack], most[kPack];
  unpack<kPack>(word, sum), unpack<kPack>(place, more), unpack<kPack>(type, most);
#pragma unroll
  for (int j = 0; j < kPack; ++j) sum[j] = sum[j] + more[j] + most[j];
  store_pack<true>(a.y + i * cols + col, pack_from<Compute, kPack>(sum));
}

// y[b]: the mean of rows start[b] .. start[b] + count[b] of x; 0 where the count is. kNormalize: divided by the larger of its
// Euclidean norm and 1 / most.
template <typename T, typename Compute>
struct Pool {
  const T* x;
  Compute* y;
  const int *start, *count;
  int64 packs;
  Compute most;
};

// A block has one sequence. Threads with the same pack of columns share the tokens, in groups, and the first group adds up.
template <int kPack, bool kNormalize, typename T, typename Compute>
__global__ void __launch_bounds__(kEncoderBlock) pool(const __grid_constant__ Pool<T, Compute> a) {
  __shared__ Compute sums[kPack][kEncoderBlock];
  take_turn();
  const int packs = int(a.packs), lanes = packs < kEncoderBlock ? packs : kEncoderBlock, groups = kEncoderBlock / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x - group * lanes, count = a.count[blockIdx.x];
  const int64 cols = a.packs * kPack;
  const T* const x = a.x + a.start[blockIdx.x] * cols;
  Compute* const y = a.y + blockIdx.x * cols;
  const Compute share = Compute(1) / (count > 0 ? Compute(count) : Compute(1));
  Compute squares = 0;
  for (int base = 0; base < packs; base += lanes) {
    const int pack = base + lane;
    Compute sum[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = 0;
    if (group < groups && pack < packs) {
#pragma unroll 4
      for (int token = group; token < count; token += groups) {
        Compute value[kPack];
        unpack<kPack>(load_pack<T, kPack, kPack, true>(x + token * cols + pack * kPack), value);
#pragma unroll
        for (int j = 0; j < kPack; ++j) sum[j] += value[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) sums[j][threadIdx.x] = sum[j];
    __syncthreads();
    if (group == 0 && pack < packs) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        for (int other = 1; other < groups; ++other) sum[j] += sums[j][other * lanes + lane];
        sum[j] *= share;
        squares += sum[j] * sum[j];
      }
      store_pack<true>(y + pack * kPack, pack_from<Compute, kPack>(sum));
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
    for (int pack = lane; pack < packs; pack += lanes) {  // each thread's own
      Compute value[kPack];
      unpack<kPack>(load_pack<Compute, kPack>(y + pack * kPack), value);
#pragma unroll
      for (int j = 0; j < kPack; ++j) value[j] *= factor;
      store_pack<true>(y + pack * kPack, pack_from<Compute, kPack>(value));
    }
  }
}

// *found becomes 1 where two arrays of `packs` times 16 bytes differ in a bit, and is left alone where they do not.
struct Differ {
  const unsigned *x, *y;
  int* found;
  int64 packs;
};

template <int kPack>
__global__ void __launch_bounds__(kEncoderBlock) differ(const __grid_constant__ Differ a) {
  take_turn();
  const int64 step = int64(gridDim.x) * kEncoderBlock;
  unsigned apart = 0;
  for (int64 i = int64(blockIdx.x) * kEncoderBlock + threadIdx.x; i < a.packs; i += step) {
    const auto x = load_pack<unsigned, kPack>(a.x + i * kPack), y = load_pack<unsigned, kPack>(a.y + i * kPack);
#pragma unroll
    for (int j = 0; j < kPack; ++j) apart |= x.word[j] ^ y.word[j];
  }
  if (apart != 0) *a.found = 1;
}

}  // namespace cupynorm
