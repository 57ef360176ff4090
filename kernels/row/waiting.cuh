// What row_computed keeps of a row: its elements, which wait in shared memory, and the scale of its results.
#pragma once
#include <io/affine.cuh>

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace cupynorm {

// A row in the shared memory of a block: `places` vectors of Held and, if there is a mask, a bit for each element that
// is kept, behind them. What was computed waits as the fields of an element beside each other. What waits as it was
// loaded is computed again when it is read. Each access of 16 bytes of a vector has a region of its own, so that
// neighbouring threads meet no bank twice.
template <class Load, typename Element, int kVector>
struct WaitingRow {
  using Compute = typename ElementTraits<Element>::Number;
  static constexpr int kFields = ElementTraits<Element>::kFields,
      kNumbers = Load::kWaitsAsLoaded ? kVector : kVector * kFields;
  using Held = typename Conditional<Load::kWaitsAsLoaded, typename Load::Type, Compute>::Type;
  using Bits = typename Conditional<(kVector > 8), unsigned short, unsigned char>::Type;
  static constexpr int kBytes = kNumbers * int(sizeof(Held)), kPiece = kBytes < 16 ? kBytes : 16;
  int places;

  void put(int number, const typename Load::template Loaded<kVector>& loaded, const Element (&x)[kVector],
      unsigned keeps) const {
    Vector<Held, kNumbers> vector;
    if constexpr (Load::kWaitsAsLoaded) vector = Load::template x_of<kVector>(loaded);
    else vector = vector_from<Held, kNumbers>(reinterpret_cast<const Compute*>(x));
#pragma unroll
    for (int i = 0; i < kBytes; i += kPiece)
      store_words<kPiece, false>(shared_memory + i * places + number * kPiece, vector.word + i / 4);
    if constexpr (Load::kDrops) bits()[number] = Bits(keeps);
  }
  // Gives a bit for each element that is kept. from: where the row was loaded from.
  unsigned get(int number, const typename Load::RowPointer& from, Element (&x)[kVector]) const {
    Vector<Held, kNumbers> vector;
#pragma unroll
    for (int i = 0; i < kBytes; i += kPiece)
      load_words<kPiece, false>(shared_memory + i * places + number * kPiece, vector.word + i / 4);
    if constexpr (Load::kWaitsAsLoaded) from.template compute_again<kVector>(vector, x);
    else unpack<kNumbers>(vector, reinterpret_cast<Compute*>(x));
    if constexpr (Load::kDrops) return bits()[number];
    else return ~0u;
  }
  // of all places
  int bytes() const { return places * (kBytes + (Load::kDrops ? int(sizeof(Bits)) : 0)); }
  Bits* bits() const { return reinterpret_cast<Bits*>(shared_memory + places * kBytes); }
};

}  // namespace cupynorm
