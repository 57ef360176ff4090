// Which elements of whole rows (whole.cuh) a mask keeps.
#pragma once
#include <io/masks.cuh>
#include <row/apart.cuh>

namespace cupynorm {

// Which of a thread's elements a mask keeps, of those that are there: element j of row v is number j * kVector + v.
template <class Shape>
using KeptOfRows = KeptElements<Shape::kVector * Shape::kElements>;

// Finds them, given the pointers to the rows from the thread's first column on, and which elements it has. A word after
// the other: unrolled, all would be loaded at once, to registers that are not free.
template <class Load, class Shape, class Has>
inline KeptOfRows<Shape> find_kept(const typename Load::RowPointer (&rows)[Shape::kVector], Has has) {
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kOfQuad = 4 / kVector, kOfWord = 8 * kOfQuad,
      kWords = KeptOfRows<Shape>::kWords;
  KeptOfRows<Shape> kept;
  typename Load::RowPointer sources[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) sources[v] = rows[v];
  auto next_word = [&](auto bytes_of) {
#pragma unroll
    for (int w = 0; w + 1 < kWords; ++w) kept.word[w] = kept.word[w + 1];
    kept.word[kWords - 1] = 0;
#pragma unroll
    for (int j = 0; j < kOfWord; j += kOfQuad) {
      unsigned quad = 0;
#pragma unroll
      for (int i = 0; i < kOfQuad; ++i) quad |= bytes_of(j + i) << 8 * i * kVector;
      kept.word[kWords - 1] |= tops_of(quad) >> j / kOfQuad;
    }
  };
#pragma unroll 1
  for (int w = 0; w + 1 < kWords; ++w) {
    next_word([&](int j) { return Load::template mask_bytes_across<kVector>(sources, Step<Shape::kDown>{j}); });
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v].mask.begin_at(kOfWord * Shape::kDown);
  }
  constexpr int kBefore = (kWords - 1) * kOfWord;
  next_word([&](int j) -> unsigned {
    if (kBefore + j >= kElements) return 0;
    const bool there = has(kBefore + j);
    const unsigned bytes = Load::template mask_bytes_across<kVector>(sources, Step<Shape::kDown>{there ? j : 0});
    return there ? bytes : 0;
  });
  return kept;
}

// kPart elements of one of a thread's rows, from number `from` on: as add_up of an op asks for them.
template <class Shape, int kPart>
struct KeptPart {
  const KeptOfRows<Shape>& kept;
  int from, row;
  bool operator()(int i) const { return kept.has((from + i) * Shape::kVector + row); }
  int total() const {
    unsigned own[KeptOfRows<Shape>::kWords] = {};
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int number = (from + i) * Shape::kVector + row;
      own[number / 32] |= KeptOfRows<Shape>::bit(number);
    }
    int total = 0;
#pragma unroll
    for (int w = 0; w < KeptOfRows<Shape>::kWords; ++w)
      if (own[w] != 0) total += __popc(kept.word[w] & own[w]);
    return total;
  }
};

// Halves that are kept, and -inf in place of the others.
template <class Shape>
inline void drop_halves(const KeptOfRows<Shape>& kept, Vector<half, Shape::kVector> (&x)[Shape::kElements]) {
  constexpr int kVector = Shape::kVector;
#pragma unroll
  for (int number = 0; number < kVector * Shape::kElements; number += kVector == 1 ? 1 : 2) {
    const unsigned tops = kept.word[number / 32] << number / 4 % 8;
    const int byte = 8 + number % 4, other = kVector == 1 ? byte : byte + 1;
    const unsigned all = permute_bytes(tops, 0, byte * 0x11 + other * 0x1100);  // top bits, over two bytes each
    unsigned& halves = x[number / kVector].word[number % kVector / 2];
    halves = (halves & all) | (0xfc00fc00u & ~all);
  }
}

}  // namespace cupynorm
