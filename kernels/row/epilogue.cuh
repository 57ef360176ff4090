// From a row's statistics to its results: the op's map, the parameters of columns, and the store; or, for results that
// are quantised with a scale for each row, the largest of them first.
#pragma once
#include <row/columns.cuh>
#include <row/load.cuh>

namespace cupynorm {

// The op's results for vector p of row r, before the parameters of columns are applied.
template <class Op, class Load, class Store, class Shape>
inline void map_vector(const ThreadRows<Op, Load, Store, Shape>& rows, int r, int p, const typename Op::Row& whole,
                     typename Op::Compute (&y)[Shape::kVector]) {
  constexpr int kVector = Shape::kVector;
  if constexpr (Load::kInterval && Store::kScales) {
    if (!rows.some[r][p]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] = Op::dropped();
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) y[i] = Op::map(rows.x[r][p * kVector + i], whole);
  if constexpr (Load::kDrops) {
    if (!Op::drops_padding(whole)) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] = rows.keeps[r] >> (p * kVector + i) & 1 ? y[i] : Op::dropped();
    }
  }
}

// The same of the element that is in no vector.
template <class Op, class Load, class Store, class Shape>
inline void map_edge(const ThreadRows<Op, Load, Store, Shape>& rows, int r, const typename Op::Row& whole,
                     typename Op::Compute (&y)[1]) {
  y[0] = Op::map(rows.x[r][Shape::kInVectors], whole);
  if constexpr (Load::kDrops) {
    if (!Op::drops_padding(whole)) y[0] = rows.keeps_edge[r] ? y[0] : Op::dropped();
  }
}

// Stores vector p of row r, of which a mask keeps nothing in this warp.
template <class Op, class Load, class Store, class Shape, class Parameters, class Tile>
inline void store_dropped(const Arguments<Op, Load, Store>& a, const ThreadRows<Op, Load, Store, Shape>& rows, int r,
    int p,
                          const Parameters& parameters, const Tile& tile) {
  constexpr int kVector = Shape::kVector;
  if constexpr (Load::kInterval && Store::kHasEpilogueOperands) {
    if (!rows.there[r] || !tile.has(p)) return;
    typename Op::Compute y[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = Op::dropped();
    rows.targets[r].template store<kVector,
        (Shape::kEdge > 0)>(y, parameters.get(a.store, p, tile), rows.epilogue_operands[r][p], tile.col(p));
  }
}

// The same of all vectors of row r.
template <class Op, class Load, class Store, class Shape, class Parameters, class Tile>
inline void store_all_dropped(const Arguments<Op, Load, Store>& a, const ThreadRows<Op, Load, Store, Shape>& rows,
    int r,
                              const Parameters& parameters, const Tile& tile) {
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    if (!rows.some[r][p]) store_dropped(a, rows, r, p, parameters, tile);
  }
}

// What was loaded for the results stays as it was loaded until here.
template <class Op, class Load, class Store, class Shape>
inline void make_operands_opaque(ThreadRows<Op, Load, Store, Shape>& rows) {
  if constexpr (Store::kHasEpilogueOperands) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
#pragma unroll
      for (int p = 0; p < Shape::kVectors; ++p) rows.epilogue_operands[r][p].make_opaque();
      if constexpr (Shape::kEdge > 0) rows.epilogue_operands_edge[r].make_opaque();
    }
  }
}

// Saves the statistics of a row if the caller asked for them: before the stores, while `whole` is in registers. Few
// callers ask, and a.op.saves(), which is the same for all threads, skips the branch for the others; partly filled
// tiles have no register for that test. saves(): whether this thread saves them.
template <class Shape, class Arguments, class Row, class Saves>
inline void save_statistics(const Arguments& a, int64 row, const Row& whole, const Saves& saves) {
  if ((!Shape::kFull || Shape::kCtasPerRow > 1 || a.op.saves()) && saves()) a.op.save(row, whole);
}

// Where row r goes: what its stores have in common.
template <class Op, class Load, class Store, class Shape, class Tile>
inline typename Store::RowPointer target_of(const Arguments<Op, Load, Store>& a, const ThreadRows<Op, Load, Store,
    Shape>& rows,
                                      int r, int64 row, const Tile& tile) {
  if constexpr (Store::kHasEpilogueOperands) {
    return rows.targets[r];
  } else if constexpr (Shape::kEdge == 0) {
    return a.store.at(row);
  } else {
    auto target = a.store.at(row).from(tile.col(0));
    target.make_opaque();
    return target;
  }
}

// Stores vector p of row r. own: the vector's parameters.
template <class Op, class Load, class Store, class Shape, class Target, class Own, class Parameters, class Tile>
inline void store_vector_of_row(const Arguments<Op, Load, Store>& a, const ThreadRows<Op, Load, Store, Shape>& rows,
                              const Target& target, int r, int p, const typename Op::Row& whole, const Own& own,
                              const Parameters& parameters, const Tile& tile) {
  constexpr int kVector = Shape::kVector;
  if constexpr (Load::kInterval) {
    if (!rows.some[r][p]) {
      if constexpr (!Choices<Op, Load, Store, Shape>::kEarly) store_dropped(a, rows, r, p, parameters, tile);
      return;
    }
  }
  typename Op::Compute y[kVector];
  map_vector(rows, r, p, whole, y);
  if constexpr (Store::kHasEpilogueOperands)
    target.template store<kVector, (Shape::kEdge > 0)>(y, own, rows.epilogue_operands[r][p], tile.col(p));
  else if constexpr (Shape::kEdge > 0) target.template store<kVector, true>(y, own, p * (Shape::kGroup * kVector));
  else target.template store<kVector>(y, own, tile.col(p));
}

// Stores the element of row r that is in no vector.
template <class Op, class Load, class Store, class Shape, class Parameters, class Tile>
inline void store_edge(const Arguments<Op, Load, Store>& a, const ThreadRows<Op, Load, Store, Shape>& rows, int64 row,
    int r,
                       const typename Op::Row& whole, const Parameters& parameters, const Tile& tile) {
  if constexpr (Shape::kEdge > 0) {
    if (!tile.has_edge()) return;
    typename Op::Compute y[1];
    map_edge(rows, r, whole, y);
    if constexpr (Store::kHasEpilogueOperands)
      rows.targets[r].template store<1>(y, parameters.edge(a.store, tile), rows.epilogue_operands_edge[r],
          tile.edge_col());
    else a.store.at(row).template store<1>(y, parameters.edge(a.store, tile), tile.edge_col());
  }
}

// Finishes and stores all rows. row(r): the number of one of them. saves: whether this thread saves statistics.
template <class Op, class Load, class Store, class Shape, class Parameters, class Row, typename Cols, class Saves,
    class Tile>
inline void store_rows(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
                       const Parameters& parameters, const Row& row, Cols cols, const Saves& saves, const Tile& tile) {
  constexpr int kVectors = Shape::kVectors, kRows = Shape::kRows;
  const auto first = parameters.first(a.store, tile);
  if constexpr (kRows > 1) {
    if (row(kRows - 1) < a.rows) {  // a vector's parameters are converted once for all rows
      typename Op::Row whole[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        whole[r] = a.op.finish(rows.mine[r], rows.total[r], cols, rows.pivot[r]);
        save_statistics<Shape>(a, row(r), whole[r], saves);
        rows.targets[r] = target_of(a, rows, r, row(r), tile);
      }
#pragma unroll
      for (int p = 0; p < kVectors; ++p) {
        if (!tile.has(p)) continue;
        const auto own = parameters.get(a.store, first, p, tile);
#pragma unroll
        for (int r = 0; r < kRows; ++r) store_vector_of_row(a, rows, rows.targets[r], r, p, whole[r], own, parameters,
            tile);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) store_edge(a, rows, row(r), r, whole[r], parameters, tile);
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64 number = row(r);
    if (Load::kInterval ? !rows.there[r] : number >= a.rows) continue;
    const typename Op::Row whole = a.op.finish(rows.mine[r], rows.total[r], cols, rows.pivot[r]);
    save_statistics<Shape>(a, number, whole, saves);
    const auto target = target_of(a, rows, r, number, tile);
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
      if (tile.has(p))
        store_vector_of_row(a, rows, target, r, p, whole, parameters.get(a.store, first, p, tile), parameters, tile);
    }
    store_edge(a, rows, number, r, whole, parameters, tile);
  }
}

// Puts the results of all rows, before they are scaled, in the place of their elements, and finds the largest that this
// thread's warp, or its group if that is less, has of each.
template <class Op, class Load, class Store, class Shape, class Parameters, class Row, typename Cols, class Saves,
    class Tile>
inline void finish_scaled(const Arguments<Op, Load, Store>& a, ThreadRows<Op, Load, Store, Shape>& rows,
                          typename Magnitude<typename Op::Compute>::State (&largest)[Shape::kRows],
                              const Parameters& parameters,
                          const Row& row, Cols cols, const Saves& saves, const Tile& tile) {
  using Compute = typename Op::Compute;
  using Largest = Magnitude<Compute>;
  constexpr int kVector = Shape::kVector, kRows = Shape::kRows;
  typename Op::Row whole[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    whole[r] = a.op.finish(rows.mine[r], rows.total[r], cols, rows.pivot[r]);
    if (row(r) < a.rows) save_statistics<Shape>(a, row(r), whole[r], saves);
    largest[r] = Largest::identity();
  }
#pragma unroll
  for (int p = 0; p < Shape::kVectors; ++p) {
    if (!tile.has(p)) continue;
    decltype(parameters.get(a.store, p, tile)) own;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Compute y[kVector], z[kVector];
      map_vector(rows, r, p, whole[r], y);
      if (r == 0) own = parameters.get(a.store, p, tile);  // converted once for all rows
      Store::template finish<kVector>(y, own, z);
      largest[r] = Largest::template merge<false>(largest[r], Largest::of(z));
#pragma unroll
      for (int i = 0; i < kVector; ++i) field(rows.x[r][p * kVector + i], 0) = z[i];
    }
  }
  if constexpr (Shape::kEdge > 0) {
    if (tile.has_edge()) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Compute y[1], z[1];
        map_edge(rows, r, whole[r], y);
        Store::template finish<1>(y, parameters.edge(a.store, tile), z);
        largest[r] = Largest::template merge<false>(largest[r], Largest::of(z));
        field(rows.x[r][Shape::kInVectors], 0) = z[0];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    largest[r] = reduce_lanes<Largest, false, Shape::kLanes>(largest[r]);
    rows.pivot[r] = 0;
  }
}

// Scales and stores all rows, given the largest of each.
template <class Op, class Load, class Store, class Shape, class Row, class Saves, class Tile>
inline void store_scaled(const Arguments<Op, Load, Store>& a, const ThreadRows<Op, Load, Store, Shape>& rows,
                         const typename Magnitude<typename Op::Compute>::State (&largest)[Shape::kRows], const Row& row,
                         const Saves& saves, const Tile& tile) {
  using Compute = typename Op::Compute;
  constexpr int kVector = Shape::kVector;
#pragma unroll
  for (int r = 0; r < Shape::kRows; ++r) {
    const int64 number = row(r);
    if (number >= a.rows) continue;
    const auto scale = a.store.scale_of(largest[r].max);
    if (saves()) a.store.save(number, scale);
    const auto source = a.store.at(number);
#pragma unroll
    for (int p = 0; p < Shape::kVectors; ++p) {
      if (!tile.has(p)) continue;
      Compute z[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] = field(rows.x[r][p * kVector + i], 0);
      source.template store_scaled<kVector, (Shape::kEdge > 0)>(z, scale, tile.col(p));
    }
    if constexpr (Shape::kEdge > 0) {
      if (tile.has_edge()) {
        const Compute z[1] = {field(rows.x[r][Shape::kInVectors], 0)};
        source.template store_scaled<1>(z, scale, tile.edge_col());
      }
    }
  }
}

}  // namespace cupynorm
