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

}  // namespace cupynorm
