// The variants of rows whose elements lie apart from one another, as variants.cuh has those of rows that are
// contiguous.
#pragma once
#include <base/grid.cuh>
#include <base/pdl.cuh>
#include <row/across.cuh>
