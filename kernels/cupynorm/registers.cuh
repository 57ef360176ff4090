// warp, block, cluster: the row waits in registers: of 1 to 32 lanes of a warp, of 2 to 32 warps of a block, or of the blocks of a
// cluster.
#pragma once
#include <cupynorm/functors.cuh>
#include <cupynorm/group.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// How a row lies in registers. A thread holds kPacks packs of kPack elements of each of kRows rows; pack p of a thread is number
// p * kGroup + lane of what its block has of the row, so neighbouring threads move neighbouring packs.
//
// kFull: the row is exactly kParts * kGroup * kPacks * kPack columns; otherwise some of a thread's packs may be missing.
// kHoist: where the columns' parameters wait: 0: nowhere, they are fetched when they are used; 1: in registers, fetched together
// with the row; 2: in shared memory, where each thread puts its own once, for all rows that the block goes through; 3: in
// registers, for all of them; 4: in shared memory, as numbers, where every thread finds those of any column: the rows of a block
// may begin anywhere, each elsewhere, and nothing is put together or converted again. Blocks of a cluster hold them for all rows.
// kPeel: 0: every row begins at a pack of x and of y. Otherwise rows begin anywhere: packs are counted from the first address of y
// that is aligned to one, and the elements before and behind the packs are held one by one, by the first threads. 1: x lies in its
// packs as y does. 2: x lies anywhere too, and its packs are put together from two accesses.
// kPeriod: with kPeel, how many rows further a row begins as this one does; the kRows rows of a group are so far from each other.
// What is kept or on its way is so for a group's rows to come: with kPeel they must be a multiple of the period further.
// kParts: blocks of a cluster that share a row; kGroup is then the whole block.
// kBlock threads a block, and registers few enough for kResident blocks on a multiprocessor.
// kStages: 0, or how many rows (of a group) are on their way: the block then goes through many rows, and each thread copies its packs
// of the rows to come into shared memory, where nobody else reads them. Packs of 16 bytes only.
template <int Pack_, int Packs, int Group, int Rows, bool Full, int Hoist, int Peel, int Period, int Parts, int Block, int Resident,
          int Stages>
struct Registers {
  static constexpr int kPack = Pack_, kPacks = Packs, kGroup = Group, kRows = Rows, kPeel = Peel, kParts = Parts;
  static constexpr int kPeriod = Period, kBlock = Block, kResident = Resident, kStages = Stages, kHoist = Hoist;
  static constexpr bool kFull = Full;
  // Whose columns are a block's parameters does not depend on where its rows begin. Its packs are then counted from the first line of
  // 128 bytes, and begin at one.
  static constexpr bool kFixed = Hoist == 4 && Parts > 1;
  static constexpr int kLine = 8, kAligned = kFixed ? kLine * Pack_ : Pack_;  // packs of a line; elements that packs are counted from
  static_assert(Peel == 0 || (Group >= 2 * Pack_ - 2 && Group >= kAligned - 1 && !Full), "the first threads hold what is around the packs");
  static_assert(Peel == 0 || Group * Pack_ % 8 == 0, "a thread's packs of parameters are multiples of 16 bytes apart");
  static_assert(Peel < 2 || Stages == 0, "what lies in other packs than y is not copied in packs");
  static_assert(Peel == 0 || Rows == 1 || (Stages == 0 && Hoist % 4 < 2), "a group's next rows begin as these do");
  static_assert(Parts == 1 || (Group == Block && Block > kWarp), "the blocks of a cluster share a row");
  static_assert(Hoist < 4 || (Stages == 0 && Parts == 1) || (Stages > 0 && Parts > 1 && Peel > 0), "all columns are a block's, or its part");
};

// Where a column's number lies in shared memory: behind each pack there is room, so that neighbouring threads, whose elements are a
// pack apart, meet no bank twice. A pack that begins at its first element is read in accesses of 16 bytes. _plan.py knows kRoom, too.
template <class Number, int kPack, bool kAnywhere>
struct Lent {
  static constexpr int kBytes = sizeof(Number), kRoom = kAnywhere ? 1 : kPack * kBytes > 16 ? 16 / kBytes : 0;
  static constexpr int kApart = kPack + kRoom;  // of neighbouring packs
  static int place(unsigned col) { return col + col / kPack * kRoom; }
};

// Which part of a row a block holds: packs `before` .. `before + packs`, the first of which is at column `head`, and, of what is
// around all packs, `heads` elements from column 0 on and `tails` from column `tail` on.
struct Share {
  int before, packs, head, heads, tail, tails;
};

constexpr unsigned kNoRow = 0x7fffffff;  // past the last

template <class Shape>
inline Share share_of(int cols, int head, int part) {
  constexpr int kPack = Shape::kPack, kParts = Shape::kParts;
  Share share = {0, cols / kPack, 0, 0, cols, 0};
  if constexpr (Shape::kFixed) {  // the lines that every row has are cut; what only some have is the last part's
    constexpr int kLine = Shape::kLine;
    const int sure = (cols - (kLine * kPack - 1)) / (kLine * kPack), each = sure / kParts, longer = sure % kParts;
    const bool last = part == kParts - 1;
    share.head = head;
    share.before = (part * each + (part < longer ? part : longer)) * kLine;
    share.packs = last ? int(unsigned(cols - head) / kPack) - share.before : (each + (part < longer)) * kLine;
    share.tail = head + (share.before + share.packs) * kPack;
    share.heads = part == 0 ? head : 0;
    share.tails = last ? cols - share.tail : 0;
    return share;
  }
  if constexpr (Shape::kPeel > 0) {
    share.head = head < cols ? head : cols;
    share.packs = (cols - share.head) / kPack;
    share.tail = share.head + share.packs * kPack;
    share.heads = part == 0 ? share.head : 0;
    share.tails = part == kParts - 1 ? cols - share.tail : 0;
  }
  if constexpr (Shape::kFull && kParts > 1) {
    // every row is cut alike, so these could be constants of Shape: a cluster of 1024 threads spilled with them
    const int each = (share.packs + kParts - 1) / kParts;
    share.before = part * each < share.packs ? part * each : share.packs;
    share.packs = share.packs - share.before < each ? share.packs - share.before : each;
  } else if constexpr (kParts > 1) {
    // Parts differ by a pack at most, so that of a thread's packs the last alone may be missing (LayerNorm, half of 128000 columns: 0.62
    // of the copy rate when any might be). Or by a line of 16-byte packs, where that leaves no more of them missing: parts then
    // begin at lines if the row does.
    constexpr int kLine = 8;
    constexpr int kMost = Shape::kGroup * Shape::kPacks, kLeast = kMost - Shape::kGroup;
    const int lines = (share.packs + kLine - 1) / kLine, all = share.packs;
    const bool in_lines = (lines + kParts - 1) / kParts * kLine <= kMost && lines / kParts * kLine - (lines * kLine - all) >= kLeast;
    const int unit = in_lines ? kLine : 1, units = in_lines ? lines : all;
    const int each = units / kParts, longer = units % kParts;
    share.before = (part * each + (part < longer ? part : longer)) * unit;
    const int own = (each + (part < longer)) * unit;
    share.packs = own < all - share.before ? own : all - share.before;
  }
  return share;
}

// The threads of a block stay together, past the last row too, because shuffles and barriers name all of them.
template <class Op, class Load, class Store, class Shape>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident)
    row_registers(const __grid_constant__ Arguments<Op, Load, Store> a) {
  using Compute = typename Op::Compute;
  using State = typename Op::State;
  using Type = typename Load::Type;
  using Digits = typename Load::Digits;
  using Loaded = typename Load::template Loaded<Shape::kPack>;
  using Columns = typename Store::template Columns<Shape::kPack>;
  using Column = typename Store::template Columns<1>;
  constexpr int kPack = Shape::kPack, kPacks = Shape::kPacks, kGroup = Shape::kGroup, kRows = Shape::kRows, kParts = Shape::kParts;
  constexpr bool kFull = Shape::kFull;
  constexpr int kWarps = kGroup / kWarp, kGroups = Shape::kBlock / kGroup;
  constexpr int kLanes = kGroup < kWarp ? kGroup : kWarp;
  constexpr int kSlots = slots_for(kWarps);
  constexpr bool kEvenly = kFull && kSlots == kWarps;  // every slot is of as many elements
  constexpr int kLone = Shape::kPeel > 0 ? 1 : 0;  // element of a thread that is in no pack: the last
  constexpr int kPacked = kPack * kPacks, kElements = kPacked + kLone;
  static_assert(Load::kDirect || Shape::kPeel < 2, "what is computed from several arrays lies in packs as y does");
  static_assert(!Load::kDrops || (kPacked <= 32 && !Load::kKeeps), "a bit for each element, and nothing of what is dropped is kept");
  // one pass over a thread's elements will do: 0.01 to 0.02 faster; to bytes instructions are scarcer, and digits fewer
  constexpr int kFew = Store::kBytes == 1 ? 8192 : 2048;
  // Of clusters all: each warp counts from an element of its own, so what is lost grows with a warp's elements.
  constexpr bool kShort = sizeof(Digits) == 2 && Store::kBytes <= 2 && (kParts > 1 || kGroup * kPacked <= kFew);
  constexpr int kSure = kFull ? kPacks : kPacks - 1;  // packs of a thread that are never missing
  // Of clusters that go through rows, said so that the compiler knows it: none of their threads is past the last row.
  constexpr bool kAll = kParts > 1 && Shape::kStages > 0;
  const int lane = kAll ? threadIdx.x : threadIdx.x % kGroup, group = kAll ? 0 : threadIdx.x / kGroup;
  const auto cols = [&] {
    if constexpr (kFull && kParts == 1) return Known<kParts * kGroup * kPacked>();
    else return int(a.cols);
  }();
  const int part = kParts > 1 ? block_of_cluster() : 0;
  constexpr bool kPersistent = Shape::kStages > 0 || Shape::kHoist == 2 || Shape::kHoist == 3;
  // Two sets of slots in turn spare a barrier, but which is free takes a register. Of 64 for 128 bytes of a row, or for 64 and other arrays,
  // NVRTC 12.9 and 13.0 have none left: 8 bytes of LayerNorm in float of 32 elements a thread spilled, and of add_layer_norm from 8192
  // columns on. One set then, and a barrier before a block's next row, of which it mostly has none.
  constexpr int kThreads = Shape::kBlock * Shape::kResident;
  constexpr bool kCrowded = (kThreads >= 1024 && kRows * kPacked * int(sizeof(Type)) >= (Load::kDirect ? 128 : 64)) || (kThreads >= 768 && kRows * kPacked >= 48);
  constexpr bool kOneSet = kCrowded && kWarps > 1 && kParts == 1 && !kPersistent && Op::kHasOrigin;
  __shared__ Slot<Op> slots[kWarps > 1 && !kOneSet ? 2 : 1][kRows][kGroups][kSlots];
  // Clusters that go through many rows claim the next ones as they come to them, so that the rows in work are neighbours: LayerNorm of 65536
  // halves 0.91 to 0.96 of the copy rate. (A copy by resident blocks has 0.99 of what one has whose blocks end; 0.94 if each takes every nth
  // piece. Blocks alone, of shorter rows, lose: LayerNorm to bytes, 2048 to 8192 halves, 0.94 to 0.8.) Where rows begin anywhere only if
  // a block's parameters are not those of rows that begin alike.
  constexpr bool kClaims = kPersistent && kParts > 1 && (Shape::kPeel == 0 || Shape::kFixed);
  __shared__ Mail<Op, kParts, kClaims> mails[kParts > 1 ? 2 : 1];
  // the row in work and those to come, by their turns: registers are scarce
  constexpr int kTurns = 8;
  __shared__ unsigned coming[kClaims ? kTurns : 1];
  static_assert(Shape::kStages + 2 <= kTurns, "a place is taken again when its row has been written");
  // of the largest results: one of each will do, since the states' barrier and letters stand between two uses
  using Largest = Magnitude<Compute>;
  __shared__ Slot<Largest> largest_slots[kRows][kGroups][kSlots];
  __shared__ Mail<Largest, kParts> largest_mail;
  if constexpr (kSlots > kWarps && kWarps > 1) {
    clear_slots<kWarps>(slots[0]);
    if constexpr (!kOneSet) clear_slots<kWarps>(slots[1]);
    if constexpr (Store::kScales) clear_slots<kWarps>(largest_slots);
  }
  unsigned turn = 0;  // of two sets of slots and mails; in clusters more: a signal's parity changes every other time
  unsigned largest_parity = 0;
  if constexpr (kParts > 1) {
    if (threadIdx.x < 2) make_signal(&mails[threadIdx.x].signal);
    if (kClaims && int(threadIdx.x) <= Shape::kStages) coming[threadIdx.x] = (blockIdx.x + threadIdx.x * gridDim.x) / kParts;
    if (kClaims && threadIdx.x == 0) mails[1].note.x = (blockIdx.x + Shape::kStages * gridDim.x) / kParts;  // as if it had come before
    if constexpr (Store::kScales) {
      if (threadIdx.x == 0) make_signal(&largest_mail.signal);
    }
    if constexpr (kClaims) __syncthreads();  // of what this block has written itself the meeting says nothing
    cluster_meet();  // all blocks have begun: they may write into one another
  }
  // Rows that begin anywhere let the next kernel begin when their loads are on their way: softmax of 8192 x 127 halves 1.08 of the
  // copy rate, before them 0.93; others the earlier the better (LayerNorm of 8192 x 1000 0.98 and 0.92).
  await_kernel_before();
  if constexpr (kLone == 0) begin_next_of();

  // Where a mask's structure keeps an interval of columns, a pack of which no lane of the warp keeps anything costs a warp its stores and
  // nothing more: instructions limit such rows (lengths, half of 2048 columns: 0.89 to 0.95 of the copy rate).
  constexpr bool kSpans = Load::kSpans;
  // What is dropped is then stored before the row is waited for: 4096 and 8192 columns in 16 bits 0.941 to 0.946 and 0.911 to 0.932, but
  // 2048 in 32 bits 0.94 to 0.933.
  constexpr bool kEarly = kSpans && Store::kAhead && kParts * kGroup * kPacked * sizeof(Type) >= 8192 && sizeof(Type) == 2;
  // Instructions are scarce: past the last row the first is loaded, and not stored. Where something is computed on the way and elements
  // are more, the compiler then moves too much ahead, and wants registers for it; with packs of 8 bytes it still has them.
  constexpr bool kPlain = Load::kDirect && !Store::kAhead && !Store::kScales;
  constexpr int kMostAnyway = kPack * sizeof(Type) == 8 ? 24 : 16;
  constexpr bool kSentLater = Shape::kStages > 0 && !Load::kDirect && !kSpans && kLone > 0;  // a pack is fetched where it is used: registers are scarce
  constexpr bool kMayRepeat = Load::kDirect || Shape::kStages == 0;  // of what is sent ahead nothing has come past the last row
  constexpr bool kAnyway = kFull && (kPlain ? Shape::kStages == 0 && kParts == 1 : kRows * kPacked <= kMostAnyway && kMayRepeat);
  // A thread's packs are then at constants behind one address of each array, not each at its own: add_layer_norm, 768 columns, 535
  // instructions to 469, int8 0.87 to 0.92 of the copy rate at 3072. Where packs may be missing the last is then asked for too late
  // (add_layer_norm, 1000 columns, 0.98 to 0.91), and doubles have no registers for it.
  constexpr bool kOneAddress = (kFull || Shape::kStages > 0) && sizeof(Type) < 8 && (!Load::kDirect || Store::kScales);
  // Each load instruction of a warp covers neighbouring rows.
  auto row_of = [group](int64 base, int r) {
    if constexpr (Shape::kPeel == 0 || kRows == 1) return base + r * kGroups + group;
    const int64 number = base / kRows + group;
    return number / Shape::kPeriod * (Shape::kPeriod * kRows) + r * Shape::kPeriod + number % Shape::kPeriod;
  };
  constexpr int64 kApart = Shape::kPeel > 0 ? kRows * Shape::kPeriod : 1;
  const int64 limit = (a.rows + kApart - 1) / kApart * kApart;
  const int64 first = int64(blockIdx.x / kParts) * (kGroups * kRows), step = int64(gridDim.x / kParts) * (kGroups * kRows);
  auto share_at = [&](int64 row) { return share_of<Shape>(cols, a.store.at(row < a.rows ? row : 0).template head<Shape::kAligned>(), part); };
  Share share = kLone > 0 ? share_at(row_of(first, 0)) : share_of<Shape>(cols, 0, part);
  auto has = [&](int p) { return p < kSure || p * kGroup + lane < share.packs; };
  auto col = [&](int p) { return share.head + (share.before + p * kGroup + lane) * kPack; };
  // kSpans: from where the columns that a mask keeps are counted: from a thread's first on other packs are at constants
  auto further = [&](int p) { return kLone > 0 ? col(p) : p * (kGroup * kPack); };
  auto lone = [&] { return lane < share.heads ? lane : lane - share.heads + share.tail; };
  auto alone = [&] { return kLone > 0 && lane < share.heads + share.tails; };
  // Of rows that begin anywhere, a thread's packs lie alike: where the first begins is found once for all, and is hidden, so that what
  // is computed from it are the constants of accesses, not addresses anew (LayerNorm, half of 1023 columns: 700 instructions a
  // thread, 580 so).
  auto columns_from = [&] {
    if constexpr (kLone > 0) {
      auto first = a.store.columns_from(col(0));
      first.hide();
      return first;
    } else {
      return NoColumns();
    }
  };
  auto parameters_from = [&](const auto& first, int p) {
    if (!has(p)) return Columns();
    return Store::template put_together<kPack>(a.store.template columns_apart<kPack>(first, p * (kGroup * kPack)));
  };
  auto parameters = [&](int p) {
    if (!has(p)) return Columns();
    if constexpr (kLone > 0) return a.store.template columns_anywhere<kPack>(col(p));
    else return a.store.template columns<kPack>(col(p));
  };

  // Of all packs, once for all rows. Where columns lie anywhere all accesses are on their way before the first is waited for: one after
  // the other each would take a trip to L2 (LayerNorm, half of 1023 columns: 0.78 of the copy rate, 0.81 so).
  auto fetch_columns = [&](auto take) {
    if constexpr (kLone > 0) {
      typename Store::template ColumnsApart<kPack> apart[kPacks];
      const auto begin = columns_from();
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (has(p)) apart[p] = a.store.template columns_apart<kPack>(begin, p * (kGroup * kPack));
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) take(p, Store::template put_together<kPack>(apart[p]));
    } else {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) take(p, parameters(p));
    }
  };

  // Numbers of all columns that rows of this block may have: of a whole row, or of its part's packs and what may be around them. All are on
  // their way at once, in packs: one by one, 64 threads of 20 columns each took five trips to L2 (LayerNorm, half of 10001 columns,
  // 0.89 to 0.935 of the copy rate). But one by one for a few rows, where a pack's numbers take 64 bytes: LayerNorm, half of 1023
  // columns, 0.885, in packs 0.795; RMSNorm of 601 0.985, in packs 1.005; LayerNorm in float of 250 0.985 and 1.015.
  // Pairs leave room for more blocks: LayerNorm, half of 50257 columns, 0.80 to 0.90.
  constexpr Lending kLending = Shape::kHoist == 4 ? lending_of<Store, Shape::kFixed>() : kNothing;
  constexpr bool kLends = kLending != kNothing;
  using Number = typename NumberOf<Store, Compute, kLending>::Type;
  using Room = Lent<Number, kPack, (kLone > 0)>;
  constexpr int kMostLent = kGroup * kPacks + (kLone > 0 ? Shape::kAligned / kPack : 0);  // packs
  constexpr int kWide = Shape::kFixed || kPack * Room::kBytes <= 32 ? kPack : 1;  // columns of an access
  constexpr int kFetches = kLends ? (kMostLent * (kPack / kWide) + Shape::kBlock - 1) / Shape::kBlock : 1;
  constexpr int kSent = Shape::kStages > 0 ? Load::template kSent<kPack> : 0;  // bytes of a pack, with all that is loaded with it
  constexpr int kRowsAhead = Shape::kStages * kRows * kPacks * (Shape::kBlock * kSent);  // bytes of shared memory that they wait in
  Number* const numbers = reinterpret_cast<Number*>(shared_memory + kRowsAhead);
  const int lent_from = Shape::kFixed ? share.before * kPack : 0;
  const int lent_to = Shape::kFixed && part < kParts - 1 ? lent_from + share.packs * kPack + Shape::kAligned : int(cols);
  const int lent_alone = lent_from + (lent_to - lent_from) / kWide * kWide + threadIdx.x;  // of what is less than an access
  typename Store::template Columns<kWide> fetched[kFetches];
  Column fetched_alone;
  auto lent = [](int i) { return (i * Shape::kBlock + int(threadIdx.x)) * kWide; };
  auto fetch_numbers = [&] {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      if (lent_from + lent(i) + kWide <= lent_to) fetched[i] = a.store.template columns<kWide>(lent_from + lent(i));
    }
    if (kWide > 1 && lent_alone < lent_to) fetched_alone = a.store.template columns<1>(lent_alone);
  };
  auto lend = [&](const auto& columns, int from, auto count) {
    if constexpr (kLends) {
      constexpr int N = decltype(count)();
      Number own[N];
      Store::Affines::template convert<N>(columns, own);
#pragma unroll
      for (int i = 0; i < N; ++i) numbers[Room::place(from) + i] = own[i];
    }
  };
  auto lend_numbers = [&] {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      if (lent_from + lent(i) + kWide <= lent_to) lend(fetched[i], lent(i), Known<kWide>());
    }
    if (kWide > 1 && lent_alone < lent_to) lend(fetched_alone, lent_alone - lent_from, Known<1>());
    if constexpr (kWarps <= 1) __syncthreads();  // else warps meet before the first is read
  };
  constexpr bool kWhole = kLone == 0 && kPack * Room::kBytes % 16 == 0;  // a pack's numbers are whole accesses
  unsigned borrowed[kLends && !kWhole ? kPack : 1];  // where element i of a thread's first pack lies, in bytes
  auto find_numbers = [&] {
    if constexpr (kLends && !kWhole) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        borrowed[i] = kRowsAhead + (Room::place(share.head + i) + lane * Room::kApart) * Room::kBytes;
        hide(borrowed[i]);
      }
    }
  };
  auto borrow_numbers = [&](int p) {
    Scalings<Number, kPack> own;
    if constexpr (!kWhole) {
      const unsigned char* const from = shared_memory + p * (kGroup * Room::kApart * Room::kBytes);
#pragma unroll
      for (int i = 0; i < kPack; ++i) own.column[i] = *reinterpret_cast<const Number*>(from + borrowed[i]);
    } else {
      constexpr int kAccesses = (kPack * Room::kBytes + 15) / 16;
      union {
        uint4 access[kAccesses];
        Scalings<Number, kPack> numbers;
      } read = {};
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) read.access[i] = reinterpret_cast<const uint4*>(numbers + (p * kGroup + lane) * Room::kApart)[i];
      own = read.numbers;
    }
    return own;
  };

  union Kept {
    Columns columns;
    uint4 piece[(sizeof(Columns) + 15) / 16];
    Kept() {}
  };
  constexpr int kPieces = int(sizeof(Kept) / 16);
  uint4* const kept = reinterpret_cast<uint4*>(shared_memory + kRowsAhead) + threadIdx.x;
  auto kept_columns = [kept](int p) {
    Kept own;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) own.piece[i] = kept[(p * kPieces + i) * Shape::kBlock];
    return own.columns;
  };
  if constexpr (Shape::kHoist == 2) {
    fetch_columns([&](int p, Columns columns) {
      Kept own;
      own.columns = columns;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) kept[(p * kPieces + i) * Shape::kBlock] = own.piece[i];
    });
  }

  Columns columns[kPacks];
  Column column;
  if constexpr (Shape::kHoist == 3) fetch_columns([&](int p, Columns own) { columns[p] = own; });
  if constexpr (kLone > 0 && Shape::kHoist > 1 && !kLends) {
    if (alone()) column = a.store.template columns<1>(lone());
  }

  // The elements around the packs of the next rows, where rows to come are on their way.
  typename Load::template Loaded<1> around[kRows];
  auto send_around = [&](int64 base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = row_of(base, r);
      if constexpr (kLone > 0 && (Load::kDirect || Shape::kStages > 0))
        around[r] = row < a.rows && alone() ? a.load.at(row).template load<1>(lone()) : Load::template absent<1>(Op::padding());
    }
  };
  int stage = 0;
  auto waiting = [](int stage, int r, int p) {
    return shared_memory + int64((stage * kRows + r) * kPacks + p) * (Shape::kBlock * kSent) + (Load::kDirect ? threadIdx.x * 16 : 0);
  };
  auto send = [&](int64 base, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = row_of(base, r);
      if (row < a.rows) {
        auto line = a.load.at(row);
        if constexpr (kOneAddress) line.hide();
        if constexpr (kSpans && kLone == 0) line.count_kept_from(col(0));
        const char* const from = static_cast<const char*>(line.address(col(0)));
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (!has(p)) continue;
          if constexpr (kSpans) {
            if (!line.template reads<kPack>(further(p))) continue;
          }
          if constexpr (Shape::kStages == 0) continue;
          else if constexpr (!Load::kDirect) line.template send<kPack, Shape::kBlock>(waiting(stage, r, p), threadIdx.x, col(p));
          else if constexpr (kParts > 1) copy_ahead<16>(waiting(stage, r, p), from + p * (kGroup * kPack * int(sizeof(Type))));
          else copy_ahead<16>(waiting(stage, r, p), line.address(col(p)));
        }
      }
    }
    commit_copies();  // an empty group too: wait counts groups
  };
  // What is sent of another row is that row's share.
  auto as_of = [&](int64 base, auto send_it) {
    const Share own = share;
    if constexpr (Shape::kFixed) share = share_at(base);
    send_it();
    if constexpr (Shape::kFixed) share = own;
  };
  // The first few rows of a cluster are given, the others claimed one turn ahead by the first block's first thread, which notes them for the
  // others as they meet.
  constexpr int kAhead = Shape::kStages;
  const unsigned teams = gridDim.x / kParts, given = (kAhead + 1) * teams;
  const bool claimer = kClaims && part == 0 && threadIdx.x == 0;
  unsigned claimed = blockIdx.x / kParts - teams;
  if (claimer) claimed = claim_next(claimed, teams);
  auto rows_ahead = [&](int64 base) {
    if constexpr (kClaims) {
      const unsigned row = mails[(turn ^ 1) % 2].note.x;
      if (threadIdx.x == 0) coming[(turn + kAhead) % kTurns] = row;
      return int64(row);
    }
    return base + kAhead * step;
  };
  if constexpr (Shape::kStages > 0) {
#pragma unroll
    for (int s = 0; s < Shape::kStages; ++s) as_of(first + s * step, [&] { send(first + s * step, s); });
    if constexpr (kLone > 0) send_around(first);
  }
  if constexpr (Shape::kFixed) fetch_numbers(), lend_numbers();
  if constexpr (kParts == 1) assume(first < limit);  // a grid has no more blocks than there are rows for
  auto next = [&](int64 base) {
    if constexpr (kLends && !Shape::kFixed) __syncthreads();  // the numbers have been read
    if constexpr (kClaims) return int64(kAhead > 0 ? coming[turn] : mails[(turn ^ 1) % 2].note.x);
    if constexpr (kOneSet && !kLends) {
      if (base + step < limit) __syncthreads();  // the slots have been read
    }
    return base + step;
  };
  for (int64 base = first; base < limit; base = next(base)) {
    if constexpr (Shape::kStages > 0) wait_for_copies<(Shape::kStages > 0 ? Shape::kStages - 1 : 0)>();
    if constexpr (kAll) assume(base < a.rows);
    Loaded loaded[kRows][kPacks];
    typename Load::Line lines[kRows];
    typename Store::Line targets[kRows];
    typename Store::template Ahead<kPack> ahead[kRows][kPacks];
    typename Store::template Ahead<1> ahead_alone[kRows];
    bool keeps_alone[kRows];
    unsigned keeps[kRows];     // a bit for each element: it is not dropped
    bool some[kRows][kPacks];  // kSpans: a lane of this warp keeps something of that pack
    bool there[kRows];         // the row is not past the last
    Compute origin[kRows], x[kRows][kElements];
    State mine[kRows], total[kRows];
    if constexpr (kLone > 0 && (Shape::kStages == 0 || Shape::kFixed)) {
      if constexpr (Shape::kHoist % 4 < 2) share = share_at(row_of(base, 0));
      if constexpr (Shape::kStages == 0) send_around(base);
    }
    if constexpr (kLends && !Shape::kFixed) fetch_numbers();
    auto load_row = [&](int r, bool here) {
      const auto line = lines[r];
      if constexpr (kLone > 0 && !Load::kDirect && Shape::kStages == 0)
        around[r] = here && alone() ? line.template load<1>(lone()) : Load::template absent<1>(Op::padding());
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if constexpr (kSpans) {
          const bool reads = ((kFull && kMayRepeat) || (here && has(p))) && line.template reads<kPack>(further(p));
          some[r][p] = any_lane(reads);
          if (reads && Shape::kStages > 0) loaded[r][p] = line.template sent<kPack, Shape::kBlock>(waiting(stage, r, p), threadIdx.x, col(p));
          else if (reads) loaded[r][p] = line.template load_kept<kPack>(col(p));
          else loaded[r][p] = {};  // or its registers are taken from the begin on
        } else if (kAnyway || (here && has(p))) {
          if constexpr (kSentLater) continue;
          else if constexpr (Shape::kStages > 0 && !Load::kDirect) loaded[r][p] = line.template sent<kPack, Shape::kBlock>(waiting(stage, r, p), threadIdx.x, col(p));
          else if constexpr (Shape::kStages > 0) loaded[r][p] = load_pack<Type, kPack>(reinterpret_cast<const Type*>(waiting(stage, r, p)));
          else if constexpr (Shape::kPeel == 2) loaded[r][p] = line.template load_anywhere<kPack>(col(p));
          else loaded[r][p] = line.template load<kPack>(col(p));
        } else {
          loaded[r][p] = Load::template absent<kPack>(Op::padding());
        }
        if constexpr (Store::kAhead) {
          if (kAnyway || (here && has(p))) ahead[r][p] = targets[r].template ahead<kPack>(col(p));
        }
      }
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64 row = row_of(base, r);
      const bool here = row < a.rows;
      lines[r] = a.load.at(here ? row : 0);
      if constexpr (kOneAddress && !Load::kDirect) lines[r].hide();
      if constexpr (kSpans && kLone == 0) lines[r].count_kept_from(col(0));
      if constexpr (Store::kAhead) targets[r] = a.store.at(here ? row : 0);
      if constexpr (Store::kAhead && kSpans) targets[r].hide();
      there[r] = here;
      load_row(r, here);
      if constexpr (kLone > 0 && Store::kAhead) {
        if (here && alone()) ahead_alone[r] = targets[r].template ahead<1>(lone());
      }
    }
    if constexpr (Shape::kHoist == 1) {
      if constexpr (kLone > 0) {
        const auto begin = columns_from();
#pragma unroll
        for (int p = 0; p < kPacks; ++p) columns[p] = parameters_from(begin, p);
      } else {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) columns[p] = parameters(p);
      }
      if constexpr (kLone > 0) {
        if (alone()) column = a.store.template columns<1>(lone());
      }
    }
    if constexpr (kLone > 0) begin_next_of();
    if constexpr (kLends && !Shape::kFixed) lend_numbers();
    // how many elements of a row this thread holds, and how many its warp, or its group if that is less
    int held = 0, count = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      held += has(p);
      const int left = share.packs - p * kGroup - lane / kLanes * kLanes;
      count += p < kSure || left > kLanes ? kLanes : left < 0 ? 0 : left;
    }
    if constexpr (Shape::kFixed) {
      const int left = share.heads + share.tails - lane / kLanes * kLanes;
      count = count * kPack + (left > kLanes ? kLanes : left < 0 ? 0 : left);
    } else {
      count = count * kPack + (lane < kLanes ? share.heads + share.tails : 0);
    }
    const Valid<kSure * kPack, kLone, (kParts > 1 ? 2 : 1)> valid = {held * kPack, alone()};
    auto unpack_all = [&](int r) {
      if constexpr (Load::kDrops) keeps[r] = 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        Compute* const values = x[r] + p * kPack;
        if (Load::kDirect || has(p)) {
          if constexpr (kSentLater) loaded[r][p] = lines[r].template sent<kPack, Shape::kBlock>(waiting(stage, r, p), threadIdx.x, col(p));
          const unsigned bits = lines[r].template unpack<kPack>(loaded[r][p], values, col(p), Op::padding());
          if constexpr (Load::kDrops) keeps[r] |= bits << (p * kPack);
          if constexpr (Load::kKeeps) {
            if (row_of(base, r) < a.rows) lines[r].template keep<kPack, (kLone > 0)>(values, col(p));
          }
        } else {
#pragma unroll
          for (int i = 0; i < kPack; ++i) values[i] = Op::padding();
        }
      }
    };
    // kSpans: all packs of which the mask keeps all, or one of which it keeps something
    auto unpack_inside = [&](int r) {
      if constexpr (kSpans) {
        keeps[r] = ~0u;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) lines[r].template unpack_kept<kPack>(loaded[r][p], x[r] + p * kPack, col(p));
      }
    };
    auto unpack_some = [&](int r, int p) {
      if constexpr (kSpans) {
        Compute* const values = x[r] + p * kPack;
        lines[r].template unpack_kept<kPack>(loaded[r][p], values, col(p));
        // what is behind this block's packs is another's, or around all packs
        const unsigned bits = has(p) ? lines[r].template bits<kPack>(loaded[r][p], further(p)) : 0;
        keeps[r] |= bits << (p * kPack);
        if (any_lane(bits != ~0u >> (32 - kPack))) {  // most packs are within what is kept
#pragma unroll
          for (int i = 0; i < kPack; ++i) values[i] = bits >> i & 1 ? values[i] : Op::padding();
        }
      }
    };
    auto columns_of = [&](int p) {
      if constexpr (Shape::kHoist % 2 == 1) return columns[p];
      else if constexpr (Shape::kHoist == 2) return kept_columns(p);
      else return parameters(p);
    };
    auto drop = [&](int r, int p) {
      if constexpr (kSpans && Store::kAhead) {
        if (!there[r] || !has(p)) return;
        Compute y[kPack];
#pragma unroll
        for (int i = 0; i < kPack; ++i) y[i] = Op::dropped();
        targets[r].template store<kPack, (kLone > 0)>(y, columns_of(p), ahead[r][p], col(p));
      }
    };
    auto unpack_alone = [&](int r) {
      Compute* const value = x[r] + kPacked;
      if constexpr (Load::kDirect) {
        unpack<1>(around[r], value);
      } else {
        *value = Op::padding();
        keeps_alone[r] = false;
        if (alone() && lines[r].template reads<1>(lone())) {
          keeps_alone[r] = lines[r].template unpack<1>(around[r], value, lone(), Op::padding());
          if constexpr (Load::kKeeps) {
            if (row_of(base, r) < a.rows) lines[r].template keep<1>(value, lone());
          }
        }
      }
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kEarly) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (!some[r][p]) drop(r, p);
        }
      }
      if constexpr (kSpans) {
        if constexpr (kLone > 0) unpack_alone(r);
        if (all_lanes(has(kPacks - 1) && lines[r].keeps_all(further(0), further(kPacks - 1) + kPack))) {
          unpack_inside(r);
          mine[r] = Op::summarize(x[r], valid, Compute(0));
        } else {
          keeps[r] = 0;
          mine[r] = Op::template summarize_some<kPack>(x[r], some[r], [&](int p) { unpack_some(r, p); });
        }
        origin[r] = 0;
        total[r] = reduce_lanes<Op, false, kLanes>(mine[r]);
        continue;
      }
      unpack_all(r);
      if constexpr (kLone > 0) unpack_alone(r);
      origin[r] = 0;
      if constexpr (Op::kHasOrigin) {  // each warp takes its own: the row's would be one more access to memory
        constexpr int kLeading = kPacks > 1 ? kPacked - kPack : kPack;  // a warp's first lane may miss its last pack
        Compute leading[kLeading < 4 ? kLeading : 4];
#pragma unroll
        for (int i = 0; i < (kLeading < 4 ? kLeading : 4); ++i) leading[i] = x[r][i];
        origin[r] = __shfl_sync(kAllLanes, Op::origin_of(leading, Digits()), 0, kLanes);
      }
      total[r] = summarize_lanes<Op, kFull, kShort, (kParts > 1), kLanes>(x[r], valid, count, origin[r], mine[r]);
    }
    // the row is in registers, and has been used: its place is free
    if constexpr (Shape::kStages > 0) {
      const int64 last = rows_ahead(base);
      if constexpr (Shape::kFixed) {
        const int64 next = kAhead == 1 ? last : int64(coming[(turn + 1) % kTurns]);
        as_of(next, [&] { send_around(next); });
      } else if constexpr (kLone > 0) {
        send_around(base + step);
      }
      as_of(last, [&] { send(last, stage); });
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
    if constexpr (kWarps > 1) reduce_warps<Op, kEvenly, kSlots>(total, origin, slots[kParts > 1 ? turn % 2 : kOneSet ? 0 : turn], group, lane / kWarp);
    if constexpr (kParts > 1) {
      // what a branch decides here the compiler would carry through the reduction, twice
      reduce_blocks<Op, kFull>(total[0], origin[0], mails[turn % 2], part, turn / 2 % 2, given + claimed);
      if (claimer) {
        const unsigned rows = unsigned(a.rows), all = (rows > given ? rows - given : 0) + teams;  // each claims until it finds none
        if (given + claimed < rows) {
          claimed = claim_next(claimed, teams);
        } else {
          if (claimed + 1 == all) forget_claims(all);
          claimed = kNoRow;
        }
      }
    }
    turn = kWarps == 1 ? 0 : kParts > 1 ? (turn + 1) % kTurns : turn ^ 1;
    // Those of all of a block's rows wait as numbers where a thread has few: int8, 128 columns, 0.86 to 0.89 of the copy rate. (In shared
    // memory numbers take too much of it: 4096 columns 0.945 to 0.87.)
    constexpr bool kNumbers = Shape::kHoist == 3 && Store::kScales && kPacked <= 16;
    if constexpr (Shape::kHoist % 2 == 1 && !kNumbers) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) columns[p].hide();
    }
    if constexpr (kLone > 0 && Shape::kHoist > 0 && !kLends) column.hide();
    if constexpr (Store::kAhead) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) ahead[r][p].hide();
        if constexpr (kLone > 0) ahead_alone[r].hide();
      }
    }
    // Before the stores: later it would take registers. Few ask for it, which all threads know at once: an instruction or two less, but ragged
    // rows of many packs have no register for it.
    auto save = [&](int64 row, const typename Op::Row& whole) {
      if ((!kFull || kParts > 1 || a.op.saves()) && lane == 0 && part == 0) a.op.save(row, whole);
    };
    auto map = [&](int r, int p, const typename Op::Row& whole, Compute (&y)[kPack]) {
      if constexpr (kSpans && Store::kScales) {
        if (!some[r][p]) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) y[i] = Op::dropped();
          return;
        }
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) y[i] = Op::map(x[r][p * kPack + i], whole);
      if constexpr (Load::kDrops) {
        if (!Op::drops_padding(whole)) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) y[i] = keeps[r] >> (p * kPack + i) & 1 ? y[i] : Op::dropped();
        }
      }
    };
    auto map_alone = [&](int r, const typename Op::Row& whole, Compute (&y)[1]) {
      y[0] = Op::map(x[r][kPacked], whole);
      if constexpr (Load::kDrops) {
        if (!Op::drops_padding(whole)) y[0] = keeps_alone[r] ? y[0] : Op::dropped();
      }
    };
    auto column_alone = [&] {
      if constexpr (kLends) return Scalings<Number, 1>{{numbers[Room::place(lone() - lent_from)]}};
      else if constexpr (Shape::kHoist > 0) return column;
      else return a.store.template columns<1>(lone());
    };
    if constexpr (Store::kScales) {
      find_numbers();
      auto own_columns = [&](int p) {
        if constexpr (kLends) return borrow_numbers(p);
        else return columns_of(p);
      };
      typename Largest::State largest[kRows];
      typename Op::Row whole[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        whole[r] = a.op.finish(mine[r], total[r], cols, origin[r]);
        if (row_of(base, r) < a.rows) save(row_of(base, r), whole[r]);
        largest[r] = Largest::identity();
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!has(p)) continue;
        decltype(own_columns(p)) own;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          Compute y[kPack], z[kPack];
          map(r, p, whole[r], y);
          if (r == 0) own = own_columns(p);  // made numbers of once for all rows
          Store::template finish<kPack>(y, own, z);
          largest[r] = Largest::template merge<false>(largest[r], Largest::of(z));
#pragma unroll
          for (int i = 0; i < kPack; ++i) x[r][p * kPack + i] = z[i];
        }
      }
      if constexpr (kLone > 0) {
        if (alone()) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            Compute y[1], z[1];
            map_alone(r, whole[r], y);
            Store::template finish<1>(y, column_alone(), z);
            largest[r] = Largest::template merge<false>(largest[r], Largest::of(z));
            x[r][kPacked] = z[0];
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        largest[r] = reduce_lanes<Largest, false, kLanes>(largest[r]);
        origin[r] = 0;
      }
      if constexpr (kWarps > 1) reduce_warps<Largest, false, kSlots>(largest, origin, largest_slots, group, lane / kWarp);
      if constexpr (kParts > 1) {
        reduce_blocks<Largest, false>(largest[0], origin[0], largest_mail, part, largest_parity);
        largest_parity ^= 1;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64 row = row_of(base, r);
        if (row >= a.rows) continue;
        const auto scale = a.store.scale_of(largest[r].max);
        if (lane == 0 && part == 0) a.store.save(row, scale);
        const auto line = a.store.at(row);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (!has(p)) continue;
          Compute z[kPack];
#pragma unroll
          for (int i = 0; i < kPack; ++i) z[i] = x[r][p * kPack + i];
          line.template store_scaled<kPack, (kLone > 0)>(z, scale, col(p));
        }
        if constexpr (kLone > 0) {
          if (alone()) {
            const Compute z[1] = {x[r][kPacked]};
            line.template store_scaled<1>(z, scale, lone());
          }
        }
      }
    } else {
      find_numbers();
      const auto begin = columns_from();
      auto own_columns = [&](int p) {
        if constexpr (kLends) return borrow_numbers(p);
        else if constexpr (kLone > 0 && Shape::kHoist == 0) return parameters_from(begin, p);
        else return columns_of(p);
      };
      auto target_of = [&](int64 row, int r) {
        if constexpr (Store::kAhead) {
          return targets[r];
        } else if constexpr (kLone == 0) {
          return a.store.at(row);
        } else {
          auto target = a.store.at(row).from(col(0));
          target.hide();
          return target;
        }
      };
      auto put = [&](const auto& target, int r, int p, const typename Op::Row& whole, const auto& own) {
        if constexpr (kSpans) {
          if (!some[r][p]) {
            if constexpr (!kEarly) drop(r, p);
            return;
          }
        }
        Compute y[kPack];
        map(r, p, whole, y);
        if constexpr (Store::kAhead) target.template store<kPack, (kLone > 0)>(y, own, ahead[r][p], col(p));
        else if constexpr (kLone > 0) target.template store<kPack, true>(y, own, p * (kGroup * kPack));
        else target.template store<kPack>(y, own, col(p));
      };
      auto put_lone = [&](int64 row, int r, const typename Op::Row& whole) {
        if constexpr (kLone > 0) {
          if (!alone()) return;
          Compute y[1];
          map_alone(r, whole, y);
          if constexpr (Store::kAhead) targets[r].template store<1>(y, column_alone(), ahead_alone[r], lone());
          else a.store.at(row).template store<1>(y, column_alone(), lone());
        }
      };
      if constexpr (kRows > 1) {
        if (row_of(base, kRows - 1) < a.rows) {  // a pack's parameters are made numbers of once for all rows
          typename Op::Row whole[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            whole[r] = a.op.finish(mine[r], total[r], cols, origin[r]);
            save(row_of(base, r), whole[r]);
            targets[r] = target_of(row_of(base, r), r);
          }
#pragma unroll
          for (int p = 0; p < kPacks; ++p) {
            if (!has(p)) continue;
            const auto own = own_columns(p);
#pragma unroll
            for (int r = 0; r < kRows; ++r) put(targets[r], r, p, whole[r], own);
          }
#pragma unroll
          for (int r = 0; r < kRows; ++r) put_lone(row_of(base, r), r, whole[r]);
          continue;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64 row = row_of(base, r);
        if (kSpans ? !there[r] : row >= a.rows) continue;
        const typename Op::Row whole = a.op.finish(mine[r], total[r], cols, origin[r]);
        save(row, whole);
        const auto target = target_of(row, r);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (has(p)) put(target, r, p, whole, own_columns(p));
        }
        put_lone(row, r, whole);
      }
    }
  }
}

}  // namespace cupynorm
