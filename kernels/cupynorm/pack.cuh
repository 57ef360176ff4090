// Pack<T, N>: neighbouring elements as they lie in memory. The only vector access to memory, and the only place that rounds.
#pragma once
#include <cupynorm/ptx.cuh>

namespace cupynorm {

template <typename T, int N>
struct Pack {
  static constexpr int kBytes = N * int(sizeof(T));
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  unsigned word[kWords];  // a pack of two bytes is the low half of its word

  // Keeps what waits in registers packed: its conversion stays where it is used.
  void hide() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) cupynorm::hide(word[i]);
  }
};

// One access of kBytes at p, which must be aligned to kBytes. kConstant promises that nothing writes there while the kernel
// runs: such loads may pass stores on their way. (Hints that spare L1 or L2 measured 2 to 25 % slower on an H200.)
template <int kBytes, bool kConstant>
inline void load_words(const void* p, unsigned* word) {
  if constexpr (kBytes == 16) {
    const uint4* q = static_cast<const uint4*>(p);
    uint4 v = kConstant ? __ldg(q) : *q;
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2* q = static_cast<const uint2*>(p);
    uint2 v = kConstant ? __ldg(q) : *q;
    word[0] = v.x, word[1] = v.y;
  } else if constexpr (kBytes == 4) {
    const unsigned* q = static_cast<const unsigned*>(p);
    word[0] = kConstant ? __ldg(q) : *q;
  } else if constexpr (kBytes == 2) {
    const unsigned short* q = static_cast<const unsigned short*>(p);
    word[0] = kConstant ? __ldg(q) : *q;
  } else {
    const unsigned char* q = static_cast<const unsigned char*>(p);
    word[0] = kConstant ? __ldg(q) : *q;
  }
}

// kWhole: to global memory, in one instruction for certain. A plain assignment the compiler takes apart, and puts together again
// only where it sees the alignment: where rows begin anywhere it leaves 4 stores (LayerNorm, half of 1023 columns: 0.75 of the copy
// rate). But it can order plain ones better, and then needs fewer registers.
template <int kBytes, bool kWhole>
inline void store_words(void* p, const unsigned* word) {
  if constexpr (kWhole && kBytes == 16) return store_quad(p, word[0], word[1], word[2], word[3]);
  else if constexpr (kWhole && kBytes == 8) return store_pair(p, word[0], word[1]);
  if constexpr (kBytes == 16) *static_cast<uint4*>(p) = uint4{word[0], word[1], word[2], word[3]};
  else if constexpr (kBytes == 8) *static_cast<uint2*>(p) = uint2{word[0], word[1]};
  else if constexpr (kBytes == 4) *static_cast<unsigned*>(p) = word[0];
  else if constexpr (kBytes == 2) *static_cast<unsigned short*>(p) = static_cast<unsigned short>(word[0]);
  else *static_cast<unsigned char*>(p) = static_cast<unsigned char>(word[0]);
}

// A pack of what is read twice, the second time while L1, or else L2, still has it: 16 bytes in one access, so p must be aligned to them.
// kAgain: it is the second time, and nobody will read it any more.
template <bool kAgain, typename T, int N>
inline Pack<T, N> load_pack_twice(const T* p) {
  static_assert(Pack<T, N>::kBytes == 16, "one access");
  Pack<T, N> pack;
  if constexpr (kAgain) load_quad_evicted_first(p, pack.word);
  else load_quad_evicted_last(p, pack.word);
  return pack;
}

// N elements at p in accesses of kWidth elements, 16 bytes at most; p must be aligned to one access.
template <typename T, int N, int kWidth = N, bool kConstant = false>
inline Pack<T, N> load_pack(const T* p) {
  constexpr int kAsked = kWidth * int(sizeof(T)), kBytes = kAsked > 16 ? 16 : kAsked, kCount = Pack<T, N>::kBytes / kBytes;
  Pack<T, N> pack;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(p);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kBytes >= 4) {
      load_words<kBytes, kConstant>(bytes + i * kBytes, pack.word + i * (kBytes / 4));
    } else {
      constexpr int kPieces = 4 / kBytes;  // of a word
      unsigned piece[1];
      load_words<kBytes, kConstant>(bytes + i * kBytes, piece);
      pack.word[i / kPieces] = i % kPieces ? pack.word[i / kPieces] | piece[0] << 8 * kBytes * (i % kPieces) : piece[0];
    }
  }
  return pack;
}

// Copies a pack from global to shared memory ahead of its use (copy_ahead): to number `place` of kPlaces, of which each access of 16 bytes
// has a region of its own, so that neighbouring threads meet no bank twice. kAsked: bytes that `from` is aligned to, 4 or more.
template <int kPlaces, int kAsked, int N, typename T>
inline void send_pack(unsigned char* shared, int place, const T* from) {
  constexpr int kBytes = Pack<T, N>::kBytes, kPiece = kBytes < 16 ? kBytes : 16, kAccess = kAsked < kPiece ? kAsked : kPiece;
  static_assert(kAccess >= 4, "no copy is of fewer bytes");
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(from);
#pragma unroll
  for (int i = 0; i < kBytes; i += kAccess) copy_ahead<kAccess>(shared + i / kPiece * kPiece * kPlaces + place * kPiece + i % kPiece, bytes + i);
}
// The pack that was sent there.
template <int kPlaces, typename T, int N>
inline Pack<T, N> sent_pack(const unsigned char* shared, int place) {
  constexpr int kBytes = Pack<T, N>::kBytes, kPiece = kBytes < 16 ? kBytes : 16;
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < kBytes; i += kPiece) load_words<kPiece, false>(shared + i * kPlaces + place * kPiece, pack.word + i / 4);
  return pack;
}

// Where elements lie that need be aligned to one element only: in accesses of kAccess bytes from the first that holds any.
template <int kAccess>
struct Anywhere {
  const unsigned char* access;
  unsigned off;  // bytes before the first element

  void hide() { cupynorm::hide(access), cupynorm::hide(off); }
};

template <int kAccess, typename T>
inline Anywhere<kAccess> anywhere(const T* p) {
  const unsigned off = unsigned(reinterpret_cast<unsigned long long>(p) % kAccess);
  return {reinterpret_cast<const unsigned char*>(p) - off, off};
}

// N of them as the accesses bring them: not put together yet. Of each access the whole is read, though it may hold but one of the elements:
// no page ends inside.
template <typename T, int N, int kAccess>
struct Apart {
  static constexpr int kPieces = (Pack<T, N>::kBytes + kAccess - 1) / kAccess + 1;
  unsigned word[kPieces * (kAccess / 4)];
  unsigned off;
};

// At `further` elements behind the first, a multiple of kAccess bytes: packs that differ in nothing else lie alike, which is then found once.
template <typename T, int N, bool kConstant = false, int kAccess, typename Index = int>
inline Apart<T, N, kAccess> load_apart(const Anywhere<kAccess>& first, Index further = 0) {
  Apart<T, N, kAccess> apart;
  apart.off = first.off;
  const unsigned char* base = first.access + further * Index(sizeof(T));
#pragma unroll
  for (int i = 0; i < apart.kPieces; ++i) {
    if (i < apart.kPieces - 1 || i * kAccess < int(apart.off) + Pack<T, N>::kBytes)
      load_words<kAccess, kConstant>(base + i * kAccess, apart.word + i * (kAccess / 4));
  }
  return apart;
}

template <typename T, int N, int kAccess>
inline Pack<T, N> together(Apart<T, N, kAccess> apart) {
  constexpr int kWords = Pack<T, N>::kWords;
  auto& word = apart.word;
  if constexpr (kAccess > 8) {
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) word[i] = apart.off & 8 ? word[i + 2] : word[i];
  }
  if constexpr (sizeof(T) < 8) {
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) word[i] = apart.off & 4 ? word[i + 1] : word[i];
  }
  if constexpr (sizeof(T) < 4) {
    const unsigned selector = apart.off & 2 ? 0x5432 : 0x3210;
#pragma unroll
    for (int i = 0; i < kWords + (sizeof(T) == 1); ++i) word[i] = choose_bytes(word[i], word[i + 1], selector);
  }
  if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = apart.off & 1 ? word[i] >> 8 | word[i + 1] << 24 : word[i];
  }
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < kWords; ++i) pack.word[i] = word[i];
  return pack;
}

template <typename T, int N, bool kConstant = false>
inline Pack<T, N> load_pack_anywhere(const T* p) {
  return together(load_apart<T, N, kConstant>(anywhere<16>(p)));
}

// p must be aligned to the whole pack, or to 16 bytes if the pack is larger.
template <bool kWhole = false, typename T, int N>
inline void store_pack(T* p, const Pack<T, N>& pack) {
  constexpr int kBytes = Pack<T, N>::kBytes > 16 ? 16 : Pack<T, N>::kBytes;
  unsigned char* bytes = reinterpret_cast<unsigned char*>(p);
#pragma unroll
  for (int i = 0; i < Pack<T, N>::kBytes / kBytes; ++i) store_words<kBytes, kWhole>(bytes + i * kBytes, pack.word + i * (kBytes / 4));
}

// From memory's type to the compute type: exact. From the compute type to memory's: the one rounding.

// Element i of a pack's words; the first argument names its type. One unpack for each type would have the compiler make the packs of all of
// them wherever it looks for one: 1 ms of 90 to 120 of an op's first kernel, and a fifth of the cubin.
inline float number_at(half, const unsigned* word, int i) { return half_to_float(static_cast<unsigned short>(word[i / 2] >> 16 * (i % 2))); }
inline float number_at(bfloat16, const unsigned* word, int i) { return as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16); }
inline float number_at(float, const unsigned* word, int i) { return as_float(word[i]); }
inline double number_at(double, const unsigned* word, int i) { return as_double(word[2 * i], word[2 * i + 1]); }

// Integers, of which the largest are rounded: these are operands, and nothing is stored so but int8.
inline signed char number_at(signed char, const unsigned* word, int i) { return static_cast<signed char>(word[i / 4] >> 8 * (i % 4)); }
inline unsigned number_at(unsigned char, const unsigned* word, int i) { return word[i / 4] >> 8 * (i % 4) & 0xff; }
inline short number_at(short, const unsigned* word, int i) { return static_cast<short>(word[i / 2] >> 16 * (i % 2)); }
inline unsigned number_at(unsigned short, const unsigned* word, int i) { return word[i / 2] >> 16 * (i % 2) & 0xffff; }
inline int number_at(int, const unsigned* word, int i) { return int(word[i]); }
inline unsigned number_at(unsigned, const unsigned* word, int i) { return word[i]; }
inline unsigned long long number_at(unsigned long long, const unsigned* word, int i) {
  return static_cast<unsigned long long>(word[2 * i + 1]) << 32 | word[2 * i];
}
inline int64 number_at(int64, const unsigned* word, int i) { return int64(number_at(0ull, word, i)); }

template <int N, typename T, typename Compute>
inline void unpack(const Pack<T, N>& pack, Compute* x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = Compute(number_at(T{}, pack.word, i));
}

// To a byte: the nearest that there is, to even in the middle, the largest for larger ones.
inline unsigned round_to_byte(signed char, float x) { return float_to_int8(x); }
inline unsigned round_to_byte(float8_e4m3fn, float x) { return float_to_float8<3, 7, 0x7e>(x); }
inline unsigned round_to_byte(float8_e5m2, float x) { return float_to_float8<2, 15, 0x7b>(x); }
// int8 of a double that is no integer, and of the middle of two: the float rounded to odd is neither, and on the same side.
template <typename T>
inline unsigned round_to_byte(T type, double x) {
  return round_to_byte(type, double_to_float_to_odd(x));
}
inline unsigned round_bytes(signed char, float a, float b, float c, float d) { return floats_to_int8s(a, b, c, d); }
inline unsigned round_bytes(float8_e4m3fn, float a, float b, float c, float d) { return floats_to_e4m3s(a, b) | floats_to_e4m3s(c, d) << 16; }
inline unsigned round_bytes(float8_e5m2, float a, float b, float c, float d) { return floats_to_e5m2s(a, b) | floats_to_e5m2s(c, d) << 16; }
template <typename T>
inline unsigned round_bytes(T type, double a, double b, double c, double d) {
  return round_to_byte(type, a) | round_to_byte(type, b) << 8 | round_to_byte(type, c) << 16 | round_to_byte(type, d) << 24;
}

inline unsigned round_to(half, float x) { return float_to_half(x); }
inline unsigned round_to(half, double x) { return double_to_half(x); }
inline unsigned round_to(bfloat16, float x) { return float_to_bfloat16(x); }
inline unsigned round_to(bfloat16, double x) { return float_to_bfloat16(double_to_float_to_odd(x)); }
inline unsigned round_pair_to(half, float low, float high) { return floats_to_halves(low, high); }
inline unsigned round_pair_to(bfloat16, float low, float high) { return floats_to_bfloat16s(low, high); }
template <typename T>
inline unsigned round_pair_to(T type, double low, double high) {
  return round_to(type, low) | round_to(type, high) << 16;
}

template <typename T, int N, typename Compute>
inline Pack<T, N> pack_from(const Compute* x) {
  Pack<T, N> pack;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.word[2 * i] = low_word(double(x[i])), pack.word[2 * i + 1] = high_word(double(x[i]));
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.word[i] = as_bits(float(x[i]));
  } else if constexpr (sizeof(T) == 1 && N < 4) {
    pack.word[0] = round_to_byte(T{}, x[0]);
    if constexpr (N == 2) pack.word[0] |= round_to_byte(T{}, x[1]) << 8;
  } else if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (int i = 0; i < N; i += 4) pack.word[i / 4] = round_bytes(T{}, x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else if constexpr (N == 1) {
    pack.word[0] = round_to(T{}, x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) pack.word[i / 2] = round_pair_to(T{}, x[i], x[i + 1]);
  }
  return pack;
}

template <typename T, int N, typename Compute>
inline Pack<T, N> pack_filled(Compute value) {
  Compute x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = value;
  return pack_from<T, N>(x);
}

}  // namespace cupynorm
