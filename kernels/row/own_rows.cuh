// Which rows of a tile a thread has, where rows' elements lie apart (apart.cuh).
//
// A thread has kVector rows that are neighbours in memory. It accesses an element of each at once, if what it accesses
// begins at a multiple of as many elements: in all columns, where the number of neighbours is such a multiple. Where it
// is odd, elements of two rows are aligned together in every other column only, and in the columns between each row is
// aligned with its other neighbour. But a thread's own columns are an even number apart, so that what is aligned in one
// of them is so in all. ShiftedRows: threads whose first row is not aligned with the next begin one row earlier. Of 2 n
// rows side by side all threads then have 2 n - 1 at least, so many are a tile's, and a thread at its end has one row:
//
//   lane                 0     1     2    ...   n - 1
//   rows, not shifted   0 1   2 3   4 5        2n-2
//   rows, shifted        0    1 2   3 4     2n-3 2n-2
//
// Tiles do not go beyond rows that are neighbours: what lies behind the last of them is another column.
#pragma once
#include <io/fused_load.cuh>
#include <row/apart.cuh>

namespace cupynorm {

//   row, here   The number of the first of the thread's rows, among all, and whether it has any.
//   has(v)      Whether the thread has its row v, if it has any. A row that it has not is its first one once more, and
//               its elements are 0.
//   of(v)       The number of row v. or_first(v, rows): of all rows' first one, if the thread has none.
//   slot(v)     The same among the tile's. place(group, v): its place for what the thread has of it.
//   step(j)     The thread's element j of its rows.
//   at(col)     Their column.
//   leave_out(left_over)   A thread that is left over has none.
template <class Shape>
struct EvenRows {
  int64 row;
  bool here;

  static EvenRows of(int64 tile, int lane, int64 rows) {
    const int64 row = (tile * Shape::kLanes + lane) * Shape::kVector;
    return {row, row < rows};
  }
  static constexpr bool has(int) { return true; }
  int64 of(int v) const { return row + v; }
  int64 or_first(int v, int64 rows) const { return row < rows ? row + v : 0; }
  static Step<Shape::kDown> step(int j) { return {j}; }
  template <typename Index>
  static Index at(Index col) {
    return col;
  }
  void leave_out(bool left_over) { here = here && !left_over; }
};

template <class Shape>
struct ShiftedRows {
  static constexpr int kOfTile = Shape::kRows - 1;
  int64 row;
  int first;
  bool here, both;
  static_assert(Shape::kVector == 2 && Shape::kDown % 2 == 0, "all elements of a thread are aligned alike");
  static_assert(Shape::kLanes % kWarp == 0 || !Shape::kInWarps, "lanes of a warp that share rows have the same");

  // Where a tile begins: no tile is there if that is beyond all rows.
  struct Tile {
    int64 row;
    int count;
  };
  template <class Load>
  static Tile tile_of(const Load& load, int64 tile, int64 rows) {
    const int64 neighbours = load.neighbours(rows);
    const auto each = static_cast<unsigned long long>(neighbours + (kOfTile - 1)) / kOfTile;
    const int64 outer = static_cast<unsigned long long>(tile) / each, before = (tile - outer * each) * kOfTile,
                left = neighbours - before;
    return {outer * neighbours + before, left < kOfTile ? int(left) : kOfTile};
  }
  // col: the thread's first one
  template <class Load>
  static ShiftedRows of(const Load& load, int64 tile, int lane, int64 col, int64 rows) {
    const Tile own = tile_of(load, tile, rows);
    const bool here = own.row < rows;
    const int at = 2 * lane - load.is_second(here ? own.row : 0, col), first = at < 0 ? 0 : at;
    return {own.row + first, first, here && first < own.count, here && at >= 0 && at + 1 < own.count};
  }
  bool has(int v) const { return v == 0 || both; }
  int64 of(int v) const { return row + (v > 0 && both); }
  int64 or_first(int v, int64) const { return here ? of(v) : 0; }
  int slot(int v) const { return first + (v > 0 && both); }
  int place(int group, int v) const { return group * Shape::kRows + slot(v); }
  Step<Shape::kDown, true> step(int j) const { return {j, both}; }
  template <typename Index>
  ShiftedColumn<Index> at(Index col) const {
    return {col, both};
  }
  void leave_out(bool left_over) { here &= !left_over, both &= !left_over; }
};

template <class Load, class Shape>
inline constexpr bool kIsOfShifted = kMayBeShifted<Load> && Shape::kVector == 2;
template <class Load, class Shape, bool = kIsOfShifted<Load, Shape>>
struct OwnRowsOf {
  using Type = EvenRows<Shape>;
};
template <class Load, class Shape>
struct OwnRowsOf<Load, Shape, true> {
  using Type = ShiftedRows<Shape>;
};

// The rows of a thread of a tile; col: the thread's first column.
template <class Shape, class Load>
inline typename OwnRowsOf<Load, Shape>::Type own_rows(const Load& load, int64 tile, int lane, int64 col, int64 rows) {
  if constexpr (kIsOfShifted<Load, Shape>) return ShiftedRows<Shape>::of(load, tile, lane, col, rows);
  else return EvenRows<Shape>::of(tile, lane, rows);
}
// Which of a tile's rows these are, for reductions (apart.cuh).
template <class Shape>
inline RowsOfLanes<Shape> slots_of(const EvenRows<Shape>&) {
  return {};
}
template <class Shape>
inline const ShiftedRows<Shape>& slots_of(const ShiftedRows<Shape>& own) {
  return own;
}
// The number among all rows of number `slot` of a tile's; all rows, or more, if there is none.
template <class Shape, class Load>
inline int64 row_of_slot(const Load& load, int64 tile, int slot, int64 rows) {
  if constexpr (kIsOfShifted<Load, Shape>) {
    const auto own = ShiftedRows<Shape>::tile_of(load, tile, rows);
    return slot < own.count ? own.row + slot : rows;
  } else {
    return tile * Shape::kRows + slot;
  }
}
// Whether there is such a tile.
template <class Shape, class Load>
inline bool is_tile(const Load& load, int64 tile, int64 rows) {
  if constexpr (kIsOfShifted<Load, Shape>) return ShiftedRows<Shape>::tile_of(load, tile, rows).row < rows;
  else return tile * Shape::kRows < rows;
}

}  // namespace cupynorm
