// What kernels/base/async_copy.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

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

}  // namespace cupynorm
