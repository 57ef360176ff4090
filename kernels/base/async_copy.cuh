// Copies from global to shared memory that go on while a thread computes, and what waits for them.
#pragma once
#include <base/types.cuh>

namespace cupynorm {

#ifdef __CUDACC_RTC__

// Copies 4, 8 or 16 bytes from global to shared memory on their own way, no register involved; both aligned to as many.
// commit() closes a group of this thread's copies, wait<n>() waits until all but its n newest groups have arrived, for
// this thread to read.
template <int kBytes>
inline void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
#else
  if constexpr (kBytes == 16) *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
  else if constexpr (kBytes == 8) *static_cast<uint2*>(shared) = *static_cast<const uint2*>(global);
  else *static_cast<unsigned*>(shared) = *static_cast<const unsigned*>(global);
#endif
}
// 16 bytes, or as many zeros; the address must be a valid one all the same. sm_80.
inline void copy_async_or_zero(void* shared, const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(there ? 16 : 0) : "memory");
#endif
}
inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kNewest>
inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

// A gate in shared memory opens when so many threads have arrived and all bytes have come that were expected; then it
// counts anew. Whoever waits names the parity: 0 for its first opening, then 1, 0 and so on; with 1 it is open before
// the first. One thread makes all, then publish_mbarriers, and a barrier follows.
struct __align__(8) CountingMbarrier {
  unsigned long long word;
};
inline void init_counting_mbarrier(CountingMbarrier* gate, unsigned arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(gate))),
      "r"(arrivals) : "memory");
#endif
}
inline void publish_mbarriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Arrives, and says how many bytes will come.
inline void expect_bytes(CountingMbarrier* gate, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      ::"r"(unsigned(__cvta_generic_to_shared(gate))), "r"(bytes) : "memory");
#endif
}
inline void await_counting_mbarrier(CountingMbarrier* gate, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}"
      ::"r"(unsigned(__cvta_generic_to_shared(gate))), "r"(parity)
      : "memory");
#endif
}

// Copies a box of a matrix, by one thread, on its own way to shared memory: columns from col on, 128 bytes of them, and
// so many rows as the map says. They lie there as bert/mma.cuh's `swizzled` has it, from an address aligned to 1024
// bytes; what is outside of the matrix is 0. Their bytes come to the gate.
struct __align__(64) TensorMap {  // cupynorm/runtime/devices.py, box_map
  unsigned long long word[16];
};
inline void load_tensor_box(void* shared, const TensorMap* map, int col, int row, CountingMbarrier* gate) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(unsigned(__cvta_generic_to_shared(shared))), "l"(map), "r"(col), "r"(row),
                   "r"(unsigned(__cvta_generic_to_shared(gate)))
               : "memory");
#endif
}

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(async_copy)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
