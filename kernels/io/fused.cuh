// All that is fused around an op: Loads and Stores that compute, their operands, and masks.
#pragma once
#include <io/dropout.cuh>
#include <io/fused_load.cuh>
#include <io/fused_store.cuh>
#include <io/labels.cuh>
