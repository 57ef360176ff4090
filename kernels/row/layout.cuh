// How a row lies in the registers of the threads that share it, and which part of a row a block has.
#pragma once
#include <base/reduce.cuh>

namespace cupynorm {

// A plan's numbers, and what follows from them alone. A thread holds kVectors vectors of kVector elements of each of
// kRows rows. Vector p of a thread is number p * kGroup + lane of what its block has of the row, so neighbouring
// threads access neighbouring vectors.
//
// kGroup: threads of a block that share a row; with kCtasPerRow > 1 the whole block.
// kFull: the row is exactly kCtasPerRow * kGroup * kVectors * kVector columns; otherwise some of a thread's vectors may
// be missing.
// kParameterMode: where gamma and beta wait (row/columns.cuh).
// kUnaligned: 0: every row begins at a vector of x and of y. Otherwise rows are unaligned: vectors are counted from the
// first address of y that is aligned to one, and the elements before and behind them (head and tail) are held one by
// one, by the first threads. 1: x is aligned as y is. 2: x is aligned in its own way, and each of its vectors is made
// of two accesses.
// kAlignmentPeriod: with kUnaligned, the alignment period: row r + kAlignmentPeriod is aligned as row r is. The kRows
// rows of a thread are that far apart. What is cached or prefetched for later rows needs equally aligned rows, so
// these must be a multiple of the period further.
// kCtasPerRow: blocks of a cluster that share a row.
// kBlock, kMinBlocks: threads of a block, and how many blocks a multiprocessor must have registers for.
// kStages: 0, or how many rows (times kRows) are prefetched: the block then loops over rows, and each thread copies its
// vectors of the next ones into shared memory, where no other thread reads them. Vectors of 16 bytes only.
template <int Vector_, int Vectors, int Group, int Rows, bool Full, int ParameterMode, int UnalignedMode,
    int AlignmentPeriod, int CtasPerRow, int Block,
          int MinBlocks, int Stages>
struct Registers {
  static constexpr int kVector = Vector_, kVectors = Vectors, kGroup = Group, kRows = Rows, kUnaligned = UnalignedMode,
      kCtasPerRow = CtasPerRow;
  static constexpr int kAlignmentPeriod = AlignmentPeriod, kBlock = Block, kMinBlocks = MinBlocks, kStages = Stages,
      kParameterMode = ParameterMode;
  static constexpr bool kFull = Full;
  // A block's share of the columns does not depend on how its rows are aligned, because it caches the parameters of
  // these columns. Vectors are then counted from the row's first line of 128 bytes, and parts begin at lines.
  static constexpr bool kFixed = ParameterMode == 4 && CtasPerRow > 1;
  // vectors of a line; elements that vectors are counted from
  static constexpr int kLine = 8, kAligned = kFixed ? kLine * Vector_ : Vector_;

  static constexpr int kWarps = Group / kWarp, kGroups = Block / Group;
  static constexpr int kLanes = Group < kWarp ? Group : kWarp;  // of a warp, that share a row
  // elements of a thread that are in no vector; behind its vectors
  static constexpr int kEdge = UnalignedMode > 0 ? 1 : 0;
  static constexpr bool kCut = false;
  static constexpr int kInVectors = Vector_ * Vectors, kElements = kInVectors + kEdge;
  static constexpr int kAlwaysValid = Full ? Vectors : Vectors - 1;  // vectors of a thread that are never missing
  // The block loops over rows, because it prefetches them or caches parameters.
  static constexpr bool kPersistent = Stages > 0 || ParameterMode == 2 || ParameterMode == 3 || ParameterMode == 5;
  // In a cluster that loops over rows no thread is past the last row. The compiler is told so.
  static constexpr bool kAll = CtasPerRow > 1 && Stages > 0;
  // Clusters that loop over rows take them from a dynamic scheduler, so that rows that are processed at the same time
  // are neighbours in memory. Single blocks, which have shorter rows, lose by it (docs/notes/048, "A dynamic scheduler
  // for clusters only"). Unaligned rows can only do so where the parameters that a block caches do not depend on how
  // its rows are aligned.
  static constexpr bool kDynamic = kPersistent && CtasPerRow > 1 && (UnalignedMode == 0 || kFixed);
  // vectors of prefetched rows that wait in a block's shared memory
  static constexpr int kPrefetchVectors = Stages * Rows * Vectors * Block;

  static_assert(UnalignedMode == 0 || (Group >= 2 * Vector_ - 2 && Group >= kAligned - 1 && !Full),
                "the first threads hold what is around the vectors");
  static_assert(UnalignedMode == 0 || Group * Vector_ % 8 == 0,
      "a thread's vectors of parameters are multiples of 16 bytes apart");
  static_assert(UnalignedMode < 2 || Stages == 0, "what lies in other vectors than y is not copied in vectors");
  static_assert(UnalignedMode == 0 || Rows == 1 || (Stages == 0 && ParameterMode % 4 < 2),
      "a group's next rows begin as these do");
  static_assert(CtasPerRow == 1 || (Group == Block && Block > kWarp), "the blocks of a cluster share a row");
  static_assert(ParameterMode != 4 || (Stages == 0 && CtasPerRow == 1) ||
      (Stages > 0 && CtasPerRow > 1 && UnalignedMode > 0),
                "all columns are a block's, or its part");
};

// Bytes of shared memory that a vector of a prefetched row takes, with all that is loaded with it, and those of all.
template <class Load, class Shape>
inline constexpr int staged_bytes() {
  if constexpr (Shape::kStages == 0) return 0;
  else return Load::template kPrefetchBytes<Shape::kVector>;
}
template <class Load, class Shape>
inline constexpr int prefetch_bytes() {
  return Shape::kPrefetchVectors * staged_bytes<Load, Shape>();
}

// Which part of a row a block has: vectors `before` .. `before + vectors`, the first of which is at column `head`, and,
// of the elements that are in no vector, `heads` from column 0 on and `tails` from column `tail` on.
struct Share {
  int before, vectors, head, heads, tail, tails;
};

template <class Shape>
inline Share share_of(int cols, int head, int part) {
  constexpr int kVector = Shape::kVector, kCtasPerRow = Shape::kCtasPerRow;
  Share share = {0, cols / kVector, 0, 0, cols, 0};
  if constexpr (Shape::kFixed) {  // the lines that every row has are cut; what only some have is the last part's
    constexpr int kLine = Shape::kLine;
    const int sure = (cols - (kLine * kVector - 1)) / (kLine * kVector), each = sure / kCtasPerRow,
        longer = sure % kCtasPerRow;
    const bool last = part == kCtasPerRow - 1;
    share.head = head;
    share.before = (part * each + (part < longer ? part : longer)) * kLine;
    share.vectors = last ? int(unsigned(cols - head) / kVector) - share.before : (each + (part < longer)) * kLine;
    share.tail = head + (share.before + share.vectors) * kVector;
    share.heads = part == 0 ? head : 0;
    share.tails = last ? cols - share.tail : 0;
    return share;
  }
  if constexpr (Shape::kCut) {
    share.head = head > 0 ? head - kVector : 0;
    share.vectors = (cols - share.head + kVector - 1) / kVector;
  } else if constexpr (Shape::kUnaligned > 0) {
    share.head = head < cols ? head : cols;
    share.vectors = (cols - share.head) / kVector;
    share.tail = share.head + share.vectors * kVector;
    share.heads = part == 0 ? share.head : 0;
    share.tails = part == kCtasPerRow - 1 ? cols - share.tail : 0;
  }
  if constexpr (Shape::kFull && kCtasPerRow > 1) {
    // every row is cut the same, so these could be constants of Shape: a cluster of 1024 threads spilled with them
    const int each = (share.vectors + kCtasPerRow - 1) / kCtasPerRow;
    share.before = part * each < share.vectors ? part * each : share.vectors;
    share.vectors = share.vectors - share.before < each ? share.vectors - share.before : each;
  } else if constexpr (kCtasPerRow > 1) {
    // Parts differ by one vector at most, so that only the last of a thread's vectors may be missing: a test for every
    // vector is slow (docs/notes/048, "How a row is cut among the blocks of a cluster"). Or they differ by a line of
    // 128 bytes, where no more vectors are missing so: parts then begin at lines if the row does.
    constexpr int kLine = 8;
    constexpr int kMost = Shape::kGroup * Shape::kVectors, kLeast = kMost - Shape::kGroup;
    const int lines = (share.vectors + kLine - 1) / kLine, all = share.vectors;
    const bool in_lines =
        (lines + kCtasPerRow - 1) / kCtasPerRow * kLine <= kMost &&
            lines / kCtasPerRow * kLine - (lines * kLine - all) >= kLeast;
    const int unit = in_lines ? kLine : 1, units = in_lines ? lines : all;
    const int each = units / kCtasPerRow, longer = units % kCtasPerRow;
    share.before = (part * each + (part < longer ? part : longer)) * unit;
    const int own = (each + (part < longer)) * unit;
    share.vectors = own < all - share.before ? own : all - share.before;
  }
  return share;
}

// How a thread finds its elements, in closures of the kernel, which alone holds the share of the row that is in work.
// has(p): whether vector p is there. col(p): its first column. has_edge(): whether the thread has an element that is in
// no vector, and edge_col(): its column. masked_from(p): the column from which an interval mask is asked for vector p.
template <class Has, class Col, class EdgeCol, class HasEdge, class MaskedFrom>
struct ThreadTile {
  Has has;
  Col col;
  EdgeCol edge_col;
  HasEdge has_edge;
  MaskedFrom masked_from;
  int lane;
};
template <class Has, class Col, class EdgeCol, class HasEdge, class MaskedFrom>
ThreadTile(Has, Col, EdgeCol, HasEdge, MaskedFrom, int) -> ThreadTile<Has, Col, EdgeCol, HasEdge, MaskedFrom>;

}  // namespace cupynorm
