// Vector<T, N>: neighbouring elements as they lie in memory. The only vector access to memory, and the only place that
// rounds.
#pragma once
#include <base/async_copy.cuh>
#include <base/convert.cuh>
#include <base/hints.cuh>
#include <base/memory.cuh>

namespace cupynorm {

template <typename T, int N>
struct Vector {
  static constexpr int kBytes = N * int(sizeof(T));
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  unsigned word[kWords];  // a vector of two bytes is the low half of its word

  // Keeps what waits in registers packed: its conversion stays where it is used.
  void make_opaque() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) cupynorm::make_opaque(word[i]);
  }
};

// Element i of a vector, as a vector of one.
template <typename T, int N>
inline Vector<T, 1> element_of(const Vector<T, N>& vector, int i) {
  constexpr int kBytes = sizeof(T);
  if constexpr (kBytes == 8) return {{vector.word[2 * i], vector.word[2 * i + 1]}};
  else if constexpr (kBytes == 4) return {{vector.word[i]}};
  else return {{vector.word[i * kBytes / 4] >> 8 * (i * kBytes % 4) & ((1u << 8 * kBytes) - 1)}};
}

// One access of kBytes at p, which must be aligned to kBytes. kConstant promises that nothing writes there while the
// kernel runs: such loads may pass stores on their way. There are no cache hints, because loads that spare L1 or L2 are
// slower (docs/notes/001).
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

// kWhole: to global memory, in one instruction for certain. The compiler splits a plain assignment of 16 bytes into
// four stores wherever it cannot see the alignment, as in unaligned rows (docs/notes/048, "Stores of 16 bytes in PTX").
// But it can reorder plain stores, and then needs fewer registers.
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

// N elements at p in accesses of kWidth elements, 16 bytes at most; p must be aligned to one access.
template <typename T, int N, int kWidth = N, bool kConstant = false>
inline Vector<T, N> load_vector(const T* p) {
  constexpr int kAsked = kWidth * int(sizeof(T)), kBytes = kAsked > 16 ? 16 : kAsked,
      kCount = Vector<T, N>::kBytes / kBytes;
  Vector<T, N> vector;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(p);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kBytes >= 4) {
      load_words<kBytes, kConstant>(bytes + i * kBytes, vector.word + i * (kBytes / 4));
    } else {
      constexpr int kPieces = 4 / kBytes;  // of a word
      unsigned piece[1];
      load_words<kBytes, kConstant>(bytes + i * kBytes, piece);
      vector.word[i / kPieces] = i % kPieces ? vector.word[i / kPieces] | piece[0] << 8 * kBytes * (i % kPieces)
          : piece[0];
    }
  }
  return vector;
}

// A vector of what is read twice, the second time while L1, or else L2, still has it. p must be aligned to its bytes;
// what is not 16 bytes is loaded as any other.
// kAgain: it is the second time, and nobody will read it any more.
template <bool kAgain, typename T, int N>
inline Vector<T, N> load_vector_twice(const T* p) {
  if constexpr (Vector<T, N>::kBytes != 16) return load_vector<T, N>(p);
  Vector<T, N> vector;
  if constexpr (kAgain) load_quad_evicted_first(p, vector.word);
  else load_quad_evicted_last(p, vector.word);
  return vector;
}

// Begins to copy a vector from global to shared memory (copy_async): to number `place` of kPlaces, of which each access
// of 16 bytes has a region of its own, so that neighbouring threads meet no bank twice. kAligned: bytes that `from` is
// aligned to, 4 or more.
template <int kPlaces, int kAligned, int N, typename T>
inline void prefetch_vector(unsigned char* shared, int place, const T* from) {
  constexpr int kBytes = Vector<T, N>::kBytes, kPiece = kBytes < 16 ? kBytes : 16;
  constexpr int kAccess = kAligned < kPiece ? kAligned : kPiece;
  static_assert(kAccess >= 4, "no copy is of fewer bytes");
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(from);
#pragma unroll
  for (int i = 0; i < kBytes; i += kAccess)
    copy_async<kAccess>(shared + i / kPiece * kPiece * kPlaces + place * kPiece + i % kPiece, bytes + i);
}
// The vector that was copied there.
template <int kPlaces, typename T, int N>
inline Vector<T, N> prefetched_vector(const unsigned char* shared, int place) {
  constexpr int kBytes = Vector<T, N>::kBytes, kPiece = kBytes < 16 ? kBytes : 16;
  Vector<T, N> vector;
#pragma unroll
  for (int i = 0; i < kBytes; i += kPiece)
    load_words<kPiece, false>(shared + i * kPlaces + place * kPiece, vector.word + i / 4);
  return vector;
}

// Where elements lie that need be aligned to one element only: in accesses of kAccess bytes from the first that holds
// any.
template <int kAccess>
struct Unaligned {
  const unsigned char* access;
  unsigned off;  // bytes before the first element

  void make_opaque() { cupynorm::make_opaque(access), cupynorm::make_opaque(off); }
};

template <int kAccess, typename T>
inline Unaligned<kAccess> unaligned_at(const T* p) {
  const unsigned off = unsigned(reinterpret_cast<unsigned long long>(p) % kAccess);
  return {reinterpret_cast<const unsigned char*>(p) - off, off};
}

// N elements as the accesses bring them, not realigned yet. Each access is read whole, even if it holds only one of the
// elements: no page ends inside.
template <typename T, int N, int kAccess>
struct SplitVector {
  static constexpr int kPieces = (Vector<T, N>::kBytes + kAccess - 1) / kAccess + 1;
  unsigned word[kPieces * (kAccess / 4)];
  unsigned off;
};

// At `further` elements behind the first, a multiple of kAccess bytes: such vectors are equally
// misaligned, which is then found once.
template <typename T, int N, bool kConstant = false, int kAccess, typename Index = int>
inline SplitVector<T, N, kAccess> load_split(const Unaligned<kAccess>& first, Index further = 0) {
  SplitVector<T, N, kAccess> split;
  split.off = first.off;
  const unsigned char* base = first.access + further * Index(sizeof(T));
#pragma unroll
  for (int i = 0; i < split.kPieces; ++i) {
    if (i < split.kPieces - 1 || i * kAccess < int(split.off) + Vector<T, N>::kBytes)
      load_words<kAccess, kConstant>(base + i * kAccess, split.word + i * (kAccess / 4));
  }
  return split;
}

template <typename T, int N, int kAccess>
inline Vector<T, N> realign(SplitVector<T, N, kAccess> split) {
  constexpr int kWords = Vector<T, N>::kWords;
  auto& word = split.word;
  if constexpr (kAccess > 8) {
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) word[i] = split.off & 8 ? word[i + 2] : word[i];
  }
  if constexpr (sizeof(T) < 8) {
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) word[i] = split.off & 4 ? word[i + 1] : word[i];
  }
  if constexpr (sizeof(T) < 4) {
    const unsigned selector = split.off & 2 ? 0x5432 : 0x3210;
#pragma unroll
    for (int i = 0; i < kWords + (sizeof(T) == 1); ++i) word[i] = permute_bytes(word[i], word[i + 1], selector);
  }
  if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = split.off & 1 ? word[i] >> 8 | word[i + 1] << 24 : word[i];
  }
  Vector<T, N> vector;
#pragma unroll
  for (int i = 0; i < kWords; ++i) vector.word[i] = word[i];
  return vector;
}

template <typename T, int N, bool kConstant = false>
inline Vector<T, N> load_vector_unaligned(const T* p) {
  return realign(load_split<T, N, kConstant>(unaligned_at<16>(p)));
}

// p must be aligned to the whole vector, or to 16 bytes if the vector is larger.
template <bool kWhole = false, typename T, int N>
inline void store_vector(T* p, const Vector<T, N>& vector) {
  constexpr int kBytes = Vector<T, N>::kBytes > 16 ? 16 : Vector<T, N>::kBytes;
  unsigned char* bytes = reinterpret_cast<unsigned char*>(p);
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kBytes / kBytes; ++i)
    store_words<kBytes, kWhole>(bytes + i * kBytes, vector.word + i * (kBytes / 4));
}

// From memory's type to the compute type: exact. From the compute type to memory's: the one rounding.

// Element i of a vector's words; the first argument names its type. With one overload of unpack for each type, the
// compiler would instantiate the vectors of all types wherever it resolves a call: a longer compilation and a larger
// cubin (docs/notes/048, "What overloads cost the compiler").
inline float number_at(half, const unsigned* word, int i) {
  return half_to_float(static_cast<unsigned short>(word[i / 2] >> 16 * (i % 2)));
}
inline float number_at(bfloat16, const unsigned* word, int i) {
  return as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
}
inline float number_at(float, const unsigned* word, int i) { return as_float(word[i]); }
inline double number_at(double, const unsigned* word, int i) { return as_double(word[2 * i], word[2 * i + 1]); }

// Integers, of which the largest are rounded: these are operands, and nothing is stored so but int8.
// A byte as the last one of 2^23, which takes a permutation and a sum; conversions have a quarter of their rate.
inline float number_at(unsigned char, const unsigned* word, int i) {
  return as_float(permute_bytes(word[i / 4], 0x4b000000u, 0x7440u + i % 4)) - 8388608.0f;
}
inline float number_at(signed char, const unsigned* word, int i) {
  return as_float(permute_bytes(word[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7440u + i % 4)) - 8388736.0f;
}
inline short number_at(short, const unsigned* word, int i) { return static_cast<short>(word[i / 2] >> 16 * (i % 2)); }
inline unsigned number_at(unsigned short, const unsigned* word, int i) { return word[i / 2] >> 16 * (i % 2) & 0xffff; }
inline int number_at(int, const unsigned* word, int i) { return int(word[i]); }
inline unsigned number_at(unsigned, const unsigned* word, int i) { return word[i]; }
inline unsigned long long number_at(unsigned long long, const unsigned* word, int i) {
  return static_cast<unsigned long long>(word[2 * i + 1]) << 32 | word[2 * i];
}
inline int64 number_at(int64, const unsigned* word, int i) { return int64(number_at(0ull, word, i)); }

template <int N, typename T, typename Compute>
inline void unpack(const Vector<T, N>& vector, Compute* x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = Compute(number_at(T{}, vector.word, i));
}

// To a byte: the nearest that there is, to even in the middle, the largest for larger ones.
inline unsigned round_to_byte(signed char, float x) { return float_to_int8(x); }
inline unsigned round_to_byte(float8_e4m3fn, float x) { return float_to_float8<3, 7, 0x7e>(x); }
inline unsigned round_to_byte(float8_e5m2, float x) { return float_to_float8<2, 15, 0x7b>(x); }
// int8 of a double that is no integer, and of the middle of two: the float rounded to odd is neither, and on the same
// side.
template <typename T>
inline unsigned round_to_byte(T type, double x) {
  return round_to_byte(type, double_to_float_to_odd(x));
}
inline unsigned round_bytes(signed char, float a, float b, float c, float d) { return floats_to_int8s(a, b, c, d); }
inline unsigned round_bytes(float8_e4m3fn, float a, float b, float c, float d) {
  return floats_to_e4m3s(a, b) | floats_to_e4m3s(c, d) << 16;
}
inline unsigned round_bytes(float8_e5m2, float a, float b, float c, float d) {
  return floats_to_e5m2s(a, b) | floats_to_e5m2s(c, d) << 16;
}
template <typename T>
inline unsigned round_bytes(T type, double a, double b, double c, double d) {
  return round_to_byte(type, a) | round_to_byte(type, b) << 8 | round_to_byte(type, c) << 16 | round_to_byte(type,
      d) << 24;
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
inline Vector<T, N> vector_from(const Compute* x) {
  Vector<T, N> vector;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      vector.word[2 * i] = low_word(double(x[i])), vector.word[2 * i + 1] = high_word(double(x[i]));
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) vector.word[i] = as_bits(float(x[i]));
  } else if constexpr (sizeof(T) == 1 && N < 4) {
    vector.word[0] = round_to_byte(T{}, x[0]);
    if constexpr (N == 2) vector.word[0] |= round_to_byte(T{}, x[1]) << 8;
  } else if constexpr (sizeof(T) == 1) {
#pragma unroll
    for (int i = 0; i < N; i += 4) vector.word[i / 4] = round_bytes(T{}, x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else if constexpr (N == 1) {
    vector.word[0] = round_to(T{}, x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) vector.word[i / 2] = round_pair_to(T{}, x[i], x[i + 1]);
  }
  return vector;
}

template <typename T, int N, typename Compute>
inline Vector<T, N> vector_filled(Compute value) {
  Compute x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = value;
  return vector_from<T, N>(x);
}

}  // namespace cupynorm
