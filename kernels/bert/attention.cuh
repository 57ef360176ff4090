// attend: softmax(q k^T / sqrt(head size)) v of packed tokens in one pass; scores are nowhere but in registers.
#pragma once
#include <base/async_copy.cuh>
#include <base/pdl.cuh>
#include <io/affine.cuh>
#include <bert/mma.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

constexpr int kAttentionWarps = 4, kAttentionBlock = kAttentionWarps * kWarp;

// qkv: [tokens, 3, heads, head size], without their bias. start, length: of each sequence, its tokens; where they are
// null, all are `each` long, one after the other. scale: of scores, times log2(e). columns: heads * head size.
template <typename T>
struct Attention {
  const T* qkv;
  const float* bias;
  T* context;  // [tokens, heads, head size]
  const int *start, *length;
  int64 columns;
  int each;
  float scale;
};

// A block has kTiles * 64 queries of one sequence and head, a warp kTiles * 16 of them, and goes through the keys,
// kKeys at a time, of which the next are on their way (Dao 2023, "FlashAttention-2"; Milakov and Gimelshein 2018 for
// the running maximum). The keys' bias adds the same to all scores of a query, which softmax does not see; the values'
// one adds itself to the result, for weights sum to 1: so keys and values are copied as they lie.
// One function of over 150 lines, because all of its loops work on the same arrays in registers (docs/notes/048, "What
// `row_registers` keeps in its own body").
template <typename T, int kSize, int kKeys, int kTiles>
__global__ void __launch_bounds__(kAttentionBlock, kTiles > 1 || kSize > 64 ? 2 : 3)
    attend(const __grid_constant__ Attention<T> a) {
  constexpr int kStride = kSize + 8;  // neighbouring rows begin 4 banks apart
  constexpr int kChunks = kSize / 8, kSteps = kSize / 16, kCols = kSize / 8, kGroups = kKeys / 8,
      kQueries = kTiles * 16;
  __shared__ __align__(16) unsigned short keys[2][kKeys][kStride], values[2][kKeys][kStride];
  pdl_trigger();
  pdl_wait();
  const int sequence = blockIdx.z, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int length = a.length ? a.length[sequence] : a.each;
  const int64 start = a.start ? int64(a.start[sequence]) : int64(sequence) * a.each;
  const int first = int(blockIdx.x) * (kAttentionWarps * kQueries);
  if (first >= length) return;
  const int64 head = int64(blockIdx.y) * kSize, row_stride = 3 * a.columns;
  const T* const base = a.qkv + start * row_stride + head;
  const int query = first + threadIdx.x / kWarp * kQueries;  // the warp's first
  const bool works = query < length;

  auto fetch = [&](int turn) {
    constexpr int kAll = kKeys * kChunks;
#pragma unroll
    for (int i = 0; i < (kAll + kAttentionBlock - 1) / kAttentionBlock; ++i) {
      const int at = i * kAttentionBlock + threadIdx.x, row = at / kChunks, col = at % kChunks * 8,
          key = turn * kKeys + row;
      if (kAll % kAttentionBlock && at >= kAll) break;
      const T* const from = base + (key < length ? key : length - 1) * row_stride + a.columns + col;
      // 0: no weight but 0 meets it, and 0 times nan is none
      copy_async_or_zero(&keys[turn % 2][row][col], from, key < length);
      copy_async_or_zero(&values[turn % 2][row][col], from + a.columns, key < length);
    }
    commit_copies();
  };
  fetch(0);

  unsigned q[kTiles][kSteps][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = query + i * 16 + g + j % 2 * 8, col = s * 16 + j / 2 * 8 + 2 * t;
        float value[2] = {0, 0}, bias[2];
        if (row < length) {
          unpack<2>(load_vector<T, 2>(base + row * row_stride + col), value);
          unpack<2>(load_vector<float, 2, 1, true>(a.bias + head + col), bias);
          value[0] += bias[0], value[1] += bias[1];
        }
        q[i][s][j] = round_pair_to(T{}, value[0], value[1]);
      }
    }
  }

  float out[kTiles][kCols][4], top[kTiles][2], sum[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) out[i][n][0] = out[i][n][1] = out[i][n][2] = out[i][n][3] = 0;
    top[i][0] = top[i][1] = -infinity<float>(), sum[i][0] = sum[i][1] = 0;
  }

  const int turns = (length + kKeys - 1) / kKeys;
  for (int turn = 0; turn < turns; ++turn) {
    if (turn + 1 < turns) fetch(turn + 1);
    else commit_copies();  // an empty group, so that the one before is this turn's
    wait_for_copies<1>();
    __syncthreads();
    if (works) {
      const auto& key = keys[turn % 2];
      const auto& value = values[turn % 2];
      float score[kTiles][kGroups][4];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) score[i][n][0] = score[i][n][1] = score[i][n][2] = score[i][n][3] = 0;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const unsigned short* const at = &key[n * 8 + g][s * 16 + 2 * t];
          const unsigned b0 = *reinterpret_cast<const unsigned*>(at), b1 = *reinterpret_cast<const unsigned*>(at + 8);
#pragma unroll
          for (int i = 0; i < kTiles; ++i) multiply_add_tile(T{}, score[i][n], q[i][s], b0, b1);
        }
      }
      if ((turn + 1) * kKeys > length) {
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (turn * kKeys + n * 8 + 2 * t + j % 2 < length) continue;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) score[i][n][j] = -infinity<float>();
          }
        }
      }
      unsigned weight[kTiles][kKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // rows g and g + 8
          float most = top[i][r];
#pragma unroll
          for (int n = 0; n < kGroups; ++n) most = larger(most, larger(score[i][n][2 * r], score[i][n][2 * r + 1]));
          most = larger(most, __shfl_xor_sync(kAllLanes, most, 1));
          most = larger(most, __shfl_xor_sync(kAllLanes, most, 2));
          const float factor = exp2_approx((top[i][r] - most) * a.scale), pivot = most * a.scale;
          top[i][r] = most;
          sum[i][r] *= factor;
#pragma unroll
          for (int n = 0; n < kCols; ++n) out[i][n][2 * r] *= factor, out[i][n][2 * r + 1] *= factor;
#pragma unroll
          for (int n = 0; n < kGroups; ++n) {
            const float low = exp2_approx(multiply_add(score[i][n][2 * r], a.scale, -pivot));
            const float high = exp2_approx(multiply_add(score[i][n][2 * r + 1], a.scale, -pivot));
            sum[i][r] += low + high;
            weight[i][n / 2][n % 2 * 2 + r] = round_pair_to(T{}, low, high);  // scores lie as the next product's a does
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kKeys / 16; ++s) {
#pragma unroll
        for (int n = 0; n < kCols; n += 2) {
          unsigned b[4];
          load_transposed(&value[s * 16 + lane % 16][n * 8 + lane / 16 * 8], b);
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            multiply_add_tile(T{}, out[i][n], weight[i][s], b[0], b[1]);
            multiply_add_tile(T{}, out[i][n + 1], weight[i][s], b[2], b[3]);
          }
        }
      }
    }
    __syncthreads();  // the turn after the next is fetched into the same place
  }
  if (!works) return;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = sum[i][r];
      all += __shfl_xor_sync(kAllLanes, all, 1);
      all += __shfl_xor_sync(kAllLanes, all, 2);
      const float factor = reciprocal(all);
      const int row = query + i * 16 + g + r * 8;
      if (row >= length) continue;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        const int col = n * 8 + 2 * t;
        float bias[2];
        unpack<2>(load_vector<float, 2, 1, true>(a.bias + 2 * a.columns + head + col), bias);
        const float value[2] =
            {multiply_add(out[i][n][2 * r], factor, bias[0]), multiply_add(out[i][n][2 * r + 1], factor, bias[1])};
        store_vector(a.context + (start + row) * a.columns + head + col, vector_from<T, 2>(value));
      }
    }
  }
}


constexpr int kGroup = 128, kGroupRows = 64, kGroupKeys = 64, kGroupTurns = 3;

// The same by products of a warpgroup (wgmma, sm_90a; Shah et al. 2024, "FlashAttention-3"): a block has 64 queries,
// goes through 64 keys in an iteration (a turn), and has three pipeline stages of keys. While the tensor cores multiply
// a turn's weights by its values, and before that the queries by the next turn's keys, the other blocks of the
// multiprocessor compute exponentials. Two warpgroups that share keys would read half as much, but wait for each other,
// and are slower (docs/notes/039). boxes: tensor maps of qkv, 64 rows each; null where threads copy, since only heads
// of 64 fill the rows of a box. Over 150 lines for the same reason as attend.
template <typename T, int kSize, bool kBoxes>
inline void attend_together(const Attention<T>& a, const TensorMap* boxes) {
  constexpr int kBytes = kSize * 2, kChunks = kSize / 8, kSteps = kSize / 16, kCols = kSize / 8,
      kScores = kGroupKeys / 8;
  constexpr int kStep = kGroup / kChunks;  // rows that the block copies at a time: whole turns of the swizzle
  static_assert(kStep % 8 == 0 && kGroupKeys % kStep == 0, "threads keep their places of the swizzle");
  using Turn = unsigned char[kGroupKeys * kBytes];
  // 8 rows of 128 bytes are where the swizzle begins again
  unsigned char* const aligned =
      shared_memory + (1024 - reinterpret_cast<unsigned long long>(shared_memory) % 1024) % 1024;
  Turn *const keys = reinterpret_cast<Turn*>(aligned), *const values = keys + kGroupTurns;
  __shared__ CountingMbarrier gates[kGroupTurns];
  if (kBoxes && threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kGroupTurns; ++i) init_counting_mbarrier(gates + i, 1);
    publish_mbarriers();
  }
  pdl_trigger();
  pdl_wait();
  const int sequence = blockIdx.z, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int length = a.length ? a.length[sequence] : a.each;
  const int64 start = a.start ? int64(a.start[sequence]) : int64(sequence) * a.each;
  const int first = int(blockIdx.x) * kGroupRows;
  if (first >= length) return;
  const unsigned columns = unsigned(a.columns), row_stride = 3 * columns, head = blockIdx.y * kSize;
  // places of one sequence fit 32 bits: MOST_PLACES in bert/packed_attention.py
  const T* const base = a.qkv + start * row_stride + head;
  // the warp's first
  const int turns = (length + kGroupKeys - 1) / kGroupKeys, query = first + int(threadIdx.x) / kWarp * 16;
  // what this thread copies of the first kStep rows
  const int row = int(threadIdx.x) / kChunks, chunk = int(threadIdx.x) % kChunks;
  const int place = swizzled<kBytes>(row, chunk);

  auto copy = [&](Turn* to, int turn, unsigned part) {
    if (turn < 0 || turn >= turns) return;
#pragma unroll
    // where there is none, 0: no weight but 0 meets it, and 0 times nan is none
    for (int i = 0; i < kGroupKeys / kStep; ++i) {
      const int key = turn * kGroupKeys + i * kStep + row, there = key < length ? key : length - 1;
      const T* const from = base + (unsigned(there) * row_stride + part * columns + chunk * 8);
      copy_async_or_zero(&to[turn % kGroupTurns][place + i * kStep * kBytes], from, key < length);
    }
  };
  // A turn's keys, and the values of the one before.
  auto fetch = [&](int turn) {
    if constexpr (kBoxes) {
      if (threadIdx.x > 0 || turn > turns) return;
      CountingMbarrier* const gate = gates + turn % kGroupTurns;
      const int from = int(start) + turn * kGroupKeys, before = turn - 1;
      expect_bytes(gate, (turn < turns) * sizeof(Turn) + (turn > 0) * sizeof(Turn));
      if (turn < turns) load_tensor_box(keys[turn % kGroupTurns], boxes, int(columns + head), from, gate);
      if (turn > 0) load_tensor_box(values[before % kGroupTurns], boxes, int(2 * columns + head), from - kGroupKeys,
          gate);
    } else {
      copy(keys, turn, 1), copy(values, turn - 1, 2), commit_copies();
    }
  };
  auto await_fetched = [&](int turn) {  // kGroupTurns - 1 fetches are newer, one less after the first
    if constexpr (kBoxes) await_counting_mbarrier(gates + turn % kGroupTurns, turn / kGroupTurns % 2);
    else if (turn == 0) wait_for_copies<kGroupTurns - 1>();
    else wait_for_copies<kGroupTurns - 2>();
  };
  if constexpr (kBoxes) __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kGroupTurns; ++turn) fetch(turn);

  unsigned q[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int mine = query + g + j % 2 * 8, col = s * 16 + j / 2 * 8 + 2 * t;
      float value[2] = {0, 0}, bias[2];
      if (mine < length) {
        unpack<2>(load_vector<T, 2>(base + (unsigned(mine) * row_stride + col)), value);
        unpack<2>(load_vector<float, 2, 1, true>(a.bias + (head + col)), bias);
        value[0] += bias[0], value[1] += bias[1];
      }
      q[s][j] = round_pair_to(T{}, value[0], value[1]);
    }
  }

  float score[kScores * 4], out[kCols * 4], top[2] = {-infinity<float>(), -infinity<float>()}, sum[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kCols * 4; ++i) out[i] = 0;

  auto multiply_keys = [&](int turn) {
    const Tile tile = tile_of<kBytes>(keys[turn % kGroupTurns]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) multiply_add_rows<kBytes, false>(T{}, score, q[s], tile_at(tile, s * 32), s > 0);
    end_products();
  };
  await_fetched(0);
  show_to_products();
  __syncthreads();
  begin_products();
  multiply_keys(0);
  wait_for_products<0>();
  make_all_opaque(score);

  for (int turn = 0; turn < turns; ++turn) {
    if ((turn + 1) * kGroupKeys > length) {
#pragma unroll
      for (int i = 0; i < kScores * 4; ++i) {
        if (turn * kGroupKeys + i / 4 * 8 + 2 * t + i % 2 >= length) score[i] = -infinity<float>();
      }
    }
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // rows g and g + 8
      float most = top[r];
#pragma unroll
      for (int n = 0; n < kScores; ++n) most = larger(most, larger(score[4 * n + 2 * r], score[4 * n + 2 * r + 1]));
      most = larger(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = larger(most, __shfl_xor_sync(kAllLanes, most, 2));
      factor[r] = exp2_approx((top[r] - most) * a.scale);
      top[r] = most;
    }
    wait_for_products<0>();  // of the turn before: weights by values
    make_all_opaque(out);
    unsigned weight[kGroupKeys / 16][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (__any_sync(kAllLanes, factor[r] != 1)) {
        sum[r] *= factor[r];
#pragma unroll
        for (int n = 0; n < kCols; ++n) out[4 * n + 2 * r] *= factor[r], out[4 * n + 2 * r + 1] *= factor[r];
      }
      const float pivot = top[r] * a.scale;
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
        const float low = exp2_approx(multiply_add(score[4 * n + 2 * r], a.scale, -pivot));
        const float high = exp2_approx(multiply_add(score[4 * n + 2 * r + 1], a.scale, -pivot));
        sum[r] += low + high;
        weight[n / 2][n % 2 * 2 + r] = round_pair_to(T{}, low, high);  // scores lie as the next product's a does
      }
    }

    await_fetched(turn + 1);
    if (kBoxes && (turn + 1) * kGroupKeys > length) {  // a box goes on into the next sequence
      for (int i = row; i < kGroupKeys; i += kStep) {
        if (turn * kGroupKeys + i >= length)
          *reinterpret_cast<uint4*>(values[turn % kGroupTurns] + swizzled<kBytes>(i, chunk)) = {0, 0, 0, 0};
      }
    }
    show_to_products();
    __syncthreads();  // this turn's values and the next one's keys have come, and nobody reads those before them
    fetch(turn + kGroupTurns);
    make_all_opaque(out);
    begin_products();
    if (turn + 1 < turns) multiply_keys(turn + 1);
    const Tile tile = tile_of<kBytes>(values[turn % kGroupTurns]);
#pragma unroll
    for (int s = 0; s < kGroupKeys / 16; ++s)
      multiply_add_rows<kBytes, true>(T{}, out, weight[s], tile_at(tile, s * 16 * kBytes), true);
    end_products();
    // the next turn's scores are there; their maximum is sought while the other product goes on
    wait_for_products<1>();
    make_all_opaque(score);
  }
  wait_for_products<0>();
  make_all_opaque(out);
  T* const to = a.context + start * columns + head;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float all = sum[r];
    all += __shfl_xor_sync(kAllLanes, all, 1);
    all += __shfl_xor_sync(kAllLanes, all, 2);
    const float factor = reciprocal(all);
    const int mine = query + g + r * 8;
    if (mine >= length) continue;
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
      const int col = n * 8 + 2 * t;
      float bias[2];
      unpack<2>(load_vector<float, 2, 1, true>(a.bias + (2 * columns + head + col)), bias);
      const float value[2] =
          {multiply_add(out[4 * n + 2 * r], factor, bias[0]), multiply_add(out[4 * n + 2 * r + 1], factor, bias[1])};
      store_vector(to + (unsigned(mine) * columns + col), vector_from<T, 2>(value));
    }
  }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kGroup, 4) attend_by_group(const __grid_constant__ Attention<T> a) {
  attend_together<T, kSize, false>(a, nullptr);
}

template <typename T>
struct BoxedAttention {
  TensorMap boxes;
  Attention<T> a;
  int unused[2];  // maps are aligned to 64 bytes, and so is the whole
};
template <typename T, int kSize>
__global__ void __launch_bounds__(kGroup, 4) attend_by_boxes(const __grid_constant__ BoxedAttention<T> boxed) {
  attend_together<T, kSize, true>(boxed.a, &boxed.boxes);
}

}  // namespace cupynorm
