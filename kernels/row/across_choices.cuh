// What row_across decides by the op, Load, Store and the plan's numbers, and what follows of how rows wait.
#pragma once
#include <io/affine.cuh>
#include <row/apart.cuh>

namespace cupynorm {

// Whether all that rows are computed from lies at even distances, and their results do.
template <class Op, class Load, class Store>
inline constexpr bool are_in_steps() {
  if constexpr (Load::kInSteps) return kStoresInSteps<Store>;
  else return false;
}
// Whether rows are whole, as whole.cuh has it.
template <class Op, class Load, class Store, class Shape>
inline constexpr bool are_whole() {
  return Shape::kEven && !Op::kRounds && are_in_steps<Op, Load, Store>();
}

// The op that computes rows of halves which are held in registers as they were loaded: Op::OfHalves, which needs no
// arguments, if there is one, else Op.
template <class Op, bool kHalves, class = void>
struct OpOfHalves {
  static constexpr bool kAny = false;
  using Type = Op;
  static const Op& of(const Op& op) { return op; }
};
template <class Op>
struct OpOfHalves<Op, true, decltype(void(sizeof(typename Op::OfHalves)))> {
  static constexpr bool kAny = true;
  using Type = typename Op::OfHalves;
  static Type of(const Op&) { return {}; }
};

template <class Load>
inline constexpr bool kAreHalves = false;
template <>
inline constexpr bool kAreHalves<half> = true;

// Whether rows of 16 bits wait in registers as they were loaded, two elements in one, where the steps to what the op is
// given are few: so twice as many have room. They are then computed in parts, once more for the results. Not where so
// few have room as the op takes them, and a thread has all of its rows, or States of parts would be merged, or each
// part be counted (docs/notes/076). Blocks of the grid need that room for the next tile.
template <class Op, class Load, class Shape>
inline constexpr bool wait_packed() {
  if constexpr (!Load::kWaitsAsLoaded || sizeof(typename Load::Type) != 2) return false;
  constexpr RunningKind kKind = kRunningKind<Op, typename Load::Precision>;
  constexpr bool kMerges = kKind == RunningKind::kStates && !Op::kExtends,
      kCounts = kKind == RunningKind::kAddsUp && Shape::kCtasPerRow == 1;
  return Shape::kOfGrid || Shape::kVector * Shape::kElements > 64 || !(Shape::kAlone || kMerges || kCounts);
}

// Whether an operand of each element waits beside x, both as they were loaded, and elements are computed from both once
// more for the results. Then blocks of the grid load both of the next tile as they store results, and pairs of numbers
// of 16 bits have twice as much room. Not where a single number of 32 bits would be two, or where States of parts would
// be merged in many steps; nor in two blocks a multiprocessor that wait for more than the pair, such as gamma
// (docs/notes/090).
template <class Op, class Load, class Shape>
inline constexpr bool hold_operands() {
  if constexpr (!Load::kMayHoldOperands) {
    return false;
  } else {
    constexpr bool kHalves = sizeof(typename Load::Type) == 2, kPairAlone = Load::kOperandCount == 1;
    if constexpr (ElementTraits<ElementOf<Op>>::kFields == 1) return Shape::kOfGrid && kHalves;
    else if constexpr (!Op::kOfSums) return false;
    else return Shape::kOfGrid || (kHalves && !Shape::kAlone && (kPairAlone || Shape::kMinBlocks > 2));
  }
}

// Rows of a thread as they were loaded, and the operands of their elements where they wait, too.
template <class Load, class Shape>
using HeldRows = Vector<typename Load::Type, Shape::kVector>[Shape::kElements];
template <class Op, class Load, class Shape>
using HeldOperands = typename Conditional<hold_operands<Op, Load, Shape>(),
    typename Load::template OperandsBeside<Shape::kVector>[Shape::kElements], NoColumns>::Type;

// What is decided of rows that are not whole (any_rows.cuh).
template <class Op, class Load, class Store, class Shape>
struct ChoicesOfAny {
  static constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kDown = Shape::kDown,
      kRound = kElements * kDown;
  static constexpr bool kHolds = Shape::kHolds, kFull = Shape::kFull;
  // Further rounds look at elements again and again: those of 16 bits wait as numbers where these have room.
  static constexpr bool kPacked = kHolds && wait_packed<Op, Load, Shape>() &&
      !(Op::kRounds && kVector * kElements <= 64);
  // kAsNumbers: they wait as the op takes them. kAlone: all of a row in one thread.
  static constexpr bool kAsNumbers = kHolds && !kPacked, kAlone = kHolds && Shape::kAlone;
  // addresses take an instruction or two
  static constexpr bool kInSteps = kHolds && are_in_steps<Op, Load, Store>() && Load::kAlone;
  static constexpr bool kMany = kVector * kElements > 64;  // of them, which leave few registers to anything else
  // Whether it is taken for granted that a thread has most of its elements. Not where kernels then spilled registers
  // (docs/notes/070, "Every form").
  static constexpr bool kEven = Shape::kEven && !Load::kInterval && (kInSteps || !kMany);
  static constexpr int kSure = kEven ? Shape::kSure : 0;
  static constexpr int kAtATime = kMany && Op::kTwoPass ? 16 : 32;  // where one part more takes few instructions
  static constexpr int kPart = kPacked ? part_of_elements(kElements, kAtATime / kVector) : kElements;
  // Whether whole rounds come first, of which nothing is asked. kKeepsRounds: those that no mask's interval drops.
  // kPassesOver: what lies outside of these intervals is not read.
  static constexpr bool kPassesOver = Load::kInterval && !kHolds && kStoresNothing<Store>,
      kWholeRounds = Shape::kOfGrid && !kHolds,
      kKeepsRounds = kPassesOver && !kWholeRounds && Op::kCountsAllKept;
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || !Load::kStoresComputed, "nothing of what is dropped is kept");
  static_assert(!kFull || kHolds, "elsewhere the last round may be shorter");
};

}  // namespace cupynorm
