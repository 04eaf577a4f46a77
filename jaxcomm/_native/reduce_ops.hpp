// Reductions that MPI does not have, or does not do alike everywhere.
//
// Open MPI 5 adds and multiplies 8- and 16-bit integers with saturating vector instructions, in part of an array: 100 +
// 100 is 127 in one element and -56 in the next. NumPy and JAX wrap around, and so does this, under every MPI.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "abi.hpp"

namespace jaxcomm {

// In 32 bits without a sign, where nothing overflows undefinedly.
template <class T, class Operation>
void wrap_around(void* in, void* inout, int* count, void*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i)
    b[i] = static_cast<T>(Operation{}(static_cast<std::uint32_t>(a[i]), static_cast<std::uint32_t>(b[i])));
}

template <class Operation>
Combiner* combiner_for(const std::string& dtype) {
  if (dtype == "int8") return &wrap_around<std::int8_t, Operation>;
  if (dtype == "uint8") return &wrap_around<std::uint8_t, Operation>;
  if (dtype == "int16") return &wrap_around<std::int16_t, Operation>;
  if (dtype == "uint16") return &wrap_around<std::uint16_t, Operation>;
  throw Failure("no reduction of our own for " + dtype);
}

inline Combiner* combiner(const std::string& name, const std::string& dtype) {
  if (name == "SUM") return combiner_for<std::plus<std::uint32_t>>(dtype);
  if (name == "PROD") return combiner_for<std::multiplies<std::uint32_t>>(dtype);
  throw Failure("no reduction of our own for " + name);
}

}  // namespace jaxcomm
