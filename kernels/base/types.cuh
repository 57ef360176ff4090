// Types that C++ has no word for, and the lanes of a warp. A build for the CPU (tests/simulator) brings its own
// functions in place of those of this folder that hold instructions. No CUDA header is included anywhere: half and
// bfloat16 are bits here, and the compiler needs no include path but ours.
#pragma once

namespace cupynorm {

using int64 = long long;

struct half {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

struct float8_e4m3fn {
  unsigned char bits;
};

struct float8_e5m2 {
  unsigned char bits;
};

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace cupynorm
