// The variants: where a row waits between its two uses, its statistics and its map. Each is a loop over any op (a struct of
// kernels/*.cu) and any Load and Store (functors.cuh).
#pragma once
#include <cupynorm/cached.cuh>
#include <cupynorm/registers.cuh>
#include <cupynorm/staged.cuh>
#include <cupynorm/together.cuh>
