// The results of whole rows: what is stored, and the scales of rows that have one.
#pragma once
#include <row/whole_tile.cuh>

namespace cupynorm {

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::finish() {
  const Op op = Own::of(a.op);
#pragma unroll
  for (int v = 0; v < kVector; ++v) whole[v] = op.finish(kPacked ? total[v] : mine[v], total[v], a.cols, pivot[v]);
  if (own.here && part == 0 && int(threadIdx.x) < kLanes) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (own.has(v)) op.save(own.of(v), whole[v]);
    }
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::results(int from, int j, Compute (&y)[kVector]) const {
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    if constexpr (kPacked) y[v] = Op::map_raw(x[v][j], whole[v]);
    else y[v] = Op::map(x[v][j], whole[v]);
    if constexpr (Load::kDrops && !kLooksLater)
      y[v] = kept.has((from + j) * kVector + v) ? y[v] : AnyOp::dropped();
  }
}

template <class AnyOp, class Load, class Store, class Shape>
template <int kRows>
inline void WholeRows<AnyOp, Load, Store, Shape>::store_at(const typename Store::RowPointer (&targets)[kRows],
    const Compute (&y)[kRows], int j) const {
  constexpr typename Store::template EpilogueOperands<1> kNoOperands[kRows] = {};
  Store::template store_across<kRows>(targets, y, columns(j), kNoOperands, own.step(j));
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::scaled_results(int from, int j, Compute (&z)[kVector]) const {
  Compute y[kVector];
  results(from, j, y);
  Store::template finish_across<kVector>(y, columns(from + j), z);
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::find_scales() {
  typename Largest::State largest[kVector];
  const Compute zero[kVector] = {};
#pragma unroll
  for (int v = 0; v < kVector; ++v) largest[v] = Largest::identity();
#pragma unroll
  for (int from = 0; from < kElements; from += kPart) {
    if (!there(from)) break;
    if constexpr (kPacked) take(from, false);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (!has(from + j)) continue;
      Compute z[kVector];
      scaled_results(from, j, z);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const Compute one[1] = {z[v]};
        largest[v] = Largest::template merge<false>(largest[v], Largest::of(one));
      }
    }
  }
  const LargestPlaces largest_places = {places.place + Places::kBytes, places.mbarriers + 2, places.meeting};
  reduce_apart<Largest, Shape>(largest, zero, largest_places, part, 0, NothingMeanwhile(),
      slots_of(own));
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    scales[v] = a.store.scale_of(largest[v].max);
    if (own.here && part == 0 && int(threadIdx.x) < kLanes) {
      if (own.has(v)) a.store.save(own.of(v), scales[v]);
    }
  }
}

template <class AnyOp, class Load, class Store, class Shape>
template <bool kNext>
inline void WholeRows<AnyOp, Load, Store, Shape>::store(const Sources& next, const Bounds<int>& read_next) {
#pragma unroll
  for (int from = 0; from < kElements; from += kPart) {
    // a thread of which some tile is the last has a next one
    if (!(kNext && !kPacked) && !there(from)) break;
    if constexpr (kPacked) take(from, false);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (has(from + j)) {
        Compute y[kVector];
        if constexpr (Store::kScales) {
          scaled_results(from, j, y);
          Store::template store_scaled_across<kVector>(targets, y, scales, own.step(from + j));
        } else {
          results(from, j, y);
          store_at<kVector>(targets, y, from + j);
        }
      }
      if constexpr (kNext) fetch<false, true>(next, read_next, from + j);
    }
  }
}

template <class AnyOp, class Load, class Store, class Shape>
inline void WholeRows<AnyOp, Load, Store, Shape>::look_later() const {
  if constexpr (kLooksLater) {
    bool wrong[kVector], any = false;
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      wrong[v] = own.here && !Op::drops_padding(whole[v]) && own.has(v), any |= wrong[v];
    if (!any) return;
    Sources again;  // the pointers from before would have waited in registers
    go_to(again, own);
#pragma unroll 1
    for (int j = 0; j < kElements && j * kDown < held - down; ++j) {
      const unsigned bytes = Load::template mask_bytes_across<kVector>(again, own.step(j));
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (!wrong[v] || (bytes >> 8 * v & 0xff) != 0) continue;
        const typename Store::RowPointer target[1] = {targets[v]};
        const Compute y[1] = {AnyOp::dropped()};
        store_at<1>(target, y, j);
      }
    }
  }
}

}  // namespace cupynorm
