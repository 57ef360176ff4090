// Every instruction that C++ has no word for. A build for the CPU (tests/simulator) brings its own functions of the
// same names. No CUDA header is included anywhere: half and bfloat16 are bits here, and the compiler needs no include
// path but ours.
#pragma once

namespace cupynorm {

using int64 = long long;

struct half {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

struct float8_e4m3fn {
  unsigned char bits;
};

struct float8_e5m2 {
  unsigned char bits;
};

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// One word of a message between blocks, as it lies in global memory: the lower 32 bits are the word, the upper 32 bits
// its validity tag. Words are sent in pairs, 16-byte aligned. Each tag is a hash of both words of the pair, with other
// constants for the first than for the second, so a pair shows by itself that both have come, and its place need not be
// cleared before. Other bytes look like a valid pair once in 2^64 times, zeros never. Messages do not stay: results are
// stored over them.
struct MailboxWord {
  unsigned long long bits;
};
inline MailboxWord mailbox_word(unsigned word, unsigned other, bool second) {
  const unsigned tag = second ? 0xffa7ffd9u + word * 0x27d4eb2fu + other * 0x9e3779b1u
      : 0xffb3ffe5u + word * 0x85ebca6bu + other * 0xc2b2ae35u;
  return {static_cast<unsigned long long>(tag) << 32 | word};
}
inline bool both_valid(MailboxWord a, MailboxWord b) {
  return a.bits == mailbox_word(unsigned(a.bits), unsigned(b.bits), false).bits &&
      b.bits == mailbox_word(unsigned(b.bits), unsigned(a.bits), true).bits;
}

// How often a thread looks for a message in device memory before it gives up: for about a second, where messages come
// within microseconds, or milliseconds if rows are gigabytes (docs/notes/048, "How long a look for a message takes").
// Looks are counted rather than the clock read, because the clock also runs while the context is switched out, and
// nobody looks then.
constexpr int kMaxPolls = 1 << 21;

#ifdef __CUDACC_RTC__

inline unsigned as_bits(float x) { return __float_as_uint(x); }
inline float as_float(unsigned bits) { return __uint_as_float(bits); }
inline double as_double(unsigned low, unsigned high) { return __hiloint2double(int(high), int(low)); }
inline unsigned low_word(double x) { return unsigned(__double2loint(x)); }
inline unsigned high_word(double x) { return unsigned(__double2hiint(x)); }

// 2^x with a relative error of 2^-22; subnormal results are flushed to zero.
inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) with an absolute error of 2^-22 near 1 and a relative one elsewhere.
inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

inline unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

inline unsigned short double_to_half(double x) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
  return bits;
}

// Both halves of a product in one instruction: of 64 bits that are known to be 32 the compiler multiplies both halves.
inline unsigned long long wide_product(unsigned a, unsigned b) {
  unsigned long long product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// The address `count` times some bytes behind another, in one instruction: of a known count the compiler would make two
// additions in place of the product.
template <typename T>
inline const T* behind(const T* from, int bytes, int count) {
  const T* place;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(place) : "r"(bytes), "r"(count), "l"(from));
  __builtin_assume(__isGlobal(place));
  return place;
}

inline float double_to_float_toward_zero(double x) { return __double2float_rz(x); }

// Copies 4, 8 or 16 bytes from global to shared memory on their own way, no register involved; both aligned to as many.
// commit() closes a group of this thread's copies, wait<n>() waits until all but its n newest groups have arrived, for
// this thread to read.
template <int kBytes>
inline void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
#else
  if constexpr (kBytes == 16) *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
  else if constexpr (kBytes == 8) *static_cast<uint2*>(shared) = *static_cast<const uint2*>(global);
  else *static_cast<unsigned*>(shared) = *static_cast<const unsigned*>(global);
#endif
}
// 16 bytes, or as many zeros; the address must be a valid one all the same. sm_80.
inline void copy_async_or_zero(void* shared, const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(there ? 16 : 0) : "memory");
#endif
}
inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kNewest>
inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

// The blocks of a cluster (sm_90) run at the same time, and may write into one another's shared memory. A block must
// not write into another before both have made their mbarriers and passed cluster_sync() once. That barrier orders
// nothing else, because an arrival with release semantics waits for all of the block's memory accesses (docs/notes/048,
// "Why blocks of a cluster arrive without release"). The wait has acquire semantics, which cannot be left out, and so
// empties the level-1 cache (CCTL.IVALL): it belongs before a block's first loads.
inline int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return int(rank);
}
inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Words sent to another block of the cluster, and the signal there that counts their bytes (an mbarrier). Nothing else
// waits for them: a barrier of the cluster would wait for every store to memory before it, too.
struct Mbarrier {
  unsigned long long word;
};
// Before the blocks of a cluster meet for the first time, by one thread.
inline void init_mbarrier(Mbarrier* mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(unsigned(__cvta_generic_to_shared(mbarrier))) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// By one thread, once for each wait: how many bytes will come.
inline void expect_bytes(Mbarrier* mbarrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      ::"r"(unsigned(__cvta_generic_to_shared(mbarrier))), "r"(bytes) : "memory");
#endif
}
// Sends four words to where `shared` lies in another block, 16-byte aligned, and tells `signal` there.
inline void send_words(void* shared, Mbarrier* mbarrier, int block, uint4 words) {
#if __CUDA_ARCH__ >= 900
  unsigned to, tell;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(unsigned(__cvta_generic_to_shared(shared))), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(tell) : "r"(unsigned(__cvta_generic_to_shared(mbarrier))),
      "r"(block));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(tell)
               : "memory");
#endif
}
// Waits for the bytes expected: for the first time with parity 0, then 1, 0 and so on. All threads call it. It acquires
// at the block's scope, as CUDA's libraries do when they wait for data from a cluster: a wider acquire empties the
// level-1 cache each time.
inline void await_mbarrier(Mbarrier* mbarrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(unsigned(__cvta_generic_to_shared(mbarrier))), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

// Programmatic dependent launch (sm_90): a kernel may begin before the previous one has ended. It waits here before it
// touches what others write or read. Without such a launch nothing happens.
inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Says that the next kernel may begin so, once every block has said it.
inline void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Only the last kLast blocks of the grid say so, because every block that does costs the device time (docs/notes/048,
// "Which blocks let the next kernel begin"); the blocks before them have ended by then. `left`: how many blocks of the
// grid there are from this one on; the default is right for a grid along x.
inline void pdl_trigger_late(unsigned left = gridDim.x - blockIdx.x) {
  constexpr unsigned kLast = 2048;
  if (left <= kLast) pdl_trigger();
}
inline void pdl_wait_and_trigger(unsigned left = gridDim.x - blockIdx.x) {
  pdl_wait();
  pdl_trigger_late(left);
}

// A gate in shared memory opens when so many threads have arrived and all bytes have come that were expected; then it
// counts anew. Whoever waits names the parity: 0 for its first opening, then 1, 0 and so on; with 1 it is open before
// the first. One thread makes all, then publish_mbarriers, and a barrier follows.
struct __align__(8) CountingMbarrier {
  unsigned long long word;
};
inline void init_counting_mbarrier(CountingMbarrier* gate, unsigned arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(gate))),
      "r"(arrivals) : "memory");
#endif
}
inline void publish_mbarriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Arrives, and says how many bytes will come.
inline void expect_bytes(CountingMbarrier* gate, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      ::"r"(unsigned(__cvta_generic_to_shared(gate))), "r"(bytes) : "memory");
#endif
}
inline void await_counting_mbarrier(CountingMbarrier* gate, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}"
      ::"r"(unsigned(__cvta_generic_to_shared(gate))), "r"(parity)
      : "memory");
#endif
}

// Copies a box of a matrix, by one thread, on its own way to shared memory: columns from col on, 128 bytes of them, and
// so many rows as the map says. They lie there as bert/mma.cuh's `swizzled` has it, from an address aligned to 1024
// bytes; what is outside of the matrix is 0. Their bytes come to the gate.
struct __align__(64) TensorMap {  // cupynorm/runtime/devices.py, box_map
  unsigned long long word[16];
};
inline void load_tensor_box(void* shared, const TensorMap* map, int col, int row, CountingMbarrier* gate) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(unsigned(__cvta_generic_to_shared(shared))), "l"(map), "r"(col), "r"(row),
                   "r"(unsigned(__cvta_generic_to_shared(gate)))
               : "memory");
#endif
}

// The barrier of a cooperative launch, whose blocks all run at the same time: arrive, then wait for all. By every
// thread of every block; what was written before an arrival is seen after the wait. The driver gives each such launch a
// counter of its own; its address is in the two registers that CUDA's own cooperative_groups take it from. The top bit
// turns over when all have come. kOrders: else all have come, but what they have written may not.
inline unsigned long long grid_counter() {
  unsigned high = 0, low = 0;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  return (static_cast<unsigned long long>(high) << 32 | low) + 4;
}
template <bool kOrders = true>
inline unsigned grid_arrive() {
  unsigned before = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned others = gridDim.x * gridDim.y - 1, step = blockIdx.x + blockIdx.y == 0 ? 0x80000000u - others : 1;
    if constexpr (kOrders)
      asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(grid_counter()),
          "r"(step) : "memory");
    else asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(grid_counter()),
        "r"(step) : "memory");
  }
  return before;
}
template <bool kOrders = true>
inline void grid_wait(unsigned before) {
  if (threadIdx.x == 0) {
    unsigned now;
    do {
      if constexpr (kOrders)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(grid_counter()) : "memory");
      else asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(grid_counter()) : "memory");
    } while (((now ^ before) & 0x80000000u) == 0);
  }
  __syncthreads();
}

// A barrier of some blocks of a cooperative launch, `blocks` of them, which have a counter of their own in global
// memory: 0 before any of them arrives. By every thread of each; what was written before an arrival is seen after the
// wait. One of the blocks is the first. turn: how often they have met before. The counter's top bit turns over each
// time.
inline void blocks_arrive(unsigned* counter, unsigned blocks, bool first) {
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)),
        "r"(first ? 0x80000000u - (blocks - 1) : 1u)
                 : "memory");
}
inline void blocks_wait(const unsigned* counter, unsigned turn) {
  if (threadIdx.x == 0) {
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(counter))
                   : "memory");
    } while (now >> 31 == (turn & 1));
  }
  __syncthreads();
}

// The dynamic scheduler counts claims in the barrier counter of a cooperative launch whose blocks do not synchronise.
// Each claim is the next number, from 0 on; the arguments are for the simulator, where a claimer's own last claim is so
// far behind. Whoever sees the last claim resets the counter for the next launch.
inline unsigned next_dynamic_row(unsigned, unsigned) {
  unsigned before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(grid_counter()) : "memory");
  return before & 0x7fffffffu;
}
inline void reset_dynamic_rows(unsigned all) {
  asm volatile("red.add.relaxed.gpu.global.u32 [%0], %1;" ::"l"(grid_counter()), "r"(0u - all) : "memory");
}

// Ends a thread that would end, so that the compiler keeps nothing for it.
inline void exit_thread() {
  asm volatile("exit;");
  __builtin_unreachable();
}

// So that who looks for what lies there finds it in the L2 cache: from memory it would come too late.
inline void prefetch_to_l2(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(place)));
}
inline void clear_mailbox(MailboxWord* pair) {
  asm volatile("st.global.v2.u64 [%0], {%1, %1};" ::"l"(__cvta_generic_to_global(pair)), "l"(0ull) : "memory");
}
inline void send_mailbox(MailboxWord* pair, unsigned a, unsigned b) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(pair)),
      "l"(mailbox_word(a, b, false).bits),
               "l"(mailbox_word(b, a, true).bits)
               : "memory");
}
// Returns false if they have not come after that many looks: then something else has overwritten them, and
// they never will. All words are loaded at once: one after the other, each would take a trip to L2.
template <int kMaxPolls, int kCount>
inline bool await_mailbox(const MailboxWord* from, unsigned (&word)[kCount]) {
#pragma unroll 1
  for (int polls = kMaxPolls; polls > 0; --polls) {
    unsigned long long bits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(bits[i]), "=l"(bits[i + 1])
                   : "l"(__cvta_generic_to_global(from + i))
                   : "memory");
    bool here = true;
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      here = here && both_valid({bits[i]}, {bits[i + 1]}), word[i] = unsigned(bits[i]),
          word[i + 1] = unsigned(bits[i + 1]);
    if (here) return true;
  }
  return false;
}
// Stops the kernel: every later call in this context returns CUDA_ERROR_LAUNCH_FAILED, for which launch_error in
// runtime/devices.py names this cause. A failed assert() would print the condition, but its call takes registers from
// the usual path (docs/notes/048, "Why a fault traps and prints nothing").
inline void stop(const char*) { asm volatile("trap;"); }

// One store of 8 or 16 bytes to global memory.
inline void store_pair(void* to, unsigned a, unsigned b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b) : "memory");
}
inline void store_quad(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b), "r"(c),
      "r"(d) : "memory");
}

// One number to global memory, where the compiler may have lost that it is there: that of sm_120 does, and for others
// to be told so costs registers.
template <typename T>
inline void store_number(T* to, T value) {
#if __CUDA_ARCH__ >= 1200
  __builtin_assume(__isGlobal(to));
#endif
  *to = value;
}

// One load of 16 bytes that caches keep longer than others, or give up before others; from sm_80 on.
#if __CUDA_ARCH__ >= 800
#define CUPYNORM_LOAD_QUAD(PRIORITY)                                                              \
  asm volatile(                                                                                   \
      "{ .reg .b64 policy; createpolicy.fractional.L2::" PRIORITY ".b64 policy, 1.0;"             \
      " ld.global.L1::" PRIORITY ".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy; }"       \
      : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])                                \
      : "l"(__cvta_generic_to_global(from)))
#else
#define CUPYNORM_LOAD_QUAD(PRIORITY)                                 \
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"            \
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) \
               : "l"(__cvta_generic_to_global(from)))
#endif
inline void load_quad_evicted_last(const void* from, unsigned* word) { CUPYNORM_LOAD_QUAD("evict_last"); }
inline void load_quad_evicted_first(const void* from, unsigned* word) { CUPYNORM_LOAD_QUAD("evict_first"); }
#undef CUPYNORM_LOAD_QUAD

// What the compiler may take for granted.
inline void assume(bool fact) { __builtin_assume(fact); }
// Hides where a word comes from: what is computed from it stays where it stands, inside a loop for example.
inline void make_opaque(int& word) { asm volatile("" : "+r"(word)); }
inline void make_opaque(unsigned& word) { asm volatile("" : "+r"(word)); }
inline void make_opaque(int64& number) { asm volatile("" : "+l"(number)); }
inline void make_opaque(float& number) { asm volatile("" : "+f"(number)); }
inline void make_opaque(double& number) { asm volatile("" : "+d"(number)); }
// The same for an address in global memory: what is computed from it is not computed from what it came from.
template <typename T>
inline void make_opaque(T*& pointer) {
  if constexpr (sizeof(T) == 1 && __is_class(T)) {  // NVRTC 13.0 breaks on such a pointer
    unsigned long long bits = reinterpret_cast<unsigned long long>(pointer);
    asm volatile("" : "+l"(bits));
    __builtin_assume(__isGlobal(reinterpret_cast<const void*>(bits)));
    pointer = reinterpret_cast<T*>(bits);
  } else {
    asm volatile("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
  }
}

// Two values in one word, the first in the low half: one instruction from sm_80 on.
inline unsigned floats_to_halves(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return float_to_half(low) | unsigned(float_to_half(high)) << 16;
#endif
}

// The larger number of each half of two words; of a number and nan the number.
inline unsigned larger_halves(unsigned a, unsigned b) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
#else
  auto half_of = [](unsigned word, int i) { return half_to_float(static_cast<unsigned short>(word >> 16 * i)); };
  return floats_to_halves(fmaxf(half_of(a, 0), half_of(b, 0)), fmaxf(half_of(a, 1), half_of(b, 1)));
#endif
}

// The nearest integer, to even in the middle; 0 for nan, the nearest int for what is beyond.
inline int float_to_int(float x) { return __float2int_rn(x); }
// a * b, both halves
inline unsigned multiply_high(unsigned a, unsigned b) { return __umulhi(a, b); }

// Four bytes of a (0 to 3) and b (4 to 7), the lowest first: one for each digit of the selector; of a digit from 8 on,
// its top bit eight times.
inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  unsigned chosen;  // __byte_perm leaves a digit's top bit out
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(a), "r"(b), "r"(selector));
  return chosen;
}

// x if it is from low up to high, or if it is finite, and 1 is added to count; else nan. Each predicate is used where
// it is found: a thread has seven, and the compiler would keep those of 32 elements as bits.
inline float between_or_nan(float x, float low, float high) {
  float y;
  asm("{\n\t.reg .pred p;\n\tsetp.ge.ftz.f32 p, %1, %2;\n\tsetp.le.and.ftz.f32 p, %1, %3, p;\n\t"
      "selp.f32 %0, %1, 0f7FC00000, p;\n\t}" : "=f"(y) : "f"(x), "f"(low), "f"(high));
  return y;
}
inline float between_or_nan(float x, float low, float high, float& count) {
  float y;
  asm("{\n\t.reg .pred p;\n\tsetp.ge.ftz.f32 p, %2, %3;\n\tsetp.le.and.ftz.f32 p, %2, %4, p;\n\t"
      "selp.f32 %0, %2, 0f7FC00000, p;\n\t@p add.ftz.f32 %1, %1, 0f3F800000;\n\t}"
      : "=f"(y), "+f"(count) : "f"(x), "f"(low), "f"(high));
  return y;
}
inline float finite_or_nan(float x, float& count) {
  float y;
  asm("{\n\t.reg .pred p;\n\t.reg .f32 size;\n\tabs.ftz.f32 size, %2;\n\tsetp.lt.ftz.f32 p, size, 0f7F800000;\n\t"
      "selp.f32 %0, %2, 0f7FC00000, p;\n\t@p add.ftz.f32 %1, %1, 0f3F800000;\n\t}"
      : "=f"(y), "+f"(count) : "f"(x));
  return y;
}

// The bits of an arithmetic result: a nan has no sign then.
inline unsigned bits_of_sum(float x) { return as_bits(x); }

// The larger, nan if either is: unlike fmaxf, which costs the same.
inline float larger_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float c;
  asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return a > b || a != a ? a : b;
#endif
}

// Over the 32 lanes of a warp, all of which call: one instruction for the five exchanges of before sm_80.
inline unsigned largest_of_warp(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, x, distance);
    x = x > other ? x : other;
  }
  return x;
#endif
}

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(ptx)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

inline float bfloat16_to_float(unsigned short bits) { return as_float(unsigned(bits) << 16); }

inline unsigned short float_to_bfloat16(float x) {
  unsigned bits = as_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // nan
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline unsigned floats_to_bfloat16s(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return float_to_bfloat16(low) | unsigned(float_to_bfloat16(high)) << 16;
#endif
}

// A double rounded to odd: rounding the result once more, to fewer bits, equals rounding the double once.
inline float double_to_float_to_odd(double x) {
  float truncated = double_to_float_toward_zero(x);
  return double(truncated) == x || x != x ? truncated : as_float(as_bits(truncated) | 1);
}

// -128 to 127: beyond them the nearest; 0 for nan. In the low byte.
inline unsigned float_to_int8(float x) {
  const int i = float_to_int(x);
  return unsigned(i < -128 ? -128 : i > 127 ? 127 : i) & 0xff;
}

inline unsigned floats_to_int8s(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 720
  unsigned word;
  asm("{\n.reg .b32 high;\ncvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\ncvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n}"
      : "=r"(word)
      : "r"(float_to_int(a)), "r"(float_to_int(b)), "r"(float_to_int(c)), "r"(float_to_int(d)));
  return word;
#else
  return float_to_int8(a) | float_to_int8(b) << 8 | float_to_int8(c) << 16 | float_to_int8(d) << 24;
#endif
}

// The same of numbers within -127 to 127, two instructions less for each four: in 1.5 * 2^23 + x the last place is 1.
constexpr float kLastPlaceIsOne = 12582912.0f;
constexpr unsigned kLowBytes = 0x40, kTopSigns = 0xfb;  // what of two such sums: their low bytes, or 0 in place of them
inline unsigned bytes_of(float a, float b, float c, float d, unsigned what) {
  const unsigned low = permute_bytes(bits_of_sum(a), bits_of_sum(b), what),
      high = permute_bytes(bits_of_sum(c), bits_of_sum(d), what);
  return permute_bytes(low, high, 0x5410);
}

// A number of 8 bits: sign, exponent, kFraction bits; kLargest is the largest finite one, which larger ones become, inf
// too. nan is 0x7f.
template <int kFraction, int kBias, unsigned kLargest>
inline unsigned float_to_float8(float x) {
  constexpr int kDropped = 23 - kFraction;
  const unsigned bits = as_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  unsigned rounded;
  if (magnitude < unsigned(128 - kBias) << 23) {  // subnormal: the sum's last place is the unit of those
    const float unit = as_float(unsigned(128 - kBias - kFraction + 23) << 23);
    rounded = as_bits(as_float(magnitude) + unit) - as_bits(unit);
  } else {
    rounded = (magnitude + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1)) >> kDropped;
    rounded -= unsigned(127 - kBias) << kFraction;
  }
  return sign | (rounded < kLargest ? rounded : kLargest);
}

inline unsigned floats_to_e4m3s(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_float8<3, 7, 0x7e>(low) | float_to_float8<3, 7, 0x7e>(high) << 8;
#endif
}
inline unsigned floats_to_e5m2s(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_float8<2, 15, 0x7b>(low) | float_to_float8<2, 15, 0x7b>(high) << 8;
#endif
}

}  // namespace cupynorm
