// How the blocks of row_reread (reread.cuh) meet by messages that lie where their first results will be. What was there
// before (x itself or an operand, where the call may write in place) is kept in shared memory while the messages are
// there, and put back when all blocks have read them. meeting.cuh has the same by messages that have room of their own.
#pragma once
#include <base/grid.cuh>
#include <base/mailbox.cuh>
#include <base/reduce.cuh>

namespace cupynorm {

// 16 bytes of a mailbox, whatever they mean.
using MailboxPiece = Vector<unsigned, 4>;
// How many pieces a message has room for.
template <class Op>
constexpr int kPiecesOf = Mailbox<Op>::kWords / 2 > 4 ? Mailbox<Op>::kWords / 2 : 4;

// As mailbox_at, in arithmetic by which the compiler still knows that it is global memory.
inline MailboxWord* mailbox_from(void* place) {
  return reinterpret_cast<MailboxWord*>(
      static_cast<unsigned char*>(place) + (-reinterpret_cast<unsigned long long>(place) & 15));
}

// Leaves a message to all blocks, and keeps what was in its place before.
template <class Op>
inline void leave_mailbox(MailboxPiece (&before)[kPiecesOf<Op>], MailboxWord* place, const Slot<Op>& slot) {
  constexpr int kPieces = Mailbox<Op>::kWords / 2;
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    before[i] = load_vector<unsigned, 4>(reinterpret_cast<const unsigned*>(place + 2 * i));
  send_mailbox<Op>(place, slot);
}
// Puts it back.
template <class Op>
inline void take_mailbox_back(const MailboxPiece (&before)[kPiecesOf<Op>], MailboxWord* place) {
#pragma unroll
  for (int i = 0; i < Mailbox<Op>::kWords / 2; ++i)
    store_vector<true>(reinterpret_cast<unsigned*>(place + 2 * i), before[i]);
}

// Merges what all blocks have found of `count` rows, kMost at most: own(r) is what a warp of this block has to say of
// row r, the same in all lanes, and give(r, slot) gets the State of the whole row, counted from pivot_of(r).
// place_at(r, cut_at(r), part) is where a block's message is; again(r, cut_at(r), part, theirs, pivot) finds once more
// what one said that has been overwritten. before: shared memory for what was there. Ends with a barrier.
template <class Op, int kMost, int kWarps, class Own, class PivotOf, class CutAt, class PlaceAt, class Again,
    class Give>
inline void meet_among_results(MailboxPiece (&before)[kMost][kPiecesOf<Op>], int count, int part, int parts, Own own,
    PivotOf pivot_of, CutAt cut_at, PlaceAt place_at, Again again, Give give) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll 1
  for (int r = warp; r < count; r += kWarps) {
    const Slot<Op> slot = own(r);
    if (lane == 0) leave_mailbox<Op>(before[r], place_at(r, cut_at(r), part), slot);
  }
  grid_wait(grid_arrive());
#pragma unroll 1
  for (int r = warp; r < count; r += kWarps) {
    const auto cut = cut_at(r);
    const auto pivot = pivot_of(r);
    typename Op::State all = Op::identity();
#pragma unroll 1
    for (int other = lane; other < parts; other += kWarp) {
      Slot<Op> theirs;
      // the barrier has made all of them visible: one look is enough
      if (!await_mailbox<Op, 1>(place_at(r, cut, other), theirs)) again(r, cut, other, theirs, pivot);
      all = Op::template merge<false>(all, Op::rebase(theirs.state, theirs.pivot, pivot));
    }
    give(r, Slot<Op>{reduce_lanes<Op, false, kWarp, true>(all), pivot});
  }
  grid_wait(grid_arrive());  // all messages are read
  if (int(threadIdx.x) < count)
    take_mailbox_back<Op>(before[threadIdx.x], place_at(threadIdx.x, cut_at(threadIdx.x), part));
  __syncthreads();
}

}  // namespace cupynorm
