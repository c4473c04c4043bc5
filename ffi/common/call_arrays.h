// The arrays of an FFI call by name: those that it has are bits of an attribute, operands first and results behind them,
// each in the order of their names. Used by layer_call.h and exchange_call.h.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "common/formats.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// None where layers have no such elements.
inline std::optional<Element> element_of(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F64: return Element::kF64;
    case xla::ffi::F32: return Element::kF32;
    case xla::ffi::BF16: return Element::kBf16;
    case xla::ffi::F16: return Element::kF16;
    case xla::ffi::F8E4M3FN: return Element::kE4M3;
    case xla::ffi::F8E8M0FNU: return Element::kE8M0;
    case xla::ffi::U8: return Element::kE2M1;   // two of them
    case xla::ffi::U32: return Element::kE2M1;  // eight, repacked
    default: return std::nullopt;
  }
}

// The names of a call, and of those that come before one, as bits. All of them fill a word, by which a word cannot be
// shifted.
template <class Name>
constexpr uint32_t bit_of(Name name) {
  return uint32_t{1} << static_cast<int32_t>(name);
}
template <class Name>
constexpr uint32_t bits_before(Name name) {
  return static_cast<uint32_t>((uint64_t{1} << static_cast<int32_t>(name)) - 1);
}

// `Name` counts from 0 to kCount.
template <class Name>
class CallArrays {
 public:
  using Array = std::optional<xla::ffi::AnyBuffer>;
  static constexpr int32_t kNumber = static_cast<int32_t>(Name::kCount);
  static_assert(kNumber <= 32);

  const Array& operator[](Name name) const { return arrays_[static_cast<std::size_t>(name)]; }
  bool has(Name name) const { return (*this)[name].has_value(); }

  // Null where there is no such array, or no element of it.
  template <class T = void>
  T* data(Name name) const {
    const Array& array = (*this)[name];
    return array && array->element_count() > 0 ? static_cast<T*>(array->untyped_data()) : nullptr;
  }
  // Of an array that is there.
  int64_t extent(Name name, std::size_t dimension) const { return (*this)[name]->dimensions()[dimension]; }
  xla::ffi::DataType type(Name name) const { return (*this)[name]->element_type(); }

 protected:
  // Takes the arrays that are named, of which `of_results` are results. `error` is set where there are not as many.
  void take(const xla::ffi::RemainingArgs& operands, xla::ffi::RemainingRets& results, uint32_t named,
            uint32_t of_results, std::string* error) {
    const auto given = [](auto count) { return static_cast<int>(count); };
    if (std::popcount(named & ~of_results) != given(operands.size()) ||
        std::popcount(named & of_results) != given(results.size())) {
      *error = "jaxmoe: " + std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) +
               " results; the attribute `arrays` names " + std::to_string(std::popcount(named & ~of_results)) +
               " and " + std::to_string(std::popcount(named & of_results)) + ".";
      return;
    }
    std::size_t operand = 0, result = 0;
    for (int32_t i = 0; i < kNumber; ++i) {
      const uint32_t bit = uint32_t{1} << i;
      if ((named & ~of_results & bit) != 0) arrays_[i] = *operands.template get<xla::ffi::AnyBuffer>(operand++);
      if ((named & of_results & bit) != 0) arrays_[i] = **results.template get<xla::ffi::AnyBuffer>(result++);
    }
  }

 private:
  std::array<Array, kNumber> arrays_;
};

}  // namespace jaxmoe
