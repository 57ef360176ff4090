// cached: the row waits in the level-1 cache. It is read twice, one row a block: the first time a cache is asked to keep it, the
// second time to drop it.
#pragma once
#include <io/affine.cuh>
#include <base/reduce.cuh>

namespace cupynorm {

// Packs of kPack elements, 16 bytes of x each, of which a thread reduces kPacks at a time, 4 at most; every row begins at one.
// kBlock threads a block, and registers few enough for kResident blocks on a multiprocessor, whose cache holds that many rows.
template <int Pack_, int Packs, int Block, int Resident>
struct Cached {
  static constexpr int kPack = Pack_, kPacks = Packs, kBlock = Block, kResident = Resident;
  static_assert(Packs <= 4, "what is left are fewer");
};

// The State of all that one thread has seen, a batch after the other.
template <class Op, bool kTwoPass = Op::kTwoPass>
struct Running {
  using Compute = typename Op::Compute;
  typename Op::State total = Op::identity();

  template <typename Digits, int N>
  void add(Compute (&x)[N]) {
    total = Op::template merge<false>(total, Op::summarize(x, Valid<N>{N, false}, 0));
  }
  typename Op::State state(Compute& from) const {
    from = 0;
    return total;
  }
};

// Where an op takes two passes elsewhere, two sums suffice: around an element of the thread's own what they lose is at most its number
// of elements times the precision.
template <class Op>
struct Running<Op, true> {
  using Compute = typename Op::Compute;
  typename Op::Sums sums = {};
  Compute origin = 0;
  int count = 0;

  template <typename Digits, int N>
  void add(Compute (&x)[N]) {
    if (count == 0) origin = Op::origin_of(x, Digits());
    const typename Op::Sums more = Op::one_pass(x, Valid<N>{N, false}, origin);
    sums = {sums.sum + more.sum, sums.squares + more.squares};
    count += N;
  }
  // Counted from the first lane's element.
  typename Op::State state(Compute& from) const {
    from = __shfl_sync(kAllLanes, origin, 0);
    return Op::rebase(Op::state_of(sums, Compute(count)), origin, from);
  }
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident) row_cached(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  constexpr int kPack = Shape::kPack, kPacks = Shape::kPacks, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  static_assert(Load::kDirect && !Store::kAhead && !Store::kScales, "what else is loaded would want room in the cache, too");
  constexpr int kSlots = slots_for(kWarps);
  __shared__ Slot<Op> slots[2][1][1][kSlots];
  if constexpr (kSlots > kWarps) {
    for (auto& each : slots) clear_slots<kWarps>(each);
  }
  const int packs = int(a.cols / kPack);
  int turn = 0;
  take_turn();
#pragma unroll 1
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    auto from = a.load.at(row);
    auto to = a.store.at(row);
    from.hide();
    to.hide();
    Running<Op> running;
    auto add = [&](int first, auto& loaded) {
      constexpr int kCount = int(sizeof(loaded) / sizeof(loaded[0]));
      Compute x[kCount * kPack];
#pragma unroll
      for (int p = 0; p < kCount; ++p) loaded[p] = from.template load_twice<kPack, false>((first + p * kBlock) * kPack);
#pragma unroll
      for (int p = 0; p < kCount; ++p) unpack<kPack>(loaded[p], x + p * kPack);
      running.template add<typename Load::Digits>(x);
    };
    int i = threadIdx.x;
#pragma unroll 1
    for (; i + (kPacks - 1) * kBlock < packs; i += kPacks * kBlock) {
      Pack<typename Load::Type, kPack> loaded[kPacks];
      add(i, loaded);
    }
    // what is left of a thread is on its way at once, too: one after the other, 4608 columns of half took a quarter longer
    const int left = kPacks < 3 ? i < packs : i < packs ? (packs - 1 - i) / kBlock + 1 : 0;
    if (kPacks > 3 && left == 3) {
      Pack<typename Load::Type, kPack> loaded[3];
      add(i, loaded);
    }
    if (kPacks > 2 && left == 2) {
      Pack<typename Load::Type, kPack> loaded[2];
      add(i, loaded);
    }
    if (kPacks > 1 && left == 1) {
      Pack<typename Load::Type, kPack> loaded[1];
      add(i, loaded);
    }
    Compute origin[1];
    typename Op::State total[1] = {running.state(origin[0])};
    total[0] = reduce_lanes<Op, false, kWarp>(total[0]);
    if constexpr (kWarps > 1) reduce_warps<Op, false, kSlots>(total, origin, slots[turn], 0, threadIdx.x / kWarp);
    turn ^= 1;
    const typename Op::Row whole = a.op.finish(total[0], total[0], a.cols, origin[0]);
    if (threadIdx.x == 0) a.op.save(row, whole);
#pragma unroll(sizeof(Compute) == 8 ? 1 : 4)
    for (int number = packs - 1 - threadIdx.x; number >= 0; number -= kBlock) {
      const int col = number * kPack;
      Compute y[kPack];
      unpack<kPack>(from.template load_twice<kPack, true>(col), y);
#pragma unroll
      for (int k = 0; k < kPack; ++k) y[k] = Op::map_raw(y[k], whole);
      to.template store<kPack, true>(y, a.store.template columns<kPack>(col), col);
    }
  }
}

}  // namespace cupynorm
