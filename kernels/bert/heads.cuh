// move_heads: rows of hidden elements to attention's heads and back, with a bias; and rows by their numbers.
#pragma once
#include <base/pdl.cuh>
#include <io/affine.cuh>

namespace cupynorm {

constexpr int kHeadsBlock = 256;

// Offsets are computed in 32 bits where they fit (Index is unsigned): then the whole argument fits in two lines of the
// constant cache, each of which a launch fetches from memory (docs/notes/040).
template <typename Index>
struct SignedOf {
  using Type = int64;
};
template <>
struct SignedOf<unsigned> {
  using Type = int;
};

// What places are divided by: a multiplication and a shift, for Granlund and Montgomery's (1994) multiplier
// (lower/heads.py), instead of a loop of 20 instructions. In 64 bits, which only huge arrays need, it is a division.
template <typename Index>
struct Divisor {
  Index value;
  unsigned multiplier, shift;
  Index of(Index n) const {
    if constexpr (sizeof(Index) == 4) return (multiply_high(n, multiplier) + n) >> shift;
    else return n / value;
  }
};

// Where an element lies: its part (queries, keys or values), its head, its token, and its column of the head. In
// elements. extents: of the tokens' axes but the first.
template <typename Index, int kAxes>
struct Places {
  using Offset = typename SignedOf<Index>::Type;
  Offset part, head, col, stride[kAxes];
  Divisor<Index> extents[kAxes > 1 ? kAxes - 1 : 1];

  Offset of_token(Index token) const {
    Offset sum = 0;
#pragma unroll
    for (int axis = kAxes - 1; axis > 0; --axis) {
      const Index outer = extents[axis - 1].of(token);
      sum += Offset(token - outer * extents[axis - 1].value) * stride[axis];
      token = outer;
    }
    return sum + Offset(token) * stride[0];
  }
};

// Bias has a column for each of a token's elements. rows: for each of y's tokens, which of x's it is; below 0 none, and
// y is 0 there. Without rows, each is itself. vectors: of a token, of which head_vectors are one head's; heads: of a
// part.
template <typename Index, typename T, typename U, class Bias, int kFrom, int kTo>
struct MovedHeads {
  const T* x;
  U* y;
  const int* rows;
  Index tokens;
  Divisor<Index> vectors, head_vectors, heads;
  Places<Index, kFrom> from;
  Places<Index, kTo> to;
  Bias bias;
};

template <typename T, typename U>
constexpr bool kSameType = false;
template <typename T>
constexpr bool kSameType<T, T> = true;

// A thread moves one vector of kTokens neighbouring tokens: their loads are on their way together, and the bias is read
// once. Neighbouring threads move neighbouring vectors of a token, so that each row of x, and each head's row of y, is
// whole.
template <typename Compute, int kVector, int kTokens, bool kIndexed, typename Index, typename T, typename U,
    class Bias, int kFrom, int kTo>
__global__ void __launch_bounds__(kHeadsBlock)
    move_heads(const __grid_constant__ MovedHeads<Index, T, U, Bias, kFrom, kTo> a) {
  using Offset = typename SignedOf<Index>::Type;
  const Index thread = Index(blockIdx.x) * kHeadsBlock + Index(threadIdx.x), group = a.vectors.of(thread),
      first = group * kTokens;
  if (first >= a.tokens) return;
  pdl_wait_and_trigger();
  const Index vector = thread - group * a.vectors.value;
  const Index each = a.head_vectors.of(vector), part = a.heads.of(each), head = each - part * a.heads.value;
  const Offset col = Offset(vector - each * a.head_vectors.value) * kVector;
  const Offset source =
      Offset(part) * a.from.part + Offset(head) * a.from.head + (kVector > 1 ? col : col * a.from.col);
  const Offset target = Offset(part) * a.to.part + Offset(head) * a.to.head + col;

  Vector<T, kVector> held[kTokens];
  bool there[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    Index row = first + i;
    there[i] = row < a.tokens;
    if constexpr (kIndexed) {
      const int number = there[i] ? a.rows[row] : -1;
      there[i] = number >= 0;
      row = Index(number);
    }
    if (there[i]) held[i] = load_vector<T, kVector>(a.x + (source + a.from.of_token(row)));
  }

  Compute bias[kVector];
  if constexpr (Bias::kPresent) unpack<kVector>(a.bias.template load<kVector>(int64(vector) * kVector), bias);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (first + i >= a.tokens) break;
    U* const to = a.y + (target + a.to.of_token(first + i));
    if constexpr (!Bias::kPresent && kSameType<T, U>) {
      if (kIndexed && !there[i]) held[i] = Vector<T, kVector>{};
      store_vector<true>(to, held[i]);
    } else {
      Compute value[kVector];
      if (!kIndexed || there[i]) unpack<kVector>(held[i], value);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if constexpr (Bias::kPresent) value[j] += bias[j];
        if (kIndexed && !there[i]) value[j] = 0;
      }
      store_vector<true>(to, vector_from<U, kVector>(value));
    }
  }
}

}  // namespace cupynorm
