// Programmatic dependent launch: when the next kernel may begin.
#pragma once

namespace cupynorm {

#ifdef __CUDACC_RTC__

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

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(pdl)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
