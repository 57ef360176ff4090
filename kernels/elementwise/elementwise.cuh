// Ops on each element: an activation after a bias, with a gate perhaps, and dropout. One kernel for all, which knows
// neither the op nor types. The ops and the kernel's numbers have host mirrors in cupynorm/lower/elementwise.py.
#pragma once
#include <base/functions.cuh>
#include <base/hints.cuh>
#include <base/pdl.cuh>
#include <base/philox.cuh>
#include <io/affine.cuh>

namespace cupynorm {

// x Phi(x), as exact as the result's type asks for: Phi(x) = 1 / (1 + 2^(-x q(|x|))) with a polynomial q near
// log2(Phi(a) / Phi(-a)) / a. Nothing cancels in either tail, and its coefficients (linear programming) make the
// largest error over all x as small as it can be, in units of the result's last place. Beyond them the power grows to
// where the result is x, or 0.
template <int kDegree>
inline float gelu_by_power(float x, const float (&coefficient)[kDegree + 1]) {
  const float a = magnitude(x);
  float q = coefficient[kDegree];
#pragma unroll
  for (int i = kDegree - 1; i >= 0; --i) q = multiply_add(q, a, coefficient[i]);
  return x * reciprocal_approx(1.0f + exp2_approx(-x * q));
}
// The error before rounding is 0.375 units of float16. 10 instructions; fn_gelu has 17, and with erff they are 30.
inline float gelu_to(half, float x) {
  const float coefficient[] = {2.3049812f, -0.004241385f, 0.101782516f, 0.0075387848f, -0.0038392362f, 0.00031293253f};
  return gelu_by_power<5>(x, coefficient);
}
// 0.67 units of bfloat16 down to x = -12.95, where the reciprocal is flushed to 0. 11 instructions.
inline float gelu_to(bfloat16, float x) {
  const float coefficient[] = {2.3491535f,   -0.11395273f,   0.19396745f,  -0.02709678f,
                               0.002205534f, -9.621301e-05f, 1.735913e-06f};
  return gelu_by_power<6>(x, coefficient);
}
inline float gelu_to(float, float x) { return fn_gelu(x); }
template <typename T>
inline double gelu_to(T, double x) {
  return fn_gelu(x);
}

// The same where the result is multiplied before it is rounded: what is subnormal in float16 needs its digits, too. A
// relative error of 2e-4 down to x = -7.4, behind which it moves no product by half of the least float16. 12
// instructions.
inline float gelu_factor_to(half, float x) {
  const float coefficient[] = {2.2984874f,    0.02242347f,   0.0636344f,     0.033505127f,
                               -0.013131806f, 0.0020677373f, -0.0001585414f, 4.865947e-06f};
  return gelu_by_power<7>(x, coefficient);
}
template <typename T, typename Compute>
inline Compute gelu_factor_to(T type, Compute x) {
  return gelu_to(type, x);
}

template <typename T, bool kFactor>
struct Gelu {
  template <typename Compute>
  static Compute apply(Compute x) {
    return kFactor ? gelu_factor_to(T{}, x) : gelu_to(T{}, x);
  }
};

struct GeluTanh {
  template <typename Compute>
  static Compute apply(Compute x) {
    return fn_gelu_tanh(x);
  }
};

struct Silu {
  template <typename Compute>
  static Compute apply(Compute x) {
    return fn_silu(x);
  }
};

// Which elements of a vector a row has: the others belong to its neighbours.
template <int N>
struct VectorMask {
  unsigned has_bits;
  bool whole() const { return has_bits == (1u << N) - 1; }
  bool has(int i) const { return has_bits >> i & 1; }
};

template <int N>
inline VectorMask<N> vector_mask_between(int begin, int end) {
  return {((1u << end) - 1) & ~((1u << begin) - 1)};
}

// Those elements of N at p, one by one; the others are 0.
template <typename T, int N, bool kConstant = false>
inline Vector<T, N> load_masked(const T* p, VectorMask<N> mask) {
  Vector<T, N> vector;
  // else the compiler keeps a predicate for each bit from one use to the next, more than there are
  make_opaque(mask.has_bits);
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i) vector.word[i] = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (!mask.has(i)) continue;
    const Vector<T, 1> one = load_vector<T, 1, 1, kConstant>(p + i);
    if constexpr (sizeof(T) == 2) vector.word[i / 2] |= one.word[0] << 16 * (i % 2);
    else if constexpr (sizeof(T) == 4) vector.word[i] = one.word[0];
    else vector.word[2 * i] = one.word[0], vector.word[2 * i + 1] = one.word[1];
  }
  return vector;
}

// The same of columns' parameters; anywhere in them.
template <int N>
inline NoColumns columns_masked(const NoColumn&, int64, VectorMask<N>) {
  return {};
}
template <int N, typename T, int kWidth>
inline Vector<T, N> columns_masked(const Column<T, kWidth>& column, int64 begin, VectorMask<N> mask) {
  return mask.whole() ? column.template load_unaligned<N>(begin)
      : load_masked<T, N, true>(column.pointer + begin, mask);
}
template <int N, typename T, int kAxes>
inline auto columns_masked(const StridedColumn<T, kAxes>& column, int64 begin, VectorMask<N> mask) {
  typename StridedColumn<T, kAxes>::template Packed<N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values.element[i] = vector_filled<T, 1>(0.0f);
    if (mask.has(i)) values.element[i] = column.template load<1>(begin + i).element[0];
  }
  return values;
}

// An op has kInputs, how many elements of x it makes one of: they lie a row of results apart. columns<N>(col, cols)
// gives what is the same for every row. columns_masked<N>(begin, cols, span) gives the same of some columns only, for a
// begin that need not be a vector's. apply(x, columns, index) leaves the results in x[0]; index: of the first one, in C
// order.

// kGate: 0: f(x + bias). Otherwise f(a) * b, where a is the first (1) or the second (2) half of x + bias.
template <typename Compute_, class Function, class Bias, int kGate>
struct Activate {
  using Compute = Compute_;
  static constexpr int kInputs = kGate > 0 ? 2 : 1;
  Bias bias;

  template <int N>
  struct Columns {
    typename Bias::template Packed<N> half[kInputs];
  };
  template <int N>
  Columns<N> columns(int64 col, int64 cols) const {
    Columns<N> columns;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) columns.half[k] = bias.template load<N>(col + k * cols);
    return columns;
  }
  template <int N>
  Columns<N> columns_masked(int64 begin, int64 cols, VectorMask<N> mask) const {
    Columns<N> columns;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) columns.half[k] = cupynorm::columns_masked<N>(bias, begin + k * cols, mask);
    return columns;
  }

  template <int N>
  void apply(Compute (&x)[kInputs][N], const Columns<N>& columns, int64) const {
    if constexpr (Bias::kPresent) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        Compute shift[N];
        unpack<N>(columns.half[k], shift);
#pragma unroll
        for (int i = 0; i < N; ++i) x[k][i] += shift[i];
      }
    }
    constexpr int kGating = kGate == 2 ? 1 : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Compute activated = Function::apply(x[kGating][i]);
      x[0][i] = kGate > 0 ? activated * x[kInputs - 1 - kGating][i] : activated;
    }
  }
};

// Element i is kept if its word is not below the threshold, and multiplied by the factor; else 0, whatever it is. Its
// word is number i % 4 of what Philox makes of the counter offset + i / 4. kWhole: vectors begin at multiples of 4.
template <typename Compute_, bool kWhole>
struct Drop {
  using Compute = Compute_;
  static constexpr int kInputs = 1;
  unsigned long long offset;
  PhiloxKeys keys;
  unsigned long long threshold;  // of 33 bits
  Compute factor;

  template <int N>
  using Columns = NoColumns;
  template <int N>
  NoColumns columns(int64, int64) const {
    return {};
  }
  template <int N>
  NoColumns columns_masked(int64, int64, VectorMask<N>) const {
    return {};
  }

  template <int N>
  void apply(Compute (&x)[1][N], NoColumns, int64 index) const {
    constexpr int kBlocks = (N + 3) / 4 + (kWhole ? 0 : 1);
    unsigned word[kBlocks * 4];
    const unsigned long long first = offset + static_cast<unsigned long long>(index >> 2);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const unsigned long long counter = first + i;
      const uint4 four = philox_block(counter, keys);
      word[i * 4] = four.x, word[i * 4 + 1] = four.y, word[i * 4 + 2] = four.z, word[i * 4 + 3] = four.w;
    }
    if constexpr (!kWhole) {  // the vector's first word comes first
#pragma unroll
      for (int i = 0; i < N + 1; ++i) word[i] = index & 2 ? word[i + 2] : word[i];
#pragma unroll
      for (int i = 0; i < N; ++i) word[i] = index & 1 ? word[i + 1] : word[i];
    }
    const bool some = threshold >> 32 == 0;
#pragma unroll
    for (int i = 0; i < N; ++i) x[0][i] = some && word[i] >= unsigned(threshold) ? x[0][i] * factor : Compute(0);
  }
};

// Where a row begins, in elements. Rows that an int counts are found by 32-bit divisions.
template <typename Index, int kAxes>
inline int64 place(const Strided<kAxes>& rows, Index row) {
  if constexpr (kAxes == 1 || sizeof(Index) == 8) {
    return rows.offset(row);
  } else {
    int64 sum = 0;
    unsigned index = unsigned(row);
#pragma unroll
    for (int axis = kAxes - 1; axis > 0; --axis) {
      const unsigned extent = unsigned(rows.extent[axis]), outer = index / extent;
      sum += int64(index - outer * extent) * rows.stride[axis];
      index = outer;
    }
    return sum + int64(index) * rows.stride[0];
  }
}

template <typename T, typename Index, int kAxes>
inline T* row_at(T* pointer, const Strided<kAxes>& rows, Index row, Index col) {
  if constexpr (kAxes == 1) {
    // modulo 2^64: with a sign each row's address would take two instructions more
    using Unsigned = unsigned long long;
    return pointer + int64(Unsigned(row) * Unsigned(rows.stride[0]) + col);
  } else {
    return pointer + (place(rows, row) + int64(col));
  }
}

template <bool kLong>
struct IndexType {
  using Type = unsigned;
};
template <>
struct IndexType<true> {
  using Type = int64;
};

constexpr int kMostThreads = 256;

// A block is a rectangle of vectors: blockDim.x across a row, blockDim.y * kRows rows; grid.x such rectangles lie side
// by side, grid.y * grid.z below one another. A thread has the same vector of kRows rows: what is read of the columns
// serves them all.
//
// kVector: elements of a vector. kUnaligned: 0: every row begins at a vector of x and of y, and is made of whole ones.
// Otherwise rows begin and end anywhere: vectors are those of y's memory, and of the ones that a row shares its
// elements are moved one by one. 1: x lies in its vectors as y does. 2: x lies anywhere, and its vectors are put
// together from two accesses.
// kLong: rows or columns are more than an int counts.
template <class Op, class Load, class Store, int kVector, int kRows, int kUnaligned, bool kLong>
__global__ void __launch_bounds__(kMostThreads) each_element(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  constexpr int kInputs = Op::kInputs;
  static_assert(kUnaligned == 0 || kRows == 1, "other rows begin elsewhere");
  using Index = typename IndexType<kLong>::Type;
  const Index cols = Index(a.cols), rows = Index(a.rows);
  const Index col = (Index(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  const Index first = (Index(blockIdx.z) * gridDim.y + blockIdx.y) * (blockDim.y * kRows) + threadIdx.y;
  if (first >= rows) return;
  pdl_wait_and_trigger((gridDim.y - blockIdx.y) * gridDim.x);  // of each layer
  if constexpr (kUnaligned == 0) {
    if (col >= cols) return;
    const auto columns = a.op.template columns<kVector>(col, cols);
    Vector<Type, kVector> vector[kRows][kInputs];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Index row = first + r * blockDim.y;
      if (r > 0 && row >= rows) break;
      const Type* from = row_at(a.load.pointer, a.load.rows, row, col);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) vector[r][k] = load_vector<Type, kVector>(from + k * cols);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Index row = first + r * blockDim.y;
      if (r > 0 && row >= rows) break;
      Compute x[kInputs][kVector];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) unpack<kVector>(vector[r][k], x[k]);
      a.op.template apply<kVector>(x, columns, int64(row) * a.cols + col);
      store_vector(row_at(a.store.pointer, a.store.rows, row, col), vector_from<typename Store::Type, kVector>(x[0]));
    }
  } else {
    const typename Load::RowPointer source = {{}, a.load.pointer + place(a.load.rows, first)};
    const typename Store::RowPointer target = {a.store.pointer + place(a.store.rows, first)};
    const int64 begin = int64(col) - (-target.template head<kVector>() & (kVector - 1)), behind = a.cols - begin;
    if (behind <= 0) return;
    VectorMask<kVector> mask =
        vector_mask_between<kVector>(begin < 0 ? int(-begin) : 0, behind < kVector ? int(behind) : kVector);
    const auto columns = a.op.template columns_masked<kVector>(begin, a.cols, mask);
    Compute x[kInputs][kVector];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const int64 at = begin + k * a.cols;
      Vector<Type, kVector> vector;
      if (!mask.whole()) vector = load_masked<Type, kVector>(source.pointer + at, mask);
      else if constexpr (kUnaligned == 1) vector = source.template load<kVector>(at);
      else vector = source.template load_unaligned<kVector>(at);
      unpack<kVector>(vector, x[k]);
    }
    a.op.template apply<kVector>(x, columns, int64(first) * a.cols + begin);
    make_opaque(mask.has_bits);
    if (mask.whole()) return target.template store<kVector, true>(x[0], NoColumns{}, begin);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (!mask.has(i)) continue;
      const Compute one[1] = {x[0][i]};
      target.template store<1>(one, NoColumns{}, begin + i);
    }
  }
}

}  // namespace cupynorm
