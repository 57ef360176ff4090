// Masks: which elements are dropped. Host mirrors: in cupynorm/lower/masks.py.
#pragma once
#include <io/operands.cuh>

namespace cupynorm {

// The interval of columns that a row keeps, from begin up to end.
template <typename Index>
struct Bounds {
  Index begin, end;
};

struct NoLengths {};
template <typename Index>
inline Index length_at(NoLengths, int64, Index cols) {
  return cols;
}
// Whatever number the caller has: none is read beyond the row.
template <typename T, class Rows, typename Index>
inline Index length_at(const PerRow<T, Rows>& lengths, int64 row, Index cols) {
  using Wide = typename Conditional<sizeof(T) <= 4 && sizeof(Index) == 4, unsigned, unsigned long long>::Type;
  const T length = lengths.pointer[lengths.rows.offset(row)];
  return length < T(1) ? 0 : Wide(length) > Wide(cols) ? cols : Index(length);
}

struct AllColumns {
  static constexpr bool kWhole = true, kFromFirst = true;
  using Index = int64;
  static int most_kept(int cols) { return cols; }
};

// cupynorm/call/masks.py, Mask.interval. Without a bound low and high are beyond every column. Index_: what cols +
// queries fit into.
template <class Lengths, bool kLeftPadded, bool kBand, typename Index_>
struct Interval {
  static constexpr bool kWhole = false, kFromFirst = !kLeftPadded && !kBand;  // an interval begins at column 0
  using Index = Index_;
  Lengths lengths;
  Index cols, queries, low, high;
  unsigned multiplier, shift;  // of a division by queries

  // How many columns a row keeps at most, as far as that follows from the band: Mask.most_band_cols.
  int most_kept(int cols) const {
    if constexpr (!kBand) return cols;
    const int64 to_end = int64(queries) - 1 + high, from_begin = int64(cols) - low, between = int64(high) - low;
    int64 most = to_end < from_begin ? to_end : from_begin;
    most = most < between ? most : between;
    return most < 0 ? 0 : most < cols ? int(most) : cols;
  }
  Bounds<Index> at(int64 row) const {
    const Index length = length_at(lengths, row, cols);
    Bounds<Index> interval = {kLeftPadded ? cols - length : 0, kLeftPadded ? cols : length};
    if constexpr (kBand) {
      const Index query = Index(row) - Index(quotient(row, queries, multiplier, shift)) * queries;
      if (query + low > interval.begin) interval.begin = query + low < cols ? query + low : cols;
      if (query + high < interval.end) interval.end = query + high;
      if (interval.end < interval.begin) interval.end = interval.begin;
    }
    return interval;
  }
};

struct NoWhere {
  static constexpr bool kPresent = false, kPerRow = false;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {};
  RowPointer at(int64) const { return {}; }
};

// Bytes, of which those that are not 0 keep.
template <class Bytes>
struct Where {
  static constexpr bool kPresent = true, kPerRow = Bytes::kPerRow, kInSteps = kLoadsInSteps<Bytes>;
  Bytes bytes;
  template <int N>
  using Packed = typename Bytes::template Packed<N>;
  template <int N>
  static constexpr int kPrefetchBytes = Bytes::template kPrefetchBytes<N>;
  using RowPointer = typename Bytes::RowPointer;
  RowPointer at(int64 row) const { return bytes.at(row); }
};

// As bytes of whole rows: 0 for those whose label is `ignored`.
template <typename T, class Rows>
struct LabelCounts {
  static constexpr bool kPerRow = true;
  const T* pointer;
  Rows rows;
  T ignored;

  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {
    Vector<unsigned char, 1> element;
  };
  RowPointer at(int64 row) const { return {{{unsigned(pointer[rows.offset(row)] != ignored)}}}; }
};

// The top bit of each of four bytes that is not 0.
inline unsigned tops_of(unsigned word) { return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u; }

// A bit for each of N bytes: whether it is not 0.
template <int N>
inline unsigned bits_of(const Vector<unsigned char, N>& vector) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const unsigned word = N < 4 ? vector.word[0] & ((1u << 8 * N % 32) - 1) : vector.word[i / 4];
    // brought together by a multiplication whose sums never meet
    bits |= ((tops_of(word) >> 7) * 0x10204080u >> 28) << i;
  }
  return bits;
}
template <int N>
inline unsigned bits_of(const InTwo<unsigned char, N>& packed) {
  return bits_of<N>(realign(packed.split));
}
template <int N, class Packed>
inline unsigned bits_of(const Packed& packed) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bits |= unsigned((packed.element[i].word[0] & 0xff) != 0) << i;
  return bits;
}

// Which of N elements a mask keeps, for as long as they wait: a bit for each. 32 elements are a word, four at a time:
// the first four have the top bits of its bytes, the next four the bits below these, and so on.
template <int N>
struct KeptElements {
  static constexpr int kWords = (N + 31) / 32;
  unsigned word[kWords] = {};
  static constexpr unsigned bit(int i) { return (0x80u >> i / 4 % 8) << 8 * (i % 4); }
  bool has(int i) const { return (word[i / 32] & bit(i)) != 0; }
  // The bits of all elements.
  static constexpr unsigned bits_of_word(int w) {
    unsigned bits = 0;
    for (int i = 32 * w; i < 32 * w + 32 && i < N; ++i) bits |= bit(i);
    return bits;
  }
  void drop(int i) { word[i / 32] &= ~bit(i); }
  void keep_all() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) word[w] = bits_of_word(w);
  }
};

inline unsigned byte_of(const Vector<unsigned char, 1>& one) { return one.word[0]; }
template <class Packed>
inline unsigned byte_of(const Packed& one) {
  return one.element[0].word[0];
}

struct NoMask {
  static constexpr bool kDrops = false, kWhole = true, kBytes = false, kInterval = false, kInSteps = true,
                        kFromFirst = true;
  template <int N>
  using Packed = NoColumns;
  template <int N>
  static constexpr int kPrefetchBytes = 0;
  struct RowPointer {
    static void begin_at(int) {}
    template <typename Index>
    static void prefetch_across(Index) {}
    template <int N, typename Index>
    static NoColumns load(Index) {
      return {};
    }
  };
  template <class Visit>
  static void each_scattered(int64, RowPointer&, Visit) {}
  RowPointer at(int64) const { return {}; }
};

template <class Structure, class Where_>
struct Mask {
  static constexpr bool kDrops = true, kWhole = Structure::kWhole && !Where_::kPerRow;
  static constexpr bool kBytes = Where_::kPresent && !Where_::kPerRow, kInterval = !kWhole;
  static constexpr bool kInSteps = !kBytes || kLoadsInSteps<Where_>, kFromFirst = Structure::kFromFirst;
  Structure structure;
  Where_ where;
  int64 cols;

  template <int N>
  using Packed = typename Where_::template Packed<N>;
  template <int N>
  static constexpr int kPrefetchBytes = Where_::template kPrefetchBytes<N>;
  struct RowPointer {
    Bounds<typename Structure::Index> interval;
    typename Where_::RowPointer where;

    void begin_at(int col) {
      if constexpr (kBytes) where.begin_at(col);
      if constexpr (!kWhole) count_from(col);
    }
    template <typename Index>
    void prefetch_across(Index col) const {
      if constexpr (kBytes) where.prefetch_across(col);
    }
    template <int N, typename Index>
    bool reads(Index col) const {
      return kWhole || (col < Index(interval.end) && col + N > Index(interval.begin));
    }
    template <int N, typename Index>
    Packed<N> load(Index col) const {
      if constexpr (kBytes) return where.template load<N>(col);
      else return {};
    }
    template <int N, int kPlaces, typename Index>
    void prefetch(unsigned char* shared, int place, Index col) const {
      where.template prefetch<N, kPlaces>(shared, place, col);
    }
    template <int N, int kPlaces, typename Index>
    Packed<N> prefetched(const unsigned char* shared, int place, Index col) const {
      return where.template prefetched<N, kPlaces>(shared, place, col);
    }
    // Columns are then counted from this one.
    template <typename Index>
    void count_from(Index col) {
      interval.begin -= col, interval.end -= col;
    }
    // kWithin: none lies outside of the interval
    template <int N, bool kWithin = false, typename Index>
    unsigned bits(const Packed<N>& packed, Index col) const {
      unsigned bits = ~0u >> (32 - N);
      if constexpr (kBytes) bits = bits_of<N>(packed);
      if constexpr (kWithin) return bits;
      if constexpr (!kWhole && N == 1) {
        if (col < Index(interval.begin) || col >= Index(interval.end)) bits = 0;
      } else if constexpr (!kWhole) {
        const Index from = Index(interval.begin) - col, to = Index(interval.end) - col;
        const int first = from < 0 ? 0 : from > N ? N : int(from), last = to < 0 ? 0 : to > N ? N : int(to);
        bits &= ((1u << last) - 1) & ~((1u << first) - 1);
      }
      return bits;
    }
  };
  template <class Visit>
  void each_scattered(int64 row, RowPointer& own, Visit visit) const {
    if constexpr (kBytes) visit_if_scattered(where.bytes, row, own.where, visit);
  }
  RowPointer at(int64 row) const {
    RowPointer pointer = {{0, typename Structure::Index(cols)}, where.at(row)};
    if constexpr (!Structure::kWhole) pointer.interval = structure.at(row);
    if constexpr (Where_::kPerRow) {
      if ((pointer.where.element.word[0] & 0xff) == 0) pointer.interval.end = pointer.interval.begin;
    }
    return pointer;
  }
};

template <class Structure, class Bytes, int kRows>
struct OfRows<Mask<Structure, Where<Bytes>>, kRows, false> {
  using Masks = Mask<Structure, Where<Bytes>>;
  OfRows<Bytes, kRows> bytes;
  template <class Get, typename Index>
  void load(Get get, Index col) {
    if constexpr (Masks::kBytes) bytes.load([&](int r) -> const auto& { return get(r).where; }, col);
  }
  typename Masks::template Packed<1> of(int r) const { return bytes.of(r); }
  // of all rows, behind one another
  unsigned word() const {
    static_assert(kRows <= 4, "a word has four bytes");
    unsigned word = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) word |= byte_of(bytes.of(r)) << 8 * r;
    return word;
  }
};

}  // namespace cupynorm
