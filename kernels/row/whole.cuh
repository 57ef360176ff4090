// Rows of row_across of which each thread has as many elements as any other, or a few less, and where all that they are
// computed from lies at even distances. Nothing is asked of most elements then.
#pragma once
#include <io/affine.cuh>
#include <row/drawn.cuh>
#include <row/kept.cuh>
#include <row/running.cuh>

namespace cupynorm {

// Columns of a block whose parameters wait in its shared memory, converted; the planner has the same number
// (WHOLE_COLUMNS in cupynorm/plan/config.py).
constexpr int kWholeColumns = 1024;

template <class Op, class Load, class Store>
inline constexpr bool are_in_steps() {
  if constexpr (Load::kInSteps) return kStoresInSteps<Store>;
  else return false;
}
template <class Op, class Load, class Store, class Shape>
inline constexpr bool are_whole() {
  return Shape::kEven && !Op::kRounds && are_in_steps<Op, Load, Store>();
}

// The op that computes rows of halves which are held in registers as they were loaded: Op::OfHalves, which needs no
// arguments, if there is one, else Op.
template <class Op, bool kHalves, class = void>
struct OpOfHalves {
  static constexpr bool kAny = false;
  using Type = Op;
  static const Op& of(const Op& op) { return op; }
};
template <class Op>
struct OpOfHalves<Op, true, decltype(void(sizeof(typename Op::OfHalves)))> {
  static constexpr bool kAny = true;
  using Type = typename Op::OfHalves;
  static Type of(const Op&) { return {}; }
};

template <class Load>
inline constexpr bool kAreHalves = false;
template <>
inline constexpr bool kAreHalves<half> = true;

// The States of a thread's rows, counted from pivots that are the same in a warp whose lanes share rows.
template <class Shape, class Op, typename Precision>
inline void take_states(const RunningRows<Op, Shape::kVector, Precision>& running,
    typename Op::State (&mine)[Shape::kVector], typename Op::Compute (&pivot)[Shape::kVector]) {
#pragma unroll
  for (int v = 0; v < Shape::kVector; ++v) {
    typename Op::Compute from;
    mine[v] = running.own_state(v, from);
    if constexpr (Op::kHasPivot) {
      pivot[v] = from;
      if constexpr (Shape::kInWarps) {
        pivot[v] = LanesApart<Shape::kLanes>::first(from);
        mine[v] = Op::rebase(mine[v], from, pivot[v]);
      }
    }
  }
}

// Whether rows of 16 bits wait in registers as they were loaded, two elements in one, where the steps to what the op is
// given are few: so twice as many have room. They are then computed in parts, once more for the results. Not where so
// few have room as the op takes them, and a thread has all of its rows, or States of parts would be merged, or each
// part be counted (docs/notes/076). Blocks of the grid need that room for the next tile.
template <class Op, class Load, class Shape>
inline constexpr bool wait_packed() {
  if constexpr (!Load::kWaitsAsLoaded || sizeof(typename Load::Type) != 2) return false;
  constexpr RunningKind kKind = kRunningKind<Op, typename Load::Precision>;
  constexpr bool kMerges = kKind == RunningKind::kStates && !Op::kExtends,
      kCounts = kKind == RunningKind::kAddsUp && Shape::kCtasPerRow == 1;
  return Shape::kOfGrid || Shape::kVector * Shape::kElements > 64 || !(Shape::kAlone || kMerges || kCounts);
}

// Whether an operand of each element waits beside x, both as they were loaded, and elements are computed from both once
// more for the results. Then blocks of the grid load both of the next tile as they store results, and pairs of numbers
// of 16 bits have twice as much room. Not where a single number of 32 bits would be two, or where States of parts would
// be merged in many steps; nor in two blocks a multiprocessor that wait for more than the pair, such as gamma
// (docs/notes/090).
template <class Op, class Load, class Shape>
inline constexpr bool hold_operands() {
  if constexpr (!Load::kMayHoldOperands) {
    return false;
  } else {
    constexpr bool kHalves = sizeof(typename Load::Type) == 2, kPairAlone = Load::kOperandCount == 1;
    if constexpr (ElementTraits<ElementOf<Op>>::kFields == 1) return Shape::kOfGrid && kHalves;
    else if constexpr (!Op::kOfSums) return false;
    else return Shape::kOfGrid || (kHalves && !Shape::kAlone && (kPairAlone || Shape::kMinBlocks > 2));
  }
}

// Rows of a thread as they were loaded, and the operands of their elements where they wait, too.
template <class Load, class Shape>
using HeldRows = Vector<typename Load::Type, Shape::kVector>[Shape::kElements];
template <class Op, class Load, class Shape>
using HeldOperands = typename Conditional<hold_operands<Op, Load, Shape>(),
    typename Load::template OperandsBeside<Shape::kVector>[Shape::kElements], NoColumns>::Type;

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
  // What waits packed is computed kPart elements at a time: fewer where more is asked of each, and registers are few.
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

  // ---- what is loaded
  void go_to(Sources& sources, const Rows& own) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v] = a.load.at(own.or_first(v, a.rows)), sources[v].begin_at(first);
  }
  // What a mask keeps an interval of: columns from the first on, of any of the rows.
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
  void fetch(const Sources& sources, const Bounds<int>& read, int j) {
    if constexpr (Load::kInterval && !kWithin) loaded[j] = {};
    if (!kWithin && !reads(read, j)) return;
    const auto step = own.step(has(j) ? j : 0);
    loaded[j] = Load::template load_x_across<kVector>(sources, step);
    if constexpr (kHoldsOperands) {
      if constexpr (kNext) Load::template load_rows_operands_across<kVector>(sources, step, operands[j]);
      else Load::template load_operands_across<kVector>(sources, step, operands[j]);
    }
  }
  void prefetch_next() const {
    prefetch_tile<Shape>(a.load, a.rows, at.next, [&](auto& source) { source.begin_at(first); },
        [&](const auto& source, int j) {
      if (has(j) && source.template reads<1>(j * kDown)) source.prefetch_across(Step<kDown>{j});
      if constexpr (Load::kDrops) {  // all of it, as none is in registers yet
        if (has(2 * j)) source.mask.prefetch_across(Step<kDown>{2 * j});
        if (has(2 * j + 1)) source.mask.prefetch_across(Step<kDown>{2 * j + 1});
      }
    });
  }
  Number* numbers(unsigned char* shared) const {
    return reinterpret_cast<Number*>(shared + Places::kBytes + (Store::kScales ? LargestPlaces::kBytes : 0));
  }
  // The block's parameters, converted: all tiles have the same columns.
  void convert_parameters() const {
    Number* const to = numbers(places.place);
#pragma unroll 1
    for (int i = threadIdx.x; is_first_tile() && i < held; i += Shape::kBlock) {
      Number number[1];
      Store::Affines::template convert<1>(a.store.template columns<1>(begin + i), number);
      to[i] = number[0];
    }
    if constexpr (!Places::kAny) __syncthreads();  // else the reduction has barriers
  }
  void load() {
    go_to(sources, own);
    if constexpr (Load::kInterval) read = interval_of(sources);
    if constexpr (kOfIntervals) keeps_all = all_lanes(keeps_all_of(sources));
    // Bytes of a mask are loaded before x, which gets their registers, where that was measured (docs/notes/087).
    constexpr bool kBytesFirst =
        Load::kMaskBytes && !Shape::kOfGrid && AnyOp::kCountsAllKept && !kStoresNothing<Store>;
    if constexpr (kBytesFirst) {
      kept = find_kept<Load, Shape, true>(sources, own, held - down,
          [this](int j) { fetch(sources, read, j); });
    } else if (is_first_tile()) {
      if (kLoadsAll && keeps_all) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) fetch<true>(sources, read, j);
      } else {
#pragma unroll
        for (int j = 0; j < kElements; ++j) fetch(sources, read, j);
      }
    }
    if (meet_for_long(at.parts)) prefetch_next();
    // ---- while they are on their way
#pragma unroll
    for (int v = 0; v < kVector; ++v) targets[v] = a.store.at(own.here ? own.of(v) : 0), targets[v].begin_at(first);
    if constexpr (Op::kOwnNumber) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) pivot[v] = a.load.at(own.here ? own.of(v) : 0).own_number();
    }
    if constexpr (kConverted) convert_parameters();
    if constexpr (kDraws<Load>) draw_across<Shape>(sources, lane, down, held);
    if constexpr (Load::kDrops) {
      if (kLoadsAll && keeps_all) keep_all();
      else if constexpr (!kBytesFirst)
        kept = find_kept<Load, Shape, false>(sources, own, held - down, [](int) {});
      if constexpr (Own::kAny) {
        if (!kOfIntervals || !keeps_all) drop_halves<Shape>(kept, loaded);
      }
    }
  }

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

  // ---- the rows' States
  void take_one(int from, int j, const Operands& operands, bool pads) {
    Element computed[kVector];
    Load::template compute_across<kVector>(sources, loaded[from + j], operands, computed, own.step(from + j));
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const Element padding = AnyOp::padding();
      if constexpr (Load::kDrops) x[v][j] = !pads || kept.has((from + j) * kVector + v) ? computed[v] : padding;
      else x[v][j] = has(from + j) ? computed[v] : Op::kHasPivot && j > 0 ? x[v][0] : padding;
    }
  }
  // Computes a part of what was loaded, with padding in place of what a mask drops, or without. Operands of each
  // element come in batches, the next one on its way: there are not registers enough for all.
  void take(int from, bool pads) {
    if constexpr (Load::kOperandsPerRow) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) take_one(from, j, {}, pads);
    } else if constexpr (kHoldsOperands) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) take_one(from, j, operands[from + j], pads);
    } else {
      constexpr int kBatch = part_of_elements(kPart, 64 / (kVector * int(sizeof(typename Load::Type))));
      Operands operands[2][kBatch];
      auto fetch_batch = [&](int first) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int number = from + first + j;
          if (!reads(read, number)) continue;
          const auto step = own.step(has(number) ? number : 0);
          Load::template load_operands_across<kVector>(sources, step, operands[first / kBatch % 2][j]);
        }
      };
      fetch_batch(0);
#pragma unroll
      for (int first = 0; first < kPart; first += kBatch) {
        if (first + kBatch < kPart) fetch_batch(first + kBatch);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) take_one(from, first + j, operands[first / kBatch % 2][j], pads);
      }
    }
  }
  void store_computed(int from) const {
    if constexpr (Load::kStoresComputed) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (!own.here || !has(from + j)) continue;
        Element computed[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) computed[v] = x[v][j];
        Load::template store_computed_across<kVector>(sources, computed, own.step(from + j));
      }
    }
  }
  // How many of a part are there: the last ones may not be.
  int valid(int from) const {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kPart; ++j) count += has(from + j);
    return count;
  }
  void summarize_halves() {
    if (there(0)) Op::begin(loaded, mine);
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      take(from, false), store_computed(from);  // what is dropped is -inf
#pragma unroll
      for (int v = 0; v < kVector; ++v) Op::add(mine[v], x[v]);
    }
  }
  void summarize_parts() {
    using Rows = RunningRows<Op, kVector, Precision>;
    constexpr bool kMarksKept = Load::kDrops && kAddsKept<Rows>;
    Rows running;
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      take(from, !kMarksKept), store_computed(from);
      if constexpr (kMarksKept) running.add_kept(x, [&](int v) { return KeptPart<Shape, kPart>{kept, from, v}; });
      else if (from + kPart <= kSure) running.add(x, Predicate<kPart>{kPart, false});
      else running.add(x, Predicate<0>{valid(from), false});
    }
    take_states<Shape>(running, mine, pivot);
  }
  template <bool kAll>
  void summarize_own() {
    if constexpr (!Op::kOwnNumber) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) pivot[v] = 0;
    }
    if constexpr (Own::kAny) {
      summarize_halves();
    } else if constexpr (kPacked) {
      summarize_parts();
    } else {
      take(0, true), store_computed(0);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if constexpr (Op::kHasPivot) pivot[v] = LanesApart<kLanes>::first(Op::pivot_of(x[v], Precision()));
        if constexpr (kAll) mine[v] = Op::summarize(x[v], AllKept<kSure>{{valid(0), false}}, pivot[v]);
        else mine[v] = Op::summarize(x[v], Predicate<kSure>{valid(0), false}, pivot[v]);
      }
    }
  }
  void summarize() {
    for_kept([this](auto warp) { summarize_own<decltype(warp)::kKeepsAll>(); });
#pragma unroll
    for (int v = 0; v < kVector; ++v) total[v] = mine[v] = with_own<Op>(mine[v], pivot[v]);
    reduce_apart<Op, Shape>(total, pivot, places, part, 0, [&] {
      if (!meet_for_long(at.parts)) prefetch_next();
    }, slots_of(own));
  }

  // ---- their results
  void finish() {
    const Op op = Own::of(a.op);
#pragma unroll
    for (int v = 0; v < kVector; ++v) whole[v] = op.finish(kPacked ? total[v] : mine[v], total[v], a.cols, pivot[v]);
    if (own.here && part == 0 && int(threadIdx.x) < kLanes) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (own.has(v)) op.save(own.of(v), whole[v]);
      }
    }
  }
  // The results for element `from` + j, of a part that has been computed.
  void results(int from, int j, Compute (&y)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if constexpr (kPacked) y[v] = Op::map_raw(x[v][j], whole[v]);
      else y[v] = Op::map(x[v][j], whole[v]);
      if constexpr (Load::kDrops && !kLooksLater)
        y[v] = kept.has((from + j) * kVector + v) ? y[v] : AnyOp::dropped();
    }
  }
  auto columns(int j) const {
    if constexpr (kConverted) return Scalings<Number, 1>{{numbers(places.place)[down + j * kDown]}};
    else return a.store.template columns<1>(first + j * kDown);
  }
  template <int kRows>
  void store_at(const typename Store::RowPointer (&targets)[kRows], const Compute (&y)[kRows], int j) const {
    constexpr typename Store::template EpilogueOperands<1> kNoOperands[kRows] = {};
    Store::template store_across<kRows>(targets, y, columns(j), kNoOperands, own.step(j));
  }
  // The same where a row has a scale, which its largest result decides.
  void scaled_results(int from, int j, Compute (&z)[kVector]) const {
    Compute y[kVector];
    results(from, j, y);
    Store::template finish_across<kVector>(y, columns(from + j), z);
  }
  void find_scales() {
    typename Largest::State largest[kVector];
    const Compute zero[kVector] = {};
#pragma unroll
    for (int v = 0; v < kVector; ++v) largest[v] = Largest::identity();
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      if constexpr (kPacked) take(from, false);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (!has(from + j)) continue;
        Compute z[kVector];
        scaled_results(from, j, z);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const Compute one[1] = {z[v]};
          largest[v] = Largest::template merge<false>(largest[v], Largest::of(one));
        }
      }
    }
    const LargestPlaces largest_places = {places.place + Places::kBytes, places.mbarriers + 2, places.meeting};
    reduce_apart<Largest, Shape>(largest, zero, largest_places, part, 0, NothingMeanwhile(),
        slots_of(own));
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      scales[v] = a.store.scale_of(largest[v].max);
      if (own.here && part == 0 && int(threadIdx.x) < kLanes) {
        if (own.has(v)) a.store.save(own.of(v), scales[v]);
      }
    }
  }
  // kNext: each element's place gets that of the next tile.
  template <bool kNext>
  void store(const Sources& next, const Bounds<int>& read_next) {
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      // a thread of which some tile is the last has a next one
      if (!(kNext && !kPacked) && !there(from)) break;
      if constexpr (kPacked) take(from, false);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (has(from + j)) {
          Compute y[kVector];
          if constexpr (Store::kScales) {
            scaled_results(from, j, y);
            Store::template store_scaled_across<kVector>(targets, y, scales, own.step(from + j));
          } else {
            results(from, j, y);
            store_at<kVector>(targets, y, from + j);
          }
        }
        if constexpr (kNext) fetch<false, true>(next, read_next, from + j);
      }
    }
  }
  // Rows of which op says that padding does not become dropped(), because of infinite numbers or nan.
  void look_later() const {
    if constexpr (kLooksLater) {
      bool wrong[kVector], any = false;
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        wrong[v] = own.here && !Op::drops_padding(whole[v]) && own.has(v), any |= wrong[v];
      if (!any) return;
      Sources again;  // the pointers from before would have waited in registers
      go_to(again, own);
#pragma unroll 1
      for (int j = 0; j < kElements && j * kDown < held - down; ++j) {
        const unsigned bytes = Load::template mask_bytes_across<kVector>(again, own.step(j));
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          if (!wrong[v] || (bytes >> 8 * v & 0xff) != 0) continue;
          const typename Store::RowPointer target[1] = {targets[v]};
          const Compute y[1] = {AnyOp::dropped()};
          store_at<1>(target, y, j);
        }
      }
    }
  }
};

// Where blocks of the grid go through tiles, an element of the next tile, and its operand, is loaded to the place of
// each element as soon as the result of that one is stored. All threads must call, with the mbarriers that reduce_apart
// takes, and shared memory that the planner counts (cupynorm/plan/variants/across.py). Returns whether there is a next
// tile.
template <class AnyOp, class Load, class Store, class Shape>
inline bool go_through_whole_rows(const Arguments<AnyOp, Load, Store>& a, unsigned char* shared, Mbarrier* mbarriers,
    const TilePart& at, GridMeeting* meeting, HeldRows<Load, Shape>& loaded,
    HeldOperands<AnyOp, Load, Shape>& operands) {
  using Rows = WholeRows<AnyOp, Load, Store, Shape>;
  Rows rows(a, {shared, mbarriers, meeting}, at, loaded, operands);
  rows.load();
  rows.summarize();
  rows.finish();
  if constexpr (Store::kScales) rows.find_scales();
  typename Rows::Sources next;
  Bounds<int> read;
  if (Shape::kOfGrid && at.next * Shape::kRows < a.rows) {
    rows.go_to(next, rows.rows_of(at.next));
    if constexpr (Load::kInterval) read = Rows::interval_of(next);
    rows.template store<true>(next, read);
    rows.look_later();
    return true;
  }
  if constexpr (Shape::kOfGrid) rows.template store<false>(next, read);  // which has two copies already
  else rows.for_kept([&](auto) { rows.template store<false>(next, read); });
  rows.look_later();
  if constexpr (Shape::kOfGrid) exit_thread();  // `loaded` does not wait for a tile that is not there
  return false;
}

}  // namespace cupynorm
