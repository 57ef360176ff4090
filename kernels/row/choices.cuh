// What row_registers decides by the op, Load, Store and the plan's numbers: each choice was measured to be faster
// where it is taken.
#pragma once
#include <io/affine.cuh>
#include <row/layout.cuh>

namespace cupynorm {

template <class Op, class Load, class Store, class Shape>
struct Choices {
  using Type = typename Load::Type;
  static constexpr int kVector = Shape::kVector, kRows = Shape::kRows, kCtasPerRow = Shape::kCtasPerRow,
      kInVectors = Shape::kInVectors;
  static constexpr bool kFull = Shape::kFull;

  // Short rows of 16 bits are summarised in one pass, which loses a few digits and is faster. Rows that are stored as
  // bytes may be longer: there are fewer digits to lose, and instructions are what limits them
  // (docs/notes/048, "One pass over short rows").
  static constexpr int kFew = one_pass_elements<Store>();
  // In clusters all rows are: each warp counts from an element of its own, so what is lost grows with a warp's elements
  // only.
  static constexpr bool kShort =
      sizeof(typename Load::Precision) == 2 && kFew > 0 && (kCtasPerRow > 1 || Shape::kGroup * kInVectors <= kFew);

  // Two sets of slots, used alternately, save a barrier for each row, but cost a register. Where a thread has no
  // register left and would spill (docs/notes/048, "One set of slots or two"), there is one set and a barrier before a
  // block's next row; most blocks have no next row.
  static constexpr int kThreads = Shape::kBlock * Shape::kMinBlocks;
  static constexpr bool kCrowded =
      (kThreads >= 1024 && kRows * kInVectors * int(sizeof(Type)) >= (Load::kDirect ? 128 : 64)) ||
      (kThreads >= 768 && kRows * kInVectors >= 48);
  static constexpr bool kOneSet =
      kCrowded && Shape::kWarps > 1 && kCtasPerRow == 1 && !Shape::kPersistent && Op::kHasPivot;

  // Where a mask keeps an interval of columns, a warp skips each vector of which none of its lanes keeps anything, and
  // only stores it: the number of instructions is what limits such rows (docs/notes/048, "Packs of which a mask keeps
  // nothing").
  static constexpr bool kInterval = Load::kInterval;
  // What is dropped is stored before the row is waited for, where rows are long enough to gain by it
  // (docs/notes/048, "Storing what a mask drops before the row has arrived").
  static constexpr bool kEarly = kInterval && Store::kHasEpilogueOperands &&
      kCtasPerRow * Shape::kGroup * kInVectors * sizeof(Type) >= 8192 &&
                                 sizeof(Type) == 2;

  // Kernels that are limited by instructions load row 0 in place of rows past the last, without a predicate, and do not
  // store it. Not with many elements and a fused computation: the compiler then moves too many loads ahead, and has no
  // registers for them.
  static constexpr bool kPlain = Load::kDirect && !Store::kHasEpilogueOperands && !Store::kScales;
  static constexpr int kMostAnyway = kVector * sizeof(Type) == 8 ? 24 : 16;
  // Past the last row nothing has been prefetched of what is computed from several arrays.
  static constexpr bool kMayRepeat = Load::kDirect || Shape::kStages == 0;
  static constexpr bool kAnyway = kFull &&
      (kPlain ? Shape::kStages == 0 && kCtasPerRow == 1 : kRows * kInVectors <= kMostAnyway && kMayRepeat);

  // A prefetched vector is read from shared memory where it is used, not with the others: registers are scarce.
  static constexpr bool kReadLate = Shape::kStages > 0 && !Load::kDirect && !kInterval && Shape::kEdge > 0;

  // A thread's vectors are found at constant offsets from one address of each array: fewer instructions than an address
  // for each vector. Not where vectors may be missing, because the load of the last is then issued too late, and not
  // for doubles, which have no register for it (docs/notes/048, "One address for all packs of a thread").
  static constexpr bool kOneAddress =
      (kFull || Shape::kStages > 0) && sizeof(Type) < 8 && (!Load::kDirect || Store::kScales);

  static_assert(Load::kDirect || Shape::kUnaligned < 2,
                "what is computed from several arrays lies in vectors as y does");
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || (kInVectors <= 32 && !Load::kStoresComputed),
                "a bit for each element, and nothing of what is dropped is kept");
};

}  // namespace cupynorm
