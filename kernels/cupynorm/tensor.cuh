// Products of small matrices by a warp: the tensor cores' instructions (sm_80 and newer), each with its C++ twin.
#pragma once
#include <cupynorm/pack.cuh>

namespace cupynorm {

// c += a b, for a of 16 x 16, b of 16 x 8 and c of 16 x 8 elements, which the lanes of a warp hold together. With g = lane / 4 and
// t = lane % 4, a lane has, two elements a word: a[0]: row g, columns 2t and 2t + 1; a[1]: row g + 8; a[2], a[3]: those, 8
// columns further. b[0]: column g, rows 2t and 2t + 1; b[1]: 8 rows further. c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]:
// row g + 8. By all lanes of the warp.

// Four matrices of 8 x 8 elements of 16 bits, transposed: lane i gives the address of row i % 8 of number i / 8, aligned to 16
// bytes in shared memory; word m gets column g, rows 2t and 2t + 1 of number m. By all lanes of the warp.

#ifdef __CUDACC_RTC__

inline void multiply_add_tile(half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
inline void multiply_add_tile(bfloat16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

inline void load_transposed(const void* shared, unsigned (&word)[4]) {
#if __CUDA_ARCH__ >= 800
  const unsigned from = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
#endif
}

#else  // the twins

template <typename T>
inline void multiply_add_tile(T, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int g = simulator::lane() / 4, t = simulator::lane() % 4;
  for (int k = 0; k < 8; ++k) {
    const int part = k / 4, from = k % 4;  // rows and columns 2k and 2k + 1
    float left[2][2], right[2][2];
    for (int i = 0; i < 2; ++i) {
      const Pack<T, 2> row = {{__shfl_sync(kAllLanes, a[part * 2 + i], g * 4 + from)}};
      const Pack<T, 2> column = {{__shfl_sync(kAllLanes, part ? b1 : b0, (2 * t + i) * 4 + from)}};
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

#endif

}  // namespace cupynorm
