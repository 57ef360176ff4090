// Products of small matrices by a warp: the tensor cores' instructions (sm_80 and newer).
#pragma once
#include <io/vector.cuh>

namespace cupynorm {

// c += a b, for a of 16 x 16, b of 16 x 8 and c of 16 x 8 elements, which the lanes of a warp hold together. With g =
// lane / 4 and t = lane % 4, a lane has, two elements a word: a[0]: row g, columns 2t and 2t + 1; a[1]: row g + 8;
// a[2], a[3]: those, 8 columns further. b[0]: column g, rows 2t and 2t + 1; b[1]: 8 rows further. c[0], c[1]: row g,
// columns 2t and 2t + 1; c[2], c[3]: row g + 8. By all lanes of the warp.

// Four matrices of 8 x 8 elements of 16 bits, transposed: lane i gives the address of row i % 8 of number i / 8,
// aligned to 16 bytes in shared memory; word m gets column g, rows 2t and 2t + 1 of number m. By all lanes of the warp.
// load_matrices: the same as they lie; word m gets row g, columns 2t and 2t + 1.

// A warpgroup's products (sm_90a): its 4 warps multiply 64 rows of a together, 16 for each, by b in shared memory. Rows
// of b lie there kBytes (64 or 128) wide, one after the other, but a row's chunks of 16 bytes change places, so that
// the tensor cores meet no bank twice: `swizzled` says where a chunk is. The first row is aligned to 8 rows. A Tile is
// such rows' address.
template <int kBytes>
inline int swizzled(int row, int chunk) {
  return row * kBytes + (chunk ^ (kBytes == 128 ? row % 8 : row / 2 % 4)) * 16;
}

// begin_products, any multiply_add_rows, end_products, wait_for_products: until all such groups but the kNewest last
// are done; by all threads of the warpgroup. Meanwhile nobody may touch their registers, which `settle` holds back
// until then. What threads wrote to shared memory is seen after show_to_products and a barrier.
//
// multiply_add_rows: c (+)= a b^T for a of 64 x 16 elements (each warp's as in multiply_add_tile), b of kCols rows, of
// which `tile` is the first one's first column; kAcross: c (+)= a b, b of 16 rows of kCols. c[4 * i] .. c[4 * i + 3]
// are the ith 8 columns.

#ifdef __CUDACC_RTC__

inline void multiply_add_tile(half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
inline void multiply_add_tile(bfloat16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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

inline void load_matrices(const void* shared, unsigned (&word)[4]) {
#if __CUDA_ARCH__ >= 800
  const unsigned from = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
#endif
}

// the descriptor that the instruction takes: address and stride in units of 16 bytes, swizzle
using Tile = unsigned long long;

template <int kBytes>
inline Tile tile_of(const void* shared) {
  const Tile rows = 8 * kBytes / 16, kind = kBytes == 128 ? 1 : 2;
  return kind << 62 | rows << 32 | 1 << 16 | (unsigned(__cvta_generic_to_shared(shared)) >> 4 & 0x3fff);
}
inline Tile tile_at(Tile tile, int bytes) { return tile + bytes / 16; }

inline void show_to_products() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kNewest>
inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

#define CUPYNORM_PLACES_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define CUPYNORM_PLACES_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define CUPYNORM_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define CUPYNORM_8(c, i) CUPYNORM_4(c, i), CUPYNORM_4(c, i + 4)
#define CUPYNORM_ROWS(T, type, cols, count, a0, a1, a2, a3, b, more, across, ...) \
  template <int kBytes, bool kAcross> \
  inline void multiply_add_rows(T, float (&c)[count], const unsigned (&a)[4], Tile tile, bool add) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" more ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" cols "k16.f32." type "." type " " CUPYNORM_PLACES_##count \
                 ", {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b ", p, 1, 1, %" across ";\n}" \
                 : __VA_ARGS__ \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"(int(add)), "n"(int(kAcross))); \
  }
#define CUPYNORM_ROWS_32(T, type) \
  CUPYNORM_ROWS(T, type, "32", 16, "16", "17", "18", "19", "20", "21", "22", CUPYNORM_8(c, 0), CUPYNORM_8(c, 8))
#define CUPYNORM_ROWS_64(T, type) \
  CUPYNORM_ROWS(T, type, "64", 32, "32", "33", "34", "35", "36", "37", "38", CUPYNORM_8(c, 0), CUPYNORM_8(c, 8), \
                CUPYNORM_8(c, 16), CUPYNORM_8(c, 24))
CUPYNORM_ROWS_32(half, "f16")
CUPYNORM_ROWS_32(bfloat16, "bf16")
CUPYNORM_ROWS_64(half, "f16")
CUPYNORM_ROWS_64(bfloat16, "bf16")
#endif

template <int kCount>
inline void make_all_opaque(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#endif

}  // namespace cupynorm

#ifndef __CUDACC_RTC__
#include SIMULATOR_TWIN(mma)  // the same in C++, by tests/simulator, which defines the macro
#endif
