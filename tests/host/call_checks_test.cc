// What compiled code refuses of calls that do not come from jaxmoe (ffi/cuda/host/call_checks.h): arrays are made up here,
// as XLA hands them over. Prints what it says of each call. Built and run by test_call_checks.py.
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "cuda/host/call_checks.h"

namespace {

using namespace jaxmoe;
namespace ffi = xla::ffi;

struct Array {
  ffi::DataType type;
  std::vector<int64_t> extents;
};

// Arrays by name, of which those before `results` are operands, with the structs that XLA has for them.
template <class Name>
class Buffers {
 public:
  Buffers(const std::map<Name, Array>& arrays, Name results) {
    for (const auto& [name, array] : arrays) {
      bits_ |= uint32_t{1} << static_cast<int32_t>(name);
      extents_.push_back(array.extents);
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(array.type), nullptr,
                          static_cast<int64_t>(array.extents.size()), extents_.back().data()});
      (name < results ? operands_ : results_).push_back(&buffers_.back());
    }
    operand_types_.resize(operands_.size(), XLA_FFI_ArgType_BUFFER);
    result_types_.resize(results_.size(), XLA_FFI_RetType_BUFFER);
    args_ = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands_.size()), operand_types_.data(),
             operands_.data()};
    rets_ = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()), result_types_.data(),
             results_.data()};
  }
  Buffers(const Buffers&) = delete;

  int32_t bits() const { return static_cast<int32_t>(bits_); }
  ffi::RemainingArgs operands() const { return {&args_, 0}; }
  ffi::RemainingRets results() const { return {&rets_, 0}; }

 private:
  uint32_t bits_ = 0;
  std::deque<std::vector<int64_t>> extents_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<void*> operands_, results_;
  std::vector<XLA_FFI_ArgType> operand_types_;
  std::vector<XLA_FFI_RetType> result_types_;
  XLA_FFI_Args args_;
  XLA_FFI_Rets rets_;
};

constexpr int64_t kTokens = 64, kWidth = 256, kExperts = 8, kTopK = 2;
const std::array<int64_t, 1> kDevices{0};

template <class Attributes>
Attributes attributes_of(const Schedule& schedule, int32_t arrays) {
  static Schedule kept;
  kept = schedule;
  Attributes a{};
  a.version = build_config::kVersion;
  a.ranks = 1;
  a.num_experts = kExperts;
  a.arrays = arrays;
  a.schedule = {reinterpret_cast<const int32_t*>(&kept), sizeof(kept) / sizeof(int32_t)};
  a.timeout_seconds = 1;
  a.groups = a.devices = {kDevices.data(), kDevices.size()};
  return a;
}

template <class Call, class Attributes>
void tell(const char* what, const Call& call, const Attributes& attributes, std::string wrong) {
  if (wrong.empty()) wrong = gpu_call_error(call, attributes);
  std::printf("%s: %s\n", what, wrong.c_str());
}

// A forward pass with weights in MXFP4.
void layer(const char* what, ffi::DataType of_x, ffi::DataType of_place, bool rounds_rows, int32_t weight_slots) {
  using Name = ArrayName;
  const Array matrix{ffi::U8, {kExperts, kWidth, kWidth / 2}}, scales{ffi::F32, {kExperts, 1, 1}};
  const Array groups{ffi::F8E8M0FNU, {kExperts, kWidth, kWidth / 32}};
  const Buffers<Name> buffers({{Name::kPlace, {of_place, {2}}},
                               {Name::kX, {of_x, {kTokens, kWidth}}},
                               {Name::kTopkIds, {ffi::S32, {kTokens, kTopK}}},
                               {Name::kTopkWeights, {ffi::F32, {kTokens, kTopK}}},
                               {Name::kWGate, matrix},
                               {Name::kWUp, matrix},
                               {Name::kWDown, matrix},
                               {Name::kWGateScales, scales},
                               {Name::kWUpScales, scales},
                               {Name::kWDownScales, scales},
                               {Name::kWGateGroupScales, groups},
                               {Name::kWUpGroupScales, groups},
                               {Name::kWDownGroupScales, groups},
                               {Name::kY, {of_x, {kTokens, kWidth}}}},
                              Name::kY);
  Schedule schedule{};
  schedule.tile = {128, 128, 256};
  schedule.unit_tiles = schedule.lag_units = 1;
  schedule.ring_tiles = 16;
  schedule.chunk_rows = 8;
  schedule.narrow_rows = 64;
  schedule.weight_slots = weight_slots;
  auto attributes = attributes_of<LayerAttributes>(schedule, buffers.bits());
  attributes.rounds_rows = rounds_rows;
  std::string wrong;
  const LayerCall call(buffers.operands(), buffers.results(), attributes, &wrong);
  tell(what, call, attributes, wrong);
}

void dispatch(const char* what, ffi::DataType of_place, int64_t tokens = kTokens, int64_t top_k = kTopK) {
  using Name = ExchangeArray;
  constexpr int64_t kRows = 256;
  const Buffers<Name> buffers({{Name::kPlace, {of_place, {2}}},
                               {Name::kX, {ffi::BF16, {tokens, kWidth}}},
                               {Name::kTopkIds, {ffi::S32, {tokens, top_k}}},
                               {Name::kRows, {ffi::BF16, {kRows, kWidth}}},
                               {Name::kMadeRowSources, {ffi::S32, {kRows}}},
                               {Name::kMadeSlotRows, {ffi::S32, {tokens, top_k}}},
                               {Name::kRowsPerExpert, {ffi::S32, {kExperts}}},
                               {Name::kDroppedRows, {ffi::S32, {kExperts}}}},
                              Name::kRows);
  Schedule schedule{};
  schedule.tile = {1, 1, 1};
  schedule.unit_tiles = schedule.chunk_rows = 1;
  auto attributes = attributes_of<ExchangeAttributes>(schedule, buffers.bits());
  attributes.top_k = static_cast<int32_t>(top_k);
  attributes.alignment = 1;
  std::string wrong;
  const ExchangeCall call(buffers.operands(), buffers.results(), attributes, &wrong);
  tell(what, call, attributes, wrong);
}

}  // namespace

int main() {
  layer("bfloat16", ffi::BF16, ffi::S32, true, 4);
  layer("float16", ffi::F16, ffi::S32, true, 4);
  layer("float16 in registers", ffi::F16, ffi::S32, true, 0);
  layer("float16 not rounded", ffi::F16, ffi::S32, false, 4);
  layer("float place of a layer", ffi::BF16, ffi::F32, true, 4);
  dispatch("dispatch", ffi::S32);
  dispatch("wide place of a dispatch", ffi::S64);
  dispatch("dispatch of no tokens", ffi::S32, 0);
  dispatch("dispatch of no slots", ffi::S32, kTokens, 0);
}
