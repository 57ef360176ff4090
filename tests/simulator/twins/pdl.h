// What kernels/base/pdl.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

inline void pdl_wait() {}
inline void pdl_trigger() {}
inline void pdl_trigger_late(unsigned = 0) {}
inline void pdl_wait_and_trigger(unsigned = 0) {}

}  // namespace cupynorm
