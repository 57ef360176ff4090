// Affine parameters that wait in shared memory as they are computed with: kParameterMode 4 of columns.cuh.
#pragma once
#include <io/affine.cuh>
#include <row/layout.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// How converted parameters lie in shared memory. Each vector has room behind it, so that neighbouring threads, whose
// elements are a vector apart, do not access one bank twice. A vector that begins at its first element is read in
// accesses of 16 bytes. The planner has the same room (converted_bytes in cupynorm/plan/partition.py).
template <class Number, int kVector, bool kAnyAlignment>
struct ConvertedLayout {
  static constexpr int kBytes = sizeof(Number), kRoom = kAnyAlignment ? 1 : kVector * kBytes > 16 ? 16 / kBytes : 0;
  static constexpr int kApart = kVector + kRoom;  // of neighbouring vectors
  static int place(unsigned col) { return col + col / kVector * kRoom; }
};

// kParameterMode 4: in shared memory, converted, where every thread finds those of any column: rows may be unaligned,
// each in its own way, and nothing is put together or converted again. A block has those of the whole row, and loads
// them with each row; a block of a cluster has those of its part, and of what may be around it, for all rows.
template <class Store, class Shape, typename Compute, int kPrefetchBytes>
struct ParametersConverted {
  // Pairs of two bytes each, not converted, take less shared memory, and so allow more blocks
  // (docs/notes/048, "Pairs of 16-bit parameters in shared memory").
  static constexpr Conversion kConversion = conversion_of<Store, Shape::kFixed>();
  static constexpr int kVector = Shape::kVector, kBlock = Shape::kBlock;
  using Number = typename NumberOf<Store, Compute, kConversion>::Type;
  using Room = ConvertedLayout<Number, kVector, (Shape::kEdge > 0)>;
  // All loads are issued at once, in vectors; one by one, each would pay the latency of L2. But one by one where a
  // vector's converted parameters take 64 bytes (docs/notes/048, "Parameters converted in shared memory: wide or narrow
  // loads").
  static constexpr int kWide = Shape::kFixed || kVector * Room::kBytes <= 32 ? kVector : 1;  // columns of an access
  // vectors
  static constexpr int kMostConverted =
      Shape::kGroup * Shape::kVectors + (Shape::kEdge > 0 ? Shape::kAligned / kVector : 0);
  static constexpr int kFetches = (kMostConverted * (kVector / kWide) + kBlock - 1) / kBlock;
  // a vector's are read in whole accesses
  static constexpr bool kWhole = Shape::kEdge == 0 && kVector * Room::kBytes % 16 == 0;

  int from, to;  // columns that the block has
  int last;      // the column that this thread loads of what is less than an access
  typename Store::template Columns<kWide> fetched[kFetches];
  typename Store::template Columns<1> fetched_last;
  unsigned place[kWhole ? 1 : kVector];  // where element i of a thread's first vector lies, in bytes

  static Number* numbers() { return reinterpret_cast<Number*>(shared_memory + kPrefetchBytes); }
  static int nth(int i) { return (i * kBlock + int(threadIdx.x)) * kWide; }

  void set_columns(const Share& share, int part, int cols) {
    from = Shape::kFixed ? share.before * kVector : 0;
    to = Shape::kFixed && part < Shape::kCtasPerRow - 1 ? from + share.vectors * kVector + Shape::kAligned : cols;
    last = from + (to - from) / kWide * kWide + threadIdx.x;
  }
  void fetch(const Store& store) {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      if (from + nth(i) + kWide <= to) fetched[i] = store.template columns<kWide>(from + nth(i));
    }
    if (kWide > 1 && last < to) fetched_last = store.template columns<1>(last);
  }
  template <int N>
  static void convert(const typename Store::template Columns<N>& columns, int at) {
    Number own[N];
    Store::Affines::template convert<N>(columns, own);
#pragma unroll
    for (int i = 0; i < N; ++i) numbers()[Room::place(at) + i] = own[i];
  }
  void convert_all() {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      if (from + nth(i) + kWide <= to) convert<kWide>(fetched[i], nth(i));
    }
    if (kWide > 1 && last < to) convert<1>(fetched_last, last - from);
    if constexpr (Shape::kWarps <= 1) __syncthreads();  // else warps meet before the first is read
  }
  // Where the parameters of a row lie that begins so.
  void find(const Share& share, int lane) {
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        place[i] = kPrefetchBytes + (Room::place(share.head + i) + lane * Room::kApart) * Room::kBytes;
        cupynorm::make_opaque(place[i]);
      }
    }
  }
  template <class Tile>
  NoColumns first(const Store&, const Tile&) const {
    return {};
  }
  template <class Tile>
  Scalings<Number, kVector> get(const Store& store, int p, const Tile& tile) const {
    return get(store, NoColumns(), p, tile);
  }
  template <class Tile>
  Scalings<Number, kVector> get(const Store&, NoColumns, int p, const Tile& tile) const {
    Scalings<Number, kVector> own;
    if constexpr (!kWhole) {
      const unsigned char* const at = shared_memory + p * (Shape::kGroup * Room::kApart * Room::kBytes);
#pragma unroll
      for (int i = 0; i < kVector; ++i) own.column[i] = *reinterpret_cast<const Number*>(at + place[i]);
    } else {
      constexpr int kAccesses = (kVector * Room::kBytes + 15) / 16;
      union {
        uint4 access[kAccesses];
        Scalings<Number, kVector> numbers;
      } read = {};
#pragma unroll
      for (int i = 0; i < kAccesses; ++i)
        read.access[i] = reinterpret_cast<const uint4*>(numbers() + (p * Shape::kGroup + tile.lane) * Room::kApart)[i];
      own = read.numbers;
    }
    return own;
  }
  template <class Tile>
  Scalings<Number, 1> edge(const Store&, const Tile& tile) const {
    return {{numbers()[Room::place(tile.edge_col() - from)]}};
  }
};

// Whether parameters are converted in shared memory: where there are any.
template <class Store, class Shape>
inline constexpr bool converts() {
  return Shape::kParameterMode == 4 && conversion_of<Store, Shape::kFixed>() != kNothing;
}

}  // namespace cupynorm
