// Runs launches: a block is one fiber a thread on one OS thread, in an order chosen to show what barriers are missing.
#include "simulator.h"

#include <link.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
constexpr int kPoison = 0xff;                   // all bits set: nan in every floating type, and no kernel computes that nan
constexpr unsigned kMaxThreads = 1024;

enum class State : unsigned char { kReady, kAtLanes, kAtBlock, kExited };

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
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes, group;
};

struct Warp {
  unsigned present, waiting, exited;
};

// Stacks for one block of the largest size. Kept from launch to launch: fresh pages cost more than the kernel.
class Stacks {
 public:
  Stacks() {
    std::lock_guard<std::mutex> hold(lock_);
    if (!free_.empty()) base_ = free_.back(), free_.pop_back();
    if (base_) return;
    void* p = mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) std::perror("simulator: no memory for stacks"), std::abort();
    base_ = static_cast<char*>(p);
  }
  ~Stacks() {
    std::lock_guard<std::mutex> hold(lock_);
    free_.push_back(base_);
  }
  char* operator[](int i) const { return base_ + kStack * i; }

 private:
  char* base_ = nullptr;
  inline static std::mutex lock_;
  inline static std::vector<char*> free_;
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
  unsigned os_threads;
};

namespace {

class Block {
 public:
  explicit Block(const Launch& launch)
      : launch_(launch), total_(int(launch.block[0] * launch.block[1] * launch.block[2])), fibers_(total_), warps_((total_ + 31) / 32), copies_(total_) {
    dynamic_ = launch.shared();
    find_shared();
  }

  // False after a failure, which error() tells.
  bool run(uint64_t number);
  const std::string& error() const { return error_; }

  void meet_block(Site site) {
    fibers_[current_].site = site;
    wait(State::kAtBlock);
  }
  Word meet_lanes(Meeting meeting, unsigned mask, Word value, int source, Site site);
  void copy_later(const Copy& copy, Site site);
  void commit_copies() { ++fibers_[current_].groups; }
  void wait_for_copies(unsigned newest);
  void fail(const std::string& what);
  const Launch& launch() const { return launch_; }
  int current() const { return current_; }
  std::string where_last() const { return current_ < 0 ? "" : describe(fibers_[current_].site); }

  static std::string describe(const Site& site) {
    return site.file ? std::string(site.call) + " at " + site.file + ":" + std::to_string(site.line) : "the kernel's start";
  }

 private:
  static void begin();
  void resume(int thread);
  void leave();
  void wait(State state) {
    fibers_[current_].state = state;
    leave();
  }
  bool run_warp(int warp);
  void shuffle_orders();
  void open_barrier();
  void report_stuck();
  void find_shared();
  void poison_shared();
  void check_after();
  uint64_t random() {  // splitmix64
    uint64_t z = random_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  bool wanders() const { return launch_.schedule > 2 && launch_.schedule % 2; }

  const Launch& launch_;
  const int total_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<std::vector<Copy>> copies_;  // of each thread, those not made yet
  std::vector<int> warp_order_, lane_order_;
  Stacks stacks_;
  void* scheduler_ = nullptr;
  int current_ = -1, exited_ = 0;
  uint64_t random_ = 0;
  std::string error_;
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

void Block::begin() {
  Block& block = *running;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_bytes_);
#endif
  block.launch_.entry(block.launch_.arguments);
  block.warps_[block.current_ / 32].exited |= 1u << block.current_ % 32;
  ++block.exited_;
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
  if (error_.empty()) {
    error_ = what + " [block (" + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ", " +
             std::to_string(block_index.z) + ")";
    if (current_ >= 0) {
      const uint3& t = fibers_[current_].index;
      error_ += ", thread (" + std::to_string(t.x) + ", " + std::to_string(t.y) + ", " + std::to_string(t.z) + ")";
    }
    error_ += "]";
  }
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
  if (wanders() && random() % 2) wait(State::kReady);
  return self.value;
}

void Block::open_barrier() {
  const Site& site = fibers_[0].site;
  for (const Fiber& fiber : fibers_)
    if (fiber.site.line != site.line || std::strcmp(fiber.site.file, site.file)) return report_stuck();
  for (Fiber& fiber : fibers_) fiber.state = State::kReady;
}

void Block::report_stuck() {
  std::map<std::string, int> places;
  bool lanes = false;
  for (const Fiber& fiber : fibers_) {
    if (fiber.state == State::kExited) continue;
    std::string place = describe(fiber.site);
    if (fiber.state == State::kAtLanes) {
      char mask[32];
      std::snprintf(mask, sizeof mask, " with mask 0x%08x", fiber.mask);
      place += mask;
      lanes = true;
    }
    ++places[place];
  }
  std::string text = lanes ? "deadlock: lanes wait for lanes that never come" : "divergent __syncthreads";
  for (const auto& [place, count] : places) text += "; " + std::to_string(count) + " of " + std::to_string(total_) + " threads wait in " + place;
  if (exited_) text += "; " + std::to_string(exited_) + " have exited";
  fail(text);
}

// ---- asynchronous copies ----

void Block::copy_later(const Copy& copy, Site site) {
  if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) % copy.bytes)
    fail("misaligned asynchronous copy of " + std::to_string(copy.bytes) + " bytes, " + describe(site));
  if (launch_.schedule == 0 || (launch_.schedule > 1 && random() % 2)) std::memcpy(copy.to, copy.from, copy.bytes);
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
  for (int i = warps - 1; i > 0; --i) std::swap(warp_order_[i], warp_order_[random() % (i + 1)]);
  for (int i = 31; i > 0; --i) std::swap(lane_order_[i], lane_order_[random() % (i + 1)]);
}

bool Block::run_warp(int warp) {
  bool moved = false;
  for (bool again = true; again && error_.empty();) {
    again = false;
    for (int lane : lane_order_) {
      const int thread = warp * 32 + lane;
      if (thread >= total_ || fibers_[thread].state != State::kReady) continue;
      resume(thread);
      if (!error_.empty()) return true;
      again = moved = true;
    }
    if (wanders() && random() % 2) break;
  }
  return moved;
}

bool Block::run(uint64_t number) {
  block_index = {unsigned(number % launch_.grid[0]), unsigned(number / launch_.grid[0] % launch_.grid[1]),
                 unsigned(number / launch_.grid[0] / launch_.grid[1])};
  random_ = launch_.schedule * 0x2545f4914f6cdd1dull + number;
  exited_ = 0;
  for (int i = 0; i < total_; ++i) {
    const unsigned x = launch_.block[0], y = launch_.block[1], t = unsigned(i);
    std::memcpy(stacks_[i], &kStackEnd, sizeof kStackEnd);
    fibers_[i] = Fiber{first_context(stacks_[i], kStack, begin), State::kReady, {t % x, t / x % y, t / (x * y)}, {}, 0, 0, 0, {}, 0};
    copies_[i].clear();
  }
  for (size_t w = 0; w < warps_.size(); ++w) {
    const int lanes = std::min(32, total_ - int(w) * 32);
    warps_[w] = Warp{lanes == 32 ? 0xffffffffu : (1u << lanes) - 1, 0, 0};
  }
  poison_shared();
  while (exited_ < total_ && error_.empty()) {
    shuffle_orders();
    for (bool moved = true; moved && error_.empty();) {
      moved = false;
      for (int warp : warp_order_) moved = run_warp(warp) || moved;
    }
    if (!error_.empty() || exited_ == total_) break;
    const bool all = std::all_of(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.state == State::kAtBlock; });
    if (all) open_barrier();
    else report_stuck();
  }
  check_after();
  return error_.empty();
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

// Before each block: static arrays and dynamic memory hold poison, and so does what lies behind the bytes asked for.
void Block::poison_shared() {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(segment_, segment_bytes_);
  for (int i = 0; i < total_; ++i) __asan_unpoison_memory_region(stacks_[i], kStack);  // of threads that never unwound
#endif
  std::memset(segment_, kPoison, segment_bytes_);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(dynamic_ + launch_.shared_bytes, launch_.shared_extent - launch_.shared_bytes);
#endif
}

void Block::check_after() {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(segment_, segment_bytes_);
#endif
  for (unsigned i = launch_.shared_bytes; i < launch_.shared_extent; ++i) {
    if (dynamic_[i] == kPoison) continue;
    fail("write past the " + std::to_string(launch_.shared_bytes) + " bytes of dynamic shared memory that were asked for, at byte " +
         std::to_string(i));
    break;
  }
  for (int i = 0; i < total_; ++i) {
    if (!std::memcmp(stacks_[i], &kStackEnd, sizeof kStackEnd)) continue;
    fail("a thread needs more than the simulator's " + std::to_string(kStack) + " bytes of stack");
    break;
  }
}

// ---- illegal addresses ----

struct sigaction previous_segv, previous_bus;

void on_signal(int signal, siginfo_t* info, void*) {
  if (running && running->current() >= 0) {
    char text[64];
    std::snprintf(text, sizeof text, "illegal address %p, some time after ", info->si_addr);
    running->fail(text + running->where_last());
  }
  sigaction(signal, signal == SIGSEGV ? &previous_segv : &previous_bus, nullptr);  // not ours: let it happen again
}

// While one exists, a wild access ends the launch and not the process. Launches take turns, so handlers nest properly.
struct SignalGuard {
  SignalGuard() {
#ifndef __SANITIZE_ADDRESS__
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
#endif
  }
  ~SignalGuard() {
#ifndef __SANITIZE_ADDRESS__
    sigaction(SIGSEGV, &previous_segv, nullptr);
    sigaction(SIGBUS, &previous_bus, nullptr);
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
  asan_report = (summary.empty() ? report : summary.substr(9)) + "; " + (read + write).substr(read.size() + write.size() > 0);
}
#endif

}  // namespace

void meet_block(Site site) { running->meet_block(site); }

Word meet_lanes(Meeting meeting, unsigned mask, Word value, int source, Site site) {
  return running->meet_lanes(meeting, mask, value, source, site);
}

void copy_later(void* to, const void* from, unsigned bytes, Site site) { running->copy_later({to, from, bytes, 0}, site); }
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
    text = "misaligned access to " + std::string(number) + ", which needs " + std::to_string(alignment) + " bytes of alignment,";
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
  const uint64_t blocks = uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::string text;
  auto work = [&] {
    Block block(*launch);
    running = &block;
    block_shape = {launch->block[0], launch->block[1], launch->block[2]};
    grid_shape = {launch->grid[0], launch->grid[1], launch->grid[2]};
    for (uint64_t number; !failed && (number = next++) < blocks;) {
      if (!block.run(launch->schedule == 1 ? blocks - 1 - number : number) && !failed.exchange(true)) text = block.error();
    }
    running = nullptr;
  };
  const unsigned threads = unsigned(std::min<uint64_t>(launch->os_threads, blocks));
  if (threads < 2) {
    work();
  } else {
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < threads; ++i) workers.emplace_back(work);
    for (auto& worker : workers) worker.join();
  }
#ifdef __SANITIZE_ADDRESS__
  __asan_set_error_report_callback(nullptr);
  if (!asan_report.empty()) failed = true, text = asan_report;
#endif
  std::snprintf(error, error_bytes, "%s", text.c_str());
  return failed;
}

}  // namespace simulator
