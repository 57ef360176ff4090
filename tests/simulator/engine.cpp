// Runs launches: a block is one fiber a thread on one OS thread, in an order chosen to show what barriers are missing.
// Blocks that may wait for one another (a cluster, or the grid of a cooperative launch) form a gang: they are alive
// together, each on an OS thread of its own, and take turns.
#include "simulator.h"

#include <link.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// ---- context switch: saves where we are in *save, goes on where `to` was saved -------------------------------------

extern "C" void simulator_switch(void** save, void* to);

#if defined(__x86_64__) && !defined(SIMULATOR_UCONTEXT)
asm(R"(.text
.globl simulator_switch
.hidden simulator_switch
simulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
// Six registers and the return address; at its entry rsp % 16 is 8, as after a call.
static void* first_context(char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes) - 2;
  *top = reinterpret_cast<void*>(entry);
  return top - 6;
}
#elif defined(__aarch64__) && !defined(SIMULATOR_UCONTEXT)
asm(R"(.text
.globl simulator_switch
.hidden simulator_switch
simulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0];   stp x21, x22, [sp, #16];  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48];  stp x27, x28, [sp, #64];  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96];    stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0];   ldp x21, x22, [sp, #16];  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48];  ldp x27, x28, [sp, #64];  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96];    ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static void* first_context(char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes) - 20;
  top[11] = reinterpret_cast<void*>(entry);  // x30
  return top;
}
#else  // slower: each switch asks the kernel about signals
#include <ucontext.h>
extern "C" void simulator_switch(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
static void* first_context(char* stack, size_t bytes, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(stack + bytes - (sizeof(ucontext_t) + 63) / 64 * 64);
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = reinterpret_cast<char*>(context) - stack;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

namespace simulator {

__thread uint3 thread_index, block_index, block_shape, grid_shape;

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStack = 256 << 10;
#else
constexpr size_t kStack = 64 << 10;
#endif
constexpr Word kStackEnd = 0x5afe57acc0ffee00;  // at the far end of each stack: overwritten if the stack was too small
// all bits set: nan in every floating type, and no kernel computes that nan
constexpr int kPoison = 0xff;
constexpr unsigned kMaxThreads = 1024;

// kHeld: has arrived at a barrier of several blocks, and goes on when nobody else can.
enum class State : unsigned char { kReady, kAtLanes, kAtBlock, kAtCluster, kAtGrid, kAtWord, kHeld, kExited };
enum Scope { kCluster, kGrid };

// A barrier of several blocks opens, again and again, when as many threads have arrived as are expected.
struct Barrier {
  int expected, arrived;
  unsigned opened;  // how often
};

// What a thread brought to such a barrier, until it has waited.
struct Arrival {
  unsigned opening;  // which one it waits for, counted from 1; 0 if it has not arrived
  Site site;
};

struct Fiber {
  void* context;
  State state;
  uint3 index;
  // what it waits for
  Meeting meeting;
  unsigned mask;
  int source;
  Word value;  // what it brought; after the meeting, what it got
  Site site;
  unsigned groups;  // of asynchronous copies, committed so far
  Arrival arrivals[2];  // by Scope
  const void* at;  // what another thread is to write, and whether it has
  bool (*written)(const void*);
  bool gave_up;  // waiting for it
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes, group;
};

struct Warp {
  unsigned present, waiting, exited;
};

// Stacks for one block of the largest size. They are kept from launch to launch, as long as no more than kKept threads
// have run on those that are: fresh pages cost more than the kernel.
// Only the two ends of a stack are written as a rule, and only written pages take memory. A stack's far end, of which
// one word is looked at, is all but at the end of a page, the rest of which is the near end of another: 4080 bytes,
// which most threads do not exceed. A grid of 132 blocks is 135168 stacks, in as many pages.
class Stacks {
 public:
  explicit Stacks(int threads) : used_(threads) {
    std::lock_guard<std::mutex> hold(lock_);
    if (!free_.empty()) {
      base_ = free_.back().base;
      kept_ -= free_.back().used;
      used_ = std::max(used_, free_.back().used);
      free_.pop_back();
      return;
    }
    void* p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) std::perror("simulator: no memory for stacks"), std::abort();
    base_ = static_cast<char*>(p);
  }
  ~Stacks() {
    std::lock_guard<std::mutex> hold(lock_);
    if (kept_ + used_ <= kKept) free_.push_back({base_, used_}), kept_ += used_;
    else munmap(base_, kBytes);
  }
  char* operator[](int i) const { return base_ + kPage - kWord + kStack * i; }

 private:
  struct Free {
    char* base;
    int used;  // threads that have written to them, at most
  };
  static constexpr size_t kPage = 4096, kWord = 16, kBytes = kStack * kMaxThreads + kPage;
  static constexpr int kKept = 132 * kMaxThreads;
  char* base_ = nullptr;
  int used_;
  inline static std::mutex lock_;
  inline static std::vector<Free> free_;
  inline static int kept_ = 0;  // threads that have written to what is free
};

}  // namespace

// ---- a launch, as Python fills it in: keep in step with engine.py -------------------------------------------------

struct Launch {
  void (*entry)(void** arguments);
  unsigned char* (*shared)();  // this OS thread's dynamic shared memory
  void** arguments;
  unsigned grid[3], block[3];
  unsigned shared_bytes;    // asked for
  unsigned shared_extent;   // that the array has
  unsigned schedule;        // 0 forward, 1 reverse, else a seed
  unsigned os_threads;      // that run at the same time
  unsigned cluster;         // blocks along x of one cluster
  unsigned cooperative;     // 1: a grid whose blocks may meet
  // a write of another stream while the launch runs; none for 0 bytes
  unsigned char* beside_to;
  const unsigned char* beside_from;
  uint64_t beside_bytes;

  unsigned threads() const { return block[0] * block[1] * block[2]; }
  uint64_t blocks() const { return uint64_t(grid[0]) * grid[1] * grid[2]; }
  unsigned gang() const { return cooperative ? unsigned(blocks()) : cluster; }  // blocks that are alive together
};

namespace {

using Places = std::map<std::string, int>;  // how many threads are at each

bool same_place(const Site& a, const Site& b) { return a.line == b.line && !std::strcmp(a.file, b.file); }

std::string tell(const Places& places, int total, const char* doing) {
  std::string text;
  for (const auto& [place, count] : places)
    text += "; " + std::to_string(count) + " of " + std::to_string(total) + " threads " + doing + " " + place;
  return text;
}

class Random {  // splitmix64
 public:
  void seed(const Launch& launch, uint64_t number) { state_ = launch.schedule * 0x2545f4914f6cdd1dull + number; }
  uint64_t operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  void permute(std::vector<int>& order) {
    for (int i = int(order.size()) - 1; i > 0; --i) std::swap(order[i], order[(*this)() % (i + 1)]);
  }

 private:
  uint64_t state_ = 0;
};

// What the gangs of one launch share.
struct Progress {
  explicit Progress(uint64_t gangs) : gangs(gangs) {}

  const uint64_t gangs;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::string error;  // of the first to fail

  void fail(const std::string& what) {
    if (!failed.exchange(true)) error = what;
  }
};

class Block;

// The blocks that are alive together: one, a cluster, or the grid of a cooperative launch. One block runs at a time,
// until none of its threads can go on. So results depend on the schedule alone, and the running block may look at the
// others.
class Gang {
 public:
  Gang(const Launch& launch, Progress& progress)
      : launch_(launch),
        progress_(progress),
        blocks_(launch.gang()),
        woken_(launch.gang()),
        clusters_(launch.gang() / launch.cluster) {}

  // Waits for the others of the gang, and then for this block's first turn. Gives false when no blocks are left to run.
  bool enter(Block& block, int rank);
  // Hands the turn on and waits until it comes back. Gives false when all blocks have ended, or one has failed.
  bool pass(int rank);

  uint64_t number() const { return number_; }  // counted over the grid
  Block& block(int rank) const { return *blocks_[rank]; }
  Barrier& barrier(Scope scope, int rank) { return scope == kGrid ? grid_ : clusters_[rank / launch_.cluster]; }
  bool failed() const { return !error_.empty(); }
  void fail(const std::string& what) {
    if (!failed()) error_ = what;
  }

 private:
  static constexpr int kNobody = -1, kDismissed = -2;  // between two runs; after the last, or a failure
  void begin();
  int choose();
  bool release();
  bool give_up();
  void write_beside();
  void report_stuck();
  void shuffle_order();

  const Launch& launch_;
  Progress& progress_;
  std::vector<Block*> blocks_;
  std::vector<std::condition_variable> woken_;
  std::vector<Barrier> clusters_;
  Barrier grid_{};
  std::mutex lock_;
  int present_ = 0, turn_ = kNobody;
  uint64_t number_ = 0;
  std::vector<int> order_;
  Random random_;
  std::string error_;
};

class Block {
 public:
  Block(const Launch& launch, Gang& gang, int rank)
      : launch_(launch),
        gang_(gang),
        rank_(rank),
        total_(int(launch.threads())),
        fibers_(total_),
        warps_((total_ + 31) / 32),
        copies_(total_),
        stacks_(total_) {
    dynamic_ = launch.shared();
    find_shared();
  }
  ~Block() { allow_shared(); }

  // Runs the block of this rank in one set of blocks after the other, until none is left.
  void run();

  bool has_ended() const { return begun_ && exited_ == total_; }
  bool can_go_on() const { return !begun_ || released_; }
  bool has_any(State state) const {
    return std::any_of(fibers_.begin(), fibers_.end(), [=](const Fiber& f) { return f.state == state; });
  }
  bool release();
  bool give_up();
  void check_arrivals(Scope scope);
  void check_untouched();
  void count_places(Places& places, int& exited) const;

  void meet_block(Site site) {
    fibers_[current_].site = site;
    wait(State::kAtBlock);
  }
  Word meet_lanes(Meeting meeting, unsigned mask, Word value, int source, Site site);
  void arrive(Scope scope, Site site);
  void wait_at(Scope scope, Site site);
  int of_cluster() const { return rank_ % int(launch_.cluster); }
  void* of_block(void* shared, int block, Site site);
  bool await_written(const void* at, bool (*written)(const void*), Site site) {
    Fiber& fiber = fibers_[current_];
    fiber.site = site, fiber.at = at, fiber.written = written, fiber.gave_up = false;
    if (!written(at)) wait(State::kAtWord);
    return !fiber.gave_up;
  }
  void copy_later(const Copy& copy, Site site);
  void commit_copies() { ++fibers_[current_].groups; }
  void wait_for_copies(unsigned newest);
  void fail(const std::string& what);
  const Launch& launch() const { return launch_; }
  int current() const { return current_; }
  std::string where_last() const { return current_ < 0 ? "" : describe(fibers_[current_].site); }

  static std::string describe(const Site& site) {
    if (!site.file) return "the kernel's start";
    return std::string(site.call) + " at " + site.file + ":" + std::to_string(site.line);
  }

 private:
  static void run_thread();
  void resume(int thread);
  void leave();
  void wait(State state) {
    fibers_[current_].state = state;
    leave();
  }
  void begin(uint64_t number);
  void go_on();
  bool run_warp(int warp);
  void shuffle_orders();
  bool open_barrier();
  void leave_barriers();
  void find_shared();
  void poison_shared();
  void allow_shared();
  void check_after();
  void forget_shared();
  bool wanders() const { return launch_.schedule > 2 && launch_.schedule % 2; }

  const Launch& launch_;
  Gang& gang_;
  const int rank_;  // in the gang
  const int total_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<std::vector<Copy>> copies_;  // of each thread, those not made yet
  std::vector<int> warp_order_, lane_order_;
  Stacks stacks_;
  void* scheduler_ = nullptr;
  int current_ = -1, exited_ = 0;
  bool begun_ = false, released_ = false;
  uint3 index_{};
  Random random_;
  unsigned char *dynamic_, *segment_ = nullptr;  // the kernel's shared memory: all of it is one thread-local segment
  size_t segment_bytes_ = 0;
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_bytes_ = 0;
#endif
};

__thread Block* running = nullptr;

// ---- switching between the scheduler and a thread of the block ----

void Block::run_thread() {
  Block& block = *running;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_bytes_);
#endif
  block.launch_.entry(block.launch_.arguments);
  block.warps_[block.current_ / 32].exited |= 1u << block.current_ % 32;
  ++block.exited_;
  block.leave_barriers();
  block.wait(State::kExited);
}

void Block::resume(int thread) {
  current_ = thread;
  thread_index = fibers_[thread].index;
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stacks_[thread], kStack);
#endif
  simulator_switch(&scheduler_, fibers_[thread].context);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  current_ = -1;
}

void Block::leave() {
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, scheduler_stack_, scheduler_bytes_);
#endif
  simulator_switch(&fibers_[current_].context, scheduler_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_bytes_);
#endif
}

// From a thread of the block: never comes back. From the scheduler: returns.
void Block::fail(const std::string& what) {
  auto triple = [](const uint3& t) {
    return "(" + std::to_string(t.x) + ", " + std::to_string(t.y) + ", " + std::to_string(t.z) + ")";
  };
  const std::string thread = current_ < 0 ? "" : ", thread " + triple(fibers_[current_].index);
  gang_.fail(what + " [block " + triple(index_) + thread + "]");
  if (current_ >= 0) wait(State::kExited);
}

// ---- meetings ----

Word Block::meet_lanes(Meeting meeting, unsigned mask, Word value, int source, Site site) {
  const int lane = current_ % 32, first = current_ - lane;
  Warp& warp = warps_[current_ / 32];
  Fiber& self = fibers_[current_];
  self.meeting = meeting, self.mask = mask, self.source = source, self.value = value, self.site = site;
  if (!(mask >> lane & 1)) fail("lane " + std::to_string(lane) + " is not in the mask it passes to " + describe(site));
  warp.waiting |= 1u << lane;
  const unsigned needed = mask & warp.present;
  bool complete = (warp.waiting & needed) == needed;
  for (unsigned left = needed; complete && left; left &= left - 1) {
    const Fiber& other = fibers_[first + __builtin_ctz(left)];
    complete = other.mask == mask && other.meeting == meeting;
  }
  if (!complete) {
    wait(State::kAtLanes);
    return self.value;
  }
  // The last to come reads for all: nobody can change what it brought before everyone has got it.
  Word brought[32], votes = 0;
  for (unsigned left = needed; left; left &= left - 1) {
    const int each = __builtin_ctz(left);
    brought[each] = fibers_[first + each].value;
    if (brought[each]) votes |= Word(1) << each;
  }
  for (unsigned left = needed; left; left &= left - 1) {
    Fiber& each = fibers_[first + __builtin_ctz(left)];
    if (meeting == Meeting::kShuffle) {
      if (each.source < 0 || each.source > 31 || !(needed >> each.source & 1)) {
        fail("lane " + std::to_string(__builtin_ctz(left)) + " reads lane " + std::to_string(each.source) +
             ", which takes no part, in " + describe(each.site));
      }
      each.value = brought[each.source];
    } else {
      each.value = votes;
    }
    each.state = State::kReady;
  }
  warp.waiting &= ~needed;
  if (wanders() && random_() % 2) wait(State::kReady);
  return self.value;
}

void Block::count_places(Places& places, int& exited) const {
  for (const Fiber& fiber : fibers_) {
    if (fiber.state == State::kExited) continue;
    char mask[32] = "";
    if (fiber.state == State::kAtLanes) std::snprintf(mask, sizeof mask, " with mask 0x%08x", fiber.mask);
    ++places[describe(fiber.site) + mask];
  }
  exited += exited_;
}

// Gives false unless every thread waits at the block's barrier, and at the same one.
bool Block::open_barrier() {
  auto waits = [](const Fiber& f) { return f.state == State::kAtBlock; };
  auto elsewhere = [&](const Fiber& f) { return !same_place(f.site, fibers_[0].site); };
  if (!std::all_of(fibers_.begin(), fibers_.end(), waits)) return false;
  if (std::any_of(fibers_.begin(), fibers_.end(), elsewhere)) {
    Places places;
    for (const Fiber& fiber : fibers_) ++places[describe(fiber.site)];
    fail("divergent __syncthreads" + tell(places, total_, "wait in"));
    return false;
  }
  for (Fiber& fiber : fibers_) fiber.state = State::kReady;
  return true;
}

// ---- barriers of several blocks ----

void Block::arrive(Scope scope, Site site) {
  Fiber& self = fibers_[current_];
  Arrival& arrival = self.arrivals[scope];
  self.site = site;
  if (scope == kGrid && !launch_.cooperative)
    fail("only a cooperative launch has a barrier of the grid: " + describe(site));
  if (arrival.opening)
    fail("a second arrival, the first was in " + describe(arrival.site) + " and nobody has waited since: " +
         describe(site));
  Barrier& barrier = gang_.barrier(scope, rank_);
  arrival = {barrier.opened + 1, site};
  ++barrier.arrived;
  // What comes between the arrival and the wait happens at once under "forward", as late as it may under "reverse".
  if (launch_.gang() > 1 && (launch_.schedule == 1 || (launch_.schedule > 1 && random_() % 2))) wait(State::kHeld);
}

void Block::wait_at(Scope scope, Site site) {
  Fiber& self = fibers_[current_];
  Arrival& arrival = self.arrivals[scope];
  self.site = site;
  if (!arrival.opening) fail("a wait without an arrival before it: " + describe(site));
  if (gang_.barrier(scope, rank_).opened < arrival.opening) wait(scope == kGrid ? State::kAtGrid : State::kAtCluster);
  arrival.opening = 0;
}

// A cluster's barrier counts the threads that have not exited; the grid's barrier, built by the kernel, counts all.
void Block::leave_barriers() {
  Barrier& barrier = gang_.barrier(kCluster, rank_);
  --barrier.expected;
  if (fibers_[current_].arrivals[kCluster].opening > barrier.opened) --barrier.arrived;
}

// Lets those go on whose barrier has opened, and those that were held. Gives false if there are none.
bool Block::release() {
  for (Fiber& fiber : fibers_) {
    auto opened = [&](State state, Scope scope) {
      return fiber.state == state && gang_.barrier(scope, rank_).opened >= fiber.arrivals[scope].opening;
    };
    const bool written = fiber.state == State::kAtWord && fiber.written(fiber.at);
    if (written || fiber.state == State::kHeld || opened(State::kAtCluster, kCluster) || opened(State::kAtGrid, kGrid))
      fiber.state = State::kReady, released_ = true;
  }
  return released_;
}

// Lets those go on that wait for a word, which nobody will write now. Gives false if there are none.
bool Block::give_up() {
  for (Fiber& fiber : fibers_) {
    if (fiber.state == State::kAtWord) fiber.state = State::kReady, fiber.gave_up = released_ = true;
  }
  return released_;
}

// The threads of this block that have arrived at a barrier which is about to open came from one place.
void Block::check_arrivals(Scope scope) {
  const unsigned opened = gang_.barrier(scope, rank_).opened;
  const Site* first = nullptr;
  bool diverged = false;
  for (const Fiber& fiber : fibers_) {
    const Arrival& arrival = fiber.arrivals[scope];
    if (arrival.opening <= opened) continue;
    if (!first) first = &arrival.site;
    diverged = diverged || !same_place(arrival.site, *first);
  }
  if (!diverged) return;
  Places places;
  for (const Fiber& fiber : fibers_)
    if (fiber.arrivals[scope].opening > opened) ++places[describe(fiber.arrivals[scope].site)];
  const std::string blocks = scope == kGrid ? "grid" : "cluster";
  fail("divergent barrier of the " + blocks + tell(places, total_, "arrive in"));
}

void* Block::of_block(void* shared, int block, Site site) {
  fibers_[current_].site = site;
  auto* address = static_cast<unsigned char*>(shared);
  if (address < segment_ || address >= segment_ + segment_bytes_)
    fail("an address outside the shared memory of this block, " + describe(site));
  if (address >= dynamic_ + launch_.shared_bytes && address < dynamic_ + launch_.shared_extent)
    fail("an address past the " + std::to_string(launch_.shared_bytes) +
         " bytes of dynamic shared memory that were asked for, " + describe(site));
  const int width = int(launch_.cluster), own = of_cluster();
  if (block < 0 || block >= width)
    fail("block " + std::to_string(block) + " of a cluster of " + std::to_string(width) + ", " + describe(site));
  const Block& other = gang_.block(rank_ - own + block);
  auto refuse = [&](const char* why) {
    fail("the shared memory of block " + std::to_string(block) + " of the cluster, which " + why + describe(site));
  };
  if (block != own && !gang_.barrier(kCluster, rank_).opened && !gang_.barrier(kGrid, rank_).opened)
    refuse("may not have begun: no barrier was waited for before ");
  if (other.has_ended()) refuse("has exited, ");
  return other.segment_ + (address - segment_);
}

// ---- asynchronous copies ----

void Block::copy_later(const Copy& copy, Site site) {
  if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) % copy.bytes)
    fail("misaligned asynchronous copy of " + std::to_string(copy.bytes) + " bytes, " + describe(site));
  if (launch_.schedule == 0 || (launch_.schedule > 1 && random_() % 2)) std::memcpy(copy.to, copy.from, copy.bytes);
  else copies_[current_].push_back({copy.to, copy.from, copy.bytes, fibers_[current_].groups});
}

void Block::wait_for_copies(unsigned newest) {
  auto& copies = copies_[current_];
  size_t made = 0;
  for (; made < copies.size() && copies[made].group + newest < fibers_[current_].groups; ++made)
    std::memcpy(copies[made].to, copies[made].from, copies[made].bytes);
  copies.erase(copies.begin(), copies.begin() + made);
}

// ---- schedules ----

// Warp by warp: a warp runs on until it can go no further, so that what another warp should have waited for is missing.
// Forward and reverse show every race of two warps between two barriers. Seeds permute anew at each barrier; odd seeds
// also leave a warp in the middle, at its shuffles.
void Block::shuffle_orders() {
  const int warps = int(warps_.size());
  warp_order_.resize(warps), lane_order_.resize(32);
  for (int i = 0; i < warps; ++i) warp_order_[i] = launch_.schedule == 1 ? warps - 1 - i : i;
  for (int i = 0; i < 32; ++i) lane_order_[i] = launch_.schedule == 1 ? 31 - i : i;
  if (launch_.schedule < 2) return;
  random_.permute(warp_order_);
  random_.permute(lane_order_);
}

bool Block::run_warp(int warp) {
  bool moved = false;
  for (bool again = true; again && !gang_.failed();) {
    again = false;
    for (int lane : lane_order_) {
      const int thread = warp * 32 + lane;
      if (thread >= total_ || fibers_[thread].state != State::kReady) continue;
      resume(thread);
      if (gang_.failed()) return true;
      again = moved = true;
    }
    if (wanders() && random_() % 2) break;
  }
  return moved;
}

void Block::run() {
  while (begun_ = false, gang_.enter(*this, rank_)) {
    begin(gang_.number() * launch_.gang() + rank_);
    do go_on();
    while (gang_.pass(rank_));
  }
}

void Block::begin(uint64_t number) {
  index_ = {unsigned(number % launch_.grid[0]), unsigned(number / launch_.grid[0] % launch_.grid[1]),
            unsigned(number / launch_.grid[0] / launch_.grid[1])};
  block_index = index_;
  random_.seed(launch_, number);
  exited_ = 0;
  begun_ = true;
  poison_shared();
  for (int i = 0; i < total_; ++i) {
    const unsigned x = launch_.block[0], y = launch_.block[1], t = unsigned(i);
    std::memcpy(stacks_[i], &kStackEnd, sizeof kStackEnd);
    fibers_[i] = Fiber{first_context(stacks_[i], kStack, run_thread), State::kReady,
                       {t % x, t / x % y, t / (x * y)},
                       {}, 0, 0, 0, {}, 0, {}, nullptr, nullptr, false};
    copies_[i].clear();
  }
  for (size_t w = 0; w < warps_.size(); ++w) {
    const int lanes = std::min(32, total_ - int(w) * 32);
    warps_[w] = Warp{lanes == 32 ? 0xffffffffu : (1u << lanes) - 1, 0, 0};
  }
}

// Runs until all threads have exited, or wait for what this block alone cannot give them.
void Block::go_on() {
  released_ = false;
  do {
    shuffle_orders();
    for (bool moved = true; moved && !gang_.failed();) {
      moved = false;
      for (int warp : warp_order_) moved = run_warp(warp) || moved;
    }
  } while (!gang_.failed() && open_barrier());
  if (exited_ == total_ || gang_.failed()) check_after();
  if (launch_.cluster > 1 && exited_ == total_) forget_shared();
}

// ---- gangs ----

bool Gang::enter(Block& block, int rank) {
  std::unique_lock<std::mutex> hold(lock_);
  blocks_[rank] = &block;
  if (turn_ != kDismissed && ++present_ == int(blocks_.size())) {
    begin();
    for (auto& each : woken_) each.notify_one();
  }
  woken_[rank].wait(hold, [&] { return turn_ == rank || turn_ == kDismissed; });
  return turn_ == rank;
}

// Everybody is there: nobody waits in pass().
void Gang::begin() {
  present_ = 0;
  number_ = progress_.failed ? progress_.gangs : progress_.next++;
  if (number_ >= progress_.gangs) {
    turn_ = kDismissed;
    return;
  }
  if (launch_.schedule == 1) number_ = progress_.gangs - 1 - number_;
  for (Barrier& barrier : clusters_) barrier = {int(launch_.threads() * launch_.cluster), 0, 0};
  grid_ = {int(launch_.threads() * launch_.gang()), 0, 0};
  random_.seed(launch_, ~number_);
  shuffle_order();
  turn_ = order_[0];
}

bool Gang::pass(int rank) {
  std::unique_lock<std::mutex> hold(lock_);
  turn_ = choose();
  if (turn_ < 0) {
    if (failed()) progress_.fail(error_);
    for (auto& each : woken_) each.notify_one();
  } else if (turn_ != rank) {
    woken_[turn_].notify_one();
    woken_[rank].wait(hold, [&] { return turn_ == rank || turn_ < 0; });
  }
  return turn_ == rank;
}

int Gang::choose() {
  while (!failed()) {
    for (int rank : order_)
      if (blocks_[rank]->can_go_on()) return rank;
    if (std::all_of(blocks_.begin(), blocks_.end(), [](const Block* b) { return b->has_ended(); })) {
      if (launch_.cluster > 1)
        for (Block* block : blocks_) block->check_untouched();
      return failed() ? kDismissed : kNobody;
    }
    write_beside();
    if (release() || give_up()) shuffle_order();
    else if (!failed()) report_stuck();
  }
  return kDismissed;
}

// Barriers open as late as possible, when no block can go on: blocks then continue in the order of the schedule.
bool Gang::release() {
  auto open = [&](Scope scope, size_t first, size_t blocks) {
    Barrier& barrier = this->barrier(scope, int(first));
    if (!barrier.arrived || barrier.arrived < barrier.expected) return;
    for (size_t i = 0; i < blocks; ++i) blocks_[first + i]->check_arrivals(scope);
    barrier.arrived = 0, ++barrier.opened;
  };
  for (size_t first = 0; first < blocks_.size(); first += launch_.cluster) open(kCluster, first, launch_.cluster);
  open(kGrid, 0, blocks_.size());
  bool any = false;
  for (Block* block : blocks_) any = block->release() || any;
  return any;
}

// Another stream's write happens at the worst moment: when all blocks wait for one another.
void Gang::write_beside() {
  if (launch_.beside_bytes) std::memcpy(launch_.beside_to, launch_.beside_from, launch_.beside_bytes);
}

// Where another stream writes, bounded waits give up, as if their time had passed. Otherwise a missing word is a fault
// of the kernel, and is reported as one.
bool Gang::give_up() {
  bool any = false;
  if (launch_.beside_bytes)
    for (Block* block : blocks_) any = block->give_up() || any;
  return any;
}

void Gang::report_stuck() {
  Places places;
  int exited = 0;
  for (const Block* block : blocks_) block->count_places(places, exited);
  auto find = [&](State state) {
    const auto found = std::find_if(blocks_.begin(), blocks_.end(), [=](const Block* b) { return b->has_any(state); });
    return found == blocks_.end() ? nullptr : *found;
  };
  Block *lanes = find(State::kAtLanes), *cluster = find(State::kAtCluster), *grid = find(State::kAtGrid);
  Block *word = find(State::kAtWord), *block = find(State::kAtBlock);
  std::string text = lanes             ? "deadlock: lanes wait for lanes that never come"
                     : cluster || grid ? "deadlock: threads wait for threads that never arrive"
                     : word            ? "deadlock: threads wait for a word that nobody writes"
                                       : "divergent __syncthreads";
  text += tell(places, int(launch_.threads() * launch_.gang()), "wait in");
  if (exited) text += "; " + std::to_string(exited) + " have exited";
  (lanes ? lanes : block ? block : cluster ? cluster : grid ? grid : word)->fail(text);
}

// Forward and reverse show every race of two blocks between two barriers.
void Gang::shuffle_order() {
  const int size = int(blocks_.size());
  order_.resize(size);
  for (int i = 0; i < size; ++i) order_[i] = launch_.schedule == 1 ? size - 1 - i : i;
  if (launch_.schedule > 1) random_.permute(order_);
}

// ---- shared memory ----

void Block::find_shared() {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) -> int {
        Block& block = *static_cast<Block*>(data);
        auto* begin = static_cast<unsigned char*>(info->dlpi_tls_data);
        for (int i = 0; begin && i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_TLS || block.dynamic_ < begin || block.dynamic_ >= begin + header.p_memsz) continue;
          block.segment_ = begin, block.segment_bytes_ = header.p_memsz;
          return 1;
        }
        return 0;
      },
      this);
}

// Before each block: static arrays and dynamic memory hold poison, and so do the bytes behind those asked for.
void Block::poison_shared() {
  allow_shared();
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stacks_[0], kStack * total_);  // of threads that never unwound
#endif
  std::memset(segment_, kPoison, segment_bytes_);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(dynamic_ + launch_.shared_bytes, launch_.shared_extent - launch_.shared_bytes);
#endif
}

void Block::allow_shared() {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(segment_, segment_bytes_);
#endif
}

// memcmp compares each byte with the one before it, many at a time.
bool is_poison(const unsigned char* bytes, size_t count) {
  return !count || (*bytes == kPoison && !std::memcmp(bytes, bytes + 1, count - 1));
}

// After a block's end its memory is nobody's: what another block still reads there is poison, what it writes is seen.
void Block::forget_shared() {
  std::memset(segment_, kPoison, segment_bytes_);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(segment_, segment_bytes_);
#endif
}

void Block::check_untouched() {
  allow_shared();
  if (!is_poison(segment_, segment_bytes_))
    fail("another block of the cluster wrote to the shared memory of this one, which had exited");
}

void Block::check_after() {
  allow_shared();
  const bool untouched = is_poison(dynamic_ + launch_.shared_bytes, launch_.shared_extent - launch_.shared_bytes);
  for (unsigned i = launch_.shared_bytes; !untouched && i < launch_.shared_extent; ++i) {
    if (dynamic_[i] == kPoison) continue;
    fail("write past the " + std::to_string(launch_.shared_bytes) +
         " bytes of dynamic shared memory that were asked for, at byte " + std::to_string(i));
    break;
  }
  for (int i = 0; i < total_; ++i) {
    if (!std::memcmp(stacks_[i], &kStackEnd, sizeof kStackEnd)) continue;
    fail("a thread needs more than the simulator's " + std::to_string(kStack) + " bytes of stack");
    break;
  }
}

// ---- illegal addresses ----

// Those of memory, and of what -fsanitize-undefined-trap-on-error writes for a misaligned access.
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
struct sigaction previous[std::size(kSignals)];

void on_signal(int signal, siginfo_t* info, void*) {
  const size_t at = std::find(std::begin(kSignals), std::end(kSignals), signal) - std::begin(kSignals);
  if (running && running->current() >= 0) {
    char text[64] = "misaligned access, some time after ";
    if (at < 2) std::snprintf(text, sizeof text, "illegal address %p, some time after ", info->si_addr);
    running->fail(text + running->where_last());
  }
  sigaction(signal, &previous[at], nullptr);  // not ours: let it happen again
}

// While one exists, a wild access ends the launch and not the process. Launches take turns, so handlers nest properly.
struct SignalGuard {
  SignalGuard() {
#ifndef __SANITIZE_ADDRESS__
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &previous[i]);
#endif
  }
  ~SignalGuard() {
#ifndef __SANITIZE_ADDRESS__
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &previous[i], nullptr);
#endif
  }
};

#ifdef __SANITIZE_ADDRESS__
std::mutex asan_lock;
std::string asan_report;  // the first of this launch

void on_asan(const char* report) {
  std::lock_guard<std::mutex> hold(asan_lock);
  if (!asan_report.empty()) return;
  auto line_of = [report](const char* key) {
    const char* begin = std::strstr(report, key);
    return begin ? std::string(begin, std::strcspn(begin + 1, "\n") + 1) : std::string();
  };
  const std::string summary = line_of("SUMMARY: "), read = line_of("\nREAD of"), write = line_of("\nWRITE of");
  const std::string access = read + write;
  asan_report = (summary.empty() ? report : summary.substr(9)) + "; " + access.substr(!access.empty());
}
#endif

}  // namespace

void meet_block(Site site) { running->meet_block(site); }

Word meet_lanes(Meeting meeting, unsigned mask, Word value, int source, Site site) {
  return running->meet_lanes(meeting, mask, value, source, site);
}

int block_of_cluster() { return running->of_cluster(); }
void cluster_arrive(Site site) { running->arrive(kCluster, site); }
void cluster_wait(Site site) { running->wait_at(kCluster, site); }
void* of_block(void* shared, int block, Site site) { return running->of_block(shared, block, site); }
void grid_arrive(Site site) { running->arrive(kGrid, site); }
void grid_wait(Site site) { running->wait_at(kGrid, site); }
bool await_written(const void* at, bool (*written)(const void*), Site site) {
  return running->await_written(at, written, site);
}

void copy_later(void* to, const void* from, unsigned bytes, Site site) {
  running->copy_later({to, from, bytes, 0}, site);
}
void commit_copies() { running->commit_copies(); }
void wait_for_copies(unsigned newest) { running->wait_for_copies(newest); }

void fail(const char* what, Site site) {
  running->fail(what + (" " + Block::describe(site)));
  __builtin_unreachable();
}

// A place that the compiler knows, of what C++ leaves undefined.
void fail_undefined(const char* what, const void* address, unsigned alignment, const char* file, int line) {
  std::string text = what;
  if (alignment && reinterpret_cast<uintptr_t>(address) % alignment) {
    char number[32];
    std::snprintf(number, sizeof number, "%p", address);
    text = "misaligned access to " + std::string(number) + ", which needs " + std::to_string(alignment) +
           " bytes of alignment,";
  } else if (alignment) {
    text = address ? "access outside an object" : "access through a null pointer";
  }
  running->fail(text + " at " + file + ":" + std::to_string(line));
  __builtin_unreachable();
}

// Runs one launch to its end. Gives 0, or 1 with the report in `error`.
extern "C" SIMULATOR_ENGINE int simulator_launch(const Launch* launch, char* error, size_t error_bytes) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> hold(one_at_a_time);
  SignalGuard guard;
#ifdef __SANITIZE_ADDRESS__
  asan_report.clear();
  __asan_set_error_report_callback(on_asan);
#endif
  Progress progress(launch->blocks() / launch->gang());
  auto work = [&](Gang& gang, int rank) {
    Block block(*launch, gang, rank);
    running = &block;
    block_shape = {launch->block[0], launch->block[1], launch->block[2]};
    grid_shape = {launch->grid[0], launch->grid[1], launch->grid[2]};
    block.run();
    running = nullptr;
  };
  std::list<Gang> gangs;
  const uint64_t count = std::min<uint64_t>(std::max(launch->os_threads, 1u), progress.gangs);
  for (uint64_t i = 0; i < count; ++i) gangs.emplace_back(*launch, progress);
  if (gangs.size() * launch->gang() == 1) {
    work(gangs.front(), 0);
  } else {
    std::vector<std::thread> workers;
    for (Gang& gang : gangs)
      for (unsigned rank = 0; rank < launch->gang(); ++rank) workers.emplace_back(work, std::ref(gang), rank);
    for (auto& worker : workers) worker.join();
  }
#ifdef __SANITIZE_ADDRESS__
  __asan_set_error_report_callback(nullptr);
  if (!asan_report.empty()) progress.failed = true, progress.error = asan_report;
#endif
  std::snprintf(error, error_bytes, "%s", progress.error.c_str());
  return progress.failed;
}

}  // namespace simulator
