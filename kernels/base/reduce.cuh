// All-reduces of an op's State over the threads that share a row: lanes, warps, the blocks of a cluster.
#pragma once
#include <base/cluster.cuh>
#include <base/mailbox.cuh>
#include <base/math.cuh>
#include <io/vector.cuh>

namespace cupynorm {

// Sums and maxima over kLanes neighbouring lanes (a power of two). All 32 lanes of the warp must call; all lanes of a
// group get the same bits, because each step is symmetric. kAlike: every group of the warp holds the same numbers, and
// has nothing else to do meanwhile. The maximum is then one warp instruction (sm_80) instead of a chain of shuffles.
// Where each lane has numbers of its own, exponentials fill the wait for the shuffles, and the shuffles are faster
// (docs/notes/048, "The maximum over a warp").
template <int kLanes, bool kAlike = false>
struct Lanes {
  template <typename T>
  static T sum(T value) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
  }
  static unsigned sum(unsigned value) { return kLanes == kWarp ? sum_of_warp(value) : sum<unsigned>(value); }
  template <typename T>
  static T first(T value) {
    return __shfl_sync(kAllLanes, value, 0, kLanes);
  }
  static unsigned max(unsigned value) {
    return kLanes == kWarp || kAlike ? largest_of_warp(value) : max<unsigned>(value);
  }
  static float max(float value) {
    return kAlike && kLanes > 2 ? from_ordered_bits(largest_of_warp(ordered_bits(value))) : max<float>(value);
  }
  template <typename T>
  static T max(T value) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
    return value;
  }
};

// Whether it is so in any lane of the warp, all of which must call: they take the same branch.
inline bool any_lane(bool so) { return __any_sync(kAllLanes, so) != 0; }
inline bool all_lanes(bool so) { return __all_sync(kAllLanes, so) != 0; }

// The State of what kLanes neighbouring lanes hold, for each of them. kEqual: every lane holds the same number of
// elements; ops of two passes then merge, symmetrically. kAlike: as in Lanes.
template <class Op, bool kEqual, int kLanes, bool kAlike = false>
inline typename Op::State reduce_lanes(typename Op::State s) {
  if constexpr (kLanes > 1 && !(kEqual && Op::kTwoPass)) {
    s = Op::gather(s, Lanes<kLanes, kAlike>());
  } else {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      auto across = [distance](auto value) { return __shfl_xor_sync(kAllLanes, value, distance); };
      if constexpr (Op::kTwoPass) s = Op::template merge<true>(s, Op::exchange(s, across));
    }
  }
  return s;
}

// The State s with the number that a row has of its own, if the op takes one.
template <class Op>
inline typename Op::State with_own(typename Op::State s, typename Op::Compute number) {
  if constexpr (Op::kOwnNumber) return Op::with_own(s, number);
  else return s;
}

// The State of what kLanes neighbouring lanes hold, x[N] each, of which `valid` ones count; `count` is the sum of that
// over the lanes. `mine` is this lane's own State, where the op has one. Two reductions of one number are cheaper than
// one reduction of a State, so an op may take two passes over its elements. kOnce: each lane summarises what it has,
// and the lanes exchange States once, which has the shorter latency where nothing else fills the wait
// (docs/notes/048, "Two reductions of one number, or one of a State").
template <class Op, bool kEqual, bool kShort, bool kOnce, int kLanes, int N, class Predicate>
inline typename Op::State summarize_lanes(ElementOf<Op> (&x)[N], Predicate valid, int count,
    typename Op::Compute pivot,
                                          typename Op::State& mine) {
  using Compute = typename Op::Compute;
  if constexpr (Op::kTwoPass && kShort) {
    const auto sums = Op::one_pass(x, valid, pivot);
    const Compute sum = Lanes<kLanes>::sum(sums.sum), squares = Lanes<kLanes>::sum(sums.squares);
    const Compute all = kEqual ? Compute(kLanes * N) : Compute(count);
    const Compute mean = kEqual ? sum * (Compute(1) / (kLanes * N)) : sum * reciprocal(larger(all, Compute(1)));
    const Compute m2 = multiply_add(-sum, mean, squares);
    return {mean, m2 < 0 ? Compute(0) : m2, all};
  } else if constexpr (Op::kTwoPass && kLanes > 1 && !kOnce) {
    const Compute sum = Lanes<kLanes>::sum(Op::first_pass(x, valid, pivot));
    const Compute mean = kEqual ? sum * (Compute(1) / (kLanes * N))
        : sum * reciprocal(larger(Compute(count), Compute(1)));
    const Compute m2 = Lanes<kLanes>::sum(Op::second_pass(x, valid, mean));
    return {mean, m2, kEqual ? Compute(kLanes * N) : Compute(count)};
  } else {
    mine = with_own<Op>(Op::summarize(x, valid, pivot), pivot);
    return reduce_lanes<Op, kEqual && !kOnce, kLanes>(mine);
  }
}

// The largest magnitude of some elements, nan if one of them is, reduced as an op's State is. Between lanes by the
// bits, which are in the order of the numbers, with inf and nan above all.
template <typename T>
struct Magnitude {
  using Compute = T;
  struct State {
    T max;
  };
  static constexpr bool kTwoPass = false, kHasPivot = false;
  static State identity() { return {0}; }

  template <int N>
  static State of(const T (&x)[N]) {
    T max = magnitude(x[0]);
#pragma unroll
    for (int i = 1; i < N; ++i) max = larger_or_nan(max, magnitude(x[i]));
    return {max};
  }
  template <bool kEqual>
  static State merge(State a, State b) {
    return {larger_or_nan(a.max, b.max)};
  }
  template <class Lanes>
  static State gather(State s, Lanes lanes) {
    return {from_bits(lanes.max(magnitude_bits(s.max)))};
  }
  static State rebase(State s, T, T) { return s; }
};

// A warp's state in shared memory, and the value that it counts from.
template <class Op>
struct Slot {
  typename Op::State state;
  typename Op::Compute pivot;
};

// How many slots hold the states of `warps` warps: a power of two.
constexpr int slots_for(int warps) { return warps > 16 ? 32 : warps > 8 ? 16 : warps > 4 ? 8 : warps > 2 ? 4
    : warps > 1 ? 2 : 1; }

// Gives the slots that no warp has the State of no elements. All threads see them after the next barrier.
template <int kWarps, class Op, int kRows, int kGroups, int kSlots>
inline void clear_slots(Slot<Op> (&slots)[kRows][kGroups][kSlots]) {
  constexpr int kSpare = kSlots - kWarps;
  for (int i = threadIdx.x; i < kRows * kGroups * kSpare; i += blockDim.x)
    slots[i / (kGroups * kSpare)][i / kSpare % kGroups][kWarps + i % kSpare] = {Op::identity(), 0};
}

// Over the kWarps neighbouring warps (a power of two, 32 at most) of each group of a block, after each warp has reduced
// its lanes; kRows states at once. Every thread gets its group's results. `warp` counts within the group. All threads
// of the block must call. `pivot` is what each warp's states count from; every warp ends with its own. One barrier: a
// caller in a loop must take other slots the next time, so that nobody overwrites what a slow warp still reads.
template <class Op, bool kEqual, int kWarps, int kRows, int kGroups>
inline void reduce_warps(typename Op::State (&s)[kRows], const typename Op::Compute (&pivot)[kRows],
                         Slot<Op> (&slots)[kRows][kGroups][kWarps], int group, int warp) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) slots[r][group][warp] = {s[r], pivot[r]};
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Slot<Op> slot = slots[r][group][lane % kWarps];
    s[r] = reduce_lanes<Op, kEqual, kWarps, true>(Op::rebase(slot.state, slot.pivot, pivot[r]));
  }
}

// The same in two steps, with a barrier between: an op without a pivot, whose threads have work until all have told.
template <class Op, class Shape, int kSlots>
inline void tell_warps(typename Op::State s, Slot<Op> (&slots)[kSlots], int warp) {
  if constexpr (Shape::kWarps > 1) {
    if (threadIdx.x % kWarp == 0) slots[warp] = {s, 0};
  }
}
template <class Op, bool kEqual, int kSlots>
inline typename Op::State told_by_warps(const Slot<Op> (&slots)[kSlots]) {
  return reduce_lanes<Op, kEqual, kSlots, true>(slots[threadIdx.x % kSlots].state);
}

// What each warp counts from, if the op does: its first lane's pivot.
template <class Op, class Precision, int kCount>
inline typename Op::Compute pivot_of_warp(const typename Op::Compute (&x)[kCount]) {
  static_assert(kCount >= 4);
  if constexpr (Op::kHasPivot) {
    typename Op::Compute first[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) first[i] = x[i];
    return __shfl_sync(kAllLanes, Op::pivot_of(first, Precision()), 0);
  } else {
    return 0;
  }
}

// How the vectors of a row are shared out among blocks: `each` to every one, and one more to the first `more`.
struct Shares {
  int64 each;
  int more;
  // In 32 bits where that is enough: a division of 64 bits takes longer (docs/notes/048, "Divisions of 64 bits").
  static Shares of(int64 vectors, int parts) {
    const int64 each = vectors >> 31 ? vectors / parts : unsigned(vectors) / unsigned(parts);
    return {each, int(vectors - each * parts)};
  }
  int64 begin(int part) const { return part * each + (part < more ? part : more); }
  int64 held(int part) const { return each + (part < more); }
};

// A Slot as the words that cross between blocks through global memory, in pairs of MailboxWords; without the pivot if
// the op has none. kWords: how many MailboxWords it takes. Where `out` is x itself, whose bytes might look like
// messages, their places must have been cleared, and all blocks have met since.
template <class Op>
struct Mailbox {
  static constexpr int kBytes = int(Op::kHasPivot ? sizeof(Slot<Op>) : sizeof(typename Op::State)),
      kWords = (kBytes + 7) / 8 * 2;
  union {
    unsigned word[kWords];
    Slot<Op> slot;
  };
};
// Where messages lie among a block's results, the first of which is at `place`: at a whole 16 bytes.
inline MailboxWord* mailbox_at(const void* place) {
  return reinterpret_cast<MailboxWord*>((reinterpret_cast<unsigned long long>(place) + 15) / 16 * 16);
}
template <class Op>
inline void send_mailbox(MailboxWord* to, const Slot<Op>& slot) {
  Mailbox<Op> own = {};
  own.slot = slot;
#pragma unroll
  for (int i = 0; i < Mailbox<Op>::kWords; i += 2) send_mailbox(to + i, own.word[i], own.word[i + 1]);
}
template <class Op, int kMaxPolls>
inline bool await_mailbox(const MailboxWord* from, Slot<Op>& slot) {
  Mailbox<Op> own = {};
  const bool here = await_mailbox<kMaxPolls>(from, own.word);
  slot = own.slot;
  return here;
}
// Returns the State of `count` elements of a row from column `begin` on, read by one thread. It replaces another
// block's message that something else has overwritten, so that somebody else who writes to `out` delays the call but
// does not stop the device; the results are right if what was written was the same. Where `out` is x itself, x may be
// overwritten too: then the kernel stops. kFew elements are summarised at a time. kMany elements (0: all) are merged
// into a sum of their own first, because what is added to a long sum is rounded at the size of that sum. This
// code takes registers from the usual path. As a function that is not inlined it would take fewer, but gave wrong
// results for unaligned rows with NVRTC 13.0 (docs/notes/048, "What a lost message costs the usual path").
template <class Op, int kFew, int kMany, class From, typename Count>
inline typename Op::State read_again(From from, int64 begin, Count count, typename Op::Compute pivot, bool in_place) {
  using State = typename Op::State;
  if (in_place) stop("nobody else writes to `out` until the call has finished");
  const auto* x = static_cast<const typename From::Type*>(from.address(begin));
  auto few = [&](Count left) {
    ElementOf<Op> own[kFew];
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      own[i] = Op::padding();
      if (i < left) unpack<1>(load_vector<typename From::Type, 1>(x + i), own + i);
    }
    x += kFew;
    return Op::summarize(own, Predicate<0>{left < kFew ? int(left) : kFew, false}, pivot);
  };
  State all = Op::identity();
#pragma unroll 1
  while (count > 0) {
    if constexpr (kMany > 0) {
      State some = Op::identity();
#pragma unroll 1
      for (int i = 0; i < kMany && count > 0; i += kFew, count -= kFew)
        some = Op::template merge<false>(some, few(count));
      all = Op::template merge<false>(all, some);
    } else {
      all = Op::template merge<false>(all, few(count)), count -= kFew;
    }
  }
  return all;
}

// What the blocks of a cluster tell one another: a Slot from each, in kQuads words of 16 bytes; with kNotes one number
// from the first block; and the mbarrier that says that all of it has come.
template <class Op, int kCtasPerRow, bool kNotes = false>
struct alignas(16) ClusterMailbox {
  static constexpr int kQuads = int((sizeof(Slot<Op>) + 15) / 16), kBytes = 16 * (kCtasPerRow * kQuads + kNotes);
  uint4 words[kCtasPerRow][kQuads], note;
  Mbarrier mbarrier;
};

// Sends a block's state to all blocks of its cluster, by the threads of its first warp. With kNotes the mailbox of each
// block gets the `note` of the first block's first thread. `part`: this block's number in its cluster.
template <class Op, int kCtasPerRow, bool kNotes>
inline void send_to_blocks(typename Op::State s, typename Op::Compute pivot,
    ClusterMailbox<Op, kCtasPerRow, kNotes>& cluster_mailbox, int part, unsigned note = 0) {
  constexpr int kQuads = ClusterMailbox<Op, kCtasPerRow>::kQuads;
  union {
    uint4 words[kQuads];
    Slot<Op> slot;
  } own = {};
  own.slot = {s, pivot};
  if (threadIdx.x == 0) expect_bytes(&cluster_mailbox.mbarrier, cluster_mailbox.kBytes);
  if constexpr (kNotes) note = __shfl_sync(kAllLanes, note, 0);
  if (int(threadIdx.x) < kCtasPerRow) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
      send_words(&cluster_mailbox.words[part][i], &cluster_mailbox.mbarrier, threadIdx.x, own.words[i]);
    if (kNotes && part == 0)
      send_words(&cluster_mailbox.note, &cluster_mailbox.mbarrier, threadIdx.x, uint4{note, 0, 0, 0});
  }
}
// Waits for what all blocks have sent, and merges it.
template <class Op, bool kEqual, int kCtasPerRow, bool kNotes>
inline typename Op::State await_blocks(ClusterMailbox<Op, kCtasPerRow, kNotes>& cluster_mailbox,
    typename Op::Compute pivot, unsigned parity) {
  constexpr int kQuads = ClusterMailbox<Op, kCtasPerRow>::kQuads;
  union {
    uint4 words[kQuads];
    Slot<Op> slot;
  } other;
  await_mbarrier(&cluster_mailbox.mbarrier, parity);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) other.words[i] = cluster_mailbox.words[threadIdx.x % kCtasPerRow][i];
  return reduce_lanes<Op, kEqual, kCtasPerRow, true>(Op::rebase(other.slot.state, other.slot.pivot, pivot));
}

// Over the blocks of a cluster, after each block has reduced its threads: every thread gets the row's state. Before the
// first call all blocks must have made their mbarriers and passed cluster_sync(). A caller in a loop alternates between
// two mailboxes, with a barrier of its own block (reduce_warps has one) between two calls; `parity` flips each time
// that a mailbox is used again.
template <class Op, bool kEqual, int kCtasPerRow, bool kNotes>
inline void reduce_blocks(typename Op::State& s, typename Op::Compute pivot,
    ClusterMailbox<Op, kCtasPerRow, kNotes>& cluster_mailbox, int part, unsigned parity,
                              unsigned note = 0) {
  send_to_blocks<Op>(s, pivot, cluster_mailbox, part, note);
  s = await_blocks<Op, kEqual>(cluster_mailbox, pivot, parity);
}

}  // namespace cupynorm
