// The contract of a row op, all of it. An op is a struct that knows neither memory nor threads; a variant (row/) is a
// loop over rows that knows no op. Every op inherits RowOp, which has the default of each optional member.
//
// Types
//   Compute   What the op computes in: float or double.
//   Element   What one element is to the op. Default: one Compute. A backward op has Fields<Compute, 2>, which the
//             function of a FusedLoad makes: it has as many outputs.
//   State     What is known of some elements of a row. Trivially copyable: it crosses lanes, warps and blocks.
//   Row       What is known of a whole row, and all that `map` needs besides an element.
//
// From elements to a State; called by row/load.cuh, staged.cuh, cached.cuh, together.cuh and the collectives
//   padding()                    The Element that stands in for those that are not there. It must not change what
//                                `summarize` gives, apart from what the predicate tells the op.
//   identity()                   The State of no elements: merge(identity(), s) is s.
//   summarize(x[N], valid, pivot)
//                                The State of those x[i] with valid.has<N>(i); the others are padding. May leave in
//                                x[i] what `map` takes instead of the element. Adds up in Predicate::kAccumulators
//                                independent accumulators.
//   merge<kEqual>(a, b)          The State of both. kEqual: both are of equally many elements. Symmetric to the bit,
//                                because lanes of a butterfly exchange their States and must agree.
//   gather(s, lanes)             The State of all that several lanes hold, by reductions of single numbers: lanes.sum,
//                                .max and .first.
//   rebase(s, from, to)          The State s, whose statistics are counted from `from`, counted from `to`. Default: s.
//
// From a State to results; called by every variant
//   finish(mine, total, cols, pivot)
//                                The Row of a row of `cols` columns, given the thread's own State and that of the row.
//                                Variants that do not hold elements in registers pass `total` twice, and use map_raw.
//   map(x, row)                  The result, one Compute, for an element as `summarize` left it.
//   map_raw(x, row)              The result for an element as it was loaded.
//   saves(), save(index, row)    Whether the caller asked for statistics, and how they are written. Default: nobody.
//
// Facts
//   kHasArguments                Whether the struct has members, which come with the launch: they take registers.
//   kOfSums                      A State is nothing but sums over the elements, so parts of a row cost no more than it.
//
// Optional, kHasPivot: statistics of x - pivot, where the pivot is an element of the row, so that no digits are lost
//   pivot_of(few[N], Precision())
//                                That element, or one as good, out of a few of the row; Precision: the type with x's
//                                precision. Without it `pivot` is 0 everywhere.
//
// Optional, kOwnNumber: a number of its own that each row has beside its elements, and that the Load gives:
// own_number() of its RowPointer. The variant passes it on in `pivot`'s place, from which nothing is counted then
//   with_own(s, number)          The State s with it. Every thread adds it before States meet, so that the State of a
//                                row says that it has been read. Blocks that leave messages among the results, and so
//                                in place of x perhaps, give only that of their own columns, own_number_between().
//
// Optional, kTwoPass: two passes over what a warp has, where they are cheaper than one exchange of States. Called by
// summarize_lanes and row_cached
//   first_pass(x[N], valid, pivot)   A number to be summed over lanes; leaves x - pivot in x.
//   second_pass(x[N], valid, mean)   A number to be summed over lanes, given the mean of the first.
//   Sums, one_pass(x[N], valid, pivot, before), state_of(sums, count)
//                                Both sums at once, for few elements of few digits, added to those before; and the
//                                State that they come to.
//   exchange(s, across)          s with all that differs between lanes of equal counts replaced by across(...).
//
// Optional, kExtends: a State to which elements come. Called by RunningRows
//   extend(s, x[N], valid)       The same State as merge(s, summarize(x, valid, 0)), in fewer steps.
//
// Optional, kAddsUp: sums of elements of 16 bits, whose digits they hold. Called by RunningRows
//   Sums, add_up(sums, x[N], kept)
//                                Adds those x[i] for which kept(i), of which there are kept.total(), or each as often
//                                as its weight says.
//   counts<N>(valid, i, x)       Whether x[i], of N, is one of them; elements that are not valid are padding.
//   kCountsAllKept               Whether those are all that no mask drops.
//   state_of(sums)               The State that they come to.
//
// Optional, OfHalves: another op without arguments, which gives the same results for x in float16 that waits two in a
// register. Called by row/whole.cuh: State, Row, identity, merge, gather, finish and map_raw as above, and
//   begin(x[kCols], s[kRows])    The States of no elements yet, given all of them, packed kRows in a Vector.
//   add(s, x[N])                 Adds some of these elements to a row's State.
//
// Optional, kMaskable: masks. Called by row/load.cuh, row/epilogue.cuh and staged.cuh
//   dropped()                    The result for an element that a mask drops.
//   drops_padding(row)           Whether `map` makes dropped() of padding by itself, as `summarize` left it. And
//                                map_raw, where kMapsPadding says that it may: what is dropped is then looked at only
//                                in other rows (row/whole.cuh).
//   summarize_some<kVector>(x[N], some[kVectors], fill)
//                                As summarize, of the vectors p for which some[p], after fill(p) has put their elements
//                                into x, and of what is behind all vectors in x.
//
// Optional, kRounds: further rounds over the elements of a row while it is on the chip, each of which may leave some of
// them out. `summarize` is the first round. Called by row/rounds.cuh, from row_registers, row_computed and row_across
//   Progress                     What is known of a row after some rounds: the same for every thread that shares it.
//   begin()                      The Progress before the first round.
//   again(progress, total)       Whether there is another round, given the State of the row that the last one has
//                                found. Once it says no it says no for good, whatever it is given.
//   settled(s, progress)         Whether the next round would find the State s again, which the last one has found of
//                                some elements.
//   summarize_again(x[N], valid, progress)
//                                The State of x in the next round, padding included. May leave in x what later rounds
//                                and `map` take instead, as `summarize` may.
//   closed(progress)             What stands for the State of the row when `finish` is called: it looks at nothing
//                                else.
//
// Optional, kSearches, of ops with kRounds: steps of a search before a round, which ask less of the elements and have
// less to tell. again(progress, total) then says what is next: kRoundNext, kStepNext or 0. Called as the rest is
//   Search                       An op, as far as State, identity, merge, gather and rebase go.
//   summarize_step(x[N], progress)
//                                What the next step finds of x. x stays as it is: as summarize or summarize_again has
//                                left it.
//   summarize_all_steps(x[N], progress)
//                                What the last step finds, given all elements of the row.
//   leave(x[N], progress)        Makes that of elements as they were, where they did not wait so.
//   step(progress, found)        What is next, given what the last step has found of the row; of a row that has no
//                                step to go, too, as those have others that share its warp.
//
// Optional, kMayEnd, of ops without kRounds: of one of several kernels, which may have nothing to do. Called by
// row/rounds.cuh, from row_reread and row_across
//   ended(row)                   Whether nothing is asked of the row.
//   hand_on(row)                 What is done then in place of save(), where it is so of all rows.
#pragma once
#include <base/math.cuh>

namespace cupynorm {

// What a row does next. Rows that go on together combine these bits.
constexpr unsigned kRoundNext = 1, kStepNext = 2;

struct RowOp {
  static constexpr bool kHasArguments = false, kHasPivot = false, kOwnNumber = false, kTwoPass = false,
      kMaskable = false, kExtends = false, kRounds = false, kSearches = false, kMayEnd = false,
      kAddsUp = false, kCountsAllKept = false, kMapsPadding = false, kOfSums = false;

  template <class State, typename T>
  static State rebase(State s, T, T) {
    return s;
  }
  static constexpr bool saves() { return false; }
  template <class Row>
  void save(int64, const Row&) const {}
};

}  // namespace cupynorm
