// How a row lies in the registers of the threads that share it, and which part of a row a block has.
#pragma once
#include <base/reduce.cuh>

namespace cupynorm {

// A plan's numbers, and what follows from them alone. A thread holds kPacks packs of kPack elements of each of kRows
// rows. Pack p of a thread is number p * kGroup + lane of what its block has of the row, so neighbouring threads access
// neighbouring packs.
//
// kGroup: threads of a block that share a row; with kParts > 1 the whole block.
// kFull: the row is exactly kParts * kGroup * kPacks * kPack columns; otherwise some of a thread's packs may be
// missing.
// kHoist: where gamma and beta wait (row/columns.cuh).
// kPeel: 0: every row begins at a pack of x and of y. Otherwise rows are unaligned: packs are counted from the first
// address of y that is aligned to one, and the elements before and behind them (head and tail) are held one by one, by
// the first threads. 1: x is aligned as y is. 2: x is aligned in its own way, and each of its packs is made of two
// accesses.
// kPeriod: with kPeel, the alignment period: row r + kPeriod is aligned as row r is. The kRows rows of a thread are
// that far apart. What is cached or prefetched for later rows needs these to be aligned alike, so they must be a
// multiple of the period further.
// kParts: blocks of a cluster that share a row.
// kBlock, kResident: threads of a block, and how many blocks a multiprocessor must have registers for.
// kStages: 0, or how many rows (times kRows) are prefetched: the block then loops over rows, and each thread copies its
// packs of the next ones into shared memory, where no other thread reads them. Packs of 16 bytes only.
template <int Pack_, int Packs, int Group, int Rows, bool Full, int Hoist, int Peel, int Period, int Parts, int Block,
          int Resident, int Stages>
struct Registers {
  static constexpr int kPack = Pack_, kPacks = Packs, kGroup = Group, kRows = Rows, kPeel = Peel, kParts = Parts;
  static constexpr int kPeriod = Period, kBlock = Block, kResident = Resident, kStages = Stages, kHoist = Hoist;
  static constexpr bool kFull = Full;
  // A block's share of the columns does not depend on how its rows are aligned, because it caches the parameters of
  // these columns. Packs are then counted from the row's first line of 128 bytes, and parts begin at lines.
  static constexpr bool kFixed = Hoist == 4 && Parts > 1;
  // packs of a line; elements that packs are counted from
  static constexpr int kLine = 8, kAligned = kFixed ? kLine * Pack_ : Pack_;

  static constexpr int kWarps = Group / kWarp, kGroups = Block / Group;
  static constexpr int kLanes = Group < kWarp ? Group : kWarp;  // of a warp, that share a row
  static constexpr int kLone = Peel > 0 ? 1 : 0;  // elements of a thread that are in no pack; behind its packs
  static constexpr int kPacked = Pack_ * Packs, kElements = kPacked + kLone;
  static constexpr int kSure = Full ? Packs : Packs - 1;  // packs of a thread that are never missing
  // The block loops over rows, because it prefetches them or caches parameters.
  static constexpr bool kPersistent = Stages > 0 || Hoist == 2 || Hoist == 3;
  // In a cluster that loops over rows no thread is past the last row. The compiler is told so.
  static constexpr bool kAll = Parts > 1 && Stages > 0;
  // Clusters that loop over rows take them from a dynamic scheduler, so that rows that are processed at the same time
  // are neighbours in memory. Single blocks, which have shorter rows, lose by it (docs/notes/kernel-comments).
  // Unaligned rows can only do so where the parameters that a block caches do not depend on how its rows are aligned.
  static constexpr bool kClaims = kPersistent && Parts > 1 && (Peel == 0 || kFixed);
  static constexpr int kAheadBytes = Stages * Rows * Packs * (Block * 16);  // of shared memory, for prefetched rows

  static_assert(Peel == 0 || (Group >= 2 * Pack_ - 2 && Group >= kAligned - 1 && !Full),
                "the first threads hold what is around the packs");
  static_assert(Peel == 0 || Group * Pack_ % 8 == 0, "a thread's packs of parameters are multiples of 16 bytes apart");
  static_assert(Peel < 2 || Stages == 0, "what lies in other packs than y is not copied in packs");
  static_assert(Peel == 0 || Rows == 1 || (Stages == 0 && Hoist % 4 < 2), "a group's next rows begin as these do");
  static_assert(Parts == 1 || (Group == Block && Block > kWarp), "the blocks of a cluster share a row");
  static_assert(Hoist < 4 || (Stages == 0 && Parts == 1) || (Stages > 0 && Parts > 1 && Peel > 0),
                "all columns are a block's, or its part");
};

// Which part of a row a block has: packs `before` .. `before + packs`, the first of which is at column `head`, and, of
// the elements that are in no pack, `heads` from column 0 on and `tails` from column `tail` on.
struct Share {
  int before, packs, head, heads, tail, tails;
};

template <class Shape>
inline Share share_of(int cols, int head, int part) {
  constexpr int kPack = Shape::kPack, kParts = Shape::kParts;
  Share share = {0, cols / kPack, 0, 0, cols, 0};
  if constexpr (Shape::kFixed) {  // the lines that every row has are cut; what only some have is the last part's
    constexpr int kLine = Shape::kLine;
    const int sure = (cols - (kLine * kPack - 1)) / (kLine * kPack), each = sure / kParts, longer = sure % kParts;
    const bool last = part == kParts - 1;
    share.head = head;
    share.before = (part * each + (part < longer ? part : longer)) * kLine;
    share.packs = last ? int(unsigned(cols - head) / kPack) - share.before : (each + (part < longer)) * kLine;
    share.tail = head + (share.before + share.packs) * kPack;
    share.heads = part == 0 ? head : 0;
    share.tails = last ? cols - share.tail : 0;
    return share;
  }
  if constexpr (Shape::kPeel > 0) {
    share.head = head < cols ? head : cols;
    share.packs = (cols - share.head) / kPack;
    share.tail = share.head + share.packs * kPack;
    share.heads = part == 0 ? share.head : 0;
    share.tails = part == kParts - 1 ? cols - share.tail : 0;
  }
  if constexpr (Shape::kFull && kParts > 1) {
    // every row is cut alike, so these could be constants of Shape: a cluster of 1024 threads spilled with them
    const int each = (share.packs + kParts - 1) / kParts;
    share.before = part * each < share.packs ? part * each : share.packs;
    share.packs = share.packs - share.before < each ? share.packs - share.before : each;
  } else if constexpr (kParts > 1) {
    // Parts differ by one pack at most, so that only the last of a thread's packs may be missing: a test for every pack
    // is slow (docs/notes/kernel-comments). Or they differ by a line of 128 bytes, where no more packs are missing so:
    // parts then begin at lines if the row does.
    constexpr int kLine = 8;
    constexpr int kMost = Shape::kGroup * Shape::kPacks, kLeast = kMost - Shape::kGroup;
    const int lines = (share.packs + kLine - 1) / kLine, all = share.packs;
    const bool in_lines =
        (lines + kParts - 1) / kParts * kLine <= kMost && lines / kParts * kLine - (lines * kLine - all) >= kLeast;
    const int unit = in_lines ? kLine : 1, units = in_lines ? lines : all;
    const int each = units / kParts, longer = units % kParts;
    share.before = (part * each + (part < longer ? part : longer)) * unit;
    const int own = (each + (part < longer)) * unit;
    share.packs = own < all - share.before ? own : all - share.before;
  }
  return share;
}

// How a thread finds its elements, in closures of the kernel, which alone holds the share of the row that is in work.
// has(p): whether pack p is there. col(p): its first column. alone(): whether the thread has an element that is in no
// pack, and
// lone(): its column. masked_from(p): the column from which an interval mask is asked for pack p.
template <class Has, class Col, class Lone, class Alone, class MaskedFrom>
struct ThreadTile {
  Has has;
  Col col;
  Lone lone;
  Alone alone;
  MaskedFrom masked_from;
  int lane;
};
template <class Has, class Col, class Lone, class Alone, class MaskedFrom>
ThreadTile(Has, Col, Lone, Alone, MaskedFrom, int) -> ThreadTile<Has, Col, Lone, Alone, MaskedFrom>;

}  // namespace cupynorm
