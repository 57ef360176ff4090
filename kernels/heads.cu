// move_heads: rows of hidden elements to attention's heads and back, with a bias; and rows by their numbers.
#pragma once
#include <cupynorm/functors.cuh>

namespace cupynorm {

constexpr int kHeadsBlock = 256;

// What places are divided by: a multiplication and a shift, for Granlund and Montgomery's (1994) multiplier (_heads.py), instead of
// a loop of 20 instructions. In 64 bits, which only huge arrays need, it is a division.
struct Divisor {
  int64 value;
  unsigned multiplier, shift;
  unsigned of(unsigned n) const { return (multiply_high(n, multiplier) + n) >> shift; }
  unsigned long long of(unsigned long long n) const { return n / static_cast<unsigned long long>(value); }
};

// Where an element lies: its part (queries, keys or values), its head, its token, and its column of the head. In elements.
template <int kAxes>
struct Places {
  int64 part, head, col;
  Strided<kAxes> tokens;
  Divisor extents[kAxes];  // of tokens
};

// Bias has a column for each of a token's elements. rows: for each of y's tokens, which of x's it is; below 0 none, and y is 0
// there. Without rows, each is itself. packs: of a token, of which head_packs are one head's; heads: of a part.
template <typename T, typename U, class Bias, int kFrom, int kTo>
struct Moved {
  const T* x;
  U* y;
  const int* rows;
  int64 tokens;
  Divisor packs, head_packs, heads;
  Places<kFrom> from;
  Places<kTo> to;
  Bias bias;
};

// Where a token lies, as Strided::offset.
template <typename Index, int kAxes>
inline int64 offset_of(const Places<kAxes>& places, Index index) {
  int64 sum = 0;
#pragma unroll
  for (int axis = kAxes - 1; axis > 0; --axis) {
    const Index outer = places.extents[axis].of(index);
    sum += int64(index - outer * Index(places.extents[axis].value)) * places.tokens.stride[axis];
    index = outer;
  }
  return sum + int64(index) * places.tokens.stride[0];
}

template <typename T, typename U>
constexpr bool kSameType = false;
template <typename T>
constexpr bool kSameType<T, T> = true;

// A thread moves one pack of kTokens neighbouring tokens: their loads are on their way together, and the bias is read once.
// Neighbouring threads move neighbouring packs of a token, so that each row of x, and each head's row of y, is whole.
template <typename Compute, int kPack, int kTokens, bool kIndexed, typename Index, typename T, typename U, class Bias, int kFrom, int kTo>
__global__ void __launch_bounds__(kHeadsBlock) move_heads(const __grid_constant__ Moved<T, U, Bias, kFrom, kTo> a) {
  const Index tokens = Index(a.tokens), thread = Index(blockIdx.x) * kHeadsBlock + Index(threadIdx.x), group = a.packs.of(thread);
  const Index first = group * kTokens;
  if (first >= tokens) return;
  const Index pack = thread - group * Index(a.packs.value);
  const Index each = a.head_packs.of(pack), part = a.heads.of(each), head = each - part * Index(a.heads.value);
  const int64 col = int64(pack - each * Index(a.head_packs.value)) * kPack;
  const T* const x = a.x + (int64(part) * a.from.part + int64(head) * a.from.head + (kPack > 1 ? col : col * a.from.col));
  U* const y = a.y + (int64(part) * a.to.part + int64(head) * a.to.head + col);

  Pack<T, kPack> held[kTokens];
  bool there[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    Index row = first + i;
    there[i] = row < tokens;
    if constexpr (kIndexed) {
      const int number = there[i] ? a.rows[row] : -1;
      there[i] = number >= 0;
      row = Index(number);
    }
    if (there[i]) held[i] = load_pack<T, kPack>(x + offset_of(a.from, row));
  }

  Compute shift[kPack];
  if constexpr (Bias::kPresent) unpack<kPack>(a.bias.template load<kPack>(int64(pack) * kPack), shift);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (first + i >= tokens) break;
    U* const to = y + offset_of(a.to, first + i);
    if constexpr (!Bias::kPresent && kSameType<T, U>) {
      if (kIndexed && !there[i]) held[i] = Pack<T, kPack>{};
      store_pack<true>(to, held[i]);
    } else {
      Compute value[kPack];
      if (!kIndexed || there[i]) unpack<kPack>(held[i], value);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if constexpr (Bias::kPresent) value[j] += shift[j];
        if (kIndexed && !there[i]) value[j] = 0;
      }
      store_pack<true>(to, pack_from<U, kPack>(value));
    }
  }
}

}  // namespace cupynorm
