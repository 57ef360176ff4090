// The Shapes of row_summed whose rows wait in registers while others are on their way to shared memory, and the vectors
// that are cut where rows are unaligned.
#pragma once
#include <row/layout.cuh>

namespace cupynorm {

// A Shape with stages whose rows wait in registers.
template <auto... kNumbers>
struct StagedRegisters : Registers<kNumbers...> {};
template <class Shape>
constexpr bool kTakesRows = false;
template <auto... kNumbers>
constexpr bool kTakesRows<StagedRegisters<kNumbers...>> = true;

// The same of unaligned rows whose first and last vectors are cut: they begin before the row, or end behind it, and
// their other elements are neither added to a row's state nor stored. So there is no element beside vectors.
template <auto... kNumbers>
struct CutRegisters : StagedRegisters<kNumbers...> {
  using Uncut = StagedRegisters<kNumbers...>;
  static constexpr int kEdge = 0, kElements = Uncut::kInVectors;
  static constexpr bool kCut = true;
};
template <auto... kNumbers>
constexpr bool kTakesRows<CutRegisters<kNumbers...>> = true;
// What the kernel makes of a Shape where vectors cannot be cut.
template <class Shape, bool kMay>
struct CutIf {
  using Type = Shape;
};
template <auto... kNumbers>
struct CutIf<CutRegisters<kNumbers...>, false> {
  using Type = StagedRegisters<kNumbers...>;
};

// Which elements of a vector are the row's: from begin up to end, with a bit for each in own.
template <class Shape>
struct Cut {
  int begin = 0, end = Shape::kVector;
  Cut(int col, int cols) {
    if constexpr (Shape::kCut) begin = col < 0 ? -col : 0, end = cols - col < end ? cols - col : end;
  }
  unsigned own() const { return (1u << end) - (1u << begin); }
  bool has(int i) const { return !Shape::kCut || (i >= begin && i < end); }
};

}  // namespace cupynorm
