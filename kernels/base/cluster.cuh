// What the blocks of a cluster do together: barriers, and words that they send to one another.
#pragma once

namespace cupynorm {

#ifdef __CUDACC_RTC__

// The blocks of a cluster (sm_90) run at the same time, and may write into one another's shared memory. A block must
// not write into another before both have made their mbarriers and passed cluster_sync() once. That barrier orders
// nothing else, because an arrival with release semantics waits for all of the block's memory accesses (docs/notes/048,
// "Why blocks of a cluster arrive without release"). The wait has acquire semantics, which cannot be left out, and so
// empties the level-1 cache (CCTL.IVALL): it belongs before a block's first loads.
inline int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return int(rank);
}
inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Words sent to another block of the cluster, and the signal there that counts their bytes (an mbarrier). Nothing else
// waits for them: a barrier of the cluster would wait for every store to memory before it, too.
struct Mbarrier {
  unsigned long long word;
};
// Before the blocks of a cluster meet for the first time, by one thread.
inline void init_mbarrier(Mbarrier* mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(unsigned(__cvta_generic_to_shared(mbarrier))) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// By one thread, once for each wait: how many bytes will come.
inline void expect_bytes(Mbarrier* mbarrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      ::"r"(unsigned(__cvta_generic_to_shared(mbarrier))), "r"(bytes) : "memory");
#endif
}
// Sends four words to where `shared` lies in another block, 16-byte aligned, and tells `signal` there.
inline void send_words(void* shared, Mbarrier* mbarrier, int block, uint4 words) {
#if __CUDA_ARCH__ >= 900
  unsigned to, tell;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(unsigned(__cvta_generic_to_shared(shared))), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(tell) : "r"(unsigned(__cvta_generic_to_shared(mbarrier))),
      "r"(block));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(tell)
               : "memory");
#endif
}
// Waits for the bytes expected: for the first time with parity 0, then 1, 0 and so on. All threads call it. It acquires
// at the block's scope, as CUDA's libraries do when they wait for data from a cluster: a wider acquire empties the
// level-1 cache each time.
inline void await_mbarrier(Mbarrier* mbarrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(unsigned(__cvta_generic_to_shared(mbarrier))), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(cluster)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
