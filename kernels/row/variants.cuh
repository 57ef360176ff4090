// The variants: where a row waits between its two uses, its statistics and its map. Each is a loop over any op (a
// struct of ops/) and any Load and Store (io/).
#pragma once
#include <row/cached.cuh>
#include <row/computed.cuh>
#include <row/registers.cuh>
#include <row/reread.cuh>
#include <row/staged.cuh>
#include <row/tiled.cuh>
#include <row/together.cuh>
