// The complete contracts of Load and Store: the only structs that know types, strides, masks and affine parameters.
// Each has its host mirror of the same name, with the same members in the same order: in cupynorm/lower/mirrors.py,
// those of masks in lower/masks.py, those of ops in RowOp.mirror of lower/row.py. All are asked only for columns below
// cols. N: a number of neighbouring elements.
//
// A Load
//   Type, Precision     That of x in memory, and the type that has the precision of what the op is given.
//   kDirect             x alone is loaded, as it is. Otherwise elements are computed from x and operands.
//   kAdjacent           kDirect: a row's columns lie next to one another; else in runs, of which each vector has one.
//   kDrops, kInterval   It drops elements (a mask); those that it keeps are in an interval of columns, which the
//                       RowPointer of each row has.
//   kStoresComputed     What it computes is written as well.
//   kWaitsAsLoaded      What it computes takes few steps, of x and numbers of its row. So x_of<N>(loaded), the Vector
//                       of x that came, may wait, and compute_again<N>(x, y) of a RowPointer gives what it becomes.
//   Loaded<N>           N elements as they lie in memory: vectors of x and of all that they are computed from.
//   absent<N>(padding)  A Loaded<N> in place of elements that are not there. With kDirect they become padding.
//   kPrefetchBytes<N>   Bytes of N elements, and of all that is loaded with them, in shared memory of rows in flight.
//   at(row)             The RowPointer of a row.
//   kInSteps            Elements that lie apart are at even distances, and so is all that they are computed from.
//                       begin_at(col) of the RowPointers moves them to a column, and columns are then Steps from there
//                       (io/strided.cuh). A Store that can be asked so has it, too (kStoresInSteps).
//   each_scattered(row, own, visit)
//                       Of rows that lie apart: visit(from, pointer, cols) for x, and for each array of operands or
//                       of a mask of which every element lies somewhere: where its `row` begins, and what `own`, a
//                       RowPointer, has of it. Whoever copies elements has it point to the copies (row/stretch.cuh),
//                       and asks for no Steps then, which are of global memory.
//   kMaskBytes          Its mask has a byte for each element; with kInterval it may have both.
//   kAlone              What it computes is computed from x and numbers of its row, all of it kept, and not written.
// A RowPointer of a Load
//   load<N>(col)        Loaded<N>, at a multiple of the plan's vectors.
//   unpack<N>(loaded, x, col, padding)
//                       Computes N Elements of the op, and gives a bit for each that is not dropped.
//   unpack_further<kMore, N>(loaded, x, col, take)
//                       The same of a FusedLoad without a mask, whose function gives kMore numbers behind an element's:
//                       take(k, i, number) gets those of element i (row/summed.cuh). Of rows that lie apart
//                       compute_further_across<kMore, kRows> of the Load does it for some neighbouring ones, and
//                       store_further_across of a FusedStore with kOperandsInSteps (row/summed_apart.cuh).
//   keep<N, As>(col, begin, end), prefetch_row<N, kPlaces>(shared, place, col),
//   unpack_row<kMore, kPlaces, N>(kept, ...)
//                       The same where a thread goes through many rows of the same columns: Kept<N, As> is what all
//                       rows share of these, converted if As is the compute type; the rest, kRowBytes<N>, is copied to
//                       shared memory, and converted from there as often as asked. A FusedStore has keep, prefetch_row
//                       and store_row, too. With kCut<N> vectors may begin before the row, or end behind it: elements
//                       begin up to end are the row's, and store_row is told which it stores.
//   make_opaque()       Keeps its addresses from being computed again (an optimisation barrier).
//   address(col)        Where x[col] lies: for copies to shared memory, and to find out whether y is x itself.
//   own_number()        LabelledLoad has it, for an op with kOwnNumber: a number of the row itself, which takes a load
//                       of its own. own_number_between(begin, end) is the same if it belongs to one of these columns,
//                       else what stands for no number.
//   begins_at(place)    Whether x, or an operand that may be `out` itself, has its row there.
//   store_computed<N>(x, col)
//                       kStoresComputed: writes what was computed, of several fields the first.
//   load_twice<N, kAgain>(col)
//                       As load, but for the last time that row_cached reads a row (kAgain), or before that.
//   kDirect:            load_unaligned<N>(col), at any column, for rows that are aligned otherwise than y.
//   otherwise:          prefetch<N, kPlaces>(shared, place, col), begins to copy N elements and what is loaded with
//                       them, to shared memory; prefetched<N, kPlaces>(shared, place, col), the Loaded<N> that came;
//                       reads<N>(col), whether any of N columns is kept, as far as is known without loading;
//                       bits<N>(loaded, col), a bit for each that is kept.
//   kInterval:          load_kept<N>, unpack_kept<N>, the same without looking at the interval; keeps_all(begin, end),
//                       whether it holds all columns between; count_kept_from(col) counts columns from col on;
//                       keep_vectors<N>(origin, first, last), which vectors it has something of; of the Load itself
//                       most_kept(cols), how many columns it holds at most.
//
// A Store
//   Type, kBytes        That of y in memory; bytes of an element of the widest result.
//   kHasEpilogueOperands  Results are computed from operands, which are loaded with the row: EpilogueOperands<N>.
//   kScales             Results are divided by a scale of their row, which the largest of them decides.
//   Columns<N>          The parameters of N columns, as they were loaded. make_opaque() keeps them so in registers.
//   columns<N>(col)     Columns<N>, at a multiple of the plan's vectors; columns_unaligned<N>(col) at any column, or in
//                       steps: columns_from(col), what equally misaligned vectors share;
//                       columns_split<N>(from, further), the accesses for N columns from col + further on, all of which
//                       may be in flight at once; realign_columns<N>(split), their Columns<N>.
//   Affines::convert<N>(columns, numbers)
//                       The parameters converted to the compute type.
//   finish<N>(y, columns, z), scale_of(largest), save(row, scale)
//                       kScales: the results before they are scaled; the scale of a row; writes it.
//   at(row)             The RowPointer of a row.
// A RowPointer of a Store
//   store<N, kWhole>(y, columns, col), with kHasEpilogueOperands store<N, kWhole>(y, columns, operands, col)
//                       Computes, rounds and writes N results. kWhole: in single accesses of up to 16 bytes.
//   store_further<kMore, N, kWhole>(y, columns, operands, col, take)
//                       The same of a FusedStore whose function gives kMore numbers behind the results, for take.
//   epilogue_operands<N>(col)   kHasEpilogueOperands: loads them.
//   store_scaled<N, kWhole>(z, scale, col)   kScales: scales, rounds and writes what finish() gave. Of rows that lie
//                       apart finish_across<kRows>(y, columns, z) and store_scaled_across<kRows>(rows, z, scales, col)
//                       of the Store do it for some neighbouring ones.
//   head<N>()           How many elements lie before the first that is aligned to N elements.
//   address()           Where y[0] lies, of the first of several results; of NoStore, which stores nothing, x[0]
//                       (kHasRoom: the messages of blocks lie in its room, not there).
//                       from(col): the same from column col on, not with epilogue operands.
//   make_opaque()       As for a Load.
#pragma once

namespace cupynorm {

// The most elements of a row for which results of that width hide what one pass over them loses to two
// (docs/notes/048, "One pass over short rows"). 0: always two passes.
template <class Store>
inline constexpr int one_pass_elements() {
  return Store::kBytes == 1 ? 8192 : Store::kBytes == 2 ? 2048 : 0;
}

}  // namespace cupynorm
