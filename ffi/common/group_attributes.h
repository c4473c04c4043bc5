// What every call says of the jaxmoe that made it, of the ranks that share in it and of its schedule, and what must hold
// of that.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "common/build_config.h"
#include "common/layout.h"

namespace jaxmoe {

// 31 years. Waits count nanoseconds in 64 bits, beside those since the machine has started.
inline constexpr float kLongestTimeoutSeconds = 1e9f;

// Of attributes without a group_error().
template <class Attributes>
Schedule schedule_of(const Attributes& a) {
  std::array<int32_t, sizeof(Schedule) / sizeof(int32_t)> numbers{};
  std::copy(a.schedule.begin(), a.schedule.end(), numbers.begin());
  return std::bit_cast<Schedule>(numbers);
}

// Of LayerAttributes or ExchangeAttributes; empty where nothing is wrong.
template <class Attributes>
std::string group_error(const Attributes& a) {
  // Of a program that was stored: what numbers and arrays mean may have changed since.
  if (a.version != build_config::kVersion) {
    return "jaxmoe: this program was made by jaxmoe " + std::string(a.version) + " and is run by jaxmoe " +
           build_config::kVersion + ", which may mean something else by its calls. Make it again with this version, or " +
           "run it with the other one.";
  }
  if (a.ranks < 1 || a.ranks > kMaxRanks || a.num_experts < 1 || a.num_experts % a.ranks != 0) {
    return "jaxmoe: num_experts=" + std::to_string(a.num_experts) + " over ranks=" + std::to_string(a.ranks) +
           " is no whole number of experts per rank, or more than " + std::to_string(kMaxRanks) + " ranks.";
  }
  if (a.groups.size() == 0 || a.groups.size() % a.ranks != 0) {
    return "jaxmoe: groups names " + std::to_string(a.groups.size()) + " devices, ranks is " +
           std::to_string(a.ranks) + ". It has to name all devices of the mesh, group by group.";
  }
  if (a.devices.size() != a.groups.size() && a.devices.size() != 1) {
    return "jaxmoe: devices names " + std::to_string(a.devices.size()) + " devices, groups " +
           std::to_string(a.groups.size()) + ". It has to name the same ones, or be -1 alone.";
  }
  if (!(a.timeout_seconds > 0 && a.timeout_seconds <= kLongestTimeoutSeconds)) {
    return "jaxmoe: timeout_seconds must be positive and at most 1e9.";
  }
  if (a.schedule.size() * sizeof(int32_t) != sizeof(Schedule)) {
    return "jaxmoe: schedule has " + std::to_string(a.schedule.size()) + " numbers. It needs the " +
           std::to_string(sizeof(Schedule) / sizeof(int32_t)) + " fields of Schedule (ffi/common/shape.h).";
  }
  return "";
}

}  // namespace jaxmoe
