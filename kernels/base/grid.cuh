// What the blocks of a cooperative launch do together: barriers, and a counter of the rows that they claim.
#pragma once

namespace cupynorm {

#ifdef __CUDACC_RTC__

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

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(grid)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
