// The Load that computes: from x and from operands. Its host mirror: in cupynorm/lower/mirrors.py. What it computes is
// a struct that lower/expressions.py writes, `Function`.
#pragma once
#include <io/masks.cuh>

namespace cupynorm {

// Where what was computed is written, too.
struct NoStoreComputed {
  static constexpr bool kStoresComputed = false, kInSteps = true;
  struct RowPointer {
    static void begin_at(int) {}
  };
  RowPointer at(int64) const { return {}; }
};
template <class To>
struct StoreComputed {
  static constexpr bool kStoresComputed = true, kInSteps = kStoresInSteps<To>;
  To to;
  using RowPointer = typename To::RowPointer;
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (&y)[kRows], Index col) {
    To::template store_across<kRows>(rows, y, col);
  }
  RowPointer at(int64 row) const { return to.at(row); }
};

// Whether a function takes so few steps that they may be taken twice.
template <class Function, class = void>
inline constexpr bool kHasFewSteps = false;
template <class Function>
inline constexpr bool kHasFewSteps<Function, decltype(void(Function::kFewSteps))> = Function::kFewSteps;

// Whether a function gives its one argument.
template <class Function, class = void>
inline constexpr bool kIsIdentity = false;
template <class Function>
inline constexpr bool kIsIdentity<Function, decltype(void(Function::kIdentity))> = Function::kIdentity;

// 16 bits that have more digits than a half: integers.
template <typename T>
inline constexpr bool kLongDigits = false;
template <>
inline constexpr bool kLongDigits<short> = true;
template <>
inline constexpr bool kLongDigits<unsigned short> = true;

// Whether numbers of a type have digits that only a double holds.
template <typename T>
inline constexpr bool kWideDigits = sizeof(T) == 8;
template <>
inline constexpr bool kWideDigits<int> = true;

// Function(x, operands), of what the mask does not drop. It has as many outputs as the op's elements have fields. Cols:
// how far x's columns lie from the first of their row: Adjacent, or a Strided where only single elements are asked for.
template <typename T, int kAxes, class Function, class Mask_, class Keep, class Operands_, class Cols>
struct FusedLoad : Cols {
  using Type = T;
  using Precision =
      typename Conditional<sizeof(T) == 2 && !kLongDigits<T> && Operands_::kBytes <= 2, T,
      typename Conditional<sizeof(T) == 8, T, float>::Type>::Type;
  static constexpr bool kDirect = false, kDrops = Mask_::kDrops, kInterval = Mask_::kInterval;
  static constexpr bool kStoresComputed = Keep::kStoresComputed,
      kWaitsAsLoaded = kHasFewSteps<Function> && Operands_::kPerRow, kIdentity = kIsIdentity<Function>,
      kInSteps = kEvenlyApart<Cols> && Operands_::kInSteps && Mask_::kInSteps && Keep::kInSteps;
  static constexpr bool kOperandsPerRow = Operands_::kPerRow, kMaskBytes = Mask_::kBytes;
  // Whether an operand of each element may wait as it was loaded, too, and elements be computed again from both.
  static constexpr bool kMayHoldOperands =
      kHasFewSteps<Function> && Operands_::kOfElements == 1 && !kDrops && !kStoresComputed;
  static constexpr int kDrawn = Operands_::kDrawn, kOperandCount = Operands_::kCount;
  static_assert(kDrawn <= 1, "two dropouts would have the same places (row/drawn.cuh)");
  static constexpr bool kAlone = kOperandsPerRow && !kDrops && !kStoresComputed;  // x and numbers of its rows
  const T* pointer;
  Strided<kAxes> rows;
  Mask_ mask;
  Keep keeping;
  Operands_ operands;

  template <int N>
  struct Loaded {
    Vector<T, N> x;
    typename Operands_::template Packed<N> operands;
    typename Mask_::template Packed<N> mask;
  };
  template <int N>
  static Vector<T, N> x_of(const Loaded<N>& loaded) {
    return loaded.x;
  }
  template <int N, typename Compute>
  static Loaded<N> absent(Compute) {
    return {};
  }
  template <int N>
  static constexpr int kPrefetchBytes =
      N * int(sizeof(T)) + Operands_::template kPrefetchBytes<N> + Mask_::template kPrefetchBytes<N>;
  template <int N>
  static constexpr int kRowBytes = N * int(sizeof(T)) + Operands_::template kRowBytes<N>;  // without a mask
  template <int N>
  static constexpr bool kCut = Operands_::template kCut<N>;
  static constexpr int kKeptColumns = Operands_::kKeptColumns;
  template <int N, class As>
  using Kept = typename Operands_::template Kept<N, As>;

  struct RowPointer : Cols {
    const T* pointer;
    typename Mask_::RowPointer mask;
    typename Keep::RowPointer keeping;
    typename Operands_::RowPointer operands;

    void make_opaque() { cupynorm::make_opaque(pointer), operands.make_opaque(); }
    bool begins_at(const void* place) const { return pointer == place || operands.begins_at(place); }
    void begin_at(int col) {
      pointer += this->offset(col);
      operands.begin_at(col), mask.begin_at(col), keeping.begin_at(col);
    }
    // An element of several neighbouring rows, and what is loaded beside it, on their way to the L2 cache.
    template <typename Index>
    void prefetch_across(Index col) const {
      prefetch_to_l2(pointer + this->offset(col));
      operands.prefetch_across(col);
    }

    template <typename Index>
    bool keeps_all(Index first, Index end) const {
      return !Mask_::kBytes && Index(mask.interval.begin) <= first && end <= Index(mask.interval.end);
    }
    // What a mask keeps is then asked for by columns counted from this one.
    template <typename Index>
    void count_kept_from(Index col) {
      mask.count_from(col);
    }
    // Narrows first .. last, numbers of vectors counted from column `origin`, to the vectors of which the mask keeps
    // some elements.
    template <int N>
    void keep_vectors(int origin, int& first, int& last) const {
      const int begin = int(mask.interval.begin) - origin, end = int(mask.interval.end) - origin;
      if (begin > 0) first = first > begin / N ? first : begin / N;
      last = end <= 0 ? 0 : last < (end + N - 1) / N ? last : (end + N - 1) / N;
      if (first >= last || mask.interval.begin >= mask.interval.end) first = last = 0;
    }
    // kInterval: the columns that a mask keeps at most, where pointers begin at a column of rows that are not long.
    Bounds<int> interval() const { return {Mask_::kFromFirst ? 0 : int(mask.interval.begin), int(mask.interval.end)}; }
    // Whether anything of a vector is kept: what lies outside the mask's interval is not read.
    template <int N, typename Index>
    bool reads(Index col) const {
      if constexpr (kInterval) return mask.template reads<N>(col);
      return true;
    }
    template <int N, typename Index>
    Loaded<N> load(Index col) const {
      if (!reads<N>(col)) return {};
      return load_kept<N>(col);
    }
    template <int N, bool kAgain>
    Loaded<N> load_twice(int col) const {
      if (!reads<N>(col)) return {};
      const auto x = load_vector_twice<kAgain, T, N>(pointer + this->offset(col));
      if constexpr (kDrops) return {x, operands.template load<N>(col), mask.template load<N>(col)};
      else return {x, operands.template load<N>(col), {}};
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      constexpr int kOperands = kPlaces * N * int(sizeof(T)),
          kMask = kOperands + kPlaces * Operands_::template kPrefetchBytes<N>;
      prefetch_vector<kPlaces, 16, N>(shared, place, pointer + this->offset(col));
      prefetch_if_any<Operands_, N, kPlaces>(operands, shared + kOperands, place, col);
      prefetch_if_any<Mask_, N, kPlaces>(mask, shared + kMask, place, col);
    }
    template <int N, int kPlaces, typename Index>
    Loaded<N> prefetched(const unsigned char* shared, int place, Index col) const {
      constexpr int kOperands = kPlaces * N * int(sizeof(T)),
          kMask = kOperands + kPlaces * Operands_::template kPrefetchBytes<N>;
      return {prefetched_vector<kPlaces, T, N>(shared, place),
          prefetched_or_loaded<Operands_, N, kPlaces>(operands, shared + kOperands, place, col),
          prefetched_or_loaded<Mask_, N, kPlaces>(mask, shared + kMask, place, col)};
    }
    // The same where a thread keeps what all rows share of the operands, and there is no mask. What came may be
    // converted several times.
    template <int N, class As>
    Kept<N, As> keep(int64 col, int begin, int end) const {
      return operands.template keep<N, As>(col, begin, end);
    }
    template <int N, int kPlaces, typename Index>
    void prefetch_row(unsigned char* shared, int place, Index col) const {
      prefetch_vector<kPlaces, 16, N>(shared, place, pointer + col);
      operands.template prefetch_row<N, kPlaces>(shared + kPlaces * N * int(sizeof(T)), place, col);
    }
    template <int kMore, int kPlaces, int N, class As, typename Element, typename Index, class Take>
    void unpack_row(const Kept<N, As>& kept, const unsigned char* shared, int place, Element* x, Index col,
        Take take) const {
      typename ElementTraits<Element>::Number in[1 + Operands_::kCount][N];
      cupynorm::unpack<N>(prefetched_vector<kPlaces, T, N>(shared, place), in[0]);
      operands.template unpack_row<N, kPlaces, As>(kept, shared + kPlaces * N * int(sizeof(T)), place, in + 1, col);
      compute_further<kMore, N>(in, x, take);
    }
    template <int N, typename Element, typename Index>
    unsigned unpack(const Loaded<N>& loaded, Element* x, Index col, Element padding) const {
      unpack_kept<N>(loaded, x, col);
      if constexpr (kDrops) {
        const unsigned bits = mask.template bits<N>(loaded.mask, col);
        if (Mask_::kWhole || bits != ~0u >> (32 - N)) {  // most vectors lie within the interval
#pragma unroll
          for (int i = 0; i < N; ++i) x[i] = bits >> i & 1 ? x[i] : padding;
        }
        return bits;
      } else {
        return ~0u;
      }
    }

    // The same without a look at the interval; and which elements are kept.
    template <int N, typename Index>
    Loaded<N> load_kept(Index col) const {
      if constexpr (kDrops)
        return {load_vector<T, N>(pointer + this->offset(col)), operands.template load<N>(col),
            mask.template load<N>(col)};
      else return {load_vector<T, N>(pointer + this->offset(col)), operands.template load<N>(col), {}};
    }
    template <int N, typename Element, typename Index>
    void unpack_kept(const Loaded<N>& loaded, Element* x, Index col) const {
      using Traits = ElementTraits<Element>;
      typename Traits::Number in[1 + Operands_::kCount][N], out[Traits::kFields][N];
      cupynorm::unpack<N>(loaded.x, in[0]);
      operands.template unpack<N>(loaded.operands, in + 1, col);
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = Traits::of(out, i);
    }
    // The same where the function gives kMore numbers behind an element's: take(k, i, number) gets those of element i.
    template <int kMore, int N, typename Element, typename Index, class Take>
    void unpack_further(const Loaded<N>& loaded, Element* x, Index col, Take take) const {
      typename ElementTraits<Element>::Number in[1 + Operands_::kCount][N];
      cupynorm::unpack<N>(loaded.x, in[0]);
      operands.template unpack<N>(loaded.operands, in + 1, col);
      compute_further<kMore, N>(in, x, take);
    }
    template <int kMore, int N, typename Number, typename Element, class Take>
    static void compute_further(const Number (&in)[1 + Operands_::kCount][N], Element* x, Take take) {
      using Traits = ElementTraits<Element>;
      constexpr int kFields = Traits::kFields;
      Number out[kFields + kMore][N], own[kFields][N];
      apply_to_each<Function>(in, out);
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int k = 0; k < kFields; ++k) own[k][i] = out[k][i];
#pragma unroll
        for (int k = 0; k < kMore; ++k) take(k, i, out[kFields + k][i]);
        x[i] = Traits::of(own, i);
      }
    }
    // Computes elements again from x, which has waited as it was loaded: as unpack, for elements that the mask keeps.
    template <int N, typename Element>
    void compute_again(const Vector<T, N>& x, Element* y) const {
      static_assert(kWaitsAsLoaded, "an operand of each element is loaded with it");
      unpack_kept<N>(Loaded<N>{x, {}, {}}, y, 0);
    }
    template <int N, typename Index>
    unsigned bits(const Loaded<N>& loaded, Index col) const {
      return mask.template bits<N>(loaded.mask, col);
    }
    // The first of several fields is stored.
    template <int N, bool kWhole = false, typename Element, typename Index>
    void store_computed(const Element* x, Index col) const {
      typename ElementTraits<Element>::Number own[N];
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] = field(x[i], 0);
      keeping.template store<N, kWhole>(own, NoColumns{}, col);
    }
    template <typename Index>
    const void* address(Index col) const {
      return pointer + this->offset(col);
    }
  };
  int most_kept(int cols) const { return mask.structure.most_kept(cols); }

  // For row/across.cuh, where neighbouring rows are loaded together: what is loaded beside an element of x, that
  // element of each row, and what becomes of them.
  template <int kRows>
  using OperandsBeside = OfRows<Operands_, kRows>;
  template <int kRows>
  struct Beside {
    OperandsBeside<kRows> operands;
    OfRows<Mask_, kRows> mask;
  };
  // kKept: none lies outside of its row's interval, which is not asked then.
  template <int kRows, bool kKept = false, class Row, typename Index>
  static Vector<T, kRows> load_across(const Row (&rows)[kRows], Index col, Beside<kRows>& beside) {
    bool any = !kInterval || kKept;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= rows[r].template reads<1>(column_of(col));
    if (!any) {
      beside = {};
      return {};
    }
    beside.mask.load([&](int r) -> const auto& { return rows[r].mask; }, col);
    load_operands_across<kRows>(rows, col, beside.operands);
    return load_x_across<kRows>(rows, col);
  }
  template <int kRows, bool kKept = false, class Row, typename Element, typename Index>
  static unsigned unpack_across(const Row (&rows)[kRows], const Vector<T, kRows>& x,
      const Beside<kRows>& beside, Element (&elements)[kRows], Index col, Element padding) {
    compute_across<kRows>(rows, x, beside.operands, elements, col);
    unsigned bits = 0;
    if constexpr (kDrops) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool kept = rows[r].mask.template bits<1, kKept>(beside.mask.of(r), column_of(col)) & 1;
        elements[r] = kept ? elements[r] : padding;
        bits |= unsigned(kept) << r;
      }
    }
    return bits;
  }
  // The same one by one, without a look at the mask; and its bytes, those of all rows in a word, 0 for what it drops.
  template <int kRows, class Row, typename Index>
  static Vector<T, kRows> load_x_across(const Row (&rows)[kRows], Index col) {
    return load_step<T, kRows>(rows[0].pointer + rows[0].offset(col), col);
  }
  template <int kRows, class Row, typename Index>
  static void load_operands_across(const Row (&rows)[kRows], Index col, OperandsBeside<kRows>& operands) {
    operands.load([&](int r) -> const auto& { return rows[r].operands; }, col);
  }
  // Operands that are the same for all rows are as they were loaded for other rows.
  template <int kRows, class Row, typename Index>
  static void load_rows_operands_across(const Row (&rows)[kRows], Index col, OperandsBeside<kRows>& operands) {
    operands.load_of_rows([&](int r) -> const auto& { return rows[r].operands; }, col);
  }
  template <int kRows, class Row, typename Element, typename Index>
  static void compute_across(const Row (&rows)[kRows], const Vector<T, kRows>& x,
      const OperandsBeside<kRows>& operands, Element (&elements)[kRows], Index col) {
    compute_further_across<0, kRows>(rows, x, operands, elements, col, [](int, int, auto) {});
  }
  // The same where the function gives kMore numbers behind an element's: take(k, r, number) gets those of row r.
  template <int kMore, int kRows, class Row, typename Element, typename Index, class Take>
  static void compute_further_across(const Row (&rows)[kRows], const Vector<T, kRows>& x,
      const OperandsBeside<kRows>& operands, Element (&elements)[kRows], Index col, Take take) {
    using Number = typename ElementTraits<Element>::Number;
    Number from_x[kRows];
    cupynorm::unpack<kRows>(x, from_x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Number in[1 + Operands_::kCount][1];
      in[0][0] = from_x[r];
      rows[r].operands.template unpack<1>(operands.of(r), in + 1, col);
      RowPointer::template compute_further<kMore, 1>(
          in, &elements[r], [&](int k, int, Number more) { take(k, r, more); });
    }
  }
  template <int kRows, class Row, typename Index>
  static unsigned mask_bytes_across(const Row (&rows)[kRows], Index col) {
    unsigned word = ~0u;
    if constexpr (kMaskBytes) {
      OfRows<Mask_, kRows> bytes;
      bytes.load([&](int r) -> const auto& { return rows[r].mask; }, col);
      word = bytes.word();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kInterval && !rows[r].template reads<1>(column_of(col))) word &= ~(0xffu << 8 * r);
    }
    return word;
  }
  template <int kRows, class Row, typename Element, typename Index>
  static void store_computed_across(const Row (&rows)[kRows], const Element (&elements)[kRows], Index col) {
    typename ElementTraits<Element>::Number own[kRows];
    typename Keep::RowPointer to[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) own[r] = field(elements[r], 0), to[r] = rows[r].keeping;
    Keep::template store_across<kRows>(to, own, col);
  }

  template <class Visit>
  void each_scattered(int64 row, RowPointer& own, Visit visit) const {
    visit(pointer + rows.offset(row), own.pointer, static_cast<Cols&>(own));
    operands.each_scattered(row, own.operands, visit), mask.each_scattered(row, own.mask, visit);
  }
  RowPointer at(int64 row) const {
    return {static_cast<const Cols&>(*this), pointer + rows.offset(row), mask.at(row), keeping.at(row),
        operands.at(row)};
  }
};

// A Load of neighbouring rows that do not come in whole vectors, as of an odd number. An access of two elements is
// aligned in the results where it is aligned in x. A thread may then have two rows (row/own_rows.cuh), or one as of any
// Load.
template <class Inner>
struct ShiftedLoad : Inner {
  static constexpr bool kShifted = true;
  // How many of all rows are neighbours.
  int64 neighbours(int64 all) const { return innermost_extent(this->rows, all); }
  // Whether an element is the second one of two that are aligned together.
  bool is_second(int64 row, int64 col) const {
    const auto* const place = this->pointer + this->rows.offset(row) + this->offset(col);
    return reinterpret_cast<unsigned long long>(place) / sizeof(typename Inner::Type) & 1;
  }
};
template <class Load, class = void>
inline constexpr bool kMayBeShifted = false;
template <class Load>
inline constexpr bool kMayBeShifted<Load, decltype(void(Load::kShifted))> = true;

}  // namespace cupynorm
