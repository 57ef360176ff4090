// warp, where rows are narrow and lie next to one another without a gap: what a block has of them is one stretch of
// memory, which comes and goes in accesses of 16 bytes by way of shared memory, wherever its rows begin.
#pragma once
#include <base/async_copy.cuh>
#include <base/pdl.cuh>
#include <base/reduce.cuh>
#include <io/affine.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// kGroup neighbouring lanes share a row, kVectors vectors of kVector elements each, of which the last may be missing;
// every row begins at a vector. A block of kBlock threads has kRows rows.
template <int Vector_, int Vectors, int Group, int Block, int MinBlocks>
struct Tiled {
  static constexpr int kVector = Vector_, kVectors = Vectors, kGroup = Group, kBlock = Block, kMinBlocks = MinBlocks;
  static constexpr int kElements = kVector * kVectors, kRows = Block / Group;
  static_assert(Group <= kWarp && kRows % 8 == 0, "what a block has begins at 16 bytes, of elements of 2 bytes, too");
};

// The affine parameters of a column in the compute type; nothing where a Store has none.
template <class Store, typename Compute, class = void>
struct ColumnNumbers {
  using Number = NoColumns;
  static constexpr bool kPresent = false;
};
template <class Store, typename Compute>
struct ColumnNumbers<Store, Compute, decltype(void(sizeof(typename Store::Affines)))> {
  using Number = typename Store::Affines::template Number<Compute>;
  static constexpr bool kPresent = Store::Affines::kPresent;
};

// Those of kCount neighbouring columns, in as few accesses as their alignment allows.
template <int kCount, class Number>
inline Scalings<Number, kCount> load_together(const Number* p) {
  constexpr int kBytes = kCount * int(sizeof(Number)), kAligned = kBytes > 16 ? 16 : kBytes;
  struct __align__(kAligned) Together {
    Scalings<Number, kCount> scalings;
  };
  return reinterpret_cast<const Together*>(p)->scalings;
}

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_tiled(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using Type = typename Load::Type;
  using Result = typename Store::Type;
  using Columns = ColumnNumbers<Store, Compute>;
  using Number = typename Columns::Number;
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kElements = Shape::kElements;
  constexpr int kGroup = Shape::kGroup, kBlock = Shape::kBlock, kRows = Shape::kRows;
  constexpr int kAccess = 16 / int(sizeof(Type)), kAccesses = (kElements + kAccess - 1) / kAccess;
  constexpr int kColumns = (kElements * kGroup + kBlock - 1) / kBlock;  // whose parameters a thread converts
  static_assert(Load::kDirect && !Store::kScales && !Store::kHasEpilogueOperands && sizeof(Type) == sizeof(Result),
      "results take the places of elements");
  const int cols = int(a.cols), lane = threadIdx.x % kGroup;
  // The rows of a warp are a row of each warp apart, not neighbours: those of an odd number of vectors then begin in
  // banks that are multiples of the group's apart, wherever the first begins, if there are as many warps as lanes share
  // a row.
  const int row = threadIdx.x % kWarp / kGroup * (kBlock / kWarp) + threadIdx.x / kWarp;
  const int64 first = int64(blockIdx.x) * kRows;
  const int rows = a.rows - first < kRows ? int(a.rows - first) : kRows, held = rows * cols;
  // Gives act() the first element of each whole access of this thread.
  auto all = [&](auto&& act) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int at = (i * kBlock + int(threadIdx.x)) * kAccess;
      if (at + kAccess <= held) act(at);
    }
  };
  const int rest = held / kAccess * kAccess + int(threadIdx.x);  // the element that this thread moves alone
  Type* const elements = reinterpret_cast<Type*>(shared_memory);
  Number* const numbers = reinterpret_cast<Number*>(shared_memory + kRows * cols * int(sizeof(Type)));

  pdl_wait();
  const Type* const from = static_cast<const Type*>(a.load.at(first).address(0));
  all([&](int at) { copy_async<16>(elements + at, from + at); });
  commit_copies();
  if (rest < held) elements[rest] = from[rest];
  if constexpr (Columns::kPresent) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int col = i * kBlock + int(threadIdx.x);
      Number own[1];
      if (col < cols) {
        Store::Affines::template convert<1>(a.store.template columns<1>(col), own);
        numbers[col] = own[0];
      }
    }
  }
  pdl_trigger_late();
  wait_for_copies<0>();
  __syncthreads();

  const bool has_last = ((kVectors - 1) * kGroup + lane) * kVector < cols;
  const int begin = row * cols + lane * kVector;
  ElementOf<Op> x[kElements];
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    if (p < kVectors - 1 || has_last) {
      unpack<kVector>(load_vector<Type, kVector>(elements + begin + p * (kGroup * kVector)), x + p * kVector);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[p * kVector + i] = Op::padding();
    }
  }
  Compute pivot = 0;
  if constexpr (Op::kHasPivot) {
    constexpr int kFirst = kVectors > 1 ? kElements - kVector : kVector, kLeading = kFirst < 4 ? kFirst : 4;
    Compute leading[kLeading];
#pragma unroll
    for (int i = 0; i < kLeading; ++i) leading[i] = x[i];
    pivot = __shfl_sync(kAllLanes, Op::pivot_of(leading, typename Load::Precision()), 0, kGroup);
  }
  constexpr int kFew = one_pass_elements<Store>();
  constexpr bool kShort = sizeof(typename Load::Precision) == 2 && kGroup * kElements <= kFew;  // as in choices.cuh
  const Predicate<kElements - kVector> valid = {kElements - (has_last ? 0 : kVector), false};
  typename Op::State mine;
  const auto total = summarize_lanes<Op, false, kShort, false, kGroup>(x, valid, cols, pivot, mine);
  const typename Op::Row whole = a.op.finish(mine, total, cols, pivot);
  if (a.op.saves() && lane == 0 && row < rows) a.op.save(first + row, whole);
#pragma unroll
  for (int p = 0; p < kVectors; ++p) {
    if (p == kVectors - 1 && !has_last) continue;
    Compute y[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = Op::map(x[p * kVector + i], whole);
    if constexpr (Columns::kPresent) {
      const auto own = load_together<kVector>(numbers + lane * kVector + p * (kGroup * kVector));
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] = own.column[i](y[i]);
    }
    store_vector(reinterpret_cast<Result*>(elements) + begin + p * (kGroup * kVector), vector_from<Result, kVector>(y));
  }
  __syncthreads();
  Result* const to = a.store.at(first).address();
  const Result* const results = reinterpret_cast<const Result*>(elements);
  all([&](int at) { store_vector<true>(to + at, load_vector<Result, kAccess>(results + at)); });
  if (rest < held) to[rest] = results[rest];
}

}  // namespace cupynorm
