// The rows of a thread in registers: how they are loaded, and how each thread's and each warp's elements become a
// State.
#pragma once
#include <row/choices.cuh>
#include <row/pipeline.cuh>

namespace cupynorm {

// What a thread has of kRows rows, and of what is computed from them. The arrays are the kernel's: in one struct the
// compiler could put none of them into registers before it has unrolled the loops over all of them, and took more
// registers. ahead: operands of the results, loaded with the row. keeps: a bit for each element that no mask drops.
// some: whether a lane of this warp keeps something of a vector (only where a mask keeps an interval). there: the row
// is not past the last. pivot: where statistics are counted from. mine, total: the State of this thread's elements, and
// of all that have been reduced. ..._alone: the same of the element that is in no vector.
template <class Op, class Load, class Store, class Shape>
struct ThreadRows {
  static constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors, kRows = Shape::kRows;
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;

  typename Load::template Loaded<kVector> (&loaded)[kRows][kVectors];
  typename Load::RowPointer (&sources)[kRows];
  typename Store::RowPointer (&targets)[kRows];
  typename Store::template EpilogueOperands<kVector> (&epilogue_operands)[kRows][kVectors];
  typename Store::template EpilogueOperands<1> (&epilogue_operands_edge)[kRows];
  bool (&keeps_edge)[kRows];
  unsigned (&keeps)[kRows];
  bool (&some)[kRows][kVectors];
  bool (&there)[kRows];
  Compute (&pivot)[kRows];
  Element (&x)[kRows][Shape::kElements];
  typename Op::State (&mine)[kRows], (&total)[kRows];
};

// Loads row r, and what else its results are computed from.
template <class Op, class Load, class Store, class Shape, class Around, class Tile>
inline void load_row(ThreadRows<Op, Load, Store, Shape>& rows, Around (&around)[Shape::kRows], int r, bool here,
    int stage,
                     const Tile& tile) {
  using Choice = Choices<Op, Load, Store, Shape>;
  constexpr int kVector = Shape::kVector;
  const auto source = rows.sources[r];
  if constexpr (Shape::kEdge > 0 && !Load::kDirect && Shape::kStages == 0)
    around[r] = here && tile.has_edge() ? source.template load<1>(tile.edge_col())
        : Load::template absent<1>(Op::padding());
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    auto& loaded = rows.loaded[r][p];
    if constexpr (Choice::kInterval) {
      const bool reads = ((Shape::kFull && Choice::kMayRepeat) || (here && tile.has(p))) &&
          source.template reads<kVector>(tile.masked_from(p));
      rows.some[r][p] = any_lane(reads);
      if (reads && Shape::kStages > 0) loaded = prefetched_of<Load, Shape>(source, stage, r, p, tile);
      else if (reads) loaded = source.template load_kept<kVector>(tile.col(p));
      else loaded = {};  // or its registers are taken from the begin on
    } else if (Choice::kAnyway || (here && tile.has(p))) {
      if constexpr (Choice::kReadLate)
        static_cast<void>(stage);
      else if constexpr (Shape::kStages > 0 && !Load::kDirect)
        loaded = prefetched_of<Load, Shape>(source, stage, r, p, tile);
      else if constexpr (Shape::kStages > 0)
        loaded = load_vector<typename Load::Type,
            kVector>(reinterpret_cast<const typename Load::Type*>(prefetched<Load, Shape>(stage, r, p)));
      else if constexpr (Shape::kUnaligned == 2) loaded = source.template load_unaligned<kVector>(tile.col(p));
      else loaded = source.template load<kVector>(tile.col(p));
    } else {
      loaded = Load::template absent<kVector>(Op::padding());
    }
    if constexpr (Store::kHasEpilogueOperands) {
      if (Choice::kAnyway || (here && tile.has(p))) rows.epilogue_operands[r][p] =
          rows.targets[r].template epilogue_operands<kVector>(tile.col(p));
    }
  }
}

// Loads all rows. row(r): the number of one of them.
template <class Op, class Load, class Store, class Shape, class Around, class Row, class Tile>
inline void load_rows(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
                      Around (&around)[Shape::kRows], int stage, const Row& row, const Tile& tile) {
  using Choice = Choices<Op, Load, Store, Shape>;
#pragma unroll
  for (int r = 0; r < Shape::kRows; ++r) {
    const int64 number = row(r);
    const bool here = number < a.rows;
    rows.sources[r] = a.load.at(here ? number : 0);
    if constexpr (Choice::kOneAddress && !Load::kDirect) rows.sources[r].make_opaque();
    if constexpr (Choice::kInterval && Shape::kEdge == 0) rows.sources[r].count_kept_from(tile.col(0));
    if constexpr (Store::kHasEpilogueOperands) rows.targets[r] = a.store.at(here ? number : 0);
    if constexpr (Store::kHasEpilogueOperands && Choice::kInterval) rows.targets[r].make_opaque();
    rows.there[r] = here;
    load_row(rows, around, r, here, stage, tile);
    if constexpr (Op::kOwnNumber) rows.pivot[r] = rows.sources[r].own_number();
    if constexpr (Shape::kEdge > 0 && Store::kHasEpilogueOperands) {
      if (here && tile.has_edge())
        rows.epilogue_operands_edge[r] = rows.targets[r].template epilogue_operands<1>(tile.edge_col());
    }
  }
}

// How many elements of a row this thread holds in vectors, and how many its warp holds, or its group if that is less.
struct Counts {
  int thread, warp;
};
template <class Shape, class Tile>
inline Counts count_elements(const Share& share, const Tile& tile) {
  constexpr int kLanes = Shape::kLanes;
  const int before = tile.lane / kLanes * kLanes;  // lanes of the group that are in warps before this one
  int held = 0, count = 0;
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    held += tile.has(p);
    const int left = share.vectors - p * Shape::kGroup - before;
    count += p < Shape::kAlwaysValid || left > kLanes ? kLanes : left < 0 ? 0 : left;
  }
  if constexpr (Shape::kFixed) {
    const int left = share.heads + share.tails - before;
    count = count * Shape::kVector + (left > kLanes ? kLanes : left < 0 ? 0 : left);
  } else {
    count = count * Shape::kVector + (tile.lane < kLanes ? share.heads + share.tails : 0);
  }
  return {held * Shape::kVector, count};
}

// Converts what was loaded of row r to the compute type; what is not there becomes padding. row: its number.
template <class Op, class Load, class Store, class Shape, class Tile>
inline void unpack_row(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows, int r, int64 row,
                       int stage, const Tile& tile) {
  constexpr int kVector = Shape::kVector;
  if constexpr (Load::kDrops) rows.keeps[r] = 0;
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    ElementOf<Op>* const values = rows.x[r] + p * kVector;
    if (Load::kDirect || tile.has(p)) {
      if constexpr (Choices<Op, Load, Store, Shape>::kReadLate)
        rows.loaded[r][p] = prefetched_of<Load, Shape>(rows.sources[r], stage, r, p, tile);
      const unsigned bits =
          rows.sources[r].template unpack<kVector>(rows.loaded[r][p], values, tile.col(p), Op::padding());
      if constexpr (Load::kDrops) rows.keeps[r] |= bits << (p * kVector);
      if constexpr (Load::kStoresComputed) {
        if (row < a.rows) rows.sources[r].template store_computed<kVector, (Shape::kEdge > 0)>(values, tile.col(p));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = Op::padding();
    }
  }
}

// The same of the element that is in no vector.
template <class Op, class Load, class Store, class Shape, class Around, class Tile>
inline void unpack_edge(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
    const Around& around,
                        int r, int64 row, const Tile& tile) {
  ElementOf<Op>* const value = rows.x[r] + Shape::kInVectors;
  if constexpr (Load::kDirect) {
    unpack<1>(around, value);
  } else {
    *value = Op::padding();
    rows.keeps_edge[r] = false;
    if (tile.has_edge() && rows.sources[r].template reads<1>(tile.edge_col())) {
      rows.keeps_edge[r] = rows.sources[r].template unpack<1>(around, value, tile.edge_col(), Op::padding());
      if constexpr (Load::kStoresComputed) {
        if (row < a.rows) rows.sources[r].template store_computed<1>(value, tile.edge_col());
      }
    }
  }
}

// Unpacks and summarises a row of which a mask keeps all that the warp has.
template <class Op, class Shape, class RowPointer, class Loaded, class Predicate, class Tile>
inline typename Op::State summarize_kept(const RowPointer& source, const Loaded (&loaded)[Shape::kVectors],
                                         ElementOf<Op> (&x)[Shape::kElements], Predicate valid,
                                             const Tile& tile) {
  constexpr int kVector = Shape::kVector;
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p)
    source.template unpack_kept<kVector>(loaded[p], x + p * kVector, tile.col(p));
  return Op::summarize(x, valid, typename Op::Compute(0));
}

// Unpacks and summarises a row of which a mask keeps an interval; what it drops becomes padding. some[p]: whether a
// lane of the warp keeps something of vector p. Gives the thread's own State, and in `keeps` a bit for each element
// that is kept.
template <class Op, class Shape, class RowPointer, class Loaded, class Predicate, class Tile>
inline typename Op::State summarize_interval(const RowPointer& source, const Loaded (&loaded)[Shape::kVectors],
                                             ElementOf<Op> (&x)[Shape::kElements],
                                                 const bool (&some)[Shape::kVectors],
                                             unsigned& keeps, Predicate valid, const Tile& tile) {
  constexpr int kVector = Shape::kVector, kVectors = Shape::kVectors;
  return Op::template summarize_some<kVector>(x, some, [&](int p) {
    ElementOf<Op>* const values = x + p * kVector;
    source.template unpack_kept<kVector>(loaded[p], values, tile.col(p));
    // what is behind this block's vectors is another's, or around all vectors
    const unsigned bits = tile.has(p) ? source.template bits<kVector>(loaded[p], tile.masked_from(p)) : 0;
    keeps |= bits << (p * kVector);
    if (any_lane(bits != ~0u >> (32 - kVector))) {  // most vectors are within what is kept
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = bits >> i & 1 ? values[i] : Op::padding();
    }
  });
}

// Where the statistics of row r are counted from, if the op asks for it: an element of each warp, since the row's would
// be one more access to memory. Or the number that the row has of its own, which came with it.
template <class Op, class Load, class Store, class Shape>
inline typename Op::Compute find_pivot(const ThreadRows<Op, Load, Store, Shape>& rows, int r) {
  if constexpr (Op::kOwnNumber) {
    return rows.pivot[r];
  } else if constexpr (!Op::kHasPivot) {
    return 0;
  } else {
    constexpr int kVector = Shape::kVector;
    // a warp's first lane may miss its last vector
    constexpr int kLeading = Shape::kVectors > 1 ? Shape::kInVectors - kVector : kVector;
    typename Op::Compute leading[kLeading < 4 ? kLeading : 4];
#pragma unroll
    for (int i = 0; i < (kLeading < 4 ? kLeading : 4); ++i) leading[i] = rows.x[r][i];
    return __shfl_sync(kAllLanes, Op::pivot_of(leading, typename Load::Precision()), 0, Shape::kLanes);
  }
}

// Unpacks row r, and summarises what this thread's warp, or its group if that is less, has of it.
template <class Op, class Load, class Store, class Shape, class Around, class Predicate, class Tile>
inline void summarize_row(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
    const Around& around,
                          int r, int64 row, int stage, Predicate valid, int count, const Tile& tile) {
  unpack_row(a, rows, r, row, stage, tile);
  if constexpr (Shape::kEdge > 0) unpack_edge(a, rows, around, r, row, tile);
  rows.pivot[r] = find_pivot(rows, r);
  rows.total[r] =
      summarize_lanes<Op, Shape::kFull, Choices<Op, Load, Store, Shape>::kShort, (Shape::kCtasPerRow > 1),
          Shape::kLanes>(
          rows.x[r], valid, count, rows.pivot[r], rows.mine[r]);
}

}  // namespace cupynorm
