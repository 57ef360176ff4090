// block, cluster, split, uncached of rows whose elements lie apart from one another in memory, as along an axis that is
// not the last: they wait in registers, or are read twice.
#pragma once
#include <base/pdl.cuh>
#include <io/affine.cuh>
#include <row/rounds.cuh>
#include <row/whole.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// Whether each thread has all elements of a round, and no interval drops any of them.
template <bool kWhole_, bool kKept_ = false>
struct Round {
  static constexpr bool kWhole = kWhole_, kKept = kKept_;
};

// Before the blocks of a cluster write into one another, and before any load.
template <class Shape>
inline void begin_together(Mbarrier (&mbarriers)[4]) {
  if constexpr (Shape::kCtasPerRow > 1) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) init_mbarrier(&mbarriers[i]);
    }
    cluster_sync();  // all blocks have begun
  }
  pdl_wait_and_trigger();
}

// Says which blocks share rows. Those of the grid then can meet: their room holds a counter of each group of blocks,
// and behind these their messages. Before any load.
template <class Op, class Shape, class Store>
inline Sharing begin_sharing(const Store& store, GridMeeting& meeting) {
  if constexpr (!Shape::kOfGrid) {
    constexpr int kCtas = Shape::kCtasPerRow;
    return {int(blockIdx.x) / kCtas, int(gridDim.x) / kCtas, kCtas > 1 ? int(cluster_rank()) : 0, kCtas};
  } else {
    const Sharing sharing = Sharing::of_grid();
    meeting = {store.room, sharing.group, sharing.part, 0, 0, sizeof(SlotWords<Op>)};
    meeting.begin();
    if constexpr (Shape::kHolds) grid_wait(meeting.begun);  // else before the first meeting: they have the registers
    return sharing;
  }
}

// Calls go(tile, meeting) for each tile that this block works on, of as many as hold all rows: for one, or, where
// blocks share rows over the grid, for one after the other. Before any load.
template <class Op, class Shape, class Store, class Go>
inline void go_through_tiles(const Store& store, int64 rows, Go go) {
  if constexpr (!Shape::kOfGrid) {
    const int part = Shape::kCtasPerRow > 1 ? cluster_rank() : 0;
    go(TilePart{blockIdx.x / Shape::kCtasPerRow, part, Shape::kCtasPerRow, rows}, nullptr);
  } else if constexpr (kIsRoomy<Store>) {
    GridMeeting meeting;
    const Sharing sharing = begin_sharing<Op, Shape>(store, meeting);
    int64 tile = sharing.group;
    while (go(TilePart{tile, sharing.part, sharing.parts, tile + sharing.groups}, &meeting)) {
      tile += sharing.groups;
      // or what is computed from these would wait in registers from one tile to the next
      make_opaque(meeting.group), make_opaque(meeting.part), make_opaque(meeting.room);
    }
  }
}

template <class Op, class Load, class Store, class Shape>
inline bool go_through_any_rows(const Arguments<Op, Load, Store>& a, Mbarrier (&mbarriers)[4], const TilePart& at,
    GridMeeting* meeting) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Largest = Magnitude<Compute>;
  using Index = typename Conditional<Shape::kHolds, int, int64>::Type;  // what waits is of few columns
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes, kDown = Shape::kDown,
      kRound = kElements * kDown;
  constexpr bool kHolds = Shape::kHolds;
  static_assert(!Load::kDrops || Op::kMaskable, "the op says what becomes of elements that a mask drops");
  static_assert(!Load::kDrops || !Load::kStoresComputed, "nothing of what is dropped is kept");
  static_assert(!Shape::kFull || kHolds, "elsewhere the last round may be shorter");
  // Further rounds look at elements again and again: those of 16 bits wait as numbers where these have room.
  constexpr bool kPacked = kHolds && wait_packed<Op, Load, Shape>() &&
      !(Op::kRounds && kVector * kElements <= 64);
  // addresses take an instruction or two
  constexpr bool kInSteps = kHolds && are_in_steps<Op, Load, Store>() && Load::kAlone;
  constexpr bool kMany = kVector * kElements > 64;  // of them, which leave few registers to anything else
  // Whether it is taken for granted that a thread has most of its elements. Not where kernels then spilled registers
  // (docs/notes/070, "Every form").
  constexpr bool kEven = Shape::kEven && !Load::kInterval && (kInSteps || !kMany);
  constexpr int kSure = kEven ? Shape::kSure : 0;
  constexpr int kAtATime = kMany && Op::kTwoPass ? 16 : 32;  // where one part more takes few instructions
  constexpr int kPart = kPacked ? part_of_elements(kElements, kAtATime / kVector) : kElements;

  // Whether whole rounds come first, of which nothing is asked. kKeepsRounds: those that no mask's interval drops.
  constexpr bool kWholeRounds = Shape::kOfGrid && !kHolds,
      kKeepsRounds = Load::kInterval && !kHolds && !kWholeRounds && kStoresNothing<Store> && Op::kCountsAllKept;

  // this block's columns, and this thread's: every kDown-th from `first` on, before `end`
  const int part = at.part, lane = threadIdx.x % kLanes;
  const Index cols = Index(a.cols);
  Index begin, end;
  if constexpr (kEven && !Shape::kFull) {
    const Shares shares = Shares::of(cols, at.parts);
    begin = Index(shares.begin(part)), end = begin + Index(shares.held(part));
  } else {
    constexpr Index kUnit = kWholeRounds ? 2 * kDown : 1;  // of columns of a block: its part begins at whole sectors
    const Index each = Shape::kFull ? kRound : ((cols + (kUnit * at.parts - 1)) / (kUnit * at.parts)) * kUnit;
    begin = part * each, end = cols - begin < each ? cols : begin + each;
  }
  const bool left_over = !Shape::kInWarps && int(threadIdx.x) >= Shape::kThreads;
  Index first = begin + (left_over ? 0 : threadIdx.x / kLanes);
  const auto own = own_rows<Shape>(a.load, at.tile, lane, first, a.rows);
  const bool here = own.here && !left_over;  // all rows of a vector are, or none
  const int64 elsewhere = kWholeRounds ? a.rows - kVector : 0;  // what is read there is in a line that others read
  const ReductionPlaces<Op, Shape, Op::kRounds> places = {shared_memory, mbarriers, meeting};
  const ReductionPlaces<Largest, Shape, false> largest_places = {places.place + places.kBytes, mbarriers + 2, meeting};
  typename Load::RowPointer sources[kVector];
  typename Store::RowPointer targets[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    sources[v] = a.load.at(own.of_or(here, v, elsewhere));
    targets[v] = a.store.at(own.of_or(here, v, elsewhere));
  }
  Compute own_number[kVector] = {};
  if constexpr (Op::kOwnNumber) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) own_number[v] = sources[v].own_number();
  }
  if constexpr (kInSteps) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) sources[v].begin_at(first), targets[v].begin_at(first);
  }

  Vector<typename Load::Type, kVector> loaded[kElements];
  typename Load::template Beside<kVector> beside[kElements];
  typename Store::template EpilogueOperands<1> operands[kElements][kVector];
  Element x[kVector][kPart];
  using Bits = typename Conditional<(kVector * kPart > 32), unsigned long long, unsigned>::Type;
  Bits keeps = 0;  // a bit for each of them that no mask drops
  // Whether the thread has an element. With kEven, a thread that has no rows reads the first row's, and stores nothing.
  // So it does, of the last rows, in whole rounds.
  auto has = [&](int number, Index col) {
    if constexpr (kEven) return number < kSure || col < end;
    else return here && col < end;
  };
  // Calls body(j, col) for each element that there is from column `at` on: of all that are fetched, or of a part, which
  // begins with a thread's element `from`.
  auto each_element = [&](Index at, auto round, auto&& body) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      if constexpr (kPacked && kMany && !Shape::kFull) {
        if (j % 4 == 0) make_opaque(at);  // or addresses of all would be computed first
      }
      if (decltype(round)::kWhole || has(j, at + j * kDown)) body(j, at + j * kDown);
    }
  };
  auto each_of_part = [&](int from, Index at, auto round, auto&& body) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (decltype(round)::kWhole || has(from + j, at + j * kDown)) body(j, at + j * kDown);
    }
  };
  auto fetch = [&](Index at, auto round) {
    each_element(at, round, [&](int j, Index col) {
      if constexpr (kInSteps) loaded[j] = Load::template load_across<kVector>(sources, own.step(j), beside[j]);
      else loaded[j] = Load::template load_across<kVector, decltype(round)::kKept>(sources, own.at(col), beside[j]);
    });
  };
  auto fetch_operands = [&](Index at, auto round) {
    if constexpr (Store::kHasEpilogueOperands) {
      each_element(at, round, [&](int j, Index col) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) operands[j][v] = targets[v].template epilogue_operands<1>(col);
      });
    }
  };
  // Computes a part of what was fetched, from number `from` and column `at` on. Elements that are not there are
  // padding. Counts those that are.
  auto take = [&](int from, Index at, auto round) {
    constexpr bool kAll = Shape::kFull || decltype(round)::kWhole;
    int there = 0;
    keeps = 0;
    if constexpr (!kAll) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) x[v][j] = Op::padding();
      }
    }
    each_of_part(from, at, round, [&](int j, Index col) {
      Element computed[kVector];
      keeps |= Bits(Load::template unpack_across<kVector, decltype(round)::kKept>(sources, loaded[from + j],
                   beside[from + j], computed, col, Op::padding())) << j * kVector;
#pragma unroll
      for (int v = 0; v < kVector; ++v) x[v][j] = computed[v];
      ++there;
    });
    if constexpr (Op::kHasPivot && !kAll) {  // the pivot is an element of the row, never padding
#pragma unroll
      for (int j = 1; j < kPart; ++j) {
        if (kEven ? has(from + j, at + j * kDown) : at + j * kDown < end) continue;
#pragma unroll
        for (int v = 0; v < kVector; ++v) x[v][j] = x[v][0];
      }
    }
    return there;
  };
  auto store_computed = [&](int j, Index col) {
    if constexpr (Load::kStoresComputed) {
      if ((kEven || kWholeRounds) && !here) return;
      Element computed[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) computed[v] = x[v][j];
      Load::template store_computed_across<kVector>(sources, computed, own.at(col));
    }
  };

  if constexpr (Load::kInterval && !kHolds && kStoresNothing<Store>) {  // what lies outside is passed over
    Index from = cols, to = 0;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const auto& kept = sources[v].mask.interval;
      from = from < kept.begin ? from : kept.begin, to = to > kept.end ? to : kept.end;
    }
    if (!kWholeRounds && first < from) first += (from - first + (kDown - 1)) / kDown * kDown;
    end = end < to ? end : to;
  }
  // Calls body(column, round) for each round of rows that wait nowhere; or from the last one back, which may still be
  // in the L2 cache.
  Index rounds = kWholeRounds && begin < end ? (end - begin) / kRound : 0;  // whole ones
  if constexpr (kKeepsRounds) {  // those at the begin that lie within the intervals of all rows of the warp
    Index to = here ? end : 0;
    bool begun = true;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const auto& kept = sources[v].mask.interval;
      to = to < kept.end ? to : kept.end, begun &= kept.begin <= first;
    }
    const unsigned mine = begun && to > first ? unsigned((to - first + (kDown - 1)) / kRound) : 0;
    rounds = ~largest_of_warp(~mine);
  }
  auto each_round = [&](auto&& body) {
    Index at = first;
    if constexpr (kWholeRounds || kKeepsRounds) {
#pragma unroll 1
      for (Index i = 0; i < rounds; ++i, at += kRound) body(at, Round<true, kKeepsRounds>());
    }
#pragma unroll 1
    for (; at < end; at += kRound) body(at, Round<false>());
  };
  auto each_round_back = [&](auto&& body) {
    Index at = first + rounds * kRound;
    if (at < end) body(at, Round<false>());
#pragma unroll 1
    for (Index i = 0; i < rounds; ++i) at -= kRound, body(at, Round<true>());
  };

  // ---- the rows' States
  Compute pivot[kVector] = {};
  typename Op::State mine[kVector], total[kVector];
  if constexpr (kHolds) {
    fetch(first, Round<false>());
    fetch_operands(first, Round<false>());
  }
  if constexpr (kHolds && !kPacked) {
    const int there = take(0, first, Round<false>());
    each_of_part(0, first, Round<false>(), store_computed);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if constexpr (Op::kHasPivot)
        pivot[v] = LanesApart<kLanes>::first(Op::pivot_of(x[v], Precision()));
      mine[v] = Op::summarize(x[v], Predicate<kSure>{there, false}, pivot[v]);
    }
  } else {
    RunningRows<Op, kVector, Precision> running;
    const auto add_all = [&](auto& running) {
      constexpr AllKept<kPart> kAll = {{kPart, false}};
      if constexpr (kAddsKept<RunningRows<Op, kVector, Precision>>) running.add_kept(x, [&](int) { return kAll; });
      else running.add(x, kAll);
    };
    auto add = [&](int from, int there, auto round) {
      if constexpr (kKeepsRounds && !Load::kMaskBytes) {
        if constexpr (decltype(round)::kKept) return add_all(running);
      }
      if (decltype(round)::kWhole || (kEven && from + kPart <= kSure)) running.add(x, Predicate<kPart>{kPart, false});
      else if (there > 0) running.add(x, Predicate<0>{there, false});
    };
    if constexpr (kPacked) {
#pragma unroll
      for (int from = 0; from < kElements; from += kPart) {
        const Index at = first + from * kDown;
        const int there = take(from, at, Round<false>());
        each_of_part(from, at, Round<false>(), store_computed);
        add(from, there, Round<false>());
      }
    } else {
      each_round([&](Index at, auto round) {
        fetch(at, round);
        const int there = take(0, at, round);
        each_of_part(0, at, round, store_computed);
        add(0, there, round);
      });
    }
    take_states<Shape>(running, mine, pivot);
  }
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    if constexpr (Op::kOwnNumber) pivot[v] = own_number[v];
    mine[v] = with_own<Op>(mine[v], own_number[v]);
    total[v] = mine[v];
  }
  const auto prefetch_next = [&] {
    auto begin = [&](auto& source) {
      if constexpr (kInSteps) source.begin_at(first);
    };
    prefetch_tile<Shape>(a.load, a.rows, at.next, begin, [&](const auto& source, int j) {
      if (!has(j, first + j * kDown)) return;
      if constexpr (kInSteps) source.prefetch_across(Step<kDown>{j});
      else source.prefetch_across(first + j * kDown);
    });
  };
  if constexpr (kWholeRounds && kStoresNothing<Store> && !Op::kRounds) {  // each block finishes some of the rows
    reduce_tile<Op, Shape>(total, pivot, places.tile(), part, 0, meeting, prefetch_next,
        [&](int number, const Slot<Op>& all) {
      const int64 finished = at.tile * Shape::kRows + number;
      if (finished < a.rows) a.op.save(finished, a.op.finish(all.state, all.state, a.cols, all.pivot));
    }, true);
    return at.next * Shape::kRows < a.rows;
  }
  reduce_apart<Op, Shape>(total, pivot, places, part, 0, prefetch_next, slots_of(own));

  // ---- further rounds, of ops that have them
  // Calls body(number, column, round) for each part of what the thread has of its rows.
  auto each_part = [&](auto&& body) {
    if constexpr (kHolds) {
#pragma unroll
      for (int from = 0; from < kElements; from += kPart) body(from, first + from * kDown, Round<false>());
    } else {
      each_round([&](Index at, auto round) { body(0, at, round); });
    }
  };
  auto each_part_back = [&](auto&& body) {
    if constexpr (kWholeRounds) each_round_back([&](Index at, auto round) { body(0, at, round); });
    else each_part(body);
  };
  // Brings its elements back.
  auto bring = [&](int from, Index at, auto round) {
    static_cast<void>(round);  // NVRTC 13.0 crashes on such a lambda of nothing but an if constexpr (docs/notes/075)
    if constexpr (!kHolds || kPacked) {
      if constexpr (!kHolds) fetch(at, round);
      take(from, at, round);
    }
  };
  if constexpr (Op::kRounds) {
    static_assert(!Store::kScales, "scales meet in the same places");
    static_assert(Shape::kInWarps || kDown == 1, "warps would go through several numbers of rounds");
    int exchange = 1;  // counts the reductions
    // Calls add(v, x, from) for each part of what the thread has of row v, from its element `from` on, brought back;
    // what a mask drops is padding.
    auto each_kept = [&](auto&& add) {
      if constexpr (kPacked) {  // or their elements would take registers from one round to the next
#pragma unroll
        for (int j = 0; j < kElements; ++j) loaded[j].make_opaque();
      }
      each_part([&](int from, Index at, auto round) {
        bring(from, at, round);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          Element held[kPart];
#pragma unroll
          for (int j = 0; j < kPart; ++j) {
            const bool there = kEven ? has(from + j, at + j * kDown) : at + j * kDown < end;
            const bool kept = there && (!Load::kDrops || (keeps >> (j * kVector + v) & 1));
            held[j] = kept ? x[v][j] : Op::padding();
          }
          add(v, held, from);
        }
      });
    };
    auto summarize = [&](const typename Op::Progress (&progress)[kVector], typename Op::State (&own)[kVector]) {
      bool settled = true;
#pragma unroll
      for (int v = 0; v < kVector; ++v) settled &= Op::settled(own[v], progress[v]);
      if (!any_lane(!settled)) return;
      constexpr Predicate<kPart> kAllOfPart = {kPart, false};
      if constexpr (kHolds && !kPacked) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) own[v] = Op::summarize_again(x[v], kAllOfPart, progress[v]);
      } else {
#pragma unroll
        for (int v = 0; v < kVector; ++v) own[v] = Op::identity();
        each_kept([&](int v, Element (&held)[kPart], int) {
          own[v] = Op::template merge<false>(own[v], Op::summarize_again(held, kAllOfPart, progress[v]));
        });
      }
    };
    auto reduce = [&](typename Op::State (&states)[kVector]) {
      reduce_apart<Op, Shape>(states, pivot, places, part, exchange++);
    };
    using Search = typename SearchOf<Op>::Type;
    auto step = [&](const typename Op::Progress (&progress)[kVector], typename Search::State (&found)[kVector]) {
      if constexpr (Op::kSearches) {
        if constexpr (kHolds && Shape::kAlone) {
          Element all[kVector][kElements];
          each_kept([&](int v, Element (&held)[kPart], int from) {
            if constexpr (kPacked) Op::leave(held, progress[v]);
#pragma unroll
            for (int j = 0; j < kPart; ++j) all[v][from + j] = held[j];
          });
#pragma unroll
          for (int v = 0; v < kVector; ++v) found[v] = Op::summarize_all_steps(all[v], progress[v]);
          return;
        } else if constexpr (kHolds && !kPacked) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) found[v] = Op::summarize_step(x[v], progress[v]);
        } else {
#pragma unroll
          for (int v = 0; v < kVector; ++v) found[v] = Search::identity();
          each_kept([&](int v, Element (&held)[kPart], int) {
            Op::leave(held, progress[v]);
            found[v] = Search::template merge<false>(found[v], Op::summarize_step(held, progress[v]));
          });
        }
        const ReductionPlaces<Search, Shape, true, Op> step_places = {places.place, mbarriers, meeting};
        reduce_apart<Search, Shape>(found, pivot, step_places, part, exchange++);
      }
    };
#pragma unroll
    for (int v = 0; v < kVector; ++v) total[v] = here ? total[v] : Op::identity();  // no row has no further round
    // those who share rows have all rows of a warp
    go_through_rounds<Op, kVector>(a.op, mine, total, summarize, reduce, step, any_next<Op>);
  }
  const bool saves = here && part == 0 && int(threadIdx.x) < kLanes;
  typename Op::Row whole[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    whole[v] = a.op.finish(kHolds && !kPacked ? mine[v] : total[v], total[v], a.cols, pivot[v]);
    if (saves && own.has(v)) a.op.save(own.of(v), whole[v]);
  }

  if constexpr (kPacked && kMany) make_opaque(first);  // or parameters of all columns would be loaded here
  if constexpr (kPacked) {  // or their elements would take the registers that waiting as loaded saves
#pragma unroll
    for (int j = 0; j < kElements; ++j) loaded[j].make_opaque();
  }

  // ---- their results
  auto results = [&](int j, Compute (&y)[kVector]) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      y[v] = kHolds && !kPacked ? Op::map(x[v][j], whole[v]) : Op::map_raw(x[v][j], whole[v]);
      if constexpr (Load::kDrops) y[v] = keeps >> (j * kVector + v) & 1 ? y[v] : Op::dropped();
    }
  };
  if constexpr (Store::kScales) {
    typename Largest::State largest[kVector];
    typename Store::Scale scales[kVector];
    const Compute zero[kVector] = {};
#pragma unroll
    for (int v = 0; v < kVector; ++v) largest[v] = Largest::identity();
    auto finish = [&](int j, Index col, Compute (&z)[kVector]) {
      Compute y[kVector];
      results(j, y);
      Store::template finish_across<kVector>(y, a.store.template columns<1>(col), z);
    };
    each_part_back([&](int from, Index at, auto round) {
      bring(from, at, round);
      each_of_part(from, at, round, [&](int j, Index col) {
        Compute z[kVector];
        finish(j, col, z);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const Compute own[1] = {z[v]};
          largest[v] = Largest::template merge<false>(largest[v], Largest::of(own));
          if constexpr (kHolds && !kPacked) field(x[v][j], 0) = z[v];
        }
      });
    });
    reduce_apart<Largest, Shape>(largest, zero, largest_places, part, 0, NothingMeanwhile(), slots_of(own));
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      scales[v] = a.store.scale_of(largest[v].max);
      if (saves && own.has(v)) a.store.save(own.of(v), scales[v]);
    }
    each_part([&](int from, Index at, auto round) {
      bring(from, at, round);
      each_of_part(from, at, round, [&](int j, Index col) {
        if ((kEven || kWholeRounds) && !here) return;
        Compute z[kVector];
        if constexpr (!kHolds || kPacked) {
          finish(j, col, z);
        } else {
#pragma unroll
          for (int v = 0; v < kVector; ++v) z[v] = field(x[v][j], 0);
        }
        if constexpr (kInSteps) Store::template store_scaled_across<kVector>(targets, z, scales, own.step(from + j));
        else Store::template store_scaled_across<kVector>(targets, z, scales, own.at(col));
      });
    });
  } else {
    each_part_back([&](int from, Index at, auto round) {
      bring(from, at, round);
      if constexpr (!kHolds) fetch_operands(at, round);
      // vectors are stored in order (io/load_store.cuh), and addresses of all would be computed before the first
      if constexpr (kInSteps && kVector > 1) targets[0].make_opaque();
      each_of_part(from, at, round, [&](int j, Index col) {
        if ((kEven || kWholeRounds) && !here) return;
        Compute y[kVector];
        results(j, y);
        const auto columns = a.store.template columns<1>(col);
        if constexpr (kInSteps)
          Store::template store_across<kVector>(targets, y, columns, operands[from + j], own.step(from + j));
        else Store::template store_across<kVector>(targets, y, columns, operands[from + j], own.at(col));
      });
    });
  }
  return Shape::kOfGrid && at.next * Shape::kRows < a.rows;
}

template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kMinBlocks)
    row_across(const __grid_constant__ Arguments<Op, Load, Store> a) {
  __shared__ Mbarrier mbarriers[4];
  begin_together<Shape>(mbarriers);
  if (has_ended(a.op, a.rows)) return;
  if constexpr (are_whole<Op, Load, Store, Shape>()) {
    HeldRows<Load, Shape> loaded;
    HeldOperands<Op, Load, Shape> operands;
    go_through_tiles<Op, Shape>(a.store, a.rows, [&](const TilePart& at, GridMeeting* meeting) {
      return go_through_whole_rows<Op, Load, Store, Shape>(
          a, shared_memory, mbarriers, at, meeting, loaded, operands);
    });
  } else {
    go_through_tiles<Op, Shape>(a.store, a.rows, [&](const TilePart& at, GridMeeting* meeting) {
      return go_through_any_rows<Op, Load, Store, Shape>(a, mbarriers, at, meeting);
    });
  }
}

}  // namespace cupynorm
