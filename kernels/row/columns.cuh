// The parameter cache: where affine parameters (gamma and beta) wait while rows are computed: one struct for each value
// of a plan's kParameterMode. Each of them has:
//
//   load_once(store, tile)       Called before the first row.
//   load_with_rows(store, tile)  Called behind the loads of a thread's rows.
//   make_opaque()                Keeps what waits in registers as it was loaded (an optimisation barrier).
//   first(store, tile)           What is computed once for all vectors of a row.
//   get(store, first, p, tile)   The parameters of vector p, given that; get(store, p, tile): the same without.
//   edge(store, tile)            The parameters of the element that is in no vector.
//
// ParametersConverted (kParameterMode 4, converted_columns.cuh) is filled by set_columns, fetch, convert_all and find
// instead.
#pragma once
#include <io/affine.cuh>
#include <row/converted_columns.cuh>
#include <row/layout.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// How a thread loads the parameters of its vectors.
template <class Store, class Shape>
struct ParameterLoads {
  static constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors;
  static constexpr bool kAnyAlignment = Shape::kEdge > 0;
  using Columns = typename Store::template Columns<kVector>;
  using Column = typename Store::template Columns<1>;

  // All vectors of a thread are equally misaligned, also in unaligned rows. So the first one's place is computed once,
  // and hidden from the compiler, which then addresses the others by constant offsets from it: fewer instructions
  // (docs/notes/048, "One place for all unaligned packs of a thread").
  template <class Tile>
  static auto first(const Store& store, const Tile& tile) {
    if constexpr (kAnyAlignment) {
      auto first = store.columns_from(tile.col(0));
      first.make_opaque();
      return first;
    } else {
      return NoColumns();
    }
  }
  template <class First, class Tile>
  static Columns behind(const Store& store, const First& first, int p, const Tile& tile) {
    if (!tile.has(p)) return Columns();
    return Store::template realign_columns<kVector>(store.template columns_split<kVector>(first,
        p * (Shape::kGroup * kVector)));
  }
  template <class Tile>
  static Columns at(const Store& store, int p, const Tile& tile) {
    if (!tile.has(p)) return Columns();
    if constexpr (kAnyAlignment) return store.template columns_unaligned<kVector>(tile.col(p));
    else return store.template columns<kVector>(tile.col(p));
  }
  template <class Tile>
  static Column edge(const Store& store, const Tile& tile) {
    return store.template columns<1>(tile.edge_col());
  }
  // Gives all vectors' parameters to take(p, parameters). Unaligned ones are all loaded before the first is waited for;
  // one after the other, each would pay the latency of L2 (docs/notes/048, "Unaligned parameters are loaded together").
  template <class Tile, class Take>
  static void all(const Store& store, const Tile& tile, Take take) {
    if constexpr (kAnyAlignment) {
      typename Store::template ColumnsSplit<kVector> split[kVectors];
      const auto begin = first(store, tile);
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        if (tile.has(p)) split[p] = store.template columns_split<kVector>(begin, p * (Shape::kGroup * kVector));
      }
#pragma unroll
      for (int p = 0; p < kVectors; ++p) take(p, Store::template realign_columns<kVector>(split[p]));
    } else {
#pragma unroll
      for (int p = 0; p < kVectors; ++p) take(p, at(store, p, tile));
    }
  }
};

// kParameterMode 0: nowhere. They are loaded when they are used.
template <class Store, class Shape>
struct ParametersAtUse : ParameterLoads<Store, Shape> {
  using Loads = ParameterLoads<Store, Shape>;
  template <class Tile>
  void load_once(const Store&, const Tile&) {}
  template <class Tile>
  void load_with_rows(const Store&, const Tile&) {}
  void make_opaque() {}
  template <class Tile>
  auto get(const Store& store, int p, const Tile& tile) const {
    return Loads::at(store, p, tile);
  }
  template <class First, class Tile>
  auto get(const Store& store, const First& first, int p, const Tile& tile) const {
    if constexpr (Shape::kEdge > 0) return Loads::behind(store, first, p, tile);
    else return Loads::at(store, p, tile);
  }
};

// kParameterMode 1: in registers, loaded together with the row. kParameterMode 3: in registers, loaded once for all
// rows of a block.
template <class Store, class Shape>
struct ParametersInRegisters {
  using Loads = ParameterLoads<Store, Shape>;
  static constexpr bool kOnce = Shape::kParameterMode == 3;
  typename Loads::Columns columns[Shape::kVectors];
  typename Loads::Column column;

  template <class Tile>
  void load_once(const Store& store, const Tile& tile) {
    if constexpr (kOnce) {
      Loads::all(store, tile, [&](int p, typename Loads::Columns own) { columns[p] = own; });
      if constexpr (Shape::kEdge > 0) {
        if (tile.has_edge()) column = Loads::edge(store, tile);
      }
    }
  }
  template <class Tile>
  void load_with_rows(const Store& store, const Tile& tile) {
    if constexpr (!kOnce) {
      const auto first = Loads::first(store, tile);
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) {
        if constexpr (Shape::kEdge > 0) columns[p] = Loads::behind(store, first, p, tile);
        else columns[p] = Loads::at(store, p, tile);
      }
      if constexpr (Shape::kEdge > 0) {
        if (tile.has_edge()) column = Loads::edge(store, tile);
      }
    }
  }
  void make_opaque() {
    // Where a thread has few parameters for all rows of its block, they stay converted in registers. In shared memory
    // converted ones would take too much room (docs/notes/048, "Converted parameters in registers").
    constexpr bool kConverted = kOnce && Store::kScales && Shape::kInVectors <= 16;
    if constexpr (!kConverted) {
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) columns[p].make_opaque();
    }
    if constexpr (Shape::kEdge > 0) column.make_opaque();
  }
  template <class Tile>
  NoColumns first(const Store&, const Tile&) const {
    return {};
  }
  template <class Tile>
  auto get(const Store&, int p, const Tile&) const {
    return columns[p];
  }
  template <class Tile>
  auto get(const Store&, NoColumns, int p, const Tile&) const {
    return columns[p];
  }
  template <class Tile>
  auto edge(const Store&, const Tile&) const {
    return column;
  }
};

// kParameterMode 2: in shared memory, as they were loaded. Each thread keeps those of its own vectors there, for all
// rows of the block.
template <class Store, class Shape, int kPrefetchBytes>
struct ParametersInShared {
  using Loads = ParameterLoads<Store, Shape>;
  union InShared {
    typename Loads::Columns columns;
    uint4 piece[(sizeof(typename Loads::Columns) + 15) / 16];
    InShared() {}
  };
  static constexpr int kPieces = int(sizeof(InShared) / 16);
  uint4* const kept = reinterpret_cast<uint4*>(shared_memory + kPrefetchBytes) + threadIdx.x;
  typename Loads::Column column;

  template <class Tile>
  void load_once(const Store& store, const Tile& tile) {
    Loads::all(store, tile, [&](int p, typename Loads::Columns columns) {
      InShared own;
      own.columns = columns;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) kept[(p * kPieces + i) * Shape::kBlock] = own.piece[i];
    });
    if constexpr (Shape::kEdge > 0) {
      if (tile.has_edge()) column = Loads::edge(store, tile);
    }
  }
  template <class Tile>
  void load_with_rows(const Store&, const Tile&) {}
  void make_opaque() {
    if constexpr (Shape::kEdge > 0) column.make_opaque();
  }
  template <class Tile>
  NoColumns first(const Store&, const Tile&) const {
    return {};
  }
  template <class Tile>
  auto get(const Store&, int p, const Tile&) const {
    InShared own;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) own.piece[i] = kept[(p * kPieces + i) * Shape::kBlock];
    return own.columns;
  }
  template <class Tile>
  auto get(const Store& store, NoColumns, int p, const Tile& tile) const {
    return get(store, p, tile);
  }
  template <class Tile>
  auto edge(const Store&, const Tile&) const {
    return column;
  }
};

// kParameterMode 5: as they were loaded, for all rows of the block: those of a thread's first vectors, one of
// kVectorsOfOneShared, in shared memory, the others in registers. For rows that leave neither of them room for all.
constexpr int kVectorsOfOneShared = 4;  // SHARED_OF_VECTORS in cupynorm/plan/config.py
template <class Store, class Shape, int kPrefetchBytes>
struct ParametersInBoth {
  static_assert(Shape::kEdge == 0, "parts of unaligned rows have converted parameters");
  struct First : Shape {
    static constexpr int kVectors = Shape::kVectors / kVectorsOfOneShared, kInVectors = kVectors * Shape::kVector;
  };
  struct Others : Shape {
    static constexpr int kParameterMode = 3, kVectors = Shape::kVectors - First::kVectors,
        kInVectors = kVectors * Shape::kVector;
  };
  ParametersInShared<Store, First, kPrefetchBytes> first_vectors;
  ParametersInRegisters<Store, Others> others;

  // A tile of the vectors behind the first.
  template <class Tile>
  struct Behind {
    const Tile& tile;
    bool has(int p) const { return tile.has(p + First::kVectors); }
    auto col(int p) const { return tile.col(p + First::kVectors); }
  };
  template <class Tile>
  void load_once(const Store& store, const Tile& tile) {
    first_vectors.load_once(store, tile);
    others.load_once(store, Behind<Tile>{tile});
  }
  template <class Tile>
  void load_with_rows(const Store&, const Tile&) {}
  void make_opaque() { first_vectors.make_opaque(), others.make_opaque(); }
  template <class Tile>
  NoColumns first(const Store&, const Tile&) const {
    return {};
  }
  template <class Tile>
  auto get(const Store& store, int p, const Tile& tile) const {
    if (p < First::kVectors) return first_vectors.get(store, p, tile);
    return others.get(store, p - First::kVectors, tile);
  }
  template <class Tile>
  auto get(const Store& store, NoColumns, int p, const Tile& tile) const {
    return get(store, p, tile);
  }
};

template <class Store, class Shape, typename Compute, int kPrefetchBytes,
    int kMode = Shape::kParameterMode == 4 && !converts<Store, Shape>() ? 0 : Shape::kParameterMode>
struct ParameterCacheOf {
  using Type = ParametersInRegisters<Store, Shape>;
};
template <class Store, class Shape, typename Compute, int kPrefetchBytes>
struct ParameterCacheOf<Store, Shape, Compute, kPrefetchBytes, 0> {
  using Type = ParametersAtUse<Store, Shape>;
};
template <class Store, class Shape, typename Compute, int kPrefetchBytes>
struct ParameterCacheOf<Store, Shape, Compute, kPrefetchBytes, 2> {
  using Type = ParametersInShared<Store, Shape, kPrefetchBytes>;
};
template <class Store, class Shape, typename Compute, int kPrefetchBytes>
struct ParameterCacheOf<Store, Shape, Compute, kPrefetchBytes, 4> {
  using Type = ParametersConverted<Store, Shape, Compute, kPrefetchBytes>;
};
template <class Store, class Shape, typename Compute, int kPrefetchBytes>
struct ParameterCacheOf<Store, Shape, Compute, kPrefetchBytes, 5> {
  using Type = ParametersInBoth<Store, Shape, kPrefetchBytes>;
};
// kPrefetchBytes: of shared memory, in front of the parameters.
template <class Store, class Shape, typename Compute, int kPrefetchBytes>
using ParameterCache = typename ParameterCacheOf<Store, Shape, Compute, kPrefetchBytes>::Type;

}  // namespace cupynorm
