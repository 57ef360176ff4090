// Dropouts as operands. Host mirrors: in cupynorm/lower/mirrors.py.
#pragma once
#include <base/philox.cuh>
#include <io/operands.cuh>

namespace cupynorm {

// A dropout as an operand: 1 where it keeps an element, 0 where it drops it. cupynorm/host/philox.py says which.
//   kWhole: true        Vectors begin at multiples of N, or of four if N is more, counted in all of x. So four
//                       neighbouring elements, or all N if they are fewer, take their random words from one block of
//                       Philox.
//   kWhole: false       A vector begins at any word of a block.
struct Dropped {
  unsigned long long seed, offset, threshold;
};
template <bool kWhole>
struct DropoutMask : LoadsNoColumns {
  static constexpr int kBytes = 2;
  static constexpr bool kPerRow = false;
  Dropped dropped;
  int64 cols;

  struct RowPointer : LoadsNoColumns::Row {
    Dropped dropped;           // offset: of the block that has the row's first element
    unsigned before;           // words of that block that are of the row before
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index col) const {
      using Unsigned = typename Conditional<sizeof(Index) == 4, unsigned, unsigned long long>::Type;
      const Unsigned index = before + Unsigned(col);
      const uint2 key = {unsigned(dropped.seed), unsigned(dropped.seed >> 32)};
      const unsigned least = unsigned(dropped.threshold);
      const bool any = dropped.threshold >> 32 == 0;  // whether anything is kept at all
      if constexpr (!kWhole && N > 1) {
        constexpr int kBlocks = (N + 6) / 4;
        unsigned word[4 * kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const unsigned long long block = dropped.offset + (index / 4 + b);
          const uint4 random = philox_block(block, key);
          word[4 * b] = random.x, word[4 * b + 1] = random.y, word[4 * b + 2] = random.z, word[4 * b + 3] = random.w;
        }
        const int at = int(index % 4);
#pragma unroll
        for (int i = 0; i < N + 2; ++i) word[i] = at & 1 ? word[i + 1] : word[i];
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = Compute(any && (at & 2 ? word[i + 2] : word[i]) >= least);
        return;
      }
      constexpr int kEach = N < 4 ? N : 4;
#pragma unroll
      for (int b = 0; b < N / kEach; ++b) {
        const unsigned long long block = dropped.offset + (index / 4 + b);
        const uint4 random = philox_block(block, key);
        const int at = kEach < 4 ? int(index % 4) : 0;
        const unsigned word[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          unsigned own = word[i];
          if constexpr (kEach == 2) own = at ? word[2 + i] : own;
          if constexpr (kEach == 1) own = at == 0 ? word[0] : at == 1 ? word[1] : at == 2 ? word[2] : word[3];
          x[b * kEach + i] = Compute(any && own >= least);
        }
      }
    }
  };
  RowPointer at(int64 row) const {
    const auto first = static_cast<unsigned long long>(row * cols);
    return {{}, {dropped.seed, dropped.offset + first / 4, dropped.threshold}, unsigned(first % 4)};
  }
};

// The same where elements lie anywhere: rows and cols give the number of an element, in the order that the random words
// have, and vectors have one element. Steps of columns, which are neighbours in that order, are asked of `kept`, which
// row/drawn.cuh draws.
template <class Rows, class Cols>
struct DropoutAnywhere : LoadsNoColumns {
  static constexpr int kBytes = 2;
  static constexpr bool kPerRow = false, kInSteps = kEvenlyApart<Cols>, kDrawn = true;
  Dropped dropped;
  Rows rows;
  Cols cols;

  struct RowPointer : LoadsNoColumns::Row {
    Dropped dropped;
    int64 first;  // number of the row's first element
    Cols cols;
    unsigned long long kept;  // a bit for each step
    void begin_at(int col) { first += cols.offset(col); }
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index col) const {
      static_assert(N == 1, "elements lie apart");
      const auto number = static_cast<unsigned long long>(first + cols.offset(col)),
          block = dropped.offset + number / 4;
      const uint2 key = {unsigned(dropped.seed), unsigned(dropped.seed >> 32)};
      const uint4 random = philox_block(block, key);
      const int at = int(number % 4);
      const unsigned own = at == 0 ? random.x : at == 1 ? random.y : at == 2 ? random.z : random.w;
      x[0] = Compute(dropped.threshold >> 32 == 0 && own >= unsigned(dropped.threshold));
    }
    template <int N, typename Compute, int kApart>
    void unpack(NoColumns, Compute* x, Step<kApart> step) const {
      x[0] = kept >> step.number & 1 ? Compute(1) : Compute(0);
    }
  };
  RowPointer at(int64 row) const { return {{}, dropped, rows.offset(row), cols, 0}; }
};

}  // namespace cupynorm
