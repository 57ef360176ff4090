// What kernels/base/grid.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

// One that orders nothing is nothing here, so that whoever relies on it is found out.
template <bool kOrders = true>
inline unsigned grid_arrive(SIMULATOR_HERE) {
  if constexpr (kOrders) simulator::grid_arrive({"grid_arrive", file, line});
  return 0;
}
template <bool kOrders = true>
inline void grid_wait(unsigned, SIMULATOR_HERE) {
  if constexpr (kOrders) simulator::grid_wait({"grid_wait", file, line});
}
inline void blocks_arrive(unsigned* counter, unsigned blocks, bool first) {
  __syncthreads();
  if (threadIdx.x == 0) *counter += first ? 0x80000000u - (blocks - 1) : 1u;
}
inline void blocks_wait(const unsigned* counter, unsigned turn, SIMULATOR_HERE) {
  auto set = [](const void* at) { return *static_cast<const unsigned*>(at) >> 31 == 1; };
  auto cleared = [](const void* at) { return *static_cast<const unsigned*>(at) >> 31 == 0; };
  if (threadIdx.x == 0)
    simulator::await_written(counter, turn & 1 ? +cleared : +set, {"blocks_wait", file, line});
  __syncthreads();
}
inline unsigned next_dynamic_row(unsigned before, unsigned step) { return before + step; }
inline void reset_dynamic_rows(unsigned) {}

}  // namespace cupynorm
