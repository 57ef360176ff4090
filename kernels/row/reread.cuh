// split, where something is fused: all blocks of the grid share each row. A row is read once for its statistics, with
// all that it is computed from, and once more for its results; with a scale for each row, once more in between.
//
// Blocks tell one another what they found by messages that lie where their first results will be (reread_meeting.cuh).
// Messages have memory of their own in three cases: results do not lie next to one another; nothing is stored, so that
// a row is read once; rows are few and long. In the last case each group of blocks has other rows, so that some groups
// work while others meet (docs/notes/084).
#pragma once
#include <base/pdl.cuh>
#include <io/affine.cuh>
#include <row/meeting.cuh>
#include <row/reread_meeting.cuh>
#include <row/reread_parts.cuh>

namespace cupynorm {

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_reread(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using State = typename Op::State;
  using Largest = Magnitude<Compute>;
  using Loaded = typename Load::template Loaded<Shape::kVector>;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kBlock = Shape::kBlock, kWarps = kBlock / kWarp;
  constexpr bool kIsUnaligned = Shape::kUnaligned > 0;
  constexpr bool kInRoom = kHasRoom<Store>, kReadsOnce = kStoresNothing<Store> && !Load::kStoresComputed;
  constexpr int kMost = 8;  // rows between two meetings
  constexpr int kFew = 4, kMany = 128;  // of a part that one thread reads again, as in read_again
  constexpr int kUnroll = sizeof(Compute) == 8 ? 1 : 2;  // vectors on their way to y
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || !Load::kStoresComputed, "nothing of what is dropped is kept");
  __shared__ Slot<Op> slots[kMost][kWarps];
  __shared__ Slot<Largest> largest_slots[Store::kScales ? kMost : 1][kWarps];
  __shared__ typename Op::Row wholes[kMost];
  __shared__ Compute largest[Store::kScales ? kMost : 1];
  __shared__ MailboxPiece before[kInRoom ? 1 : kMost][kPiecesOf<Op>];
  constexpr int kSlotBytes = int(sizeof(SlotWords<Op>));
  static_assert(kSlotBytes <= 96 && sizeof(SlotWords<Largest>) <= kSlotBytes, "ROOM_BYTES in cupynorm/plan/config.py");
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Sharing sharing = kInRoom ? Sharing::of_grid() : Sharing{0, 1, int(blockIdx.y), int(gridDim.y)};
  const int group = sharing.group, groups = sharing.groups, part = sharing.part, parts = sharing.parts;
  // One group has nobody to work while it meets, and meets for as many rows as it can.
  const int most = kInRoom && !kReadsOnce && groups > 1 ? 1 : kMost;
  using Cut = RereadCut<Load, Shape>;
  auto cut_of = [&](int64 row) { return Cut::of(a.store.at(row), a.cols, parts); };
  auto mailbox = [&](int64 row, const auto& cut, int part) {
    return mailbox_from(a.store.at(row).address() + cut.first(part));
  };
  auto columns_at = [&](int64 col) {
    if constexpr (kIsUnaligned) return a.store.template columns_unaligned<kVector>(col);
    else return a.store.template columns<kVector>(col);
  };
  // the op's results for what was loaded, before the parameters of columns are applied
  auto map = [&](const auto& from, const auto& loaded, int64 col, const typename Op::Row& whole, auto& y) {
    constexpr int kCount = int(sizeof(y) / sizeof(Compute));
    ElementsOf<Element, kCount> elements;
    auto& x = elements.over(y);
    const unsigned keeps = from.template unpack<kCount>(loaded, x, col, Op::padding());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      y[i] = Op::map_raw(x[i], whole);
      if constexpr (Load::kDrops) y[i] = keeps >> i & 1 ? y[i] : Op::dropped();
    }
    static_cast<void>(keeps);
  };
  auto edge_col = [&](const RereadPart& p) {
    return int(threadIdx.x) < p.heads ? int64(threadIdx.x) : int64(threadIdx.x) - p.heads + p.tail;
  };
  auto has_edge = [&](const RereadPart& p) { return kIsUnaligned && int(threadIdx.x) < p.heads + p.tails; };
  // A message was overwritten: one thread computes again what it said, unless it is not there any more.
  auto all_again = [&](int64 row, const Cut& cut, int other, auto&& few) {
    const auto from = a.load.at(row);
    if (from.begins_at(a.store.at(row).address()))
      stop("nobody else writes to `out` until the call has finished");
    const int64 end = other == parts - 1 ? a.cols : cut.first(other + 1);
#pragma unroll 1
    for (int64 col = other == 0 ? 0 : cut.first(other); col < end; col += kFew)
      few(from, col, int(end - col < kFew ? end - col : kFew));
  };

  pdl_wait_and_trigger();
  if (has_ended(a.op, a.rows)) return;
  GridMeeting meeting = {nullptr, group, part, 0, 0, kSlotBytes};
  if constexpr (kInRoom) {
    meeting.room = a.store.room;
    meeting.begin();
  }
  auto row_at = [&](int64 base, int r) { return base + r * groups; };
#pragma unroll 1
  for (int64 base = group; base < a.rows; base += most * groups) {
    const int64 left = (a.rows - base + groups - 1) / groups;
    const int count = left < most ? int(left) : most;
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      const auto from = a.load.at(row_at(base, r));
      const RereadPart own = cut_of(row_at(base, r)).part(part);
      Compute pivot = 0;
      if constexpr (Op::kHasPivot) {  // each warp's first lane has a vector
        constexpr int kLeading = kVector < 4 ? 4 / kVector : 1;
        Compute leading[kLeading * kVector] = {};
        const int mine = threadIdx.x;
        if (mine < own.held) {
#pragma unroll
          for (int i = 0; i < kLeading; ++i) {
            const int64 col = own.base + int64(mine + i < own.held ? mine + i : mine) * kVector;
            from.template unpack<kVector>(from.template load<kVector>(col), leading + i * kVector, col, Op::padding());
          }
        }
        pivot = pivot_of_warp<Op, typename Load::Precision>(leading);
      }
      if constexpr (Op::kOwnNumber) {
        const Cut cut = cut_of(row_at(base, r));
        pivot = from.own_number_between(part == 0 ? 0 : cut.first(part),
            part == parts - 1 ? a.cols : cut.first(part + 1));
      }
      State total = Op::identity();
      // Loads at once, from number `begin` on, the vectors whose elements are valid, and adds them.
      auto add = [&](auto& loaded, int64 begin, auto valid) {
        constexpr int kCount = int(sizeof(loaded) / sizeof(loaded[0])), kElements = kCount * kVector;
        auto has = [&](int p) { return valid.template has<kElements>(p * kVector); };
        auto col = [&](int p) { return own.base + (begin + p * kBlock) * kVector; };
        Element x[kElements];
#pragma unroll
        for (int p = 0; p < kCount; ++p) {
          if (has(p)) loaded[p] = from.template load<kVector>(col(p));
          else loaded[p] = Load::template absent<kVector>(Op::padding());
        }
#pragma unroll
        for (int p = 0; p < kCount; ++p) {
          if (has(p)) {
            from.template unpack<kVector>(loaded[p], x + p * kVector, col(p), Op::padding());
          } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[p * kVector + i] = Op::padding();
          }
        }
        total = Op::template merge<false>(total, Op::summarize(x, valid, pivot));
      };
      int64 begin = threadIdx.x;
#pragma unroll 1
      for (; begin + (kVectors - 1) * kBlock < own.held; begin += kVectors * kBlock) {
        Loaded loaded[kVectors];
        add(loaded, begin, Predicate<kVectors * kVector>{kVectors * kVector, false});
      }
      if constexpr (kVectors > 1) {
        if (begin < own.held) {  // one vector less at most
          Loaded loaded[kVectors - 1];
          const int left = int((own.held - 1 - begin) / kBlock) + 1;
          add(loaded, begin, Predicate<kVector>{left * kVector, false});
        }
      }
      if constexpr (kIsUnaligned) {
        if (has_edge(own)) {
          const int64 col = edge_col(own);
          Element x[1];
          from.template unpack<1>(from.template load<1>(col), x, col, Op::padding());
          total = Op::template merge<false>(total, Op::summarize(x, Predicate<1>{1, false}, pivot));
        }
      }
      total = reduce_lanes<Op, false, kWarp>(with_own<Op>(total, pivot));
      if (lane == 0) slots[r][warp] = {total, pivot};
    }
    __syncthreads();
    auto own = [&](int r) {
      const Slot<Op> slot = slots[r][lane % kWarps];
      const Compute pivot = slots[r][0].pivot;
      return Slot<Op>{reduce_lanes<Op, false, kWarps, true>(Op::rebase(slot.state, slot.pivot, pivot)), pivot};
    };
    auto give = [&](int r, const Slot<Op>& all) {
      const typename Op::Row whole = a.op.finish(all.state, all.state, a.cols, all.pivot);
      if (lane == 0) wholes[r] = whole;
      if (lane == 0 && part == 0) a.op.save(row_at(base, r), whole);
    };
    auto cut_at = [&](auto r) { return cut_of(base + r); };
    auto place_at = [&](auto r, const Cut& cut, int part) { return mailbox(base + r, cut, part); };
    auto state_again = [&](int r, const Cut& cut, int other, Slot<Op>& theirs, Compute pivot) {
      State all = Op::identity(), some = Op::identity();
      int there = 0;
      all_again(base + r, cut, other, [&](const auto& from, int64 col, int left) {
        Element x[kFew];
#pragma unroll
        for (int i = 0; i < kFew; ++i) {
          x[i] = Op::padding();
          if (i < left) from.template unpack<1>(from.template load<1>(col + i), x + i, col + i, Op::padding());
        }
        some = Op::template merge<false>(some, Op::summarize(x, Predicate<0>{left, false}, pivot));
        if (++there % (kMany / kFew) == 0) all = Op::template merge<false>(all, some), some = Op::identity();
      });
      theirs = {Op::template merge<false>(all, some), pivot};
      // x has not been overwritten: where it is `out`, await_mailbox has stopped the kernel
      if constexpr (Op::kOwnNumber) theirs.state = Op::with_own(theirs.state, a.load.at(base + r).own_number());
    };
    if constexpr (kInRoom) {
      meet_in_room<Op, kMost, kWarps>(meeting, count, own, give);
    } else {
      meet_among_results<Op, kMost, kWarps>(before, count, part, parts, own,
          [&](int r) { return slots[r][0].pivot; }, cut_at, place_at, state_again, give);
    }

    if constexpr (Store::kScales) {
      auto finish = [&](const auto& from, const auto& loaded, const auto& columns, int64 col, int r, auto& z) {
        Compute y[sizeof(z) / sizeof(Compute)];
        map(from, loaded, col, wholes[r], y);
        Store::template finish<int(sizeof(z) / sizeof(Compute))>(y, columns, z);
      };
#pragma unroll 1
      for (int r = 0; r < count; ++r) {
        const auto from = a.load.at(row_at(base, r));
        const RereadPart own = cut_of(row_at(base, r)).part(part);
        typename Largest::State most = Largest::identity();
#pragma unroll(kUnroll)
        for (int64 number = threadIdx.x; number < own.held; number += kBlock) {
          const int64 col = own.base + number * kVector;
          Compute z[kVector];
          finish(from, from.template load<kVector>(col), columns_at(col), col, r, z);
          most = Largest::template merge<false>(most, Largest::of(z));
        }
        if (has_edge(own)) {
          const int64 col = edge_col(own);
          Compute z[1];
          finish(from, from.template load<1>(col), a.store.template columns<1>(col), col, r, z);
          most = Largest::template merge<false>(most, Largest::of(z));
        }
        most = reduce_lanes<Largest, false, kWarp>(most);
        if (lane == 0) largest_slots[r][warp] = {most, 0};
      }
      __syncthreads();
      auto own_largest = [&](int r) {
        return Slot<Largest>{reduce_lanes<Largest, false, kWarps, true>(largest_slots[r][lane % kWarps].state), 0};
      };
      auto give_largest = [&](int r, const Slot<Largest>& all) {
        if (lane == 0) largest[r] = all.state.max;
        if (lane == 0 && part == 0) a.store.save(row_at(base, r), a.store.scale_of(all.state.max));
      };
      auto largest_again = [&](int r, const Cut& cut, int other, Slot<Largest>& theirs, Compute) {
        theirs = {Largest::identity(), 0};
        all_again(base + r, cut, other, [&](const auto& from, int64 col, int left) {
#pragma unroll 1
          for (int i = 0; i < left; ++i) {
            Compute z[1];
            finish(from, from.template load<1>(col + i), a.store.template columns<1>(col + i), col + i, r, z);
            theirs.state = Largest::template merge<false>(theirs.state, Largest::of(z));
          }
        });
      };
      if constexpr (kInRoom) {
        meet_in_room<Largest, kMost, kWarps>(meeting, count, own_largest, give_largest);
      } else {
        meet_among_results<Largest, kMost, kWarps>(before, count, part, parts, own_largest,
            [](int) { return Compute(0); }, cut_at, place_at, largest_again, give_largest);
      }
      // the last first, and backwards: what was read last L2 still has
#pragma unroll 1
      for (int r = count - 1; r >= 0; --r) {
        const auto from = a.load.at(row_at(base, r));
        const auto to = a.store.at(row_at(base, r));
        const RereadPart own = cut_of(row_at(base, r)).part(part);
        const auto scale = a.store.scale_of(largest[r]);
        auto write = [&](const auto& loaded, const auto& columns, int64 col, auto& z) {
          constexpr int kCount = int(sizeof(z) / sizeof(Compute));
          if constexpr (Load::kStoresComputed) {
            ElementsOf<Element, kCount> elements;
            auto& x = elements.over(z);
            from.template unpack<kCount>(loaded, x, col, Op::padding());
            from.template store_computed<kCount, true>(x, col);
          }
          finish(from, loaded, columns, col, r, z);
          to.template store_scaled<kCount, true>(z, scale, col);
        };
#pragma unroll(kUnroll)
        for (int64 number = own.held - 1 - threadIdx.x; number >= 0; number -= kBlock) {
          const int64 col = own.base + number * kVector;
          Compute z[kVector];
          write(from.template load<kVector>(col), columns_at(col), col, z);
        }
        if (has_edge(own)) {
          const int64 col = edge_col(own);
          Compute z[1];
          write(from.template load<1>(col), a.store.template columns<1>(col), col, z);
        }
      }
    } else if constexpr (!kStoresNothing<Store> || Load::kStoresComputed) {
#pragma unroll 1
      for (int r = count - 1; r >= 0; --r) {
        const auto from = a.load.at(row_at(base, r));
        const auto to = a.store.at(row_at(base, r));
        const RereadPart own = cut_of(row_at(base, r)).part(part);
        const typename Op::Row whole = wholes[r];
        auto write = [&](const auto& loaded, const auto& columns, int64 col, auto& y) {
          constexpr int kCount = int(sizeof(y) / sizeof(Compute));
          typename Store::template EpilogueOperands<kCount> operands;
          if constexpr (Store::kHasEpilogueOperands) operands = to.template epilogue_operands<kCount>(col);
          if constexpr (Load::kStoresComputed) {
            ElementsOf<Element, kCount> elements;
            auto& x = elements.over(y);
            from.template unpack<kCount>(loaded, x, col, Op::padding());
            from.template store_computed<kCount, true>(x, col);
          }
          map(from, loaded, col, whole, y);
          if constexpr (Store::kHasEpilogueOperands) to.template store<kCount, true>(y, columns, operands, col);
          else to.template store<kCount, true>(y, columns, col);
        };
#pragma unroll(kUnroll)
        for (int64 number = own.held - 1 - threadIdx.x; number >= 0; number -= kBlock) {
          const int64 col = own.base + number * kVector;
          Compute y[kVector];
          write(from.template load<kVector>(col), columns_at(col), col, y);
        }
        if (has_edge(own)) {
          const int64 col = edge_col(own);
          Compute y[1];
          write(from.template load<1>(col), a.store.template columns<1>(col), col, y);
        }
      }
    }
    __syncthreads();  // slots and wholes are the next rows' from here on
  }
}

}  // namespace cupynorm
