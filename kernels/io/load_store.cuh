// The plain Load and Store: x as it is, and y as the op gives it. contract.cuh beside this has the contract of both,
// and says where their host mirrors are.
#pragma once
#include <io/contract.cuh>
#include <io/strided.cuh>
#include <io/vector.cuh>

namespace cupynorm {

// One element of each of N neighbouring rows; of one row, if a Step says so, with 0 in place of the other's.
template <typename T, int N, typename Index>
inline Vector<T, N> load_step(const T* place, Index col) {
  if constexpr (kIsShifted<Index> && N == 2) {
    Vector<T, N> vector;
    load_one_or_two<int(sizeof(T))>(place, col.both, vector.word);
    return vector;
  } else {
    return load_vector<T, N>(place);
  }
}

// Cols: how far columns lie from the first of their row; those of a vector are neighbours.
template <typename T, int kAxes, class Cols = Adjacent>
struct DirectLoad : Cols {
  using Type = T;
  using Precision = T;
  static constexpr bool kDirect = true, kDrops = false, kInterval = false, kStoresComputed = false,
      kWaitsAsLoaded = true, kMayHoldOperands = false, kAdjacent = kIsAdjacent<Cols>;
  const T* pointer;  // first element of the first row
  Strided<kAxes> rows;

  template <int N>
  using Loaded = Vector<T, N>;
  template <int N>
  static constexpr int kPrefetchBytes = N * int(sizeof(T));
  template <int N>
  static Vector<T, N> x_of(const Vector<T, N>& loaded) {
    return loaded;
  }
  template <int N, typename Compute>
  static Vector<T, N> absent(Compute padding) {
    return vector_filled<T, N>(padding);
  }

  struct RowPointer : Cols {
    using Type = T;
    const T* pointer;
    // where it comes from, which a loop would compute again for each access
    void make_opaque() { cupynorm::make_opaque(pointer); }
    template <int N, typename Index>
    Vector<T, N> load(Index col) const {
      return load_vector<T, N>(pointer + this->offset(col));
    }
    template <int N, bool kAgain>
    Vector<T, N> load_twice(int col) const {
      return load_vector_twice<kAgain, T, N>(pointer + this->offset(col));
    }
    template <int N>
    Vector<T, N> load_unaligned(int64 col) const {
      static_assert(kAdjacent, "a vector of a row in runs is aligned");
      return load_vector_unaligned<T, N>(pointer + col);
    }
    template <int N, typename Compute, typename Index>
    static unsigned unpack(const Vector<T, N>& loaded, Compute* x, Index, Compute) {
      cupynorm::unpack<N>(loaded, x);
      return ~0u;
    }
    template <int N, typename Compute>
    static void compute_again(const Vector<T, N>& x, Compute* y) {
      cupynorm::unpack<N>(x, y);
    }
    template <typename Index>
    const void* address(Index col) const {
      return pointer + this->offset(col);
    }
    bool begins_at(const void* place) const { return pointer == place; }
  };
  RowPointer at(int64 row) const { return {static_cast<const Cols&>(*this), pointer + rows.offset(row)}; }
};

struct NoColumns {
  void make_opaque() {}
};

// The scale of a row, of a Store that has one.
template <class Store, bool = Store::kScales>
struct ScaleOf {
  using Type = NoColumns;
};
template <class Store>
struct ScaleOf<Store, true> {
  using Type = typename Store::Scale;
};

template <typename T, int kAxes>
struct DirectStore {
  using Type = T;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kHasEpilogueOperands = false, kScales = false;
  T* pointer;
  Strided<kAxes> rows;

  template <int N>
  using EpilogueOperands = NoColumns;
  template <int N>
  using Columns = NoColumns;
  template <int N>
  using ColumnsSplit = NoColumns;
  NoColumns columns_from(int64) const { return {}; }
  template <int N, typename Index>
  NoColumns columns_split(NoColumns, Index) const {
    return {};
  }
  template <int N>
  static NoColumns realign_columns(NoColumns) {
    return {};
  }
  template <int N, typename Index>
  NoColumns columns(Index) const {
    return {};
  }
  template <int N>
  NoColumns columns_unaligned(int64) const {
    return {};
  }

  struct RowPointer {
    T* pointer;
    void make_opaque() { cupynorm::make_opaque(pointer); }
    T* address() const { return pointer; }
    RowPointer from(int col) const { return {pointer + col}; }
    // how many elements lie before the first that is aligned to N elements
    template <int N>
    int head() const {
      return int(-(reinterpret_cast<unsigned long long>(pointer) / sizeof(T)) % N);
    }
    template <int N, bool kWhole = false, typename Compute, typename Index>
    void store(const Compute (&y)[N], NoColumns, Index col) const {
      put<kWhole>(vector_from<T, N>(y), col);
    }
    template <bool kWhole, int N, typename Index>
    void put(const Vector<T, N>& vector, Index col) const {
      store_vector<kWhole>(pointer + col, vector);
    }
  };
  RowPointer at(int64 row) const { return {pointer + rows.offset(row)}; }
};

// Whether a Store can be asked for Steps of columns.
template <class Store, class = void>
inline constexpr bool kStoresInSteps = false;
template <class Store>
inline constexpr bool kStoresInSteps<Store, decltype(void(Store::kInSteps))> = Store::kInSteps;

// Where elements of y go that do not all lie next to one another. Cols: how far from the first of their row. kAcross:
// so many rows lie next to one another, aligned to as many elements, and are stored together (row/across.cuh). kAlong:
// so many elements of a row do, from each multiple of so many columns on.
template <typename T, int kAxes, class Cols, int kAcross, int kAlong = 1>
struct ApartStore : Cols {
  using Type = T;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kInSteps = kEvenlyApart<Cols>;
  T* pointer;
  Strided<kAxes> rows;

  struct RowPointer : Cols {
    T* pointer;
    void make_opaque() { cupynorm::make_opaque(pointer); }
    void begin_at(int col) { pointer += this->offset(col); }
    T* address() const { return pointer; }
    template <int N>
    static int head() {  // rows begin at vectors: others have shorter ones
      return 0;
    }
    template <int N, bool kWhole = false, typename Compute, typename Index>
    void store(const Compute (&y)[N], NoColumns, Index col) const {
      put<kWhole>(vector_from<T, N>(y), col);
    }
    template <bool kWhole, int N, typename Index>
    void put(const Vector<T, N>& vector, Index col) const {
      static_assert(N == 1 || N <= kAcross || N <= kAlong, "elements lie apart");
      store_vector<kWhole>(pointer + this->offset(col), vector);
    }
  };
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (&y)[kRows], Index col) {
    if constexpr (kIsShifted<Index> && kRows == 2) {
      put_across<kRows>(rows, vector_from<T, kRows>(y), col);
    } else if constexpr (kRows <= kAcross) {
      // of addresses in Steps the compiler would store a vector's elements one by one
      rows[0].template put<kIsStep<Index>>(vector_from<T, kRows>(y), col);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Compute own[1] = {y[r]};
        rows[r].template put<false>(vector_from<T, 1>(own), col);
      }
    }
  }
  // The same of elements that have T already.
  template <int kRows, typename Index>
  static void put_across(const RowPointer (&rows)[kRows], const Vector<T, kRows>& vector, Index col) {
    if constexpr (kIsShifted<Index> && kRows == 2) {
      store_one_or_two<int(sizeof(T))>(rows[0].pointer + rows[0].offset(col), col.both, vector.word);
    } else if constexpr (kRows <= kAcross) {
      rows[0].template put<kIsStep<Index>>(vector, col);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r].template put<false>(element_of(vector, r), col);
    }
  }
  RowPointer at(int64 row) const { return {static_cast<const Cols&>(*this), pointer + rows.offset(row)}; }
};

// Stores nothing, for an op that only saves a row's statistics. Rows are aligned as those of x, where `pointer` points.
// Among other results `split` leaves its messages; here it has `room` for them, or is not planned where that is null.
template <typename T, int kAxes>
struct NoStore {
  using Type = T;
  static constexpr int kBytes = sizeof(T);
  static constexpr bool kHasEpilogueOperands = false, kScales = false, kInSteps = true;
  struct Affines {
    static constexpr bool kPresent = false, kPairs = false;
    template <typename>
    using Number = NoColumns;
  };
  const T* pointer;
  Strided<kAxes> rows;
  unsigned char* room;

  template <int N>
  using EpilogueOperands = NoColumns;
  template <int N>
  using Columns = NoColumns;
  template <int N>
  using ColumnsSplit = NoColumns;
  static NoColumns columns_from(int64) { return {}; }
  template <int N, typename Index>
  static NoColumns columns_split(NoColumns, Index) {
    return {};
  }
  template <int N>
  static NoColumns realign_columns(NoColumns) {
    return {};
  }
  template <int N, typename Index>
  static NoColumns columns(Index) {
    return {};
  }
  template <int N>
  static NoColumns columns_unaligned(int64) {
    return {};
  }

  struct RowPointer {
    const T* pointer;
    static void make_opaque() {}
    static void begin_at(int) {}
    const T* address() const { return pointer; }
    RowPointer from(int) const { return *this; }
    template <int N>
    int head() const {
      return int(-(reinterpret_cast<unsigned long long>(pointer) / sizeof(T)) % N);
    }
    template <int N, bool kWhole = false, typename Compute, typename Index>
    static void store(const Compute (&)[N], NoColumns, Index) {}
  };
  template <int kRows, typename Compute, typename Index>
  static void store_across(const RowPointer (&)[kRows], const Compute (&)[kRows], NoColumns, const NoColumns (&)[kRows],
      Index) {}
  RowPointer at(int64 row) const { return {pointer + rows.offset(row)}; }
};

// A Store that has room beside it, where blocks of a grid that share rows leave messages.
template <class Inner>
struct RoomyStore : Inner {
  unsigned char* room;
};
template <class Store, class = void>
inline constexpr bool kIsRoomy = false;
template <class Inner>
inline constexpr bool kIsRoomy<RoomyStore<Inner>> = true;

// Whether rows are only read.
template <class Store>
inline constexpr bool kStoresNothing = false;
template <typename T, int kAxes>
inline constexpr bool kStoresNothing<NoStore<T, kAxes>> = true;
template <class Inner>
inline constexpr bool kStoresNothing<RoomyStore<Inner>> = kStoresNothing<Inner>;

// Whether messages have room of their own: nothing is stored among which they could lie, or not at neighbouring places.
template <class Store>
inline constexpr bool kHasRoom = kIsRoomy<Store>;
template <typename T, int kAxes>
inline constexpr bool kHasRoom<NoStore<T, kAxes>> = true;

// The one argument of every row kernel.
template <class Op, class Load, class Store>
struct Arguments {
  Load load;
  Store store;
  int64 rows;
  int64 cols;
  Op op;  // last: softmax's is empty, and all that is asked for before the first load lies in one line
};

}  // namespace cupynorm
