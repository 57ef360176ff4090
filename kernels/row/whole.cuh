// Rows of row_across of which each thread has as many elements as any other, or a few less, and where all that they are
// computed from lies at even distances. Nothing is asked of most elements then.
#pragma once
#include <io/affine.cuh>
#include <io/masks.cuh>
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
template <class Shape, class Op, typename Precision>
inline void take_states(const RunningRows<Op, Shape::kVector, Precision>& running, typename Op::State (&mine)[Shape::kVector],
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

// Which of a thread's elements a mask keeps, of those that are there: element j of row v is number j * kVector + v.
template <class Shape>
using KeptOfRows = KeptElements<Shape::kVector * Shape::kElements>;

// Finds them, given the pointers to the rows from the thread's first column on, and which elements it has. A word after
// the other: unrolled, all would be loaded at once, to registers that are not free.
template <class Load, class Shape, class Has>
inline KeptOfRows<Shape> find_kept(const typename Load::RowPointer (&rows)[Shape::kVector], Has has) {
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kOfQuad = 4 / kVector, kOfWord = 8 * kOfQuad,
      kWords = KeptOfRows<Shape>::kWords;
  KeptOfRows<Shape> kept;
  typename Load::RowPointer sources[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) sources[v] = rows[v];
  auto next_word = [&](auto bytes_of) {
#pragma unroll
    for (int w = 0; w + 1 < kWords; ++w) kept.word[w] = kept.word[w + 1];
    kept.word[kWords - 1] = 0;
#pragma unroll
    for (int j = 0; j < kOfWord; j += kOfQuad) {
      unsigned quad = 0;
#pragma unroll
      for (int i = 0; i < kOfQuad; ++i) quad |= bytes_of(j + i) << 8 * i * kVector;
      kept.word[kWords - 1] |= tops_of(quad) >> j / kOfQuad;
    }
  };
#pragma unroll 1
  for (int w = 0; w + 1 < kWords; ++w) {
    next_word([&](int j) { return Load::template mask_bytes_across<kVector>(sources, Step<Shape::kDown>{j}); });
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v].mask.begin_at(kOfWord * Shape::kDown);
  }
  constexpr int kBefore = (kWords - 1) * kOfWord;
  next_word([&](int j) -> unsigned {
    if (kBefore + j >= kElements) return 0;
    const bool there = has(kBefore + j);
    const unsigned bytes = Load::template mask_bytes_across<kVector>(sources, Step<Shape::kDown>{there ? j : 0});
    return there ? bytes : 0;
  });
  return kept;
}
// Of a thread's elements from number kFrom on, kPart of row kRow: as add_up of an op asks for them.
template <class Shape, int kPart>
struct KeptPart {
  const KeptOfRows<Shape>& kept;
  int from, row;
  bool operator()(int i) const { return kept.has((from + i) * Shape::kVector + row); }
  int total() const {
    unsigned own[KeptOfRows<Shape>::kWords] = {};
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int number = (from + i) * Shape::kVector + row;
      own[number / 32] |= KeptOfRows<Shape>::bit(number);
    }
    int total = 0;
#pragma unroll
    for (int w = 0; w < KeptOfRows<Shape>::kWords; ++w)
      if (own[w] != 0) total += __popc(kept.word[w] & own[w]);
    return total;
  }
};
// Halves that are kept, and -inf in place of the others.
template <class Shape>
inline void drop_halves(const KeptOfRows<Shape>& kept, Vector<half, Shape::kVector> (&x)[Shape::kElements]) {
  constexpr int kVector = Shape::kVector;
#pragma unroll
  for (int number = 0; number < kVector * Shape::kElements; number += kVector == 1 ? 1 : 2) {
    const unsigned tops = kept.word[number / 32] << number / 4 % 8;
    const int byte = 8 + number % 4, other = kVector == 1 ? byte : byte + 1;
    const unsigned all = permute_bytes(tops, 0, byte * 0x11 + other * 0x1100);  // top bits, over two bytes each
    unsigned& halves = x[number / kVector].word[number % kVector / 2];
    halves = (halves & all) | (0xfc00fc00u & ~all);
  }
}

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
  constexpr int kAtATime = Load::kDrops || AnyOp::kAddsUp ? 16 : 32;  // where more is asked of each, registers are few
  constexpr int kPart = kPacked ? part_of_elements(kElements, kAtATime / kVector) : kElements;
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
  auto fetch = [&](const Sources& sources, int j) {
    loaded[j] = Load::template load_x_across<kVector>(sources, Step<kDown>{has(j) ? j : 0});
  };
  const bool first_tile = !Shape::kOfGrid || meeting->turn == 0;
  if (first_tile) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) fetch(sources, j);
  }
  auto prefetch_next = [&](bool now) {
    if (!now) return;
    prefetch_tile<Shape>(a.load, a.rows, at.next, [&](auto& source) { source.begin_at(first); },
        [&](const auto& source, int j) {
      if (has(j)) source.prefetch_across(Step<kDown>{j});
      if constexpr (Load::kDrops) {  // all of it, as none is in registers yet
        if (has(2 * j)) source.mask.prefetch_across(Step<kDown>{2 * j});
        if (has(2 * j + 1)) source.mask.prefetch_across(Step<kDown>{2 * j + 1});
      }
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

  KeptOfRows<Shape> kept;
  if constexpr (Load::kDrops) {
    static_assert(AnyOp::kMaskable && !Op::kHasPivot, "the op says what becomes of elements that a mask drops");
    kept = find_kept<Load, Shape>(sources, has);
    if constexpr (Own::kAny) drop_halves<Shape>(kept, loaded);
  }

  // ---- the rows' States
  // Whether results of padding are what is to be stored for what is dropped, but in rows that are looked at later.
  constexpr bool kLooksLater = Load::kDrops && AnyOp::kMapsPadding && (Own::kAny || !kPacked);
  Element x[kVector][kPart];
  const Element padding = AnyOp::padding();
  using Operands = typename Load::template OperandsBeside<kVector>;
  auto take_one = [&](int from, int j, const Operands& operands, bool pads) {
    Element own[kVector];
    Load::template compute_across<kVector>(sources, loaded[from + j], operands, own, Step<kDown>{from + j});
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if constexpr (Load::kDrops) x[v][j] = !pads || kept.has((from + j) * kVector + v) ? own[v] : padding;
      else x[v][j] = has(from + j) ? own[v] : Op::kHasPivot && j > 0 ? x[v][0] : padding;
    }
  };
  // Computes a part of what was loaded, with padding in place of what a mask drops, or without. Operands of each element
  // come in batches, the next one on its way: there are not registers enough for all.
  auto take = [&](int from, bool pads) {
    if constexpr (Load::kOperandsPerRow) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) take_one(from, j, {}, pads);
    } else {
      constexpr int kBatch = part_of_elements(kPart, 64 / (kVector * int(sizeof(typename Load::Type))));
      Operands operands[2][kBatch];
      auto fetch_batch = [&](int first) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const Step<kDown> step = {has(from + first + j) ? from + first + j : 0};
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
  };
  auto store_computed = [&](int from) {
    if constexpr (Load::kStoresComputed) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (!here || !has(from + j)) continue;
        Element own[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) own[v] = x[v][j];
        Load::template store_computed_across<kVector>(sources, own, Step<kDown>{from + j});
      }
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
      take(from, false), store_computed(from);  // what is dropped is -inf
#pragma unroll
      for (int v = 0; v < kVector; ++v) Op::add(mine[v], x[v]);
    }
  } else if constexpr (kPacked) {
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
  } else {
    take(0, true), store_computed(0);
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
  constexpr typename Store::template EpilogueOperands<1> kNoOperandsOfOne[1] = {};
  Sources next;
  auto finish = [&](auto with_next) {
    constexpr bool kNext = int(with_next);  // each element's place gets that of the next tile
#pragma unroll
    for (int from = 0; from < kElements; from += kPart) {
      // a thread of which some tile is the last has a next one
      if (!(kNext && !kPacked) && !there(from)) break;
      if constexpr (kPacked) take(from, false);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (has(from + j)) {
          Compute y[kVector];
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            if constexpr (kPacked) y[v] = Op::map_raw(x[v][j], whole[v]);
            else y[v] = Op::map(x[v][j], whole[v]);
            if constexpr (Load::kDrops && !kLooksLater) y[v] = kept.has((from + j) * kVector + v) ? y[v] : AnyOp::dropped();
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
  // Rows of which op says that padding does not become dropped(), because of infinite numbers or nan.
  auto look_later = [&] {
    if constexpr (kLooksLater) {
      bool wrong[kVector], any = false;
#pragma unroll
      for (int v = 0; v < kVector; ++v) wrong[v] = here && !op.drops_padding(whole[v]), any |= wrong[v];
      if (!any) return;
      Sources again;  // the pointers from before would have waited in registers
      go_to(again, row_of(at.tile));
#pragma unroll 1
      for (int j = 0; j < kElements && j * kDown < held - down; ++j) {
        const Step<kDown> step = {j};
        const unsigned bytes = Load::template mask_bytes_across<kVector>(again, step);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          if (!wrong[v] || (bytes >> 8 * v & 0xff) != 0) continue;
          const typename Store::RowPointer target[1] = {targets[v]};
          const Compute y[1] = {AnyOp::dropped()};
          Store::template store_across<1>(target, y, a.store.template columns<1>(first + j * kDown),
              kNoOperandsOfOne, step);
        }
      }
    }
  };
  if (Shape::kOfGrid && at.next * Shape::kRows < a.rows) {
    go_to(next, row_of(at.next));
    finish(Constant<true>());
    look_later();
    return true;
  }
  finish(Constant<false>());
  look_later();
  if constexpr (Shape::kOfGrid) exit_thread();  // `loaded` does not wait for a tile that is not there
  return false;
}

}  // namespace cupynorm
