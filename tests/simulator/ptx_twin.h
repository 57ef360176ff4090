// What kernels/base/ptx.cuh declares for a GPU, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline unsigned as_bits(float x) { return same_bits<unsigned>(x); }
inline float as_float(unsigned bits) { return same_bits<float>(bits); }
inline double as_double(unsigned low, unsigned high) {
  return same_bits<double>(low | static_cast<unsigned long long>(high) << 32);
}
inline unsigned low_word(double x) { return unsigned(same_bits<unsigned long long>(x)); }
inline unsigned high_word(double x) { return unsigned(same_bits<unsigned long long>(x) >> 32); }

inline int cluster_rank() { return simulator::block_of_cluster(); }
inline void cluster_sync(SIMULATOR_HERE) {
  simulator::cluster_arrive({"cluster_sync", file, line});
  simulator::cluster_wait({"cluster_sync", file, line});
}
struct Mbarrier {};
inline void init_mbarrier(Mbarrier*) {}
inline void expect_bytes(Mbarrier*, unsigned) {}
inline void send_words(void* shared, Mbarrier*, int block, uint4 words, SIMULATOR_HERE) {
  *static_cast<uint4*>(simulator::of_block(shared, block, {"send_words", file, line})) = words;
}
inline void await_mbarrier(Mbarrier*, unsigned, SIMULATOR_HERE) { cluster_sync(file, line); }

inline void pdl_wait() {}
inline void pdl_trigger() {}
inline void pdl_trigger_late(unsigned = 0) {}
inline void pdl_wait_and_trigger(unsigned = 0) {}

struct CountingMbarrier {
  unsigned long long open[2];  // by parity, in the high half
  int64 bytes;
  unsigned arrivals, missing, parity;
};
inline void change_counting_mbarrier(CountingMbarrier* gate, int arrived, int64 bytes) {
  gate->missing -= unsigned(arrived), gate->bytes += bytes;
  if (gate->missing || gate->bytes) return;
  gate->open[gate->parity ^ 1] = 0, gate->open[gate->parity] = 1ull << 32;
  gate->missing = gate->arrivals, gate->parity ^= 1;
}
inline void init_counting_mbarrier(CountingMbarrier* gate, unsigned arrivals) {
  *gate = {{0, 1ull << 32}, 0, arrivals, arrivals, 0};
}
inline void publish_mbarriers() {}
inline void expect_bytes(CountingMbarrier* gate, unsigned bytes) { change_counting_mbarrier(gate, 1, bytes); }
inline void await_counting_mbarrier(CountingMbarrier* gate, unsigned parity, SIMULATOR_HERE) {
  auto open = [](const void* at) { return *static_cast<const unsigned long long*>(at) >> 32 != 0; };
  simulator::await_written(&gate->open[parity], open, {"await_counting_mbarrier", file, line});
}
struct TensorMap {
  const unsigned char* data;
  unsigned long long cols, rows, box_rows, unused[12];  // elements of 2 bytes
};
inline void load_tensor_box(void* shared, const TensorMap* map, int col, int row, CountingMbarrier* gate) {
  if (reinterpret_cast<unsigned long long>(shared) % 1024)
    simulator::fail("an address that is no multiple of 1024 in", {"load_tensor_box", __FILE__, __LINE__});
  for (int r = 0; r < int(map->box_rows); ++r) {
    for (int c = 0; c < 64; ++c) {
      const bool there = row + r < int(map->rows) && col + c < int(map->cols);
      unsigned short element = 0;
      if (there) __builtin_memcpy(&element, map->data + 2 * ((row + r) * map->cols + unsigned(col + c)), 2);
      __builtin_memcpy(static_cast<unsigned char*>(shared) + r * 128 + ((c / 8) ^ (r % 8)) * 16 + c % 8 * 2, &element,
          2);
    }
  }
  change_counting_mbarrier(gate, 0, -int64(map->box_rows) * 128);
}

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

inline void exit_thread() {}
inline void prefetch_to_l2(const void*) {}
inline void clear_mailbox(MailboxWord* pair) { pair[0].bits = pair[1].bits = 0; }
inline void send_mailbox(MailboxWord* pair, unsigned a, unsigned b) {
  pair[0] = mailbox_word(a, b, false), pair[1] = mailbox_word(b, a, true);
}
template <int kMaxPolls, int kCount>
inline bool await_mailbox(const MailboxWord* from, unsigned (&word)[kCount], SIMULATOR_HERE) {
  auto come = [](const void* at) {
    const MailboxWord* pair = static_cast<const MailboxWord*>(at);
    return both_valid(pair[0], pair[1]);
  };
  for (int i = 0; i < kCount; i += 2) {
    if (!simulator::await_written(from + i, come, {"await_mailbox", file, line})) return false;
  }
  for (int i = 0; i < kCount; ++i) word[i] = unsigned(from[i].bits);
  return true;
}
inline void stop(const char* should_hold, SIMULATOR_HERE) {
  simulator::fail(should_hold, {"should hold: stop", file, line});
}

inline int float_to_int(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : int(std::nearbyint(x));
}
inline unsigned multiply_high(unsigned a, unsigned b) { return unsigned(static_cast<unsigned long long>(a) * b >> 32); }
inline unsigned long long wide_product(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b; }
template <typename T>
inline const T* behind(const T* from, int bytes, int count) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + static_cast<long long>(bytes) * count);
}
inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> 4 * i & 15, byte = unsigned(both >> 8 * (digit & 7) & 0xff);
    chosen |= (digit < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * i;
  }
  return chosen;
}
inline float between_or_nan(float x, float low, float high) {
  return x >= low && x <= high ? x : as_float(0x7fc00000u);
}
inline float between_or_nan(float x, float low, float high, float& count) {
  count += x >= low && x <= high;
  return between_or_nan(x, low, high);
}
inline float finite_or_nan(float x, float& count) {
  const float most = as_float(0x7f7fffffu);
  return between_or_nan(x, -most, most, count);
}
inline unsigned bits_of_sum(float x) { return x != x ? 0x7fffffffu : as_bits(x); }
inline float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }
inline unsigned largest_of_warp(unsigned x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, x, distance);
    x = x > other ? x : other;
  }
  return x;
}

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

inline void assume(bool) {}
inline void make_opaque(int&) {}
inline void make_opaque(unsigned&) {}
inline void make_opaque(float&) {}
inline void make_opaque(double&) {}
inline void make_opaque(int64&) {}
template <typename T>
inline void make_opaque(T*&) {}
template <int kBytes>
inline void copy_async(void* shared, const void* global) {
  simulator::copy_later(shared, global, kBytes, {"copy_async", __FILE__, __LINE__});
}
inline void copy_async_or_zero(void* shared, const void* global, bool there) {
  static const uint4 zeros = {0, 0, 0, 0};
  simulator::copy_later(shared, there ? global : &zeros, 16, {"copy_async_or_zero", __FILE__, __LINE__});
}
inline void commit_copies() { simulator::commit_copies(); }
template <int kNewest>
inline void wait_for_copies() {
  simulator::wait_for_copies(kNewest);
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline float half_to_float(unsigned short bits) {
  unsigned sign = unsigned(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // inf, nan
  // 2^112 moves the exponent's bias from 15 to 127, and turns a subnormal half into a normal float
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

inline unsigned short double_to_half(double x) {
  unsigned short sign = std::signbit(x) ? 0x8000 : 0;
  double magnitude = std::fabs(x);
  if (magnitude != magnitude) return sign | 0x7fff;
  // halfway to the number after the largest: ties to even, which is inf
  if (magnitude >= 65520.0) return sign | 0x7c00;
  int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  // ties to even; 1024..2048, or less if subnormal
  double scaled = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return sign | static_cast<unsigned short>(int(scaled) + (exponent + 14) * 1024);
}

inline unsigned short float_to_half(float x) { return double_to_half(x); }

inline float double_to_float_toward_zero(double x) {
  float nearest = float(x);
  return std::fabs(nearest) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

inline unsigned floats_to_halves(float low, float high) {
  return float_to_half(low) | unsigned(float_to_half(high)) << 16;
}
inline unsigned larger_halves(unsigned a, unsigned b) {
  auto half_of = [](unsigned word, int i) { return half_to_float(static_cast<unsigned short>(word >> 16 * i)); };
  return floats_to_halves(std::fmax(half_of(a, 0), half_of(b, 0)), std::fmax(half_of(a, 1), half_of(b, 1)));
}

}  // namespace cupynorm
