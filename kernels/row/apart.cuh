// How rows whose elements lie apart from one another are reduced (across.cuh). A thread has some rows that are
// neighbours in memory, and accesses one element of all of them at once; neighbouring threads have the next rows, so
// that a warp accesses whole lines. Rows are reduced over the threads in between. A tile: all rows of a block.
#pragma once
#include <base/cluster.cuh>
#include <row/meeting.cuh>
#include <row/running.cuh>

namespace cupynorm {

// A thread has kVector neighbouring rows, and loads kElements elements of each at a time, which are all that it has
// where rows wait in registers (kHolds). kLanes threads lie side by side, and kDown share each row, every kDown-th
// element of it. kFull: a block has exactly kElements * kDown elements of each row. kEven, with Waits 2: each thread
// has at least one element, and lacks kSpare at most. kCtasPerRow: blocks of a cluster that share rows; 0: the
// gridDim.y blocks of a cooperative launch do. kBlock, kMinBlocks: as in Registers. kLanes may be those of several
// warps, each of which then has rows of its own (kInWarps is false). Where blocks of the grid share rows that wait
// nowhere, kLanes may be any number, so that a block has whole stretches of memory of a table with any number of
// columns; the last threads may then be left over (kThreads are not), and have no elements.
template <int Vector_, int Elements, int Lanes_, bool Full, int Waits, int CtasPerRow, int Block, int MinBlocks>
struct Across {
  static constexpr int kVector = Vector_, kElements = Elements, kLanes = Lanes_, kCtasPerRow = CtasPerRow,
      kBlock = Block, kMinBlocks = MinBlocks;
  static constexpr bool kFull = Full, kHolds = Waits > 0, kEven = Full || Waits == 2;
  static constexpr int kSpare = Full ? 0 : Elements > 4 ? 4 : Elements - 1, kSure = Elements - kSpare;
  static constexpr int kDown = Block / Lanes_, kRows = Lanes_ * Vector_, kWarps = Block / kWarp,
      kThreads = kDown * Lanes_;
  static constexpr bool kOfGrid = CtasPerRow == 0, kIsPower = (Lanes_ & (Lanes_ - 1)) == 0,
      kInWarps = Lanes_ <= kWarp && kIsPower;
  static constexpr bool kAlone = kDown == 1 && CtasPerRow == 1;  // all elements of a row are one thread's
  static constexpr int kSlots = kInWarps ? kWarps : kDown;       // of a block, for what it knows of a row
  static_assert(kIsPower || (kOfGrid && !kHolds), "lanes of a warp that share rows are kLanes apart");
  static_assert(kDown > 0, "each lane is a thread");
  static_assert(!kIsPower || (kWarps & (kWarps - 1)) == 0, "lanes that are a power of two merge what the warps have");
};

// Which tile a block works on, and which part of its rows it has; and its next tile, which may be none, where blocks of
// the grid go through tiles.
struct TilePart {
  int64 tile;
  int part, parts;
  int64 next;
};

// So many blocks take long to meet, and what is to come meanwhile is asked for sooner (docs/notes/071, "When").
inline bool meet_for_long(int parts) { return parts >= 24 && parts <= 80; }

// Where blocks of the grid go through tiles, a thread's first elements of the next one are on their way to the L2 cache
// while all meet, so that memory is not idle (docs/notes/071): begin(source) is called with the pointer to the thread's
// rows there, then prefetch(source, j) for each of these.
template <class Shape, class Load, class Begin, class Prefetch>
inline void prefetch_tile(const Load& load, int64 rows, int64 tile, Begin begin, Prefetch prefetch) {
  if constexpr (Shape::kOfGrid) {
    make_opaque(tile);  // or its address would wait in registers until its elements are loaded
    const int64 row = (tile * Shape::kLanes + int(threadIdx.x) % Shape::kLanes) * Shape::kVector;
    if (row >= rows) return;
    auto source = load.at(row);
    begin(source);
#pragma unroll 1
    for (int j = 0; j < Shape::kElements / 2; ++j) prefetch(source, j);
  }
}
// The shared memory of a tile's reductions: a Slot of each row from each warp, then from each block of the cluster.
// kMore: twice, as a block may send what it has of the next reduction while another reads what it had of this one.
// Room: the op whose States it has room for, where reductions of several ops alternate.
template <class Op, class Shape, bool kMore = true, class Room = Op>
struct TileReduction {
  static constexpr int kCtasPerRow = Shape::kCtasPerRow,
      kMessages = kCtasPerRow > 1 ? kCtasPerRow * Shape::kRows : 0, kSlots = Shape::kSlots * Shape::kRows;
  static constexpr int kBytes = ((kMore ? 2 : 1) * kMessages + kSlots) * int(sizeof(SlotWords<Room>));
  static_assert(sizeof(SlotWords<Op>) <= sizeof(SlotWords<Room>));
  SlotWords<Op>* slots;  // [warp][row], or [thread of a row][row]
  Mbarrier* mbarriers;   // two

  // [block][row]
  SlotWords<Op>* messages(int turn) const {
    auto* const room = reinterpret_cast<SlotWords<Room>*>(slots) + kSlots + (kMore ? turn & 1 : 0) * kMessages;
    return reinterpret_cast<SlotWords<Op>*>(room);
  }
};

// The most lanes, a power of two, of `most` that there are, so that each has one of `count` slots.
constexpr int lanes_for(int most, int count) {
  int lanes = 1;
  while (2 * lanes <= most && 2 * lanes <= count && 2 * lanes <= kWarp) lanes *= 2;
  return lanes;
}

// Calls give(row, lane, slot) with the State of each row, given kCount slots of each; 0: as many as are asked for. As
// many lanes have it, kLanes, as the block has threads for. All threads must call.
template <class Op, class Shape, int kCount>
struct GatheredSlots {
  static constexpr int kRows = Shape::kRows, kMost = Shape::kBlock / kRows > 0 ? Shape::kBlock / kRows : 1;
  static constexpr int kLanes = lanes_for(kMost, kCount > 0 ? kCount : kWarp), kApart = kWarp / kLanes;
  static constexpr int kWarps = (kRows + kApart - 1) / kApart;

  template <class Give>
  static void give_all(const SlotWords<Op>* slots, Give give, int count = kCount) {
    int thread = threadIdx.x;
    if constexpr (Shape::kOfGrid) make_opaque(thread);  // or it would be divided once for all tiles
#pragma unroll 1
    for (int warp = thread / kWarp; warp < kWarps; warp += Shape::kBlock / kWarp) {
      const int number = thread % kWarp / kApart, row = warp * kApart + thread % kApart;
      const SlotWords<Op>* const from = slots + number * kRows + row % kRows;
      const Slot<Op> all = merge_slots<Op, kLanes, kCount>([from](int i) {
        if constexpr (kCount > 0) return from[i * kRows].slot;
        else return read_slot(from + i * kRows);
      }, kCount > 0 || number < count, 0, count - number);
      if (row < kRows) give(row, number, all);
    }
  }
};

// Calls give(row, slot) for those of a tile's rows that fall to this block of those that share them, a warp for each,
// given the slots of all blocks.
template <class Op, class Shape, class Give>
inline void merge_own_rows(const SlotWords<Op>* slots, int part, Give give) {
  constexpr int kRows = Shape::kRows;
  const int parts = gridDim.y, lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int row = part + int(threadIdx.x / kWarp) * parts; row < kRows; row += Shape::kWarps * parts) {
    const Slot<Op> all = merge_slots<Op, kWarp, 0>(
        [&](int i) { return read_slot(slots + i * kRows + row); }, lane < parts, lane, parts);
    if (lane == 0) give(row, all);
  }
}

// The reduction of rows that wait nowhere, over the blocks of the grid that share them. Each block leaves the States of
// its part of all rows, and merges all parts of some of the rows. If each block merged all of them, 132 blocks would
// read 70 MB for 128 rows.
template <class Op, class Shape, class Gather, class Meanwhile, class Finish>
inline void reduce_over_grid(Gather gather, int part, GridMeeting* meeting, Meanwhile meanwhile, bool each_its_own,
    Finish finish) {
  SlotWords<Op>* const messages = meeting->template messages<Op, Shape::kRows>();
  gather([&](int row, int number, const Slot<Op>& all) {
    if (number == 0) write_slot(messages + part * Shape::kRows + row, all);
  });
  if (meeting->turn == 0) grid_wait(meeting->begun);  // the counters are 0
  meeting->meet(meanwhile);
  ++meeting->turn;
  if (each_its_own) {
    merge_own_rows<Op, Shape>(messages, part, finish);
    return;
  }
  SlotWords<Op>* const totals = meeting->template messages<Op, Shape::kRows>();
  merge_own_rows<Op, Shape>(messages, part, [&](int row, const Slot<Op>& all) { write_slot(totals + row, all); });
  meeting->meet(NothingMeanwhile());
  ++meeting->turn;
#pragma unroll 1
  for (int row = threadIdx.x; row < Shape::kRows; row += Shape::kBlock)
    finish(row, read_slot(totals + row));
}

// Which of a tile's rows a thread has: kVector of them, as lanes come. own_rows.cuh has others.
template <class Shape>
struct RowsOfLanes {
  static constexpr bool has(int) { return true; }
  static int slot(int v) { return int(threadIdx.x) % Shape::kLanes * Shape::kVector + v; }
  // its place for what the thread has of it, given the thread's number among those that have Slots
  static int place(int thread, int v) { return thread * Shape::kVector + v; }
};

// Leaves what each warp has of its rows in slots, or each thread where lanes side by side are several warps, for all
// threads of the block to read.
template <class Op, class Shape, class Own>
inline void leave_slots(typename Op::State (&s)[Shape::kVector], const typename Op::Compute (&pivot)[Shape::kVector],
    SlotWords<Op>* slots, const Own& own) {
  constexpr int kLanes = Shape::kLanes;
  if constexpr (Shape::kInWarps && kLanes < kWarp) {
#pragma unroll
    for (int v = 0; v < Shape::kVector; ++v) s[v] = Op::gather(s[v], LanesApart<kLanes>());
  }
  const int lane = threadIdx.x % kWarp;
  if (Shape::kInWarps ? lane < kLanes : int(threadIdx.x) < Shape::kThreads) {
    const int place = Shape::kInWarps ? int(threadIdx.x) / kWarp * kLanes + lane : int(threadIdx.x);
#pragma unroll
    for (int v = 0; v < Shape::kVector; ++v) {
      if (own.has(v)) slots[own.place(place, v)].slot = {s[v], pivot[v]};
    }
  }
  __syncthreads();
}

// Calls finish(row, slot) once for each of the tile's rows, with the State of the whole row, given those of each
// thread's rows and what they are counted from, which is the same in a warp. All threads must call; turn: how often
// they have before, 0 without kMore. They see what finish has written. each_its_own: of rows that blocks of the grid
// share and that wait nowhere, only one of these blocks calls finish for each. own: which rows the thread has. In which
// order States are merged follows from Shape alone, and from how many blocks of the grid share rows.
template <class Op, class Shape, bool kMore, class Room, class Meanwhile, class Finish,
    class Own = RowsOfLanes<Shape>>
inline void reduce_tile(typename Op::State (&s)[Shape::kVector], const typename Op::Compute (&pivot)[Shape::kVector],
    const TileReduction<Op, Shape, kMore, Room>& places, int part, int turn, GridMeeting* meeting,
    Meanwhile meanwhile, Finish finish, bool each_its_own = false, const Own& own = {}) {
  constexpr int kCtasPerRow = Shape::kCtasPerRow, kQuads = SlotWords<Op>::kQuads;
  using OfWarps = GatheredSlots<Op, Shape, Shape::kSlots>;
  const auto finish_once = [&](int row, int number, const Slot<Op>& all) {
    if (number == 0) finish(row, all);
  };
  leave_slots<Op, Shape>(s, pivot, places.slots, own);
  if constexpr (kCtasPerRow == 1) {
    OfWarps::give_all(places.slots, finish_once);
  } else if constexpr (Shape::kOfGrid && !Shape::kHolds) {
    reduce_over_grid<Op, Shape>([&](auto give) { OfWarps::give_all(places.slots, give); }, part, meeting, meanwhile,
        each_its_own, finish);
  } else if constexpr (Shape::kOfGrid) {
    SlotWords<Op>* const messages = meeting->template messages<Op, Shape::kRows>();
    OfWarps::give_all(places.slots, [&](int row, int number, const Slot<Op>& all) {
      if (number > 0) return;
      write_slot(&messages[part * Shape::kRows + row], all);
    });
    meeting->meet(meanwhile);
    GatheredSlots<Op, Shape, 0>::give_all(messages, finish_once, gridDim.y);
    ++meeting->turn;
  } else {
    SlotWords<Op>* const messages = places.messages(turn);
    Mbarrier* const mbarrier = places.mbarriers + (turn & 1);
    if (threadIdx.x == 0) expect_bytes(mbarrier, unsigned(kCtasPerRow * Shape::kRows * kQuads * 16));
    OfWarps::give_all(places.slots, [&](int row, int number, const Slot<Op>& all) {
      SlotWords<Op> own = {};
      own.slot = all;
#pragma unroll
      for (int block = 0; block < kCtasPerRow; block += OfWarps::kLanes) {
        if (kCtasPerRow % OfWarps::kLanes && block + number >= kCtasPerRow) continue;
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
          send_words(&messages[part * Shape::kRows + row].words[i], mbarrier, block + number, own.words[i]);
      }
    });
    await_mbarrier(mbarrier, turn >> 1 & 1);
    GatheredSlots<Op, Shape, kCtasPerRow>::give_all(messages, finish_once);
  }
  __syncthreads();
}

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

// The largest divisor of kElements that is no more than `most`.
constexpr int part_of_elements(int elements, int most) {
  int part = elements < most ? elements : most;
  while (elements % part) --part;
  return part;
}

// The shared memory of reductions whose result all threads take: what reduce_tile needs, and a Slot of each row.
template <class Op, class Shape, bool kMore, class Room = Op>
struct ReductionPlaces {
  using Tile = TileReduction<Op, Shape, kMore, Room>;
  static constexpr bool kAny = Shape::kSlots > 1 || Shape::kCtasPerRow != 1;
  static constexpr int kBytes = kAny ? Tile::kBytes + Shape::kRows * int(sizeof(SlotWords<Room>)) : 0;
  unsigned char* place;
  Mbarrier* mbarriers;   // two
  GridMeeting* meeting;  // of a Shape of the grid

  Tile tile() const { return {reinterpret_cast<SlotWords<Op>*>(place), mbarriers}; }
  Slot<Op>& whole(int row) const { return reinterpret_cast<SlotWords<Op>*>(place + Tile::kBytes)[row].slot; }
};

// The States of a thread's rows become those of whole rows, counted from the thread's own pivots, which are the same in
// a warp. All threads must call; turn: how often they have before. The mbarriers have been made, and the blocks of the
// cluster have met since. States are merged in an order that follows from Shape alone.
template <class Op, class Shape, bool kMore, class Room, class Meanwhile = NothingMeanwhile,
    class Own = RowsOfLanes<Shape>>
inline void reduce_apart(typename Op::State (&s)[Shape::kVector], const typename Op::Compute (&pivot)[Shape::kVector],
    const ReductionPlaces<Op, Shape, kMore, Room>& places, int part, int turn = 0, Meanwhile meanwhile = {},
    const Own& own = {}) {
  constexpr int kVector = Shape::kVector, kLanes = Shape::kLanes;
  if constexpr (ReductionPlaces<Op, Shape, kMore, Room>::kAny) {
    reduce_tile<Op, Shape>(s, pivot, places.tile(), part, turn, places.meeting, meanwhile,
        [&](int row, const Slot<Op>& all) { places.whole(row) = all; }, false, own);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const Slot<Op> all = places.whole(own.slot(v));
      s[v] = Op::rebase(all.state, all.pivot, pivot[v]);
    }
  } else if constexpr (kLanes < kWarp) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) s[v] = Op::gather(s[v], LanesApart<kLanes>());
  }
}

}  // namespace cupynorm
