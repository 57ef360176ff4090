// Messages between blocks that run at the same time, through global memory.
#pragma once
#include <base/types.cuh>

namespace cupynorm {

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

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(mailbox)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
