// Which elements of whole rows (whole.cuh) a mask keeps.
#pragma once
#include <io/masks.cuh>
#include <row/own_rows.cuh>

namespace cupynorm {

// Which of a thread's elements a mask keeps, of those that are there: element j of row v is number j * kVector + v.
template <class Shape>
using KeptOfRows = KeptElements<Shape::kVector * Shape::kElements>;

// Whether a thread has an element, given how many columns lie from its first one to the block's end.
template <class Shape>
inline bool has_element(int number, int last) {
  return number < Shape::kSure || number * Shape::kDown < last;
}

// Those of which a byte of the mask says so, before column `last`, given the pointers to the rows from the thread's
// first column on. kFirst: before x is loaded, by fetch(j) for each of these elements, behind the loads of some bytes,
// so that both are on their way together; as many bytes at once as there are registers for. Else a word after the
// other, in a loop: unrolled, all bytes would be loaded at once, to registers that are not free.
template <class Load, class Shape, bool kFirst, class Own, class Fetch>
inline KeptOfRows<Shape> find_kept_by_bytes(const typename Load::RowPointer (&rows)[Shape::kVector], const Own& own,
    int last, Fetch fetch) {
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kOfQuad = 4 / kVector, kOfWord = 8 * kOfQuad,
      kWords = KeptOfRows<Shape>::kWords;
  constexpr int kAtATime = kFirst && kOfWord < 48 ? part_of_elements(kWords, 48 / kOfWord) : 1,  // words
      kTurns = kWords / kAtATime, kLoads = kAtATime * kOfWord;
  KeptOfRows<Shape> kept;
  typename Load::RowPointer sources[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) sources[v] = rows[v];
  auto next_words = [&](auto has_byte, auto fetch_one) {
    unsigned bytes[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      bytes[j] = 0;
      if (has_byte(j)) bytes[j] = Load::template mask_bytes_across<kVector>(sources, own.step(j));
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) fetch_one(j);
#pragma unroll
    for (int w = 0; w < kWords; ++w) kept.word[w] = w + kAtATime < kWords ? kept.word[w + kAtATime] : 0;
#pragma unroll
    for (int j = 0; j < kLoads; j += kOfQuad) {
      unsigned quad = 0;
#pragma unroll
      for (int i = 0; i < kOfQuad; ++i) quad |= bytes[j + i] << 8 * i * kVector;
      const int word = kWords - kAtATime + j / kOfWord;
      kept.word[word] |= tops_of(quad) >> j % kOfWord / kOfQuad;
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v].mask.begin_at(kLoads * Shape::kDown);
  };
#pragma unroll(kFirst ? kTurns : 1)
  for (int turn = 0; turn + 1 < kTurns; ++turn)
    next_words([](int) { return true; }, [&](int j) { fetch(turn * kLoads + j); });
  constexpr int kBefore = (kTurns - 1) * kLoads;
  next_words([&](int j) { return kBefore + j < kElements && has_element<Shape>(kBefore + j, last); },
      [&](int j) { if (kBefore + j < kElements) fetch(kBefore + j); });
  return kept;
}

// How many of a thread's elements lie before a column, counted from the first of them.
template <class Shape>
inline int elements_before(int col) {
  const unsigned count = (unsigned(col > 0 ? col : 0) + (Shape::kDown - 1)) / unsigned(Shape::kDown);
  return count < unsigned(Shape::kElements) ? int(count) : Shape::kElements;
}
// Bits 7 - i of a byte, for those i of 0 .. 7 that are from `begin` on and before `end`.
inline unsigned tops_between(int begin, int end) {
  const unsigned first = begin < 0 ? 0 : begin < 8 ? begin : 8, last = end < 0 ? 0 : end < 8 ? end : 8;
  return (0xffu >> first) & ~(0xffu >> last);
}
// Those that lie in their row's interval, before column `last`.
template <class Load, class Shape>
inline KeptOfRows<Shape> find_kept_by_intervals(const typename Load::RowPointer (&rows)[Shape::kVector], int last) {
  constexpr int kVector = Shape::kVector, kOfQuad = 4 / kVector;
  KeptOfRows<Shape> kept;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const Bounds<int> interval = rows[v].interval();
    const int begin = elements_before<Shape>(interval.begin),
              end = elements_before<Shape>(interval.end < last ? interval.end : last);
#pragma unroll
    for (int w = 0; w < KeptOfRows<Shape>::kWords; ++w) {
#pragma unroll
      for (int i = 0; i < kOfQuad; ++i) {  // every kOfQuad-th element has its bit in the same byte
        const unsigned tops = tops_between(
            (begin + (kOfQuad - 1 - i)) / kOfQuad - 8 * w, (end + (kOfQuad - 1 - i)) / kOfQuad - 8 * w);
        kept.word[w] |= tops << 8 * (i * kVector + v);
      }
    }
  }
  return kept;
}

// Finds them, given the pointers to the rows from the thread's first column on, and which these are (own_rows.cuh). It
// has those before column `last`, counted from there. kFirst, fetch: as in find_kept_by_bytes.
template <class Load, class Shape, bool kFirst, class Own, class Fetch>
inline KeptOfRows<Shape> find_kept(const typename Load::RowPointer (&rows)[Shape::kVector], const Own& own, int last,
    Fetch fetch) {
  KeptOfRows<Shape> kept;
  if constexpr (Load::kMaskBytes) kept = find_kept_by_bytes<Load, Shape, kFirst>(rows, own, last, fetch);
  if constexpr (Load::kInterval) {
    const KeptOfRows<Shape> within = find_kept_by_intervals<Load, Shape>(rows, last);
#pragma unroll
    for (int w = 0; w < KeptOfRows<Shape>::kWords; ++w)
      kept.word[w] = Load::kMaskBytes ? kept.word[w] & within.word[w] : within.word[w];
  }
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
