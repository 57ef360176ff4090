// What kernels/base/memory.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

inline void store_pair(void* to, unsigned a, unsigned b) { *static_cast<uint2*>(to) = uint2{a, b}; }
inline void store_quad(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  *static_cast<uint4*>(to) = uint4{a, b, c, d};
}

// What the device does not forgive: it has no access of any number of bytes at any place.
template <int kBytes>
inline void need_aligned(const void* place, bool both, SIMULATOR_HERE) {
  if (reinterpret_cast<unsigned long long>(place) % (both ? 2 * kBytes : kBytes) != 0)
    simulator::fail("an access is not aligned", {"one or two", file, line});
}
template <int kBytes>
inline void load_one_or_two(const void* from, bool both, unsigned* word) {
  need_aligned<kBytes>(from, both);
  word[0] = 0;
  if (kBytes == 4) word[1] = 0;
  __builtin_memcpy(word, from, both ? 2 * kBytes : kBytes);
}
template <int kBytes>
inline void store_one_or_two(void* to, bool both, const unsigned* word) {
  need_aligned<kBytes>(to, both);
  __builtin_memcpy(to, word, both ? 2 * kBytes : kBytes);
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
