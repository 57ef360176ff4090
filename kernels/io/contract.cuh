// The contracts of Load and Store, all of them: the only structs that know types, strides, masks and parameters of
// columns. Each has its counterpart of the same name in cupynorm/functors.py, with the same members in the same order.
// All are asked only for columns below cols. N: a number of neighbouring elements; Index: int or int64.
//
// A Load Type          That of x in memory. Digits: the type that has the precision of what the op is given. kDirect x
// alone is loaded, as it is. Otherwise elements are computed from x and operands. kDrops        It drops elements (a
// mask). kInterval: it keeps an interval of columns at most, which each Line knows. kKeeps        What it computes is
// written as well. Loaded<N>     N elements as they lie in memory: vectors of x and of all that they are computed from.
// absent<N>(padding) A Loaded<N> in place of elements that are not there. With kDirect they become padding themselves.
// at(row)       -> Line A Line of a Load load<N>(col)  -> Loaded<N>, at a multiple of the plan's vectors.
// unpack<N>(loaded, x, col, padding) Computes N elements, and gives a bit for each that is not dropped. hide() Keeps
// its addresses from being computed again (optimisation barrier). address(col)  Where x[col] lies: for copies to shared
// memory, and to find out whether y is x itself. load_unaligned<N>(col)          kDirect: at any column. Called for
// rows that are aligned otherwise than y. load_twice<N, kAgain>(col)     kDirect: row_cached: the first and the second
// time that a row is read. reads<N>(col), bits<N>(loaded, col) not kDirect: whether any of N columns is kept, as far as
// is known without loading; a bit for each kept. keep<N>(x, col)                kKeeps: writes what was computed.
// load_kept<N>, unpack_kept<N>, keeps_all(begin, end), count_kept_from(col)
// kInterval: the same without looking at the interval; whether the interval holds all columns from begin to end; counts
// columns from col on from here.
//
// A Store Type          That of y in memory. kBytes: of an element of the widest result. kHasEpilogueOperands
// Results are computed from operands, which are loaded with the row. kScales       Results are divided by a scale of
// their row, which the largest of them decides. Columns<N>    The parameters of N columns, as they were loaded. They
// may wait in registers: hide() keeps them so. columns<N>(col)                -> Columns<N>, at a multiple of the
// plan's vectors. columns_unaligned<N>(col)       The same at any column. Or in steps: columns_from(col)
// what many vectors share that are misaligned alike, ColumnsSplit<N> columns_split<N>(from, further) the accesses for N
// columns from col + further on, all of which may be on their way, realign_columns<N>(apart)         -> Columns<N>.
// Affines::convert<N>(columns, numbers) The parameters converted to the compute type (ParametersConverted; not with
// kHasEpilogueOperands or kScales). Ahead<N>      Operands of N results, as they were loaded. finish<N>(y, columns, z),
// scale_of(largest), save(row, scale)
// kScales: the results before they are scaled; the scale of a row; writes it. at(row)       -> Line A Line of a Store
// store<N, kWhole>(y, columns, col), or with kHasEpilogueOperands store<N, kWhole>(y, columns, ahead, col) Computes,
// rounds and writes N results. kWhole: in single accesses of up to 16 bytes. ahead<N>(col) kHasEpilogueOperands: ->
// Ahead<N>. store_scaled<N, kWhole>(z, scale, col)
// kScales: scales, rounds and writes what finish() gave. head<N>()     How many elements lie before the first that is
// aligned to N elements. address()     Where y[0] lies. from(col): the same Line from column col on; neither with
// kHasEpilogueOperands. hide()        As for a Load.
#pragma once
#include <base/ptx.cuh>

namespace cupynorm {

// The most elements of a row for which results of that width hide what one pass over them loses to two
// (docs/notes/kernel-comments). 0: always two passes.
template <class Store>
inline constexpr int one_pass_elements() {
  return Store::kBytes == 1 ? 8192 : Store::kBytes == 2 ? 2048 : 0;
}

}  // namespace cupynorm
