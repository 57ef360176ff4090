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
//   of(v)       The number of row v. or_first(v, rows): of all rows' first one, if the thread has none;
//               of_or(there, v, other): of another one, if not `there`.
//   slot(v)     The same among the tile's. place(thread, v): as RowsOfLanes has it.
//   step(j)     The thread's element j of its rows.
//   at(col)     Their column.
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
  int64 of_or(bool there, int v, int64 other) const { return (there ? row : other) + v; }
  static Step<Shape::kDown> step(int j) { return {j}; }
  template <typename Index>
  static Index at(Index col) {
    return col;
  }
};

template <class Shape>
struct ShiftedRows {
  static constexpr int kOfTile = Shape::kRows - 1;
  int64 row;
  int first;
  bool here, both;
  static_assert(Shape::kVector == 2 && Shape::kDown % 2 == 0, "all elements of a thread have the same parity");
  static_assert(Shape::kIsPower && Shape::kLanes >= kWarp, "lanes of a warp that share rows have the same");
  static_assert(!Shape::kOfGrid, "a thread that has no rows of this tile has none of a next one (docs/notes/089)");

  // The first of a tile's rows, among all, and how many it has.
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
    const int at = 2 * lane - load.is_second(own.row, col), first = at < 0 ? 0 : at;
    return {own.row + first, first, first < own.count, at >= 0 && at + 1 < own.count};
  }
  bool has(int v) const { return v == 0 || both; }
  int64 of(int v) const { return row + (v > 0 && both); }
  int64 or_first(int v, int64) const { return here ? of(v) : 0; }
  int64 of_or(bool there, int v, int64 other) const { return there ? of(v) : other; }
  int slot(int v) const { return first + (v > 0 && both); }
  int place(int thread, int v) const { return thread / Shape::kLanes * Shape::kRows + slot(v); }
  Step<Shape::kDown, true> step(int j) const { return {j, both}; }
  template <typename Index>
  ShiftedColumn<Index> at(Index col) const {
    return {col, both};
  }
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

}  // namespace cupynorm
