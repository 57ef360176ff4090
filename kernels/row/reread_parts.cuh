// Shapes of row_reread (reread.cuh), and which part of a row each of its blocks has.
#pragma once
#include <base/reduce.cuh>

namespace cupynorm {

// A thread reduces kVectors vectors of kVector elements at a time. kUnaligned: as in Registers, but never 2. The
// gridDim.y blocks of a group share a row, kBlock threads each, registers few enough for kMinBlocks on a
// multiprocessor. The launch is cooperative, of gridDim.x groups: of one where messages lie among results.
template <int Vector_, int Vectors, int UnalignedMode, int Block, int MinBlocks>
struct Reread {
  static constexpr int kVector = Vector_, kVectors = Vectors, kUnaligned = UnalignedMode, kBlock = Block,
      kMinBlocks = MinBlocks;
  static_assert(UnalignedMode < 2, "what is computed from several arrays lies in vectors as y does");
  static_assert(Block >= 128 && (Block & (Block - 1)) == 0,
      "a block has a vector for each thread, whose results leave room for a message");
};

// Which part of a row a block has: `held` vectors from column `base` on, and, of the elements that are in no vector,
// `heads` from column 0 on and `tails` from column `tail` on.
struct RereadPart {
  int64 base, held, tail;
  int heads, tails;
};

// Parts begin at multiples of 128 bytes from the first vector on, and the last part has what is left.
template <class Load, class Shape>
struct RereadCut {
  static constexpr int kVector = Shape::kVector, kVectorBytes = kVector * int(sizeof(typename Load::Type)),
      kUnit = kVectorBytes < 128 ? 128 / kVectorBytes : 1;
  int64 cols, head, vectors;
  Shares units;
  int parts;

  template <class RowPointer>
  static RereadCut of(const RowPointer& to, int64 cols, int parts) {
    int64 head = 0;
    if constexpr (Shape::kUnaligned > 0) head = to.template head<kVector>();
    head = head < cols ? head : cols;
    const int64 vectors = (cols - head) / kVector;
    return {cols, head, vectors, Shares::of(vectors / kUnit, parts), parts};
  }
  int64 begin(int part) const { return part == parts ? vectors : units.begin(part) * kUnit; }
  int64 first(int part) const { return head + begin(part) * kVector; }  // column
  RereadPart part(int part) const {
    const int64 tail = first(parts);
    return {first(part), begin(part + 1) - begin(part), tail, part == 0 ? int(head) : 0,
        part == parts - 1 ? int(cols - tail) : 0};
  }
};

}  // namespace cupynorm
