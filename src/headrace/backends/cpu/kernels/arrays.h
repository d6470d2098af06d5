// numpy arrays as the bindings take them: C-contiguous, on the CPU, and refused by ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace headrace {

namespace nb = nanobind;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoubleArray = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoubleMatrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

inline void check_rows(const IntArray& values, int low, int high, const char* message) {
  for (size_t i = 0; i < values.size(); ++i)
    require(values.data()[i] >= low && values.data()[i] < high, message);
}

// Offsets into an array of `size`: one more than there are rows, from 0 to the size, never falling.
inline void check_offsets(const IntArray& offsets, size_t rows, size_t size, const char* message) {
  require(offsets.size() == rows + 1 && offsets.data()[0] == 0 &&
              static_cast<size_t>(offsets.data()[rows]) == size,
          message);
  for (size_t i = 0; i < rows; ++i) require(offsets.data()[i] <= offsets.data()[i + 1], message);
}

}  // namespace headrace
