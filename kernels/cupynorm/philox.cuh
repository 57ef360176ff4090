// Philox4x32-10: random words of a counter and a key, without a state (Salmon et al. 2011).
#pragma once
#include <cupynorm/ptx.cuh>

namespace cupynorm {

inline uint4 philox4x32_10(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = multiply_high(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    const unsigned high2 = multiply_high(0xcd9e8d57u, counter.z), low2 = 0xcd9e8d57u * counter.z;
    counter = uint4{high2 ^ counter.y ^ key.x, low2, high0 ^ counter.w ^ key.y, low0};
    key.x += 0x9e3779b9u, key.y += 0xbb67ae85u;
  }
  return counter;
}

}  // namespace cupynorm
