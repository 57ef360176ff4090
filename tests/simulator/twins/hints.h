// What kernels/base/hints.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

inline void assume(bool) {}
inline void make_opaque(int&) {}
inline void make_opaque(unsigned&) {}
inline void make_opaque(float&) {}
inline void make_opaque(double&) {}
inline void make_opaque(int64&) {}
template <typename T>
inline void make_opaque(T*&) {}
inline void exit_thread() {}

}  // namespace cupynorm
