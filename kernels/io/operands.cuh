// Several operands (operand.cuh), those of neighbouring rows, and what a function makes of them.
#pragma once
#include <io/operand.cuh>

namespace cupynorm {

// Several operands; values of operand k are row k of x.
template <class... Operands_>
struct Operands {
  static constexpr int kCount = 0, kBytes = 2, kDrawn = 0, kOfElements = 0;
  static constexpr bool kPerRow = true, kInSteps = true;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  template <int N>
  static constexpr int kRowBytes = 0;
  template <int N>
  static constexpr bool kCut = true;
  static constexpr int kKeptColumns = 0;
  template <int N, class As>
  using Kept = NoColumns;
  struct RowPointer {
    static void make_opaque() {}
    static bool begins_at(const void*) { return false; }
    static void begin_at(int) {}
    template <class Draw>
    static void draw(Draw) {}
    template <typename Index>
    static void prefetch_across(Index) {}
    template <int N, typename Index>
    NoColumns load(Index) const {
      return {};
    }
    template <int N, class As>
    static NoColumns keep(int64, int, int) {
      return {};
    }
    template <int N, int kPlaces, typename Index>
    static void prefetch_row(unsigned char*, int, Index) {}
    template <int N, int kPlaces, class As, typename Compute, typename Index>
    static void unpack_row(NoColumns, const unsigned char*, int, Compute (*)[N], Index) {}
    template <int N, typename Compute, typename Index>
    static void unpack(NoColumns, Compute (*)[N], Index) {}
  };
  template <class Visit>
  static void each_scattered(int64, RowPointer&, Visit) {}
  static constexpr int kNumbers = 0;
  static void prefetch_numbers(int64) {}
  RowPointer at(int64) const { return {}; }
};
template <class First, class... Rest>
struct Operands<First, Rest...> {
  using Others = Operands<Rest...>;
  static constexpr int kCount = 1 + Others::kCount,
      kBytes = First::kBytes > Others::kBytes ? First::kBytes : Others::kBytes,
      kDrawn = kIsDrawn<First> + Others::kDrawn,  // dropouts
      kOfElements = !(First::kPerRow || kOfColumns<First>) + Others::kOfElements;
  static constexpr bool kPerRow = First::kPerRow && Others::kPerRow,
      kInSteps = kLoadsInSteps<First> && Others::kInSteps;
  First first;
  Others rest;

  // How many operands are one number for each row; and a call that asks the L2 cache for those of a later row.
  static constexpr int kNumbers = Others::kNumbers + (First::kPerRow && !kIsDrawn<First>);
  void prefetch_numbers(int64 row) const {
    if constexpr (First::kPerRow && !kIsDrawn<First>) prefetch_to_l2(first.pointer + first.rows.offset(row));
    rest.prefetch_numbers(row);
  }

  template <int N>
  struct Packed {
    typename First::template Packed<N> first;
    typename Others::template Packed<N> rest;
    void make_opaque() { first.make_opaque(), rest.make_opaque(); }
  };
  template <int N>
  static constexpr int kPrefetchBytes = First::template kPrefetchBytes<N> + Others::template kPrefetchBytes<N>;
  template <int N>
  static constexpr int kFirstRowBytes = kOfColumns<First> ? 0 : First::template kPrefetchBytes<N>;
  template <int N>
  static constexpr int kRowBytes = kFirstRowBytes<N> + Others::template kRowBytes<N>;
  template <int N>
  static constexpr bool kCut = kMayBeCut<First, N> && Others::template kCut<N>;
  static constexpr int kKeptColumns = kOfColumns<First> + Others::kKeptColumns;  // arrays
  template <int N, class As>
  struct Kept {
    typename KeptOf<First, N, As, kOfColumns<First>>::Type first;
    typename Others::template Kept<N, As> rest;
    void make_opaque() { make_kept_opaque(first), rest.make_opaque(); }
  };
  struct RowPointer {
    typename First::RowPointer first;
    typename Others::RowPointer rest;
    void make_opaque() { first.make_opaque(), rest.make_opaque(); }
    bool begins_at(const void* place) const { return first.begins_at(place) || rest.begins_at(place); }
    void begin_at(int col) { first.begin_at(col), rest.begin_at(col); }
    // Calls draw(pointer) with that of each dropout.
    template <class Draw>
    void draw(Draw draw) {
      if constexpr (kIsDrawn<First>) draw(first);
      rest.draw(draw);
    }
    template <typename Index>
    void prefetch_across(Index col) const {
      first.prefetch_across(col), rest.prefetch_across(col);
    }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      return {first.template load<N>(col), rest.template load<N>(col)};
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      prefetch_if_any<First, N, kPlaces>(first, shared, place, col);
      prefetch_if_any<Others, N, kPlaces>(rest, shared + kPlaces * First::template kPrefetchBytes<N>, place, col);
    }
    template <int N, int kPlaces, typename Index>
    Packed<N> prefetched(const unsigned char* shared, int place, Index col) const {
      const unsigned char* const behind = shared + kPlaces * First::template kPrefetchBytes<N>;
      return {prefetched_or_loaded<First, N, kPlaces>(first, shared, place, col),
          prefetched_or_loaded<Others, N, kPlaces>(rest, behind, place, col)};
    }
    // Where a thread keeps what is the same for every row: keep() loads that (begin, end: as for load_part),
    // prefetch_row() begins to copy the rest, and unpack_row() converts both.
    template <int N, class As>
    Kept<N, As> keep(int64 col, int begin, int end) const {
      Kept<N, As> kept = {{}, rest.template keep<N, As>(col, begin, end)};
      if constexpr (kOfColumns<First>) keep_as(first.template whole<N>(col, begin, end), kept.first);
      return kept;
    }
    template <int N, int kPlaces, typename Index>
    void prefetch_row(unsigned char* shared, int place, Index col) const {
      if constexpr (!kOfColumns<First>) prefetch_if_any<First, N, kPlaces>(first, shared, place, col);
      rest.template prefetch_row<N, kPlaces>(shared + kPlaces * kFirstRowBytes<N>, place, col);
    }
    template <int N, int kPlaces, class As, typename Compute, typename Index>
    void unpack_row(const Kept<N, As>& kept, const unsigned char* shared, int place, Compute (*x)[N], Index col) const {
      if constexpr (kOfColumns<First>) cupynorm::unpack<N>(kept.first, x[0]);
      else first.template unpack<N>(prefetched_or_loaded<First, N, kPlaces>(first, shared, place, col), x[0], col);
      rest.template unpack_row<N, kPlaces, As>(kept.rest, shared + kPlaces * kFirstRowBytes<N>, place, x + 1, col);
    }
    template <int N, typename Compute, typename Index>
    void unpack(const Packed<N>& packed, Compute (*x)[N], Index col) const {
      first.template unpack<N>(packed.first, x[0], col);
      rest.template unpack<N>(packed.rest, x + 1, col);
    }
  };
  template <class Visit>
  void each_scattered(int64 row, RowPointer& own, Visit visit) const {
    visit_if_scattered(first, row, own.first, visit), rest.each_scattered(row, own.rest, visit);
  }
  RowPointer at(int64 row) const { return {first.at(row), rest.at(row)}; }
};

// Of how many neighbouring rows one access can load an element of an operand or a mask.
template <class Operand, class = void>
inline constexpr int kRowsAtOnce = 1;
template <class Operand>
inline constexpr int kRowsAtOnce<Operand, decltype(void(Operand::kAcross))> = Operand::kAcross;

// One element of each of kRows neighbouring rows of an operand or a mask, in one access if the rows lie so.
//   load(get, col)   Loads the elements of a column; get(r) gives the pointer of row r.
//   of(r)            What the pointer of row r would have loaded alone.
//   load_of_rows     load, but for what is the same for all rows: it is there from another row's load.
//   make_opaque()    Makes the compiler take what was loaded for something new.
template <class Operand, int kRows, bool = (kRows > 1 && kRowsAtOnce<Operand> % kRows == 0)>
struct OfRows {
  typename Operand::template Packed<1> rows[kRows];
  template <class Get, typename Index>
  void load(Get get, Index col) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = get(r).template load<1>(col);
  }
  template <class Get, typename Index>
  void load_of_rows(Get get, Index col) {
    load(get, col);
  }
  void make_opaque() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r].make_opaque();
  }
  typename Operand::template Packed<1> of(int r) const { return rows[r]; }
};
template <class Operand, int kRows>
struct OfRows<Operand, kRows, true> {
  using Type = typename Operand::Type;
  Vector<Type, kRows> rows;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    rows = load_step<Type, kRows>(place_in_row(get(0).pointer, get(0).cols, col), col);
  }
  template <class Get, typename Index>
  void load_of_rows(Get get, Index col) {
    load(get, col);
  }
  void make_opaque() { rows.make_opaque(); }
  typename Operand::template Packed<1> of(int r) const { return {{element_of(rows, r)}}; }
};
template <typename T, int kWidth, bool kConstant, int kRows>
struct OfRows<AlongColumns<T, kWidth, kConstant>, kRows, false> {
  typename AlongColumns<T, kWidth, kConstant>::template Packed<1> all;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    all = get(0).template load<1>(col);
  }
  template <class Get, typename Index>
  static void load_of_rows(Get, Index) {}
  void make_opaque() { all.make_opaque(); }
  const auto& of(int) const { return all; }
};
template <class First, class... Rest, int kRows>
struct OfRows<Operands<First, Rest...>, kRows, false> {
  OfRows<First, kRows> first;
  OfRows<Operands<Rest...>, kRows> rest;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    first.load([&](int r) -> const auto& { return get(r).first; }, col);
    rest.load([&](int r) -> const auto& { return get(r).rest; }, col);
  }
  template <class Get, typename Index>
  void load_of_rows(Get get, Index col) {
    first.load_of_rows([&](int r) -> const auto& { return get(r).first; }, col);
    rest.load_of_rows([&](int r) -> const auto& { return get(r).rest; }, col);
  }
  void make_opaque() { first.make_opaque(), rest.make_opaque(); }
  typename Operands<First, Rest...>::template Packed<1> of(int r) const { return {first.of(r), rest.of(r)}; }
};

// in: kInputs numbers of each of N elements; out: kOutputs of each.
template <class Function, int kInputs, int kOutputs, int N, typename Compute>
inline void apply_to_each(const Compute (&in)[kInputs][N], Compute (&out)[kOutputs][N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    Compute given[kInputs], result[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) given[k] = in[k][i];
    Function::apply(given, result);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) out[k][i] = result[k];
  }
}

}  // namespace cupynorm
