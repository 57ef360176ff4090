// cached: the row waits in the level-1 cache. It is read twice, one row a block: the first time a cache is asked to
// keep it, the second time to drop it.
#pragma once
#include <base/pdl.cuh>
#include <base/reduce.cuh>
#include <io/affine.cuh>
#include <row/running.cuh>

namespace cupynorm {

// Vectors of kVector elements, of which a thread reduces kVectors at a time, 4 at most; every row begins at one. They
// are 16 bytes of x each where nothing is fused. kBlock threads a block, and registers few enough for kMinBlocks
// blocks on a multiprocessor, whose cache holds that many rows.
template <int Vector_, int Vectors, int Block, int MinBlocks>
struct Cached {
  static constexpr int kVector = Vector_, kVectors = Vectors, kBlock = Block, kMinBlocks = MinBlocks;
  static_assert(Vectors <= 4, "what is left are fewer");
};

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_cached(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  using Largest = Magnitude<Compute>;
  using Loaded = typename Load::template Loaded<kVector>;
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  constexpr int kSlots = slots_for(kWarps);
  __shared__ Slot<Op> slots[2][1][1][kSlots];
  __shared__ Slot<Largest> largest_slots[1][1][kSlots];
  if constexpr (kSlots > kWarps) {
    for (auto& each : slots) clear_slots<kWarps>(each);
    if constexpr (Store::kScales) clear_slots<kWarps>(largest_slots);
  }
  // of vectors on their way to y
  constexpr bool kPlain = Load::kDirect && !Store::kScales && !Store::kHasEpilogueOperands;
  constexpr int kUnroll = sizeof(Compute) == 8 ? 1 : kPlain ? 4 : 2;
  const int vectors = int(a.cols / kVector);
  int slot_set = 0;
  pdl_wait_and_trigger();
#pragma unroll 1
  for (int64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    auto from = a.load.at(row);
    auto to = a.store.at(row);
    from.make_opaque();
    // results of fewer bytes are stored by plain C++, which must still know that this is global memory
    if constexpr (kPlain || kVector * Store::kBytes >= 8) to.make_opaque();
    Compute own = 0;
    if constexpr (Op::kOwnNumber) own = from.own_number();
    Running<Op> running;
    auto add = [&](int first, auto& loaded) {
      constexpr int kCount = int(sizeof(loaded) / sizeof(loaded[0]));
      Element x[kCount * kVector];
#pragma unroll
      for (int p = 0; p < kCount; ++p)
        loaded[p] = from.template load_twice<kVector, false>((first + p * kBlock) * kVector);
#pragma unroll
      for (int p = 0; p < kCount; ++p)
        from.template unpack<kVector>(loaded[p], x + p * kVector, (first + p * kBlock) * kVector, Op::padding());
      running.template add<typename Load::Precision>(x);
    };
    int i = threadIdx.x;
#pragma unroll 1
    for (; i + (kVectors - 1) * kBlock < vectors; i += kVectors * kBlock) {
      Loaded loaded[kVectors];
      add(i, loaded);
    }
    // the vectors that are left are loaded all at once, too (docs/notes/048, "What is left of a thread's vectors")
    const int left = kVectors < 3 ? i < vectors : i < vectors ? (vectors - 1 - i) / kBlock + 1 : 0;
    if (kVectors > 3 && left == 3) {
      Loaded loaded[3];
      add(i, loaded);
    }
    if (kVectors > 2 && left == 2) {
      Loaded loaded[2];
      add(i, loaded);
    }
    if (kVectors > 1 && left == 1) {
      Loaded loaded[1];
      add(i, loaded);
    }
    Compute pivot[1];
    typename Op::State total[1] = {running.state(pivot[0])};
    if constexpr (Op::kOwnNumber) pivot[0] = own, total[0] = Op::with_own(total[0], own);
    total[0] = reduce_lanes<Op, false, kWarp>(total[0]);
    if constexpr (kWarps > 1) reduce_warps<Op, false, kSlots>(total, pivot, slots[slot_set], 0, threadIdx.x / kWarp);
    slot_set ^= 1;
    const typename Op::Row whole = a.op.finish(total[0], total[0], a.cols, pivot[0]);
    if (threadIdx.x == 0) a.op.save(row, whole);
    // last: nobody reads the vector after this. It is then also where what was computed is written: in place of what
    // it was computed from, perhaps.
    auto map = [&](const Loaded& loaded, int col, bool last, Compute (&y)[kVector]) {
      ElementsOf<Element, kVector> elements;
      auto& x = elements.over(y);
      const unsigned keeps = from.template unpack<kVector>(loaded, x, col, Op::padding());
      if constexpr (Load::kStoresComputed) {
        if (last) from.template store_computed<kVector, true>(x, col);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        y[k] = Op::map_raw(x[k], whole);
        if constexpr (Load::kDrops) y[k] = keeps >> k & 1 ? y[k] : Op::dropped();
      }
      static_cast<void>(keeps);
    };
    if constexpr (Store::kScales) {
      auto finish = [&](const Loaded& loaded, int col, bool last, Compute (&z)[kVector]) {
        Compute y[kVector];
        map(loaded, col, last, y);
        Store::template finish<kVector>(y, a.store.template columns<kVector>(col), z);
      };
      typename Largest::State largest[1] = {Largest::identity()};
#pragma unroll(kUnroll)
      for (int number = vectors - 1 - threadIdx.x; number >= 0; number -= kBlock) {
        Compute z[kVector];
        finish(from.template load_twice<kVector, false>(number * kVector), number * kVector, false, z);
        largest[0] = Largest::template merge<false>(largest[0], Largest::of(z));
      }
      largest[0] = reduce_lanes<Largest, false, kWarp>(largest[0]);
      if constexpr (kWarps > 1)
        reduce_warps<Largest, false, kSlots>(largest, pivot, largest_slots, 0, threadIdx.x / kWarp);
      const auto scale = a.store.scale_of(largest[0].max);
      if (threadIdx.x == 0) a.store.save(row, scale);
#pragma unroll(kUnroll)
      for (int number = vectors - 1 - threadIdx.x; number >= 0; number -= kBlock) {
        const int col = number * kVector;
        Compute z[kVector];
        finish(from.template load_twice<kVector, true>(col), col, true, z);
        to.template store_scaled<kVector, true>(z, scale, col);
      }
    } else {
#pragma unroll(kUnroll)
      for (int number = vectors - 1 - threadIdx.x; number >= 0; number -= kBlock) {
        const int col = number * kVector;
        typename Store::template EpilogueOperands<kVector> operands;
        if constexpr (Store::kHasEpilogueOperands) operands = to.template epilogue_operands<kVector>(col);
        Compute y[kVector];
        map(from.template load_twice<kVector, true>(col), col, true, y);
        const auto columns = a.store.template columns<kVector>(col);
        if constexpr (Store::kHasEpilogueOperands) to.template store<kVector, true>(y, columns, operands, col);
        else to.template store<kVector, true>(y, columns, col);
      }
    }
  }
}

}  // namespace cupynorm
