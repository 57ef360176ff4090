// A label of each row: as an operand, and as the row's own number. Host mirrors: in cupynorm/lower/mirrors.py.
#pragma once
#include <io/operands.cuh>

namespace cupynorm {

// A row's label as an operand: 1 in the label's column, else 0. A label outside 0 .. cols - 1 matches no column, or,
// with kNan, makes the whole row nan.
template <typename T, class Rows, bool kNan>
struct LabelMask : LoadsNoColumns {
  static constexpr int kBytes = 2;
  static constexpr bool kPerRow = false;
  const T* pointer;
  Rows rows;
  int64 cols;

  struct RowPointer : LoadsNoColumns::Row {
    int64 label;  // -1: none
    float other;  // what stands in other columns
    template <int N, typename Compute, typename Index>
    void unpack(NoColumns, Compute* x, Index col) const {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = col + i == Index(label) ? Compute(1) : Compute(other);
    }
  };
  RowPointer at(int64 row) const {
    const auto label = static_cast<int64>(pointer[rows.offset(row)]);  // what is negative is large without a sign
    const bool there = static_cast<unsigned long long>(label) < static_cast<unsigned long long>(cols);
    return {{}, there ? label : -1, as_float(kNan && !there ? 0x7fc00000u : 0u)};
  }
};

// A row's label. Rows: as of PerRow. kIgnores: rows of the label `ignored` do not count.
template <typename T, class Rows, bool kIgnores>
struct RowLabel {
  const T* pointer;
  Rows rows;
  T ignored;
  int64 cols;  // 2^24 at most

  struct RowPointer {
    T label;
    T ignored;
    int64 cols;
    bool is_ignored() const { return kIgnores && label == ignored; }
    // its column; -1: it has none, because it is ignored, or outside 0 .. cols - 1
    int column() const {
      const auto wide = static_cast<unsigned long long>(static_cast<int64>(label));  // large if it is negative
      return !is_ignored() && wide < static_cast<unsigned long long>(cols) ? int(wide) : -1;
    }
    static int share() { return 1; }  // of the target, that it has
  };
  RowPointer at(int64 row) const { return {pointer[rows.offset(row)], ignored, cols}; }
};

// The same of a label that has a part of the target.
template <typename Compute, class Label>
struct PartLabel : Label {
  Compute part;

  struct RowPointer : Label::RowPointer {
    Compute part;
    Compute share() const { return part; }
  };
  RowPointer at(int64 row) const { return {Label::at(row), part}; }
};

// The elements of Inner, and of each row the one in its label's column as the row's own number. That is +inf for a row
// whose label is ignored, which Inner's mask drops; nan for a label that is no column.
template <class Inner, class Label>
struct LabelledLoad : Inner {
  Label label;

  struct RowPointer : Inner::RowPointer {
    typename Label::RowPointer label;
    auto own_number() const { return own_number_between(0, label.cols); }
    // -inf for another column
    auto own_number_between(int64 begin, int64 end) const {
      using Compute = typename Conditional<kWideDigits<typename Inner::Type>, double, float>::Type;
      const int column = label.column();
      const bool here = column >= begin && column < end;
      Compute number[1];
      const auto* const place = static_cast<const typename Inner::Type*>(this->address(here ? column : 0));
      cupynorm::unpack<1>(load_vector<typename Inner::Type, 1>(place), number);
      const Compute other = label.is_ignored() ? infinity<Compute>() : column < 0 ? Compute(as_float(0x7fc00000u))
          : -infinity<Compute>();
      return here ? number[0] : other;
    }
  };
  RowPointer at(int64 row) const { return {Inner::at(row), label.at(row)}; }
};

// What Inner makes of the results, from which the label's share is taken away in the column of a row's label before.
template <class Inner, class Label>
struct LabelledStore : Inner {
  static constexpr bool kInSteps = kStoresInSteps<Inner>;
  Label label;

  struct RowPointer : Inner::RowPointer {
    typename Label::RowPointer label;
    int column;  // the label's; negative: none. Counted as other columns are, of rows whose elements lie apart
    void begin_at(int col) { Inner::RowPointer::begin_at(col), column -= col; }
    template <int N, bool kWhole = false, typename Compute, class Columns, class Operands, typename Index>
    void store(const Compute (&y)[N], const Columns& columns, const Operands& operands, Index col) const {
      Compute less[N];
#pragma unroll
      for (int i = 0; i < N; ++i) less[i] = y[i];
      const unsigned from_here = unsigned(label.column()) - unsigned(col);
      if (from_here < unsigned(N)) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (from_here == unsigned(i)) less[i] -= label.share();
        }
      }
      Inner::RowPointer::template store<N, kWhole>(less, columns, operands, col);
    }
  };
  template <int kRows, typename Compute, class Columns, class Operands, typename Index>
  static void store_across(const RowPointer (&rows)[kRows], const Compute (&y)[kRows], const Columns& columns,
      const Operands (&operands)[kRows], Index col) {
    Compute less[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      less[r] = rows[r].column == column_of(col) ? y[r] - rows[r].label.share() : y[r];
    Inner::template store_across<kRows>(rows, less, columns, operands, col);
  }
  RowPointer at(int64 row) const {
    const auto own = label.at(row);
    return {Inner::at(row), own, own.column()};
  }
};

}  // namespace cupynorm
