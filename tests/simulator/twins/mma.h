// What kernels/bert/mma.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

template <typename T>
inline void multiply_add_tile(T, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int g = simulator::lane() / 4, t = simulator::lane() % 4;
  for (int k = 0; k < 8; ++k) {
    const int part = k / 4, from = k % 4;  // rows and columns 2k and 2k + 1
    float left[2][2], right[2][2];
    for (int i = 0; i < 2; ++i) {
      const Vector<T, 2> row = {{__shfl_sync(kAllLanes, a[part * 2 + i], g * 4 + from)}};
      const Vector<T, 2> column = {{__shfl_sync(kAllLanes, part ? b1 : b0, (2 * t + i) * 4 + from)}};
      unpack<2>(row, left[i]), unpack<2>(column, right[i]);
    }
    for (int i = 0; i < 4; ++i) c[i] += left[i / 2][0] * right[i % 2][0] + left[i / 2][1] * right[i % 2][1];
  }
}

inline void load_transposed(const void* shared, unsigned (&word)[4]) {
  const int g = simulator::lane() / 4, t = simulator::lane() % 4;
  for (int m = 0; m < 4; ++m) {
    unsigned value[2];
    for (int i = 0; i < 2; ++i) {
      const auto row = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(shared), m * 8 + 2 * t + i);
      value[i] = reinterpret_cast<const unsigned short*>(row)[g];
    }
    word[m] = value[0] | value[1] << 16;
  }
}

inline void load_matrices(const void* shared, unsigned (&word)[4]) {
  const int g = simulator::lane() / 4, t = simulator::lane() % 4;
  for (int m = 0; m < 4; ++m) {
    const auto row = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(shared), m * 8 + g);
    word[m] = reinterpret_cast<const unsigned*>(row)[t];
  }
}

using Tile = unsigned long long;  // an address

template <int kBytes>
inline Tile tile_of(const void* shared) {
  return reinterpret_cast<Tile>(shared);
}
inline Tile tile_at(Tile tile, int bytes) { return tile + bytes; }
inline void show_to_products() {}
inline void begin_products() {}
inline void end_products() {}
template <int kNewest>
inline void wait_for_products() {}
template <int kCount>
inline void make_all_opaque(float (&)[kCount]) {}

template <int kBytes, bool kAcross, typename T, int kCount>
inline void multiply_add_rows(T, float (&c)[kCount], const unsigned (&a)[4], Tile tile, bool add) {
  const int g = simulator::lane() / 4, t = simulator::lane() % 4;
  for (int i = 0; i < kCount && !add; ++i) c[i] = 0;
  for (int k = 0; k < 16; ++k) {
    float left[2], right;
    for (int i = 0; i < 2; ++i) {
      const Vector<T, 2> row = {{__shfl_sync(kAllLanes, a[k / 8 * 2 + i], g * 4 + k % 8 / 2)}};
      float both[2];
      unpack<2>(row, both);
      left[i] = both[k % 2];
    }
    for (int i = 0; i < kCount; ++i) {
      const int col = i / 4 * 8 + 2 * t + i % 2;
      // as if in order; bits 7.. move bits 4..
      const Tile at = tile + (kAcross ? k * kBytes + 2 * col : col * kBytes + 2 * k);
      const Vector<T, 1> element =
          {{*reinterpret_cast<const unsigned short*>(at ^ (at >> 7 & (kBytes / 16 - 1)) << 4)}};
      unpack<1>(element, &right);
      c[i] += left[i / 2 % 2] * right;
    }
  }
}

}  // namespace cupynorm
