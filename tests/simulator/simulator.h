// What a kernel's text finds in place of CUDA when g++ compiles it: the names the kernels use, each with CUDA's
// meaning. The list is closed on purpose: a kernel that needs a new name fails to compile until the name is added here.
#pragma once
#include <cmath>
#include <cstddef>

struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using dim3 = uint3;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)  // build.py reads them, and a launch is held to them
#define __align__(bytes) __attribute__((aligned(bytes)))
// a block runs on one OS thread: this also makes `extern __shared__ ... []` legal
#define __shared__ thread_local
// the file that holds C++ for what NAME.cuh in kernels/ has in PTX: its twin
#define SIMULATOR_TWIN(name) <twins/name.h>
#define __ldg(...) (*(__VA_ARGS__))  // not a function: a report of a misaligned read names the kernel's own line

namespace simulator {

using Word = unsigned long long;

// Where in the kernel's text a thread called something.
struct Site {
  const char* call;
  const char* file;
  int line;
};

enum class Meeting : unsigned char { kSync, kShuffle, kVote };

#define SIMULATOR_ENGINE __attribute__((visibility("default")))  // defined in engine.cpp, a library of its own

SIMULATOR_ENGINE extern __thread uint3 thread_index, block_index, block_shape, grid_shape;

// Waits for every thread of the block.
SIMULATOR_ENGINE void meet_block(Site site);

// Waits for the lanes in `mask`, the caller among them, and for no others. Gives the `value` of lane `source`
// (kShuffle) or the set of lanes whose value is not 0 (kVote).
SIMULATOR_ENGINE Word meet_lanes(Meeting meeting, unsigned mask, Word value, int source, Site site);

// For the C++ stand-ins for thread block clusters. A launch without them has clusters of one block.
SIMULATOR_ENGINE int block_of_cluster();  // %cluster_ctarank

// barrier.cluster.arrive.release and barrier.cluster.wait.acquire, for one thread: the wait returns when every thread
// of the cluster has arrived or exited. Arrivals and waits alternate, and the threads of a block arrive from one place.
SIMULATOR_ENGINE void cluster_arrive(Site site);
SIMULATOR_ENGINE void cluster_wait(Site site);

// mapa: the address in `block` of the cluster that corresponds to `shared` in this block. Callers ask for it where they
// use it, between two barriers: after the first the other block has begun, and before the second it does not exit.
SIMULATOR_ENGINE void* of_block(void* shared, int block, Site site);

// For the C++ stand-in for a barrier of the grid, in a cooperative launch: the wait returns when every thread of the
// grid has arrived.
SIMULATOR_ENGINE void grid_arrive(Site site);
SIMULATOR_ENGINE void grid_wait(Site site);

// Waits until another thread of the grid has `written` the word at an address. Gives false if the wait ends without it,
// as a bounded wait does, which happens only where something writes beside the launch (settings.beside). Otherwise a
// word that nobody writes is reported as a deadlock.
SIMULATOR_ENGINE bool await_written(const void* at, bool (*written)(const void*), Site site);

// For the C++ stand-ins for asynchronous copies (cp.async): a thread's copies are made some time between the call and
// the wait that covers them; at once under the schedule "forward", only in the wait under "reverse", either under a
// seed. So data that is read without waiting differs from schedule to schedule. Copies that nobody waits for may never
// be made. Both addresses are aligned to `bytes`: 4, 8 or 16.
SIMULATOR_ENGINE void copy_later(void* to, const void* from, unsigned bytes, Site site);
SIMULATOR_ENGINE void commit_copies();                   // those since the last commit become one group
SIMULATOR_ENGINE void wait_for_copies(unsigned newest);  // waits for all groups but the `newest` last

// Ends the launch with a report.
[[noreturn]] SIMULATOR_ENGINE void fail(const char* what, Site site);
[[noreturn]] SIMULATOR_ENGINE void fail_undefined(
    const char* what, const void* address, unsigned alignment, const char* file, int line);

inline int lane() {
  return int(thread_index.x + block_shape.x * (thread_index.y + block_shape.y * thread_index.z)) % 32;
}

template <typename T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= sizeof(Word), "CUDA shuffles 4 or 8 bytes");
  Word word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  word = meet_lanes(Meeting::kShuffle, mask, word, source, site);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

inline int checked(int width, Site site) {
  if (width < 1 || width > 32 || (width & (width - 1))) fail("a shuffle's width is a power of two, 32 at most", site);
  return width;
}

// Calls a kernel with its parameters copied from where `arguments` points to, as a launch does for every thread.
template <typename... Parameter>
struct Kernel {
  template <std::size_t... i>
  struct Indices {};
  template <std::size_t n, std::size_t... i>
  struct Count : Count<n - 1, n - 1, i...> {};
  template <std::size_t... i>
  struct Count<0, i...> {
    using Type = Indices<i...>;
  };
  template <std::size_t... i>
  static void call(void (*kernel)(Parameter...), void** arguments, Indices<i...>) {
    kernel(*static_cast<Parameter*>(arguments[i])...);
  }
};
template <typename... Parameter>
void call(void (*kernel)(Parameter...), void** arguments) {
  using Indices = typename Kernel<Parameter...>::template Count<sizeof...(Parameter)>::Type;
  Kernel<Parameter...>::call(kernel, arguments, Indices{});
}
template <typename... Parameter>
int sizes(void (*)(Parameter...), int* bytes) {
  int count = 0;
  ((bytes[count++] = int(sizeof(Parameter))), ...);
  return count;
}

}  // namespace simulator

#define threadIdx (simulator::thread_index)
#define blockIdx (simulator::block_index)
#define blockDim (simulator::block_shape)
#define gridDim (simulator::grid_shape)

// The last two parameters of each are the caller's place: nobody passes them.
#define SIMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMULATOR_HERE) { simulator::meet_block({"__syncthreads", file, line}); }

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMULATOR_HERE) {
  simulator::meet_lanes(simulator::Meeting::kSync, mask, 0, 0, {"__syncwarp", file, line});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMULATOR_HERE) {
  const simulator::Site site{"__shfl_sync", file, line};
  const int inside = simulator::checked(width, site) - 1;
  return simulator::shuffle(mask, value, (simulator::lane() & ~inside) | (source & inside), site);
}

// The three below give a lane its own value where the source would be outside its `width` lanes (xor: behind them).
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, SIMULATOR_HERE) {
  const simulator::Site site{"__shfl_xor_sync", file, line};
  const int lane = simulator::lane(), last = lane | (simulator::checked(width, site) - 1), source = lane ^ distance;
  return simulator::shuffle(mask, value, source > last ? lane : source, site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, SIMULATOR_HERE) {
  const simulator::Site site{"__shfl_down_sync", file, line};
  const int lane = simulator::lane(), last = lane | (simulator::checked(width, site) - 1);
  const int source = lane + int(distance);
  return simulator::shuffle(mask, value, source > last ? lane : source, site);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, SIMULATOR_HERE) {
  const simulator::Site site{"__shfl_up_sync", file, line};
  const int lane = simulator::lane(), first = lane & ~(simulator::checked(width, site) - 1);
  const int source = lane - int(distance);
  return simulator::shuffle(mask, value, source < first ? lane : source, site);
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMULATOR_HERE) {
  const simulator::Site site{"__ballot_sync", file, line};
  return unsigned(simulator::meet_lanes(simulator::Meeting::kVote, mask, predicate != 0, 0, site));
}
inline int __any_sync(unsigned mask, int predicate, SIMULATOR_HERE) {
  return simulator::meet_lanes(simulator::Meeting::kVote, mask, predicate != 0, 0, {"__any_sync", file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMULATOR_HERE) {
  return simulator::meet_lanes(simulator::Meeting::kVote, mask, predicate == 0, 0, {"__all_sync", file, line}) == 0;
}

[[noreturn]] inline void __trap(SIMULATOR_HERE) { simulator::fail("the kernel called", {"__trap", file, line}); }

// Handlers of -fsanitize=alignment and -fsanitize=undefined, which the compiler calls: a report then ends the launch,
// not the process, and no sanitizer library is needed. Every record begins with the place in the source.
namespace simulator {
struct Record {
  const char* file;
  unsigned line, column;
};
struct TypeRecord {
  Record record;
  const void* type;
  unsigned char log_alignment, kind;
};
}  // namespace simulator

#define SIMULATOR_HANDLER \
  extern "C" __attribute__((visibility("hidden"), used, noreturn, no_sanitize("undefined"))) void
#define SIMULATOR_UNDEFINED(name, text)                                        \
  SIMULATOR_HANDLER __ubsan_handle_##name##_abort(const simulator::Record* r) { \
    simulator::fail_undefined(text, nullptr, 0, r->file, int(r->line));        \
  }
SIMULATOR_HANDLER __ubsan_handle_type_mismatch_v1_abort(const simulator::TypeRecord* r, const void* address) {
  simulator::fail_undefined("bad pointer", address, 1u << r->log_alignment, r->record.file, int(r->record.line));
}
SIMULATOR_UNDEFINED(add_overflow, "signed overflow in +")
SIMULATOR_UNDEFINED(sub_overflow, "signed overflow in -")
SIMULATOR_UNDEFINED(mul_overflow, "signed overflow in *")
SIMULATOR_UNDEFINED(negate_overflow, "signed overflow in unary -")
SIMULATOR_UNDEFINED(divrem_overflow, "division by zero or overflow")
SIMULATOR_UNDEFINED(shift_out_of_bounds, "shift out of range")
SIMULATOR_UNDEFINED(out_of_bounds, "index out of bounds")
SIMULATOR_UNDEFINED(pointer_overflow, "pointer overflow")
SIMULATOR_UNDEFINED(load_invalid_value, "invalid bool or enum value")
SIMULATOR_UNDEFINED(vla_bound_not_positive, "array of no elements")
SIMULATOR_UNDEFINED(nonnull_arg, "null argument")
SIMULATOR_UNDEFINED(invalid_builtin, "invalid argument of a builtin")
SIMULATOR_UNDEFINED(float_cast_overflow, "float outside the integer's range")
SIMULATOR_UNDEFINED(builtin_unreachable, "unreachable code reached")
SIMULATOR_UNDEFINED(missing_return, "function ended without a return")
