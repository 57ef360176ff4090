// The Stores that compute: from the op's result and from operands. Their host mirrors: in cupynorm/lower/mirrors.py.
// What they compute is a struct that lower/expressions.py writes, `Function`.
#pragma once
#include <io/operands.cuh>

namespace cupynorm {

// Where results go, one behind another.
template <class... Stores>
struct Outputs {
  static constexpr int kCount = 0, kBytes = 1;
  static constexpr bool kInSteps = true;
  struct RowPointer {
    void make_opaque() {}
    void begin_at(int) {}
    template <int N, bool kWhole, typename Compute, typename Index>
    static void store(const Compute (*)[N], Index) {}
  };
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&)[kRows], const Compute (*)[kRows], Index) {}
  RowPointer at(int64) const { return {}; }
};
template <class First, class... Rest>
struct Outputs<First, Rest...> {
  using Others = Outputs<Rest...>;
  using Type = typename First::Type;
  static constexpr int kCount = 1 + Others::kCount,
      kBytes = First::kBytes > Others::kBytes ? First::kBytes : Others::kBytes;
  static constexpr bool kInSteps = kStoresInSteps<First> && Others::kInSteps;
  First first;
  Others rest;

  struct RowPointer {
    typename First::RowPointer first;
    typename Others::RowPointer rest;
    void make_opaque() { first.make_opaque(), rest.make_opaque(); }
    void begin_at(int col) { first.begin_at(col), rest.begin_at(col); }
    template <int N, bool kWhole, typename Compute, typename Index>
    void store(const Compute (*y)[N], Index col) const {
      first.template store<N, kWhole>(y[0], NoColumns{}, col);
      rest.template store<N, kWhole>(y + 1, col);
    }
  };
  // One element of each of some neighbouring rows.
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (*y)[kRows], Index col) {
    typename First::RowPointer to[kRows];
    typename Others::RowPointer others[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) to[r] = rows[r].first, others[r] = rows[r].rest;
    First::template store_across<kRows>(to, y[0], col);
    Others::template store_across<kRows>(others, y + 1, col);
  }
  RowPointer at(int64 row) const { return {first.at(row), rest.at(row)}; }
};

// A bit for each of N elements.
template <int N>
constexpr unsigned all_of() {
  return ~0u >> (32 - N);
}

// Function(y * gamma + beta, operands), each result rounded once.
template <class Function, class Gamma, class Beta, class Outputs_, class Operands_>
struct FusedStore : ColumnsOf<FusedStore<Function, Gamma, Beta, Outputs_, Operands_>, Gamma, Beta> {
  using Type = typename Outputs_::Type;
  using Affines = AffineColumns<Gamma, Beta>;
  static constexpr int kBytes = Outputs_::kBytes, kDrawn = Operands_::kDrawn;
  static constexpr bool kHasEpilogueOperands = true, kScales = false,
      kInSteps = Outputs_::kInSteps && Operands_::kPerRow, kOperandsInSteps = Outputs_::kInSteps && Operands_::kInSteps;
  Outputs_ to;
  Affines affine;
  Operands_ operands;

  template <int N>
  using EpilogueOperands = typename Operands_::template Packed<N>;
  template <int N, class As>
  using Kept = typename Operands_::template Kept<N, As>;
  template <int N>
  static constexpr int kRowBytes = Operands_::template kRowBytes<N>;
  template <int N>
  static constexpr bool kCut = Operands_::template kCut<N>;

  struct RowPointer {
    typename Outputs_::RowPointer to;
    typename Operands_::RowPointer operands;
    Type* address() const { return to.first.address(); }
    void make_opaque() { to.make_opaque(), operands.make_opaque(); }
    void begin_at(int col) { to.begin_at(col), operands.begin_at(col); }
    template <int N>
    int head() const {
      return to.first.template head<N>();
    }
    template <int N, typename Index>
    EpilogueOperands<N> epilogue_operands(Index col) const {
      return operands.template load<N>(col);
    }
    // columns: as they were loaded, or numbers
    template <int N, bool kWhole = false, typename Compute, class Columns, typename Index>
    void store(const Compute (&y)[N], const Columns& columns, const EpilogueOperands<N>& epilogue_operands,
        Index col) const {
      store_further<0, N, kWhole>(y, columns, epilogue_operands, col, [](int, int, Compute) {});
    }
    // The same where the function gives kMore numbers behind the results: take(k, i, number) gets those of element i.
    template <int kMore, int N, bool kWhole, typename Compute, class Columns, typename Index, class Take>
    void store_further(const Compute (&y)[N], const Columns& columns, const EpilogueOperands<N>& epilogue_operands,
        Index col, Take take) const {
      Compute in[1 + Operands_::kCount][N];
      operands.template unpack<N>(epilogue_operands, in + 1, col);
      store_computed<kMore, N, kWhole>(in, y, columns, col, take);
    }
    // The same with operands as FusedLoad's that a thread keeps, or whose rows were copied to shared memory.
    template <int N, class As>
    Kept<N, As> keep(int64 col, int begin, int end) const {
      return operands.template keep<N, As>(col, begin, end);
    }
    template <int N, int kPlaces, typename Index>
    void prefetch_row(unsigned char* shared, int place, Index col) const {
      operands.template prefetch_row<N, kPlaces>(shared, place, col);
    }
    template <int kMore, int kPlaces, int N, bool kWhole, class As, typename Compute, class Columns, typename Index,
        class Take>
    void store_row(const Compute (&y)[N], const Columns& columns, const Kept<N, As>& kept, const unsigned char* shared,
        int place, Index col, Take take, unsigned own = all_of<N>()) const {
      Compute in[1 + Operands_::kCount][N];
      operands.template unpack_row<N, kPlaces, As>(kept, shared, place, in + 1, col);
      store_computed<kMore, N, kWhole>(in, y, columns, col, take, own);
    }
    template <int kMore, int N, bool kWhole, typename Compute, class Columns, typename Index, class Take>
    void store_computed(Compute (&in)[1 + Operands_::kCount][N], const Compute (&y)[N], const Columns& columns,
        Index col, Take take, unsigned own = all_of<N>()) const {
      Compute out[Outputs_::kCount + kMore][N];
      Affines::template apply<N>(y, columns, in[0]);
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int k = 0; k < kMore; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) take(k, i, out[Outputs_::kCount + k][i]);
      }
      if (own == all_of<N>()) {
        to.template store<N, kWhole>(out, col);
        return;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Compute one[Outputs_::kCount][1];
#pragma unroll
        for (int k = 0; k < Outputs_::kCount; ++k) one[k][0] = out[k][i];
        if (own >> i & 1) to.template store<1, false>(one, col + i);
      }
    }
  };
  // The results of one element of each of some neighbouring rows, whose function gives kMore numbers behind them:
  // take(k, r, number) gets those of row r. operands_of(r): row r's operands, as they were loaded.
  template <int kMore, int kRows, class Row, typename Compute, class Columns, class OperandsOf, typename Index,
      class Take>
  static void store_all_across(const Row (&rows)[kRows], const Compute (&y)[kRows], const Columns& columns,
      OperandsOf operands_of, Index col, Take take) {
    Compute all[Outputs_::kCount][kRows];
    typename Outputs_::RowPointer to[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Compute own[1] = {y[r]};
      Compute in[1 + Operands_::kCount][1], out[Outputs_::kCount + kMore][1];
      Affines::template apply<1>(own, columns, in[0]);
      rows[r].operands.template unpack<1>(operands_of(r), in + 1, col);
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int k = 0; k < Outputs_::kCount; ++k) all[k][r] = out[k][0];
#pragma unroll
      for (int k = 0; k < kMore; ++k) take(k, r, out[Outputs_::kCount + k][0]);
      to[r] = rows[r].to;
    }
    Outputs_::template store_across<kRows>(to, all, col);
  }
  template <int kRows, class Row, typename Compute, class Columns, typename Index>
  static void store_across(const Row (&rows)[kRows], const Compute (&y)[kRows], const Columns& columns,
      const EpilogueOperands<1> (&epilogue_operands)[kRows], Index col) {
    store_all_across<0>(rows, y, columns, [&](int r) -> const auto& { return epilogue_operands[r]; }, col,
        [](int, int, Compute) {});
  }
  // With operands that were loaded for all rows at once.
  template <int kRows>
  using OperandsBeside = OfRows<Operands_, kRows>;
  template <int kRows, class Row, typename Index>
  static void load_operands_across(const Row (&rows)[kRows], Index col, OperandsBeside<kRows>& operands) {
    operands.load([&](int r) -> const auto& { return rows[r].operands; }, col);
  }
  template <int kMore, int kRows, class Row, typename Compute, class Columns, typename Index, class Take>
  static void store_further_across(const Row (&rows)[kRows], const Compute (&y)[kRows], const Columns& columns,
      const OperandsBeside<kRows>& operands, Index col, Take take) {
    store_all_across<kMore>(rows, y, columns, [&](int r) -> decltype(auto) { return operands.of(r); }, col, take);
  }
  RowPointer at(int64 row) const { return {to.at(row), operands.at(row)}; }
};

template <typename T>
constexpr bool kIsInt8 = false;
template <>
constexpr bool kIsInt8<signed char> = true;

// (y * gamma + beta) / scale, where scale takes the largest of a row to the largest number that is stored, and is
// written.
template <typename Compute, class To, class Gamma, class Beta>
struct ScaledStore : ColumnsOf<ScaledStore<Compute, To, Gamma, Beta>, Gamma, Beta> {
  using T = typename To::Type;
  using Type = T;
  using Affines = AffineColumns<Gamma, Beta>;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kHasEpilogueOperands = false, kScales = true, kInSteps = kStoresInSteps<To>;
  // int8 of a row's own scale: nothing is beyond the limit
  static constexpr bool kInRange = kIsInt8<T> && sizeof(Compute) == 4;
  To to;
  Affines affine;
  Compute* scales;
  Compute limit;  // the largest number that is stored

  template <int N>
  using EpilogueOperands = NoColumns;
  template <int N, class Columns>
  static void finish(const Compute (&y)[N], const Columns& columns, Compute (&z)[N]) {
    Affines::template apply<N>(y, columns, z);
  }

  // lift: 1, or for a scale of a double that is too small to have an inverse a power of two, which elements are
  // multiplied by first.
  struct Scale {
    Compute scale, inverse, lift;
    unsigned what;  // bytes_of: 0 for an int8 of a row that has nan or inf
  };
  // in float a scale without an inverse is subnormal, and flushed to zero
  static constexpr bool kLifts = sizeof(Compute) == 8;
  Scale scale_of(Compute largest) const {
    const Compute scale = largest * reciprocal(limit);
    const bool zero = scale == 0 || scale == infinity<Compute>();
    Compute lift = 1;
    if constexpr (kLifts) lift = scale < 0x1p-1000 ? 0x1p+100 : 1.0;
    const Compute inverse = zero ? Compute(0) : reciprocal(scale * lift);
    const Compute finite = !kLifts && inverse == infinity<Compute>() ? Compute(3.0e38f) : inverse;  // nan stays
    return {scale, finite, lift, scale < infinity<Compute>() ? kLowBytes : kTopSigns};
  }
  void save(int64 row, Scale scale) const { scales[row] = scale.scale; }

  struct RowPointer {
    typename To::RowPointer to;
    void make_opaque() { to.make_opaque(); }
    void begin_at(int col) { to.begin_at(col); }
    Type* address() const { return to.address(); }
    template <int N>
    int head() const {
      return to.template head<N>();
    }
    template <int N, bool kWhole = false, typename Index>
    void store_scaled(const Compute (&z)[N], Scale scale, Index col) const {
      Compute q[N];
      if constexpr (kInRange) {
        Vector<T, N> vector;
        float sum[N < 4 ? 4 : N] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = multiply_add(z[i], scale.inverse, kLastPlaceIsOne);
#pragma unroll
        for (int i = 0; i < N; i += 4)
          vector.word[i / 4] = bytes_of(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], scale.what);
        to.template put<kWhole>(vector, col);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) q[i] = (kLifts ? z[i] * scale.lift : z[i]) * scale.inverse;
        to.template store<N, kWhole>(q, NoColumns{}, col);
      }
    }
  };
  // finish() of one element of each of some neighbouring rows, and how it is stored.
  template <int kRows, class Columns>
  static void finish_across(const Compute (&y)[kRows], const Columns& columns, Compute (&z)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Compute from[1] = {y[r]};
      Compute to[1];
      finish<1>(from, columns, to);
      z[r] = to[0];
    }
  }
  template <int kRows, class Row, typename Index>
  static void store_scaled_across(const Row (&rows)[kRows], const Compute (&z)[kRows], const Scale (&scales)[kRows],
      Index col) {
    typename To::RowPointer targets[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) targets[r] = rows[r].to;
    if constexpr (kInRange) {
      float sum[4] = {};
      unsigned finite = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = multiply_add(z[r], scales[r].inverse, kLastPlaceIsOne);
        finite |= (scales[r].what == kLowBytes ? 0xffu : 0u) << 8 * r;
      }
      const Vector<T, kRows> vector = {{bytes_of(sum[0], sum[1], sum[2], sum[3], kLowBytes) & finite}};
      To::template put_across<kRows>(targets, vector, col);
    } else {
      Compute q[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) q[r] = (kLifts ? z[r] * scales[r].lift : z[r]) * scales[r].inverse;
      To::template store_across<kRows>(targets, q, col);
    }
  }
  RowPointer at(int64 row) const { return {to.at(row)}; }
};

}  // namespace cupynorm
