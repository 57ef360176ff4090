// Which elements of whole rows (whole.cuh) a dropout keeps. Words of Philox are counted along rows, of which a thread
// has every kDown-th column: each alone, elements would take a block of four words each. So threads that share rows
// draw whole blocks, and tell one another in bits what these keep (docs/notes/083).
#pragma once
#include <io/dropout.cuh>
#include <row/apart.cuh>

namespace cupynorm {

// Whether a Load has a dropout among its operands.
template <class Load, class = void>
inline constexpr bool kDraws = false;
template <class Load>
inline constexpr bool kDraws<Load, decltype(void(Load::kDrawn))> = Load::kDrawn > 0;

// Whether each word of a block keeps its element.
struct KeptOfBlock {
  bool word[4];
};
inline KeptOfBlock kept_of_block(const Dropped& dropped, unsigned long long block) {
  const uint2 key = {unsigned(dropped.seed), unsigned(dropped.seed >> 32)};
  const uint4 random = philox_block(dropped.offset + block, key);
  const unsigned least = unsigned(dropped.threshold);
  return {{random.x >= least, random.y >= least, random.z >= least, random.w >= least}};
}

// What one thread does of it.
//   leave(row, v, parts)   Draws some words of the thread's row v: every kGroups-th block of a fourth of them, for the
//                          four threads that have its columns. With kShares alone.
//   found(row, v, parts)   What the row keeps, a bit for each of the thread's elements, after all threads have left
//                          theirs and have met. Without kShares it is drawn here.
// row: the RowPointer of the dropout, which begins at the thread's first column. Places of parts are counted from the
// first word of a block, which may lie `before` columns before the tile's first one. Then as many of the tile's last
// words have the places of those before.
template <class Shape>
struct DrawnWords {
  static constexpr int kElements = Shape::kElements, kDown = Shape::kDown, kRound = kElements * kDown, kWords = 4;
  static constexpr bool kShares = kDown >= kWords;
  static constexpr int kGroups = kShares ? kDown / kWords : 1, kEach = (kElements + kWords - 1) / kWords;
  using Part = typename Conditional<(kEach <= 8), unsigned char, unsigned short>::Type;
  struct alignas(kWords * sizeof(Part)) Parts {
    Part part[kWords];
  };
  static constexpr int kPlaces = kShares ? Shape::kVector * Shape::kBlock : 1;
  static_assert(kElements <= 64, "there is a bit for each");

  int lane, down, held;  // as in WholeRows (whole_tile.cuh)

  static int place_of(int v, int down, int lane) { return (v * kDown + down) * Shape::kLanes + lane; }

  template <class Row>
  void leave(const Row& row, int v, Parts* parts) const {
    if constexpr (kShares) {
      const auto number = static_cast<unsigned long long>(row.first - down), block = number / kWords;
      const int before = int(number % kWords), own = down / kGroups, group = down % kGroups;
      unsigned bits[kWords] = {};
#pragma unroll 2
      for (int n = kEach - 1; n >= 0; --n) {  // so that bits are shifted by one
        const int j = own * kEach + n, at = j * kGroups + group;
        KeptOfBlock kept = {};
        if (j < kElements && (Shape::kFull || kWords * at < held + before))
          kept = kept_of_block(row.dropped, block + at);
#pragma unroll
        for (int k = 0; k < kWords; ++k) bits[k] = 2 * bits[k] + kept.word[k];
      }
      if (down == 0 && held + before > kRound) {
        const KeptOfBlock kept = kept_of_block(row.dropped, block + kRound / kWords);
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          if (k < before) bits[k] = (bits[k] & ~1u) | unsigned(kept.word[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kWords; ++k) parts[place_of(v, group * kWords + k, lane)].part[own] = Part(bits[k]);
    }
  }

  template <class Row>
  unsigned long long found(const Row& row, int v, const Parts* parts) const {
    const auto number = static_cast<unsigned long long>(row.first - down);
    const int before = int(number % kWords);
    unsigned long long kept = 0;
    if constexpr (kShares) {
      const bool next = down + before >= kDown;
      const Parts all = parts[place_of(v, down + before - (next ? kDown : 0), lane)];
#pragma unroll
      for (int i = 0; i < kWords; ++i) kept |= static_cast<unsigned long long>(all.part[i]) << i * kEach;
      if (next) kept = kept >> 1 | (kept & 1) << (kElements - 1);
    } else {
      constexpr int kOwn = kWords / kDown;  // of a block, every kDown-th from `from` on
      const int from = (down + before) % kDown, earlier = (down + before) / kDown;
#pragma unroll 2
      for (int at = 0; at * kOwn < kElements + earlier; ++at) {
        const KeptOfBlock block = kept_of_block(row.dropped, number / kWords + at);
        unsigned long long bits = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const bool own = kDown > 1 && from > 0 ? block.word[i * kDown + kDown - 1] : block.word[i * kDown];
          bits |= static_cast<unsigned long long>(own) << i;
        }
        const int shift = at * kOwn - earlier;
        kept |= shift < 0 ? bits >> -shift : bits << shift;
      }
    }
    return row.dropped.threshold >> 32 == 0 ? kept : 0;  // whether anything is kept at all
  }
};

// Finds what a dropout keeps of a thread's rows, given the pointers to them from its first column on; lane, down, held:
// as in WholeRows. All threads must call, and meet before they call again.
template <class Shape, class Row>
inline void draw_across(Row (&rows)[Shape::kVector], int lane, int down, int held) {
  using Drawn = DrawnWords<Shape>;
  __shared__ typename Drawn::Parts parts[Drawn::kPlaces];
  const Drawn drawn = {lane, down, held};
#pragma unroll
  for (int v = 0; v < Shape::kVector; ++v) rows[v].operands.draw([&](auto& own) { drawn.leave(own, v, parts); });
  if constexpr (Drawn::kShares) __syncthreads();
#pragma unroll
  for (int v = 0; v < Shape::kVector; ++v)
    rows[v].operands.draw([&](auto& own) { own.kept = drawn.found(own, v, parts); });
}

}  // namespace cupynorm
