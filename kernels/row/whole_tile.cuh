// A tile of whole rows (whole.cuh), as one thread has it.
#pragma once
#include <row/across_choices.cuh>
#include <row/kept.cuh>

namespace cupynorm {

// Columns of a block whose parameters wait in its shared memory, converted; the planner has the same number
// (WHOLE_COLUMNS in cupynorm/plan/config.py).
constexpr int kWholeColumns = 1024;

// Whether a mask is known to keep all elements that a warp has.
template <bool kKeepsAll_>
struct OfWarp {
  static constexpr bool kKeepsAll = kKeepsAll_;
};

// A tile of whole rows, as one thread has it, from its loads to its results. All threads must call load, summarize and
// finish, in this order.
template <class AnyOp, class Load, class Store, class Shape>
struct WholeRows {
  static constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes,
      kDown = Shape::kDown, kRound = kElements * kDown, kSure = Shape::kSure;
  // Packed elements are computed kPart at a time: fewer where an element takes more steps, and so more registers.
  static constexpr bool kHoldsOperands = hold_operands<AnyOp, Load, Shape>(),
      kPacked = wait_packed<AnyOp, Load, Shape>() || kHoldsOperands;
  static constexpr int kAtATime = Load::kDrops || AnyOp::kAddsUp || kHoldsOperands ? 16 : 32,
      kPart = kPacked ? part_of_elements(kElements, kAtATime / kVector) : kElements;
  using Own = OpOfHalves<AnyOp, kPacked && Load::kIdentity && kAreHalves<typename Load::Type>>;
  using Op = typename Own::Type;
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Places = ReductionPlaces<Op, Shape, false>;
  using Number = typename Store::Affines::template Number<Compute>;
  using Largest = Magnitude<Compute>;
  using LargestPlaces = ReductionPlaces<Largest, Shape, false>;
  using Sources = typename Load::RowPointer[kVector];
  using Rows = typename OwnRowsOf<Load, Shape>::Type;
  using Operands = typename Load::template OperandsBeside<kVector>;
  static constexpr bool kConverted = Store::Affines::kPresent && kRound <= kWholeColumns;
  // Whether results of padding are what is to be stored for what is dropped, but in rows that are looked at later.
  static constexpr bool kLooksLater =
      Load::kDrops && AnyOp::kMapsPadding && (Own::kAny || !kPacked) && !Store::kScales;
  // Whether there is code for warps of which a mask drops nothing: of intervals most keep all or nothing. Not where
  // little is asked of each element and blocks of the grid have two copies of the results. kLoadsAll: for their loads,
  // too, but where little is asked, or nothing is stored, so that a multiprocessor has room for three blocks
  // (docs/notes/087).
  static constexpr bool kOfIntervals = Load::kInterval && !Load::kMaskBytes,
      kLoadsAll = kOfIntervals && AnyOp::kCountsAllKept && !kStoresNothing<Store>,
      kMayKeepAll = kOfIntervals && !Own::kAny && (!Shape::kOfGrid || AnyOp::kCountsAllKept) &&
          kVector * kElements > 32;
  static_assert(!Load::kDrops || (AnyOp::kMaskable && !Op::kHasPivot),
      "the op says what becomes of elements that a mask drops");

  const Arguments<AnyOp, Load, Store>& a;
  const TilePart& at;
  const Places places;
  HeldRows<Load, Shape>& loaded;
  // not a reference to nothing, which changes the registers of others
  typename Conditional<kHoldsOperands, HeldOperands<AnyOp, Load, Shape>&, NoColumns>::Type operands;
  int part, lane, down;     // this block's number of those that share the rows; the thread's rows, and its columns
  int begin, held, first;   // the block's first column, how many it has, and the thread's first
  Rows own;  // which rows of the tile the thread has. One that has none reads the first ones
  Sources sources;
  Bounds<int> read;  // by which columns, counted from the first, a mask that keeps intervals drops what is not read
  typename Store::RowPointer targets[kVector];
  KeptOfRows<Shape> kept;
  bool keeps_all;  // kOfIntervals: of all threads of the warp
  Element x[kVector][kPart];  // a part of what was loaded
  Compute pivot[kVector];  // or each row's own number
  typename Op::State mine[kVector], total[kVector];
  typename Op::Row whole[kVector];
  typename ScaleOf<Store>::Type scales[kVector];

  WholeRows(const Arguments<AnyOp, Load, Store>& a, const Places& places, const TilePart& at,
      HeldRows<Load, Shape>& loaded, HeldOperands<AnyOp, Load, Shape>& operands)
      : a(a), at(at), places(places), loaded(loaded), operands(operands), part(at.part) {
    int thread = threadIdx.x;
    if constexpr (Shape::kOfGrid) make_opaque(part), make_opaque(thread);  // each tile anew, as the meeting's addresses
    lane = thread % kLanes, down = thread / kLanes;
    const Shares shares = Shape::kFull ? Shares{kRound, 0} : Shares::of(a.cols, at.parts);
    begin = int(shares.begin(part)), held = Shape::kFull ? kRound : int(shares.held(part)), first = begin + down;
    own = rows_of(at.tile);
  }

  Rows rows_of(int64 tile) const { return own_rows<Shape>(a.load, tile, lane, first, a.rows); }
  bool has(int j) const { return has_element<Shape>(j, held - down); }  // an element of each row
  // Asked before each part of what waits packed, though the answer is that of the first. Without such branches the
  // compiler computes all parts before it stores the first, and keeps elements as numbers from their State on to their
  // results (255 registers instead of 110).
  bool there(int from) const { return first + from * kDown < (own.here ? begin + held : 0); }
  bool is_first_tile() const { return !Shape::kOfGrid || places.meeting->turn == 0; }

  // ---- how it is loaded: whole_load.cuh
  void go_to(Sources& sources, const Rows& own) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v] = a.load.at(own.or_first(v, a.rows)), sources[v].begin_at(first);
  }
  // The columns, counted from the first, that the mask's interval keeps of at least one of the rows.
  static Bounds<int> interval_of(const Sources& sources) {
    Bounds<int> all = sources[0].interval();
#pragma unroll
    for (int v = 1; v < kVector; ++v) {
      const Bounds<int> own = sources[v].interval();
      all = {own.begin < all.begin ? own.begin : all.begin, own.end > all.end ? own.end : all.end};
    }
    return all;
  }
  // Whether the intervals of all rows hold all that the thread has.
  bool keeps_all_of(const Sources& sources) const {
    bool all = true;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const Bounds<int> own = sources[v].interval();
      all &= own.begin <= 0 && own.end >= held - down;
    }
    return all || !own.here;
  }
  bool reads(const Bounds<int>& read, int j) const {
    return !Load::kInterval || (j * kDown >= read.begin && j * kDown < read.end);
  }
  // kWithin: none lies outside of what a mask keeps. kNext: operands of columns are there from the tile before.
  template <bool kWithin = false, bool kNext = false>
  void fetch(const Sources& sources, const Bounds<int>& read, int j);
  void prefetch_next() const;
  Number* numbers(unsigned char* shared) const {
    return reinterpret_cast<Number*>(shared + Places::kBytes + (Store::kScales ? LargestPlaces::kBytes : 0));
  }
  // The block's parameters, converted: all tiles have the same columns.
  void convert_parameters() const;
  void load();

  // ---- what of it a mask keeps
  void keep_all() {
    kept.keep_all();
#pragma unroll
    for (int j = kSure; j < kElements; ++j) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (!has(j)) kept.drop(j * kVector + v);
      }
    }
  }
  // Calls body(OfWarp), in a copy that asks no element whether it is kept where all are.
  template <class Body>
  void for_kept(Body body) {
    if constexpr (kMayKeepAll) {
      if (keeps_all) {
        keep_all(), body(OfWarp<true>());
        return;
      }
    }
    body(OfWarp<false>());
  }

  // ---- the rows' States: whole_states.cuh
  void take_one(int from, int j, const Operands& operands, bool pads);
  // Computes a part of what was loaded, with padding in place of what a mask drops, or without. Operands of each
  // element come in batches, the next one on its way: there are not registers enough for all.
  void take(int from, bool pads);
  void store_computed(int from) const;
  // How many of a part are there: the last ones may not be.
  int valid(int from) const;
  void summarize_halves();
  void summarize_parts();
  template <bool kAll>
  void summarize_own();
  void summarize();

  // ---- their results: whole_results.cuh
  void finish();
  // The results for element `from` + j, of a part that has been computed.
  void results(int from, int j, Compute (&y)[kVector]) const;
  auto columns(int j) const {
    if constexpr (kConverted) return Scalings<Number, 1>{{numbers(places.place)[down + j * kDown]}};
    else return a.store.template columns<1>(first + j * kDown);
  }
  template <int kRows>
  void store_at(const typename Store::RowPointer (&targets)[kRows], const Compute (&y)[kRows], int j) const;
  // The same where a row has a scale, which its largest result decides.
  void scaled_results(int from, int j, Compute (&z)[kVector]) const;
  void find_scales();
  // kNext: each element's place gets that of the next tile.
  template <bool kNext>
  void store(const Sources& next, const Bounds<int>& read_next);
  // Rows of which op says that padding does not become dropped(), because of infinite numbers or nan.
  void look_later() const;
};

}  // namespace cupynorm
