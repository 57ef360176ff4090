// Rows of row_across of which each thread has as many elements as any other, or a few less, at even distances, where
// nothing but x and numbers of its rows decides what they become. Nothing is asked of most elements then.
#pragma once
#include <io/affine.cuh>
#include <row/apart.cuh>
#include <row/running.cuh>

namespace cupynorm {

// Columns of a block whose parameters wait in its shared memory, converted; the planner has the same number
// (WHOLE_COLUMNS in cupynorm/plan/config.py).
constexpr int kWholeColumns = 1024;

template <class Op, class Load, class Store>
inline constexpr bool are_in_steps() {
  if constexpr (Load::kInSteps && kStoresInSteps<Store>) return !Op::kOwnNumber;
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

// The States of a thread's rows, counted from pivots that are the same in a warp.
template <class Shape, class Op>
inline void take_states(const RunningRows<Op, Shape::kVector>& running, typename Op::State (&mine)[Shape::kVector],
    typename Op::Compute (&pivot)[Shape::kVector]) {
#pragma unroll
  for (int v = 0; v < Shape::kVector; ++v) {
    typename Op::Compute from;
    mine[v] = running.own_state(v, from);
    if constexpr (Op::kHasPivot) {
      pivot[v] = LanesApart<Shape::kLanes>::first(from);
      mine[v] = Op::rebase(mine[v], from, pivot[v]);
    }
  }
}

// Rows of a thread as they were loaded.
template <class Load, class Shape>
using HeldRows = Vector<typename Load::Type, Shape::kVector>[Shape::kElements];

// Where blocks of the grid go through tiles, each element's place in `loaded` gets that of the next tile as soon as its
// result is stored. All threads must call, with the mbarriers that reduce_apart takes, and shared memory that the
// planner counts (cupynorm/plan/variants/across.py). Returns whether there is a next tile.
template <class AnyOp, class Load, class Store, class Shape>
inline bool go_through_whole_rows(const Arguments<AnyOp, Load, Store>& a, unsigned char* shared, Mbarrier* mbarriers,
    const TilePart& at, GridMeeting* meeting, HeldRows<Load, Shape>& loaded) {
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes, kDown = Shape::kDown,
      kRound = kElements * kDown;
  // Rows of 16 bits wait in registers as they were loaded, two elements in one, and are computed kPart at a time.
  constexpr bool kPacked = Load::kWaitsAsLoaded && sizeof(typename Load::Type) == 2;
  constexpr int kPart = kPacked ? part_of_elements(kElements, 32 / kVector) : kElements;
  using Own = OpOfHalves<AnyOp, kPacked && Load::kIdentity && kAreHalves<typename Load::Type>>;
  using Op = typename Own::Type;
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Places = ReductionPlaces<Op, Shape, false>;
  using Number = typename Store::Affines::template Number<Compute>;
  constexpr bool kConverted = Store::Affines::kPresent && kRound <= kWholeColumns;

  int part = at.part, thread = threadIdx.x;
  if constexpr (Shape::kOfGrid) make_opaque(part), make_opaque(thread);  // each tile anew, as the meeting's addresses
  const int lane = thread % kLanes, down = thread / kLanes;
  constexpr int kSure = Shape::kSure;
  const Shares shares = Shape::kFull ? Shares{kRound, 0} : Shares::of(a.cols, at.parts);
  const int begin = int(shares.begin(part)), held = Shape::kFull ? kRound : int(shares.held(part));
  const int first = begin + down;
  auto has = [&](int j) { return j < kSure || j * kDown < held - down; };  // a thread's element
  auto row_of = [&](int64 tile) { return (tile * kLanes + lane) * kVector; };
  const int64 row = row_of(at.tile);
  const bool here = row < a.rows;  // all rows of a vector are, or none: its thread reads the first, and stores nothing
  const Places places = {shared, mbarriers, meeting};
  Number* const numbers = reinterpret_cast<Number*>(shared + Places::kBytes);

  using Sources = typename Load::RowPointer[kVector];
  auto go_to = [&](Sources& sources, int64 row) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v] = a.load.at(row < a.rows ? row + v : 0), sources[v].begin_at(first);
  };
  Sources sources;
  go_to(sources, row);
  typename Load::template Beside<kVector> beside;  // nothing
  auto fetch = [&](const Sources& sources, int j) {
    loaded[j] = Load::template load_across<kVector>(sources, Step<kDown>{has(j) ? j : 0}, beside);
  };
  const bool first_tile = !Shape::kOfGrid || meeting->turn == 0;
  if (first_tile) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) fetch(sources, j);
  }
  auto prefetch_next = [&](bool now) {
    if (now) prefetch_tile<Shape>(a.load, a.rows, at.next, [&](auto& source, int j) -> const void* {
      if (j == 0) source.begin_at(first);
      return has(j) ? source.address(Step<kDown>{j}) : nullptr;
    });
  };
  const bool soon = meet_for_long(at.parts);
  prefetch_next(soon);

  // ---- while they are on their way
  typename Store::RowPointer targets[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) targets[v] = a.store.at(here ? row + v : 0), targets[v].begin_at(first);
  if constexpr (kConverted) {
#pragma unroll 1
    for (int i = threadIdx.x; first_tile && i < held; i += Shape::kBlock) {  // all tiles have the same columns
      Number number[1];
      Store::Affines::template convert<1>(a.store.template columns<1>(begin + i), number);
      numbers[i] = number[0];
    }
    if constexpr (!Places::kAny) __syncthreads();  // else the reduction has barriers
  }

  // Asked before each part of what waits packed, though the answer is that of the first. Without such branches the
  // compiler computes all parts before it stores the first, and keeps elements as numbers from their State on to their
  // results (255 registers instead of 110).
  const int end = here ? begin + held : 0;
  auto there = [&](int from) { return first + from * kDown < end; };

  // ---- the rows' States
  Element x[kVector][kPart];
  const Element padding = AnyOp::padding();
  auto take = [&](int from) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      Element own[kVector];
      Load::template unpack_across<kVector>(sources, loaded[from + j], beside, own, from + j, AnyOp::padding());
#pragma unroll
      for (int v = 0; v < kVector; ++v) x[v][j] = has(from + j) ? own[v] : Op::kHasPivot && j > 0 ? x[v][0] : padding;
    }
  };
  // Which of a part are there: the last ones may not be.
  auto valid = [&](int from) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kPart; ++j) count += has(from + j);
    return count;
  };
  Compute pivot[kVector] = {};
  typename Op::State mine[kVector], total[kVector];
  if constexpr (Own::kAny) {
    if (there(0)) Op::begin(loaded, mine);
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      take(from);
#pragma unroll
      for (int v = 0; v < kVector; ++v) Op::add(mine[v], x[v]);
    }
  } else if constexpr (kPacked) {
    RunningRows<Op, kVector> running;
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      if (!there(from)) break;
      take(from);
      if (from + kPart <= kSure) running.template add<Precision>(x, Predicate<kPart>{kPart, false});
      else running.template add<Precision>(x, Predicate<0>{valid(from), false});
    }
    take_states<Shape>(running, mine, pivot);
  } else {
    take(0);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if constexpr (Op::kHasPivot) pivot[v] = LanesApart<kLanes>::first(Op::pivot_of(x[v], Precision()));
      mine[v] = Op::summarize(x[v], Predicate<kSure>{valid(0), false}, pivot[v]);
    }
  }
#pragma unroll
  for (int v = 0; v < kVector; ++v) total[v] = mine[v];
  reduce_apart<Op, Shape>(total, pivot, places, part, 0, [&] { prefetch_next(!soon); });

  // ---- their results
  const Op op = Own::of(a.op);
  typename Op::Row whole[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) whole[v] = op.finish(kPacked ? total[v] : mine[v], total[v], a.cols, pivot[v]);
  if (here && part == 0 && int(threadIdx.x) < kLanes) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) op.save(row + v, whole[v]);
  }
  constexpr typename Store::template EpilogueOperands<1> kNoOperands[kVector] = {};
  Sources next;
  auto finish = [&](auto with_next) {
    constexpr bool kNext = int(with_next);  // each element's place gets that of the next tile
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      // a thread of which some tile is the last has a next one
      if (!(kNext && !kPacked) && !there(from)) break;
      if constexpr (kPacked) take(from);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (has(from + j)) {
          Compute y[kVector];
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            if constexpr (kPacked) y[v] = Op::map_raw(x[v][j], whole[v]);
            else y[v] = Op::map(x[v][j], whole[v]);
          }
          const Step<kDown> step = {from + j};
          if constexpr (kConverted) {
            const Scalings<Number, 1> own = {{numbers[down + step.number * kDown]}};
            Store::template store_across<kVector>(targets, y, own, kNoOperands, step);
          } else {
            const auto own = a.store.template columns<1>(first + step.number * kDown);
            Store::template store_across<kVector>(targets, y, own, kNoOperands, step);
          }
        }
        if constexpr (kNext) fetch(next, from + j);
      }
    }
  };
  if (Shape::kOfGrid && at.next * Shape::kRows < a.rows) {
    go_to(next, row_of(at.next));
    finish(Constant<true>());
    return true;
  }
  finish(Constant<false>());
  if constexpr (Shape::kOfGrid) exit_thread();  // `loaded` does not wait for a tile that is not there
  return false;
}

}  // namespace cupynorm
