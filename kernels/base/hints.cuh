// What the compiler is told, beside what it could know.
#pragma once
#include <base/types.cuh>

namespace cupynorm {

#ifdef __CUDACC_RTC__

// What the compiler may take for granted.
inline void assume(bool fact) { __builtin_assume(fact); }
// Hides where a word comes from: what is computed from it stays where it stands, inside a loop for example.
inline void make_opaque(int& word) { asm volatile("" : "+r"(word)); }
inline void make_opaque(unsigned& word) { asm volatile("" : "+r"(word)); }
inline void make_opaque(int64& number) { asm volatile("" : "+l"(number)); }
inline void make_opaque(float& number) { asm volatile("" : "+f"(number)); }
inline void make_opaque(double& number) { asm volatile("" : "+d"(number)); }
// The same for an address in global memory: what is computed from it is not computed from what it came from.
template <typename T>
inline void make_opaque(T*& pointer) {
  if constexpr (sizeof(T) == 1 && __is_class(T)) {  // NVRTC 13.0 breaks on such a pointer
    unsigned long long bits = reinterpret_cast<unsigned long long>(pointer);
    asm volatile("" : "+l"(bits));
    __builtin_assume(__isGlobal(reinterpret_cast<const void*>(bits)));
    pointer = reinterpret_cast<T*>(bits);
  } else {
    asm volatile("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
  }
}

// Ends a thread that would end, so that the compiler keeps nothing for it.
inline void exit_thread() {
  asm volatile("exit;");
  __builtin_unreachable();
}

#else
}  // namespace cupynorm
#include SIMULATOR_TWIN(hints)  // the same in C++, by tests/simulator, which defines the macro
namespace cupynorm {
#endif

}  // namespace cupynorm
