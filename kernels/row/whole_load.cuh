// How a tile of whole rows comes to the registers of its threads, with the columns' parameters, and with what a mask
// keeps of it.
#pragma once
#include <row/drawn.cuh>
#include <row/whole_tile.cuh>

namespace cupynorm {

template <class AnyOp, class Load, class Store, class Shape>
template <bool kWithin, bool kNext>
inline void WholeRows<AnyOp, Load, Store, Shape>::fetch(const Sources& sources, const Bounds<int>& read, int j) {
  if constexpr (Load::kInterval && !kWithin) loaded[j] = {};
  if (!kWithin && !reads(read, j)) return;
  const auto step = own.step(has(j) ? j : 0);
  loaded[j] = Load::template load_x_across<kVector>(sources, step);
  if constexpr (kHoldsOperands) {
    if constexpr (kNext) Load::template load_rows_operands_across<kVector>(sources, step, operands[j]);
    else Load::template load_operands_across<kVector>(sources, step, operands[j]);
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::prefetch_next() const {
  prefetch_tile<Shape>(a.load, a.rows, at.next, [&](auto& source) { source.begin_at(first); },
      [&](const auto& source, int j) {
    if (has(j) && source.template reads<1>(j * kDown)) source.prefetch_across(Step<kDown>{j});
    if constexpr (Load::kDrops) {  // all of it, as none is in registers yet
      if (has(2 * j)) source.mask.prefetch_across(Step<kDown>{2 * j});
      if (has(2 * j + 1)) source.mask.prefetch_across(Step<kDown>{2 * j + 1});
    }
  });
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::convert_parameters() const {
  Number* const to = numbers(places.place);
#pragma unroll 1
  for (int i = threadIdx.x; is_first_tile() && i < held; i += Shape::kBlock) {
    Number number[1];
    Store::Affines::template convert<1>(a.store.template columns<1>(begin + i), number);
    to[i] = number[0];
  }
  if constexpr (!Places::kAny) __syncthreads();  // else the reduction has barriers
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::load() {
  go_to(sources, own);
  if constexpr (Load::kInterval) read = interval_of(sources);
  if constexpr (kOfIntervals) keeps_all = all_lanes(keeps_all_of(sources));
  // Bytes of a mask are loaded before x, which gets their registers, where that was measured (docs/notes/087).
  constexpr bool kBytesFirst =
      Load::kMaskBytes && !Shape::kOfGrid && AnyOp::kCountsAllKept && !kStoresNothing<Store>;
  if constexpr (kBytesFirst) {
    kept = find_kept<Load, Shape, true>(sources, own, held - down,
        [this](int j) { fetch(sources, read, j); });
  } else if (is_first_tile()) {
    if (kLoadsAll && keeps_all) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) fetch<true>(sources, read, j);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) fetch(sources, read, j);
    }
  }
  if (meet_for_long(at.parts)) prefetch_next();
  // ---- while they are on their way
#pragma unroll
  for (int v = 0; v < kVector; ++v) targets[v] = a.store.at(own.here ? own.of(v) : 0), targets[v].begin_at(first);
  if constexpr (Op::kOwnNumber) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) pivot[v] = a.load.at(own.here ? own.of(v) : 0).own_number();
  }
  if constexpr (kConverted) convert_parameters();
  if constexpr (kDraws<Load>) draw_across<Shape>(sources, lane, down, held);
  if constexpr (Load::kDrops) {
    if (kLoadsAll && keeps_all) keep_all();
    else if constexpr (!kBytesFirst)
      kept = find_kept<Load, Shape, false>(sources, own, held - down, [](int) {});
    if constexpr (Own::kAny) {
      if (!kOfIntervals || !keeps_all) drop_halves<Shape>(kept, loaded);
    }
  }
}

}  // namespace cupynorm
