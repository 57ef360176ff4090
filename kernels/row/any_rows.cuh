// Rows of row_across that need not be whole (whole.cuh): of columns at any distances, with masks and operands of any
// kind, in threads with any number of elements. They wait in registers, or are read twice.
#pragma once
#include <io/affine.cuh>
#include <row/any_columns.cuh>
#include <row/own_rows.cuh>
#include <row/rounds_apart.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

template <class Op, class Load, class Store, class Shape>
inline bool go_through_any_rows(const Arguments<Op, Load, Store>& a, Mbarrier (&mbarriers)[4], const TilePart& at,
    GridMeeting* meeting) {
  using Compute = typename Op::Compute;
  using Element = ElementOf<Op>;
  using Precision = typename Load::Precision;
  using Largest = Magnitude<Compute>;
  using Index = typename Conditional<Shape::kHolds, int, int64>::Type;  // what waits is of few columns
  using Choice = ChoicesOfAny<Op, Load, Store, Shape>;
  constexpr int kVector = Shape::kVector, kElements = Shape::kElements, kLanes = Shape::kLanes, kDown = Shape::kDown,
      kSure = Choice::kSure, kPart = Choice::kPart;
  constexpr bool kHolds = Shape::kHolds, kPacked = Choice::kPacked, kInSteps = Choice::kInSteps,
      kMany = Choice::kMany, kEven = Choice::kEven, kWholeRounds = Choice::kWholeRounds,
      kKeepsRounds = Choice::kKeepsRounds;

  // this block's columns, and this thread's: every kDown-th from `first` on, before `end`
  const int part = at.part, lane = threadIdx.x % kLanes;
  const Index cols = Index(a.cols);
  const Bounds<Index> own_columns = columns_of_block<Choice>(cols, at);
  Index end = own_columns.end;
  const bool left_over = !Shape::kInWarps && int(threadIdx.x) >= Shape::kThreads;
  Index first = own_columns.begin + (left_over ? 0 : threadIdx.x / kLanes);
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

  if constexpr (Choice::kPassesOver) pass_over<Choice>(sources, cols, first, end);
  Index rounds =  // whole ones
      kWholeRounds && own_columns.begin < end ? (end - own_columns.begin) / Choice::kRound : 0;
  if constexpr (kKeepsRounds) rounds = count_kept_rounds<Choice>(sources, first, here ? end : 0);
  auto each_round = [&](auto&& body) { go_through_columns<Choice>(first, end, rounds, body); };

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
    if constexpr (kWholeRounds) {
      go_back_through_columns<Choice>(first, end, rounds, [&](Index at, auto round) { body(0, at, round); });
    } else {
      each_part(body);
    }
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
    int exchange = 1;  // counts the reductions
    auto summarize = [&](const typename Op::Progress (&progress)[kVector], typename Op::State (&own)[kVector]) {
      summarize_again<Op, Choice>(x, progress, own, each_kept);
    };
    auto reduce = [&](typename Op::State (&states)[kVector]) {
      reduce_apart<Op, Shape>(states, pivot, places, part, exchange++);
    };
    using Search = typename SearchOf<Op>::Type;
    auto step = [&](const typename Op::Progress (&progress)[kVector], typename Search::State (&found)[kVector]) {
      if constexpr (Op::kSearches) {
        find_step<Op, Choice>(x, progress, found, each_kept);
        if constexpr (Choice::kAlone) return;
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

}  // namespace cupynorm
