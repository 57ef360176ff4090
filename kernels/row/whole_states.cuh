// The elements of whole rows, computed from what was loaded, and the rows' States.
#pragma once
#include <row/whole_tile.cuh>

namespace cupynorm {

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::take_one(int from, int j, const Operands& operands, bool pads) {
  Element computed[kVector];
  Load::template compute_across<kVector>(sources, loaded[from + j], operands, computed, own.step(from + j));
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const Element padding = AnyOp::padding();
    if constexpr (Load::kDrops) x[v][j] = !pads || kept.has((from + j) * kVector + v) ? computed[v] : padding;
    else x[v][j] = has(from + j) ? computed[v] : Op::kHasPivot && j > 0 ? x[v][0] : padding;
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::take(int from, bool pads) {
  if constexpr (Load::kOperandsPerRow) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) take_one(from, j, {}, pads);
  } else if constexpr (kHoldsOperands) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) take_one(from, j, operands[from + j], pads);
  } else {
    constexpr int kBatch = part_of_elements(kPart, 64 / (kVector * int(sizeof(typename Load::Type))));
    Operands operands[2][kBatch];
    auto fetch_batch = [&](int first) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int number = from + first + j;
        if (!reads(read, number)) continue;
        const auto step = own.step(has(number) ? number : 0);
        Load::template load_operands_across<kVector>(sources, step, operands[first / kBatch % 2][j]);
      }
    };
    fetch_batch(0);
#pragma unroll
    for (int first = 0; first < kPart; first += kBatch) {
      if (first + kBatch < kPart) fetch_batch(first + kBatch);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) take_one(from, first + j, operands[first / kBatch % 2][j], pads);
    }
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::store_computed(int from) const {
  if constexpr (Load::kStoresComputed) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (!own.here || !has(from + j)) continue;
      Element computed[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) computed[v] = x[v][j];
      Load::template store_computed_across<kVector>(sources, computed, own.step(from + j));
    }
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline int WholeRows<AnyOp, Load, Store, Shape>::valid(int from) const {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kPart; ++j) count += has(from + j);
  return count;
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::summarize_halves() {
  if (there(0)) Op::begin(loaded, mine);
#pragma unroll
  for (int from = 0; from < kElements; from += kPart) {
    if (!there(from)) break;
    take(from, false), store_computed(from);  // what is dropped is -inf
#pragma unroll
    for (int v = 0; v < kVector; ++v) Op::add(mine[v], x[v]);
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::summarize_parts() {
  using Rows = RunningRows<Op, kVector, Precision>;
  constexpr bool kMarksKept = Load::kDrops && kAddsKept<Rows>;
  Rows running;
#pragma unroll
  for (int from = 0; from < kElements; from += kPart) {
    if (!there(from)) break;
    take(from, !kMarksKept), store_computed(from);
    if constexpr (kMarksKept) running.add_kept(x, [&](int v) { return KeptPart<Shape, kPart>{kept, from, v}; });
    else if (from + kPart <= kSure) running.add(x, Predicate<kPart>{kPart, false});
    else running.add(x, Predicate<0>{valid(from), false});
  }
  take_states<Shape>(running, mine, pivot);
}

template <class AnyOp, class Load, class Store, class Shape>
template <bool kAll>
inline void WholeRows<AnyOp, Load, Store, Shape>::summarize_own() {
  if constexpr (!Op::kOwnNumber) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) pivot[v] = 0;
  }
  if constexpr (Own::kAny) {
    summarize_halves();
  } else if constexpr (kPacked) {
    summarize_parts();
  } else {
    take(0, true), store_computed(0);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if constexpr (Op::kHasPivot) pivot[v] = LanesApart<kLanes>::first(Op::pivot_of(x[v], Precision()));
      if constexpr (kAll) mine[v] = Op::summarize(x[v], AllKept<kSure>{{valid(0), false}}, pivot[v]);
      else mine[v] = Op::summarize(x[v], Predicate<kSure>{valid(0), false}, pivot[v]);
    }
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::summarize() {
  for_kept([this](auto warp) { summarize_own<decltype(warp)::kKeepsAll>(); });
#pragma unroll
  for (int v = 0; v < kVector; ++v) total[v] = mine[v] = with_own<Op>(mine[v], pivot[v]);
  reduce_apart<Op, Shape>(total, pivot, places, part, 0, [&] {
    if (!meet_for_long(at.parts)) prefetch_next();
  }, slots_of(own));
}

}  // namespace cupynorm
