// Kernels that read a row, let the threads that share it meet, and write it: no arithmetic but the meeting's. limits.py
// times them.
#pragma once
#include <base/reduce.cuh>
#include <ops/contract.cuh>

namespace cupynorm {

// How the threads that share a row meet between its loads and its stores.
// kAlone: not at all: a copy in this grid. kStates: each gets a word of every other. kBarrier: only a grid's: it waits
// for the others, and gets nothing from them. kRead: a grid's states, read in place after a barrier.
enum Meeting { kAlone, kStates, kBarrier, kRead };

// kGroup threads hold a row, kVectors vectors of 16 bytes each; or the kCtasPerRow blocks of a cluster, or, 0, the
// gridDim.y blocks of a cooperative launch. kColumns: rows of parameters that are read as well, the same for every row.
template <int Group, int Vectors, int CtasPerRow, Meeting kind, int Columns, int Block, int MinBlocks>
struct Skeleton {
  static constexpr int kGroup = Group, kVectors = Vectors, kCtasPerRow = CtasPerRow, kColumns = Columns,
      kBlock = Block, kMinBlocks = MinBlocks;
  static constexpr Meeting kMeeting = kind;
};

// `word` of all threads that share a row, summed. Every step waits for the one before, as an op's states would.
template <class Shape>
inline unsigned meet(unsigned word, uint4* cluster_mailbox, Mbarrier* mbarrier) {
  constexpr int kGroup = Shape::kGroup, kLanes = kGroup < kWarp ? kGroup : kWarp, kWarps = kGroup / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  word = Lanes<kLanes>::sum(word);
  if constexpr (Shape::kCtasPerRow > 1) {  // each warp tells every block's warps, at once
    if (threadIdx.x == 0) expect_bytes(mbarrier, Shape::kCtasPerRow * kWarps * 16);
    if (lane < Shape::kCtasPerRow)
      send_words(cluster_mailbox + cluster_rank() * kWarps + warp, mbarrier, lane, uint4{word, 0, 0, 0});
    await_mbarrier(mbarrier, 0);
    word = 0;
#pragma unroll
    for (int i = 0; i < Shape::kCtasPerRow * kWarps; i += kWarp)
      word += i + lane < Shape::kCtasPerRow * kWarps ? cluster_mailbox[i + lane].x : 0;
    return Lanes<kWarp>::sum(word);
  }
  if constexpr (kWarps > 1) {
    constexpr int kGroups = Shape::kBlock / kGroup;
    __shared__ unsigned words[kGroups][kWarps];
    if (lane == 0) words[warp / kWarps][warp % kWarps] = word;
    __syncthreads();
    word = Lanes<kWarps>::sum(words[warp / kWarps][lane % kWarps]);
  }
  return word;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    skeleton(const uint4* x, uint4* y, const uint4* gamma, const uint4* beta, int rows, int row_vectors,
        unsigned zero) {
  constexpr int kGroup = Shape::kGroup, kVectors = Shape::kVectors, kCtasPerRow = Shape::kCtasPerRow,
      kGroups = Shape::kBlock / kGroup;
  constexpr bool kGrid = kCtasPerRow == 0;
  constexpr Meeting kMeeting = Shape::kMeeting;
  constexpr int kClusterMailboxes = kCtasPerRow > 1 ? kCtasPerRow * (kGroup / kWarp) : 1;
  __shared__ __align__(16) uint4 cluster_mailbox[kClusterMailboxes];
  __shared__ Mbarrier mbarrier;
  const int parts = kGrid ? gridDim.y : kCtasPerRow, part = kGrid ? blockIdx.y : kCtasPerRow > 1 ? cluster_rank() : 0;
  const int row = kGrid ? blockIdx.x : blockIdx.x / parts * kGroups + threadIdx.x / kGroup;
  const int each = (row_vectors + parts - 1) / parts, lane = threadIdx.x % kGroup;
  const int held = row_vectors - part * each < each ? row_vectors - part * each : each;
  const long long base = (long long)row * row_vectors + part * each;
  if constexpr (kCtasPerRow > 1 && kMeeting == kStates) {
    if (threadIdx.x == 0) init_mbarrier(&mbarrier);
    cluster_sync();
  }
  // a grid's messages are where their reader's first results will be, its states for kRead in the same places: as many
  // words as LayerNorm's or softmax's
  constexpr int kWords = Shape::kColumns > 1 ? 4 : 2;
  auto box = [&](int reader, int writer) {
    return reinterpret_cast<MailboxWord*>(y + (long long)row * row_vectors + reader * each) + writer * kWords;
  };
  pdl_wait_and_trigger();
  uint4 loaded[kVectors], own[Shape::kColumns > 0 ? Shape::kColumns : 1][kVectors];
#pragma unroll
  for (int p = 0; p < kVectors; ++p)
    if (row < rows && lane + p * kGroup < held) loaded[p] = x[base + lane + p * kGroup];
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p)
      if (lane + p * kGroup < held) own[c][p] = (c == 0 ? gamma : beta)[part * each + lane + p * kGroup];
  }
  unsigned word = 0;
  if constexpr (kMeeting != kAlone) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) word += lane + p * kGroup < held ? loaded[p].x : 0;
    word = meet<Shape>(word, cluster_mailbox, &mbarrier);
  }
  if constexpr (kGrid && kMeeting != kAlone) {
    if constexpr (kMeeting != kBarrier) {
      for (int i = threadIdx.x; i < parts; i += Shape::kBlock) {
#pragma unroll
        for (int w = 0; w < kWords; w += 2) send_mailbox(box(i, part) + w, word, word);
      }
    }
    grid_wait<kMeeting != kStates>(grid_arrive<kMeeting != kStates>());
    if constexpr (kMeeting != kBarrier) {
      word = 0;
      for (int i = threadIdx.x; i < parts; i += Shape::kBlock) {
        unsigned words[kWords];
        await_mailbox(box(part, i), words);
#pragma unroll
        for (int w = 0; w < kWords; ++w) word += words[w];
      }
      __syncthreads();  // of the block's own words
      word = meet<Shape>(word, cluster_mailbox, &mbarrier);
    }
  }
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    uint4 stored = loaded[p];
    if constexpr (kMeeting != kAlone) stored.x ^= word & zero;
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c)
      stored.x ^= own[c][p].x & zero, stored.y ^= own[c][p].y & zero, stored.z ^= own[c][p].z & zero,
          stored.w ^= own[c][p].w & zero;
    if (row < rows && lane + p * kGroup < held) y[base + lane + p * kGroup] = stored;
  }
}

// The same for unaligned rows of which x and y are aligned alike: vectors from y's first aligned address, and
// the elements of kElement bytes around them, which the first threads hold. Parameters are aligned otherwise: a thread
// loads a vector of one by three accesses of 8 bytes.
template <class Shape, int kElement>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    skeleton_anywhere(const unsigned char* x, unsigned char* y, const unsigned char* gamma, const unsigned char* beta,
        int rows, int row_bytes,
                      unsigned zero) {
  constexpr int kGroup = Shape::kGroup, kVectors = Shape::kVectors, kGroups = Shape::kBlock / kGroup,
      kColumns = Shape::kColumns;
  const int lane = threadIdx.x % kGroup, row = blockIdx.x * kGroups + threadIdx.x / kGroup;
  const long long base = (long long)row * row_bytes;
  const int head = int(-reinterpret_cast<unsigned long long>(y + base) % 16),
      vectors = row < rows ? (row_bytes - head) / 16 : 0;
  const int heads = head / kElement, tails = (row_bytes - head - vectors * 16) / kElement;
  const bool has_edge = row < rows && lane < heads + tails;
  const int edge_col = (lane < heads ? lane : lane - heads + (head + vectors * 16) / kElement) * kElement;
  pdl_wait_and_trigger();
  uint4 loaded[kVectors];
  uint2 own[kColumns > 0 ? kColumns : 1][kVectors][3];
  unsigned single = 0;
#pragma unroll
  for (int p = 0; p < kVectors; ++p)
    if (lane + p * kGroup < vectors) loaded[p] = reinterpret_cast<const uint4*>(x + base + head)[lane + p * kGroup];
  if (has_edge) load_words<kElement, false>(x + base + edge_col, &single);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (lane + p * kGroup < vectors) {
        const auto first = unaligned_at<8>((c == 0 ? gamma : beta) + head + (lane + p * kGroup) * 16);
#pragma unroll
        for (int i = 0; i < 3; ++i)
          if (i < 2 || first.off) own[c][p][i] = __ldg(reinterpret_cast<const uint2*>(first.access) + i);
      }
    }
  }
  unsigned word = single;
  if constexpr (Shape::kMeeting != kAlone) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) word += lane + p * kGroup < vectors ? loaded[p].x : 0;
    word = meet<Shape>(word, nullptr, nullptr);
  }
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    if (lane + p * kGroup >= vectors) continue;
    uint4 stored = loaded[p];
    if constexpr (Shape::kMeeting != kAlone) stored.x ^= word & zero;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 3; ++i) stored.y ^= own[c][p][i].x & zero, stored.z ^= own[c][p][i].y & zero;
    }
    store_words<16, true>(y + base + head + (lane + p * kGroup) * 16, &stored.x);
  }
  single ^= word & zero;
  if (has_edge) store_words<kElement, false>(y + base + edge_col, &single);
}

// What is fused around an op: rows of other arrays are read with x (kBeside), kColumns parameters of kColumnBytes for
// an access of kAccess bytes of x, results take kStored bytes, and the sum is stored, too (kSums). kMeets: how often
// threads meet. kEnd: how far x is asked for: as far as its row goes, as its length says when it has come, one for
// `queries` rows, or up to the diagonal of `queries` rows.
enum End { kWhole, kLength, kDiagonal };
template <int Group, int Vectors, int Access, int Beside, int Columns, int ColumnBytes, int Stored, bool Sums,
    int Meets, End end, int Block,
          int MinBlocks>
struct FusedSkeleton {
  static constexpr int kGroup = Group, kVectors = Vectors, kCtasPerRow = 1, kAccess = Access, kBeside = Beside,
      kColumns = Columns;
  static constexpr int kColumnBytes = ColumnBytes, kStored = Stored, kMeets = Meets, kBlock = Block,
      kMinBlocks = MinBlocks;
  static constexpr bool kSums = Sums;
  static constexpr End kEnd = end;
};
template <class Shape>
struct Again : Shape {};  // slots of its own

struct FusedArrays {
  const unsigned char *x, *beside, *columns[3];
  const int* lengths;
  unsigned char *y, *sum;
  // queries: the logarithm of how many rows share a length; vector: elements of an access
  int rows, row_vectors, queries, vector;
  unsigned zero;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    fused_skeleton(const __grid_constant__ FusedArrays a) {
  constexpr int kGroup = Shape::kGroup, kVectors = Shape::kVectors, kAccess = Shape::kAccess, kWords = kAccess / 4;
  constexpr int kOwn = Shape::kColumns > 0 ? Shape::kColumns : 1;
  const int row = blockIdx.x * (Shape::kBlock / kGroup) + threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const long long base = (long long)row * a.row_vectors + lane;
  int end = a.row_vectors;
  pdl_wait_and_trigger();
  if constexpr (Shape::kEnd == kLength)
    end = row < a.rows ? (a.lengths[unsigned(row) >> a.queries] + a.vector - 1) / a.vector : 0;
  if constexpr (Shape::kEnd == kDiagonal) end = ((row & ((1 << a.queries) - 1)) + a.vector) / a.vector;
  unsigned x[kVectors][kWords] = {}, beside[kVectors][kWords] = {}, own[kOwn][kVectors][Shape::kColumnBytes / 4] = {};
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    const long long at = (base + p * kGroup) * kAccess;
    if (row < a.rows && lane + p * kGroup < end) {
      load_words<kAccess, false>(a.x + at, x[p]);
      if constexpr (Shape::kBeside > 0) load_words<kAccess, true>(a.beside + at, beside[p]);
    }
  }
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p)
      if (lane + p * kGroup < a.row_vectors)
        load_words<Shape::kColumnBytes, true>(a.columns[c] + (lane + p * kGroup) * Shape::kColumnBytes, own[c][p]);
  }
  unsigned word = 0;
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[p][i] ^= beside[p][i];
    word += x[p][0];
    if constexpr (Shape::kSums) {
      if (row < a.rows && lane + p * kGroup < a.row_vectors)
        store_words<kAccess, false>(a.sum + (base + p * kGroup) * kAccess, x[p]);
    }
  }
  if constexpr (Shape::kMeets > 0) word = meet<Shape>(word, nullptr, nullptr);
  if constexpr (Shape::kMeets > 1) word = meet<Again<Shape>>(word ^ x[0][0], nullptr, nullptr);
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    x[p][0] ^= word & a.zero;
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < Shape::kColumnBytes / 4; ++i) x[p][i % kWords] ^= own[c][p][i] & a.zero;
    }
    if constexpr (Shape::kStored < kAccess) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) x[p][i] ^= x[p][i + kWords / 2];
    }
    if (row < a.rows && lane + p * kGroup < a.row_vectors)
      store_words<Shape::kStored, false>(a.y + (base + p * kGroup) * Shape::kStored, x[p]);
  }
}

// An op that asks nothing of its elements: a thread's state is its first. For the package's own kernels, where rows
// wait in shared memory.
template <typename T>
struct Meet : RowOp {
  using Compute = T;
  struct State {
    T one;
  };
  struct Row {
    T one;
  };
  T eps;  // 0, which the compiler does not know

  static constexpr bool kHasArguments = true;
  static T padding() { return 0; }
  static State identity() { return {0}; }
  template <int N, class Predicate>
  static State summarize(T (&x)[N], Predicate, T) {
    return {x[0]};
  }
  template <bool kEqual>
  static State merge(State a, State b) {
    return {a.one + b.one};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return {lanes.sum(s.one)};
  }
  template <typename Cols>
  Row finish(State, State row, Cols, T) const {
    return {row.one * eps};
  }
  static T map(T x, Row row) { return x + row.one; }
  static T map_raw(T x, Row row) { return x + row.one; }
};

}  // namespace cupynorm
