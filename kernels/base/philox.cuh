// Philox4x32-10: random words without a state. Its host mirror is cupynorm/host/philox.py.
#pragma once
#include <base/arithmetic.cuh>

namespace cupynorm {

constexpr int kPhiloxRounds = 10;

// The key of each round. Where the host has made them, a round's two exclusive-ors take them as they lie in a kernel's
// parameters.
struct PhiloxKeys {
  uint2 round[kPhiloxRounds];
};

inline PhiloxKeys philox_keys(uint2 key) {
  PhiloxKeys keys;
#pragma unroll
  for (int i = 0; i < kPhiloxRounds; ++i) {
    keys.round[i] = key;
    key.x += 0x9e3779b9u, key.y += 0xbb67ae85u;
  }
  return keys;
}

template <int kFirst>
inline uint4 philox_rounds(uint4 counter, const PhiloxKeys& keys) {
#pragma unroll
  for (int i = kFirst; i < kPhiloxRounds; ++i) {
    const auto first = wide_product(0xd2511f53u, counter.x), second = wide_product(0xcd9e8d57u, counter.z);
    counter = uint4{unsigned(second >> 32) ^ counter.y ^ keys.round[i].x, unsigned(second),
                    unsigned(first >> 32) ^ counter.w ^ keys.round[i].y, unsigned(first)};
  }
  return counter;
}

// Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
inline uint4 philox4x32_10(uint4 counter, const PhiloxKeys& keys) { return philox_rounds<0>(counter, keys); }
inline uint4 philox4x32_10(uint4 counter, uint2 key) { return philox4x32_10(counter, philox_keys(key)); }

// The same of the counter that is the number of a block and zeros: half of the first round is known.
inline uint4 philox_block(unsigned long long block, const PhiloxKeys& keys) {
  const auto product = wide_product(0xd2511f53u, unsigned(block));
  const uint2 key = keys.round[0];
  return philox_rounds<1>(
      uint4{unsigned(block >> 32) ^ key.x, 0, unsigned(product >> 32) ^ key.y, unsigned(product)}, keys);
}
inline uint4 philox_block(unsigned long long block, uint2 key) { return philox_block(block, philox_keys(key)); }

}  // namespace cupynorm
