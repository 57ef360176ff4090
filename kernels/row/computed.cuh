// shared, where something is fused: one block has a row, which waits in its shared memory as it was computed, or as it
// was loaded if the steps in between are few. Operands are read once, and a dropout's numbers are made once. While a
// row's results are written, the next row of the block takes its places, a few vectors at a time, and the loads of the
// vectors after these are in flight. What a mask drops around the interval that it keeps is written before the row is
// reduced, and never waits.
#pragma once
#include <base/pdl.cuh>
#include <base/reduce.cuh>
#include <io/affine.cuh>
#include <row/rounds.cuh>
#include <row/running.cuh>
#include <row/waiting.cuh>

namespace cupynorm {

// A thread loads kVectors vectors of kVector elements at a time. kUnaligned: as in Registers, but never 2. kBlock
// threads a block, and registers few enough for kMinBlocks blocks on a multiprocessor.
template <int Vector_, int Vectors, int UnalignedMode, int Block, int MinBlocks>
struct Computed {
  static constexpr int kVector = Vector_, kVectors = Vectors, kUnaligned = UnalignedMode, kBlock = Block,
      kMinBlocks = MinBlocks;
  static_assert(UnalignedMode < 2, "what is computed from several arrays lies in vectors as y does");
  static_assert(UnalignedMode == 0 || Block >= 2 * Vector_ - 2, "the first threads hold what is around the vectors");
};

constexpr int kLineVectors = 8;  // of 16 bytes each: a line

// How many vectors of a row wait at most (computed_bytes in cupynorm/plan/partition.py). They are counted from a line
// where rows are unaligned, or where a mask keeps an interval: of so many columns they touch two vectors in part.
template <class Load, int kVector, bool kIsUnaligned>
inline int places_of(const Load& load, int cols) {
  const int whole = cols / kVector;
  if constexpr (Load::kInterval) {
    const int most = (load.most_kept(cols) + 2 * kVector - 2) / kVector;
    return (most < whole ? most : whole) + kLineVectors - 1;
  }
  return whole + (kIsUnaligned ? kLineVectors - 1 : 0);
}

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_computed(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Largest = Magnitude<Compute>;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  constexpr bool kIsUnaligned = Shape::kUnaligned > 0;
  constexpr int kAtOnce = kVectors * kBlock;  // vectors that the block loads in a round
  // The results of dropped elements are stored before the row is reduced, unless they are divided by the row's scale:
  // before it has come, where a block has no other row whose results it could write meanwhile.
  constexpr bool kEarly = Load::kInterval && !Store::kScales;
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || !Load::kStoresComputed, "nothing of what is dropped is kept");
  constexpr int kSlots = slots_for(kWarps);
  __shared__ Slot<Op> slots[2][1][1][kSlots];
  __shared__ Slot<Largest> largest_slots[1][1][kSlots];
  __shared__ Slot<typename SearchOf<Op>::Type> step_slots[Op::kSearches ? 2 : 1][1][1][kSlots];
  int steps = 0;  // of a search
  if constexpr (kSlots > kWarps) {
    for (auto& each : slots) clear_slots<kWarps>(each);
    if constexpr (Store::kScales) clear_slots<kWarps>(largest_slots);
    if constexpr (Op::kSearches) {
      for (auto& each : step_slots) clear_slots<kWarps>(each);
    }
  }
  const int cols = int(a.cols), warp = threadIdx.x / kWarp;
  const WaitingRow<Load, Element, kVector> waiting = {places_of<Load, kVector, kIsUnaligned>(a.load, cols)};
  pdl_wait_and_trigger();

  // A row's vectors `begin` .. `end`, from column `head` on; `around` elements are in no vector, one for each of the
  // first threads. Vectors are counted from column `origin`, where a line begins in y if rows are unaligned: so warps
  // store whole lines. Those from `first` up to `last` wait, in places from `base` on: all, or, where a mask keeps an
  // interval, those that it keeps something of. The others are neither loaded nor waited for.
  struct Cut {
    bool here;
    int head, around, origin, begin, end, base, first, last;
    bool waits(int number) const { return number >= first && number < last; }
    int waiting() const { return last - base; }
    bool has_edge() const { return kIsUnaligned && int(threadIdx.x) < around; }
    int edge_col() const {
      return int(threadIdx.x) < head ? int(threadIdx.x) : int(threadIdx.x) + (end - begin) * kVector;
    }
  };
  auto cut_of = [&](int64 row, const typename Load::RowPointer& from) -> Cut {
    if (row >= a.rows) return {};
    Cut cut = {};
    cut.here = true;
    if constexpr (kIsUnaligned) {
      const int to_line = a.store.at(row).template head<kLineVectors * kVector>();
      const int head = to_line % kVector, before = (kLineVectors - to_line / kVector) % kLineVectors;
      cut.head = head < cols ? head : cols, cut.origin = cut.head - before * kVector, cut.begin = before;
    }
    const int held = (cols - cut.head) / kVector;
    cut.around = cols - held * kVector;
    cut.end = cut.last = cut.begin + held, cut.first = cut.begin;
    if constexpr (Load::kInterval) {
      from.template keep_vectors<kVector>(cut.origin, cut.first, cut.last);
      cut.base = cut.first / kLineVectors * kLineVectors;
    }
    return cut;
  };
  // `now`: the row whose results are written; `next`: the one that takes its places, from which loads are in flight.
  int64 row = blockIdx.x;
  auto from = a.load.at(row < a.rows ? row : 0), from_now = from;
  auto to = a.store.at(0);
  Cut now = {}, next = cut_of(row, from);
  auto columns_at = [&](int col) {
    if constexpr (kIsUnaligned) return a.store.template columns_unaligned<kVector>(col);
    else return a.store.template columns<kVector>(col);
  };
  auto map = [&](const Element& x, unsigned keeps, int i, const typename Op::Row& whole) {
    Compute y = Op::map_raw(x, whole);
    if constexpr (Load::kDrops) y = keeps >> i & 1 ? y : Op::dropped();
    return y;
  };
  auto map_vector = [&](int number, const typename Op::Row& whole, Compute (&y)[kVector]) {
    ElementsOf<Element, kVector> elements;
    auto& x = elements.over(y);
    const unsigned keeps = !Load::kInterval || now.waits(number) ? waiting.get(number - now.base, from_now, x) : 0;
    if constexpr (Load::kInterval) {
      if (keeps == 0) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = Op::dropped();
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = map(x[i], keeps, i, whole);
  };

  typename Load::template Loaded<kVector> ahead[kVectors];
  typename Load::template Loaded<1> ahead_edge;
  Compute edge_result[1] = {};
  ElementsOf<Element, 1> edge_elements = {};
  auto& edge = edge_elements.over(edge_result);
  unsigned keeps_edge = 0;
  typename Op::Row whole = {};
  typename ScaleOf<Store>::Type scale = {};
  int slot_set = 0;
  // The vectors of a round of next, from its place `begin` on.
  auto fetch = [&](int begin) {
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      const int number = next.base + begin + p * kBlock;
      if (next.waits(number)) ahead[p] = from.template load<kVector>(next.origin + number * kVector);
    }
  };
  auto fetch_edge = [&] {
    if (next.has_edge()) ahead_edge = from.template load<1>(next.edge_col());
  };
  // Results of kCount elements of the row at `place`, from the op's.
  auto write = [&](const auto& place, auto& y, const auto& columns, const auto& operands, int col) {
    constexpr int kCount = int(sizeof(y) / sizeof(Compute));
    if constexpr (Store::kScales) {
      Compute z[kCount];
      Store::template finish<kCount>(y, columns, z);
      place.template store_scaled<kCount, true>(z, scale, col);
    } else if constexpr (Store::kHasEpilogueOperands) {
      place.template store<kCount, true>(y, columns, operands, col);
    } else {
      place.template store<kCount, true>(y, columns, col);
    }
  };
  // Those of now, from the same place on.
  auto write_round = [&](int begin) {
    typename Store::template EpilogueOperands<kVector> operands[kVectors];
    if constexpr (Store::kHasEpilogueOperands) {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int number = now.base + begin + p * kBlock;
        if (now.waits(number)) operands[p] = to.template epilogue_operands<kVector>(now.origin + number * kVector);
      }
    }
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      const int number = now.base + begin + p * kBlock, col = now.origin + number * kVector;
      if (!now.waits(number)) continue;
      Compute y[kVector];
      map_vector(number, whole, y);
      write(to, y, columns_at(col), operands[p], col);
    }
  };
  auto write_dropped = [&](const Cut& cut, const auto& place) {
    if constexpr (Load::kInterval) {
#pragma unroll 2
      for (int number = threadIdx.x; number < cut.end; number += kBlock) {
        if (number < cut.begin || cut.waits(number)) continue;
        const int col = cut.origin + number * kVector;
        typename Store::template EpilogueOperands<kVector> operands;
        if constexpr (Store::kHasEpilogueOperands) operands = place.template epilogue_operands<kVector>(col);
        Compute y[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = Op::dropped();
        write(place, y, columns_at(col), operands, col);
      }
    }
  };

  // The first of a thread's vectors may lie before an unaligned row, and the second in it: each is added alone then,
  // since what is there has to be the first of what is added together.
  constexpr bool kAlone = kIsUnaligned && kVectors > 1;
  fetch(threadIdx.x);
  fetch_edge();
  Compute own = 0;
  if constexpr (Op::kOwnNumber) own = from.own_number();
  const bool only_row = gridDim.x >= a.rows;
  if constexpr (kEarly) {
    if (only_row) write_dropped(next, a.store.at(row < a.rows ? row : 0));
  }
#pragma unroll 1
  while (true) {
    Running<Op> running;
    const int places = now.waiting() > next.waiting() ? now.waiting() : next.waiting();
#pragma unroll 1
    for (int begin = threadIdx.x; begin < places; begin += kAtOnce) {
      write_round(begin);
      Element x[kVectors * kVector];
      int there = 0;
      bool some = false;
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        const int number = next.base + begin + p * kBlock, col = next.origin + number * kVector;
        Element own[kVector];
        if (next.waits(number)) {
          const unsigned keeps = from.template unpack<kVector>(ahead[p], own, col, Op::padding());
          if constexpr (Load::kStoresComputed) from.template store_computed<kVector, true>(own, col);
          waiting.put(number - next.base, ahead[p], own, keeps);
          ++there;
          some |= keeps != 0;
          if constexpr (kAlone) {
            if (keeps != 0) running.template add<Precision>(own);
          }
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[p * kVector + i] = next.waits(number) ? own[i] : Op::padding();
      }
      if (some && !kAlone) running.template add<Precision>(x, Predicate<0>{there * kVector, false});
      fetch(begin + kAtOnce);
    }
    if constexpr (kIsUnaligned) {
      if (now.has_edge()) {
        const int col = now.edge_col();
        typename Store::template EpilogueOperands<1> operands;
        if constexpr (Store::kHasEpilogueOperands) operands = to.template epilogue_operands<1>(col);
        edge_result[0] = map(edge[0], keeps_edge, 0, whole);
        write(to, edge_result, a.store.template columns<1>(col), operands, col);
      }
      if (next.has_edge()) {
        const int col = next.edge_col();
        keeps_edge = from.template unpack<1>(ahead_edge, edge, col, Op::padding());
        if constexpr (Load::kStoresComputed) from.template store_computed<1>(edge, col);
        Element x[1] = {edge[0]};
        running.template add<Precision>(x);
      }
    }
    if (!next.here) break;
    const int64 current = row;
    now = next;
    to = a.store.at(current);
    row += gridDim.x;
    from_now = from;
    from = a.load.at(row < a.rows ? row : 0);
    next = cut_of(row, from);
    fetch(threadIdx.x);
    fetch_edge();
    if constexpr (kEarly) {
      if (!only_row) write_dropped(now, to);
    }

    Compute pivot[1];
    typename Op::State total[1] = {running.state(pivot[0])};
    if constexpr (Op::kOwnNumber) {
      pivot[0] = own, total[0] = Op::with_own(total[0], own);
      own = from.own_number();
    }
    total[0] = reduce_lanes<Op, false, kWarp>(total[0]);
    typename Op::State of_warp[1] = {total[0]};
    if constexpr (kWarps > 1) reduce_warps<Op, false, kSlots>(total, pivot, slots[slot_set], 0, warp);
    slot_set ^= 1;
    if constexpr (Op::kRounds) {
      // Calls add(x) for what waits, some elements at a time.
      auto each_waiting = [&](auto&& add) {
#pragma unroll 1
        for (int begin = threadIdx.x; begin < now.waiting(); begin += kAtOnce) {
          Element x[kVectors * kVector];
#pragma unroll
          for (int p = 0; p < kVectors; ++p) {
            const int number = now.base + begin + p * kBlock;
            Element held[kVector];
            unsigned keeps = 0;
            if (now.waits(number)) keeps = waiting.get(number - now.base, from_now, held);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[p * kVector + i] = keeps >> i & 1 ? held[i] : Op::padding();
          }
          add(x);
        }
        if constexpr (kIsUnaligned) {
          Element x[1] = {now.has_edge() && keeps_edge & 1 ? edge[0] : Op::padding()};
          add(x);
        }
      };
      auto summarize = [&](const typename Op::Progress (&progress)[1], typename Op::State (&own)[1]) {
        if (!any_lane(!Op::settled(own[0], progress[0]))) return;
        typename Op::State all = Op::identity();
        each_waiting([&](auto& x) {
          constexpr int kCount = int(sizeof(x) / sizeof(Element));
          all = Op::template merge<false>(all, Op::summarize_again(x, Predicate<kCount>{kCount, false}, progress[0]));
        });
        own[0] = reduce_lanes<Op, false, kWarp>(all);
      };
      auto reduce = [&](typename Op::State (&states)[1]) {
        if constexpr (kWarps > 1) reduce_warps<Op, false, kSlots>(states, pivot, slots[slot_set], 0, warp);
        slot_set ^= 1;
      };
      using Search = typename SearchOf<Op>::Type;
      auto step = [&](const typename Op::Progress (&progress)[1], typename Search::State (&found)[1]) {
        if constexpr (Op::kSearches) {
          typename Search::State all = Search::identity();
          each_waiting([&](auto& x) {
            Op::leave(x, progress[0]);
            all = Search::template merge<false>(all, Op::summarize_step(x, progress[0]));
          });
          found[0] = reduce_lanes<Search, false, kWarp>(all);
          if constexpr (kWarps > 1) reduce_warps<Search, false, kSlots>(found, pivot, step_slots[steps % 2], 0, warp);
          ++steps;
        }
      };
      auto any = [](unsigned next) { return kWarps == 1 ? any_next<Op>(next) : next; };
      go_through_rounds<Op, 1>(a.op, of_warp, total, summarize, reduce, step, any);
    }
    whole = a.op.finish(total[0], total[0], a.cols, pivot[0]);
    if (threadIdx.x == 0) a.op.save(current, whole);
    if constexpr (Store::kScales) {
      typename Largest::State largest[1] = {Largest::identity()};
#pragma unroll 1
      // each thread reads the places that it has written
      for (int number = (now.base + int(threadIdx.x)) % kBlock; number < now.end; number += kBlock) {
        if (number < now.begin) continue;
        Compute y[kVector], z[kVector];
        map_vector(number, whole, y);
        Store::template finish<kVector>(y, columns_at(now.origin + number * kVector), z);
        largest[0] = Largest::template merge<false>(largest[0], Largest::of(z));
      }
      if (now.has_edge()) {
        Compute y[1] = {map(edge[0], keeps_edge, 0, whole)}, z[1];
        Store::template finish<1>(y, a.store.template columns<1>(now.edge_col()), z);
        largest[0] = Largest::template merge<false>(largest[0], Largest::of(z));
      }
      largest[0] = reduce_lanes<Largest, false, kWarp>(largest[0]);
      if constexpr (kWarps > 1) reduce_warps<Largest, false, kSlots>(largest, pivot, largest_slots, 0, warp);
      scale = a.store.scale_of(largest[0].max);
      if (threadIdx.x == 0) a.store.save(current, scale);
      write_dropped(now, to);
    }
  }
}

}  // namespace cupynorm
