// Reductions that MPI does not have, or does not do alike everywhere.
//
// Small integers: Open MPI 5 adds and multiplies 8- and 16-bit integers with saturating vector instructions, in part of
// an array: 100 + 100 is 127 in one element and -56 in the next. NumPy and JAX wrap around, and so does this.
//
// Small floats, which MPI lacks: each combination is done in float32 and rounded once, to the nearest, ties to even.
//
// MAX and MIN of floats: MPI leaves open what becomes of NaN, and libraries differ, even from element to element. Here
// it is as in jax.numpy.maximum: NaN if any operand is NaN, and -0 is less than +0.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>

#include "abi.hpp"

namespace jaxcomm {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T, class F>
void for_each_pair(void* in, void* inout, const int* count, F combine) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  const int n = *count;
  for (int i = 0; i < n; ++i) b[i] = combine(a[i], b[i]);
}

// In 32 bits without a sign, where nothing overflows undefinedly.
template <class T, class Operation>
void wrap_around(void* in, void* inout, int* count, void*) {
  for_each_pair<T>(in, inout, count, [](T a, T b) {
    return static_cast<T>(Operation{}(static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(b)));
  });
}

// By the bits: of equal operands, which differ in the sign of zero at most, the maximum has the sign bit of both, the
// minimum that of either; all bits set are a NaN.
//
// Also for several numbers at once, as GCC's and Clang's vectors: their comparisons give all bits set where true. MPI
// libraries have vector instructions for MAX and MIN, and compilers do not find them in this by themselves.
template <class T>
struct Lanes {
  static constexpr int count = 16 / sizeof(T);
  typedef T Numbers __attribute__((vector_size(16)));
  typedef std::int32_t Words __attribute__((vector_size(16)));  // of 64 bits, GCC 12 would take them apart
};
struct OfMaximum {
  template <class Words, class Numbers>
  static Words bits(Numbers a, Numbers b) {
    const Words nan = bit_cast<Words>(a != a) | bit_cast<Words>(b != b);
    return (bit_cast<Words>(a > b ? a : b) & bit_cast<Words>(b > a ? b : a)) | nan;
  }
};
struct OfMinimum {
  template <class Words, class Numbers>
  static Words bits(Numbers a, Numbers b) {
    const Words nan = bit_cast<Words>(a != a) | bit_cast<Words>(b != b);
    return bit_cast<Words>(a < b ? a : b) | bit_cast<Words>(b < a ? b : a) | nan;
  }
};

template <class Rule, class T>
void combine_lanes(const T* a, T* b, std::size_t bytes = 16) {
  typename Lanes<T>::Numbers x{}, y{};
  std::memcpy(&x, a, bytes);
  std::memcpy(&y, b, bytes);
  using Words = typename Lanes<T>::Words;
  const Words result = Rule::template bits<Words>(x, y);
  std::memcpy(b, &result, bytes);
}
template <class T, class Rule>
void extremes(void* in, void* inout, int* count, void*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  const int n = *count, lanes = Lanes<T>::count, whole = n - n % lanes;
  for (int i = 0; i < whole; i += lanes) combine_lanes<Rule>(a + i, b + i);
  for (int i = whole; i < n; ++i) combine_lanes<Rule>(a + i, b + i, sizeof(T));
}
template <class Rule>
struct Extreme {
  template <class T>
  T operator()(T a, T b) const {
    combine_lanes<Rule>(&a, &b, sizeof(T));
    return b;
  }
};

// What the largest code numbers of a format mean, and what becomes of what is too large for it.
//   kIeee: infinity, and above it NaN.
//   kFn: the last is NaN, there is no infinity. kFnuz: negative zero is NaN, there is no infinity.
//   kFinite: all are numbers; what is too large becomes the largest one, and NaN negative zero, as in ml_dtypes.
enum class Specials { kIeee, kFn, kFnuz, kFinite };

// A binary floating-point format of at most 16 bits: sign, exponent, mantissa. See ml_dtypes, and IEEE 754-2019, 3.4.
template <class Storage, int exponent_bits, int mantissa_bits, int bias, Specials specials>
struct Format {
  using Bits = Storage;
  using Real = float;
  static constexpr std::uint32_t kSign = 1u << (exponent_bits + mantissa_bits), kMagnitude = kSign - 1,
                                 kTop = ((1u << exponent_bits) - 1) << mantissa_bits,
                                 kMost = specials == Specials::kIeee ? kTop - 1
                                         : specials == Specials::kFn ? kMagnitude - 1
                                                                     : kMagnitude;
  static constexpr int kShift = 23 - mantissa_bits, kRebias = 127 - bias;

  static float decode(Storage stored) {
    const std::uint32_t bits = stored, magnitude = bits & kMagnitude, sign = (bits & kSign) != 0 ? 1u << 31 : 0;
    if (is_nan(bits)) return std::numeric_limits<float>::quiet_NaN();
    if (specials == Specials::kIeee && magnitude == kTop) return bit_cast<float>(0x7F800000u | sign);
    if (kRebias > 0 && magnitude < (1u << mantissa_bits))  // subnormal: a multiple of the least number
      return bit_cast<float>(
          bit_cast<std::uint32_t>(static_cast<float>(magnitude) * power_of_two(1 - bias - mantissa_bits)) | sign);
    return bit_cast<float>(((magnitude << kShift) + (static_cast<std::uint32_t>(kRebias) << 23)) | sign);
  }

  static Storage encode(float value) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(value), magnitude = bits & 0x7FFFFFFFu,
                        sign = (bits >> 31) != 0 ? kSign : 0;
    if (magnitude > 0x7F800000u) return static_cast<Storage>(nan());
    std::uint32_t code = rounded(magnitude);
    if (code > kMost) code = specials == Specials::kIeee ? kTop : specials == Specials::kFinite ? kMost : nan();
    if (specials == Specials::kFnuz && (code & kMagnitude) == 0) return static_cast<Storage>(code);
    return static_cast<Storage>(code | sign);
  }

 private:
  static bool is_nan(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & kMagnitude;
    if (specials == Specials::kIeee) return magnitude > kTop;
    if (specials == Specials::kFn) return magnitude == kMagnitude;
    return specials == Specials::kFnuz && bits == kSign;
  }
  static constexpr std::uint32_t nan() {
    if (specials == Specials::kIeee) return kTop | (1u << (mantissa_bits - 1));
    return specials == Specials::kFn ? kMagnitude : kSign;
  }
  static float power_of_two(int exponent) { return bit_cast<float>(static_cast<std::uint32_t>(127 + exponent) << 23); }
  // The code of the nearest number of the format, as if its exponents had no end. float32's own addition rounds what is
  // below the format's normal numbers: its last bit, beside a number so large, is worth the least of the format.
  static std::uint32_t rounded(std::uint32_t magnitude) {
    if (kRebias > 0 && magnitude < (static_cast<std::uint32_t>(kRebias + 1) << 23)) {
      const float large = power_of_two(23 + 1 - bias - mantissa_bits);
      return bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + large) - bit_cast<std::uint32_t>(large);
    }
    const std::uint32_t moved = magnitude - (static_cast<std::uint32_t>(kRebias) << 23);
    return (moved + (1u << (kShift - 1)) - 1 + ((moved >> kShift) & 1)) >> kShift;
  }
};

// float8_e8m0fnu: nothing but an exponent. No sign, no zero: what is not positive becomes NaN. Ties go up, as in
// ml_dtypes. In double, because its least number is subnormal in float32, which XLA's threads take for zero.
struct Exponent {
  using Bits = std::uint8_t;
  using Real = double;
  static double decode(Bits bits) {
    if (bits == 0xFF) return std::numeric_limits<double>::quiet_NaN();
    return bit_cast<double>(static_cast<std::uint64_t>(bits + 1023 - 127) << 52);
  }
  static Bits encode(double value) {
    constexpr double zero_in_float32 = 1.0 / (1ull << 50) / (1ull << 50) / (1ull << 50);
    if (!(value > zero_in_float32)) return 0xFF;
    const auto code = static_cast<std::int64_t>((bit_cast<std::uint64_t>(value) + (1ull << 51)) >> 52) - (1023 - 127);
    return static_cast<Bits>(code < 0 ? 0 : code > 0xFE ? 0xFF : code);
  }
};

template <class F>
typename F::Real decoded(typename F::Bits bits) {
  if constexpr (sizeof bits > 1) {
    return F::decode(bits);
  } else {
    static const auto table = [] {
      std::array<typename F::Real, 256> all{};
      for (unsigned i = 0; i < all.size(); ++i) all[i] = F::decode(static_cast<std::uint8_t>(i));
      return all;
    }();
    return table[bits];
  }
}

template <class F, class Operation>
void rounded_once(void* in, void* inout, int* count, void*) {
  using Bits = typename F::Bits;
  for_each_pair<Bits>(in, inout, count,
                      [](Bits a, Bits b) { return F::encode(Operation{}(decoded<F>(a), decoded<F>(b))); });
}

using Combiners = std::map<std::string, Combiner*>;  // by the name of the operation

template <class T>
Combiners wrapping() {
  return {{"SUM", &wrap_around<T, std::plus<std::uint32_t>>},
          {"PROD", &wrap_around<T, std::multiplies<std::uint32_t>>}};
}
template <class T>
Combiners ordered() {
  return {{"MAX", &extremes<T, OfMaximum>}, {"MIN", &extremes<T, OfMinimum>}};
}
template <class F>
Combiners rounding() {
  return {{"SUM", &rounded_once<F, std::plus<typename F::Real>>},
          {"PROD", &rounded_once<F, std::multiplies<typename F::Real>>},
          {"MAX", &rounded_once<F, Extreme<OfMaximum>>},
          {"MIN", &rounded_once<F, Extreme<OfMinimum>>}};
}

inline const std::map<std::string, Combiners>& combiners() {
  using Byte = std::uint8_t;
  using Half = std::uint16_t;
  static const std::map<std::string, Combiners> all = {
      {"int8", wrapping<std::int8_t>()},
      {"uint8", wrapping<std::uint8_t>()},
      {"int16", wrapping<std::int16_t>()},
      {"uint16", wrapping<std::uint16_t>()},
      {"float32", ordered<float>()},
      {"float64", ordered<double>()},
      {"float16", rounding<Format<Half, 5, 10, 15, Specials::kIeee>>()},
      {"bfloat16", rounding<Format<Half, 8, 7, 127, Specials::kIeee>>()},
      {"float8_e3m4", rounding<Format<Byte, 3, 4, 3, Specials::kIeee>>()},
      {"float8_e4m3", rounding<Format<Byte, 4, 3, 7, Specials::kIeee>>()},
      {"float8_e4m3b11fnuz", rounding<Format<Byte, 4, 3, 11, Specials::kFnuz>>()},
      {"float8_e4m3fn", rounding<Format<Byte, 4, 3, 7, Specials::kFn>>()},
      {"float8_e4m3fnuz", rounding<Format<Byte, 4, 3, 8, Specials::kFnuz>>()},
      {"float8_e5m2", rounding<Format<Byte, 5, 2, 15, Specials::kIeee>>()},
      {"float8_e5m2fnuz", rounding<Format<Byte, 5, 2, 16, Specials::kFnuz>>()},
      {"float8_e8m0fnu", rounding<Exponent>()},
      {"float4_e2m1fn", rounding<Format<Byte, 2, 1, 1, Specials::kFinite>>()},
  };
  return all;
}

inline Combiner* combiner(const std::string& name, const std::string& dtype) {
  const auto of_dtype = combiners().find(dtype);
  if (of_dtype == combiners().end()) throw Failure("no reduction of our own for " + dtype);
  const auto found = of_dtype->second.find(name);
  if (found == of_dtype->second.end()) throw Failure("no reduction " + name + " of our own for " + dtype);
  return found->second;
}

}  // namespace jaxcomm
