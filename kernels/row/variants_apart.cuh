// The variants of rows whose elements lie apart from one another, as variants.cuh has those of rows that are
// contiguous.
#pragma once
#include <row/across.cuh>
#include <row/ring.cuh>
#include <row/stretch.cuh>
