// What kernels/base/memory.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

inline void store_pair(void* to, unsigned a, unsigned b) { *static_cast<uint2*>(to) = uint2{a, b}; }
inline void store_quad(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  *static_cast<uint4*>(to) = uint4{a, b, c, d};
}

template <typename T>
inline void store_number(T* to, T value) {
  *to = value;
}

inline void load_quad_evicted_last(const void* from, unsigned* word) {
  for (int i = 0; i < 4; ++i) word[i] = static_cast<const unsigned*>(from)[i];
}
inline void load_quad_evicted_first(const void* from, unsigned* word) { load_quad_evicted_last(from, word); }

inline void prefetch_to_l2(const void*) {}

}  // namespace cupynorm
