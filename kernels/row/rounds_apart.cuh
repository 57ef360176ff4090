// Statistics of a thread's rows that lie apart, in a further round over their elements and in a step of a search
// (rounds.cuh). x: the elements, all of them where they wait as numbers. each_kept(add) calls add(v, x, from) for each
// part of the thread's elements of row v, from its element `from` on, with padding in place of elements that a mask
// drops.
#pragma once
#include <row/across_choices.cuh>
#include <row/rounds.cuh>

namespace cupynorm {

// The States of the thread's own elements. Nothing is asked of rows that are through.
template <class Op, class Choice, class EachKept>
inline void summarize_again(ElementOf<Op> (&x)[Choice::kVector][Choice::kPart],
    const typename Op::Progress (&progress)[Choice::kVector], typename Op::State (&own)[Choice::kVector],
    const EachKept& each_kept) {
  constexpr int kVector = Choice::kVector, kPart = Choice::kPart;
  bool settled = true;
#pragma unroll
  for (int v = 0; v < kVector; ++v) settled &= Op::settled(own[v], progress[v]);
  if (!any_lane(!settled)) return;
  constexpr Predicate<kPart> kAllOfPart = {kPart, false};
  if constexpr (Choice::kAsNumbers) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) own[v] = Op::summarize_again(x[v], kAllOfPart, progress[v]);
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) own[v] = Op::identity();
    each_kept([&](int v, ElementOf<Op> (&held)[kPart], int) {
      own[v] = Op::template merge<false>(own[v], Op::summarize_again(held, kAllOfPart, progress[v]));
    });
  }
}

// The same of the next step.
template <class Op, class Choice, class EachKept>
inline void find_step(ElementOf<Op> (&x)[Choice::kVector][Choice::kPart],
    const typename Op::Progress (&progress)[Choice::kVector], typename Op::Search::State (&found)[Choice::kVector],
    const EachKept& each_kept) {
  using Search = typename Op::Search;
  constexpr int kVector = Choice::kVector, kElements = Choice::kElements, kPart = Choice::kPart;
  if constexpr (Choice::kAlone) {
    ElementOf<Op> all[kVector][kElements];
    each_kept([&](int v, ElementOf<Op> (&held)[kPart], int from) {
      if constexpr (Choice::kPacked) Op::leave(held, progress[v]);
#pragma unroll
      for (int j = 0; j < kPart; ++j) all[v][from + j] = held[j];
    });
#pragma unroll
    for (int v = 0; v < kVector; ++v) found[v] = Op::summarize_all_steps(all[v], progress[v]);
  } else if constexpr (Choice::kAsNumbers) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) found[v] = Op::summarize_step(x[v], progress[v]);
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) found[v] = Search::identity();
    each_kept([&](int v, ElementOf<Op> (&held)[kPart], int) {
      Op::leave(held, progress[v]);
      found[v] = Search::template merge<false>(found[v], Op::summarize_step(held, progress[v]));
    });
  }
}

}  // namespace cupynorm
