#include "cuda/host/tensor_map.h"

#include <cuda_runtime.h>

#include <optional>
#include <string>
#include <vector>

#include "cuda/host/driver.h"

namespace jaxmoe {
namespace {

constexpr int64_t kAlignment = 16;         // of the base and of every stride, in bytes
constexpr int32_t kMaxBoxExtent = 256;
constexpr int32_t kSwizzleBytes = 128;     // widest row of a box under this swizzle
constexpr std::size_t kMaxRank = 5;

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, or null and why.
Encode find_encode(std::string& error) {
  cudaError_t status = cudaSuccess;
  const Encode encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", &status);
  if (encode != nullptr) return encode;
  error = "jaxmoe: the CUDA driver has no cuTensorMapEncodeTiled (" + std::string(cudaGetErrorString(status)) +
          "). It needs a driver of CUDA 12.0 or newer.";
  return nullptr;
}

// None where no kernel multiplies such elements.
std::optional<CUtensorMapDataType> copied_as(Element element) {
  switch (element) {
    case Element::kBf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Element::kF16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Element::kE4M3:
    case Element::kE2M1: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default: return std::nullopt;
  }
}

CUtensorMapSwizzle swizzle_of(int32_t bytes) {
  return bytes == 0    ? CU_TENSOR_MAP_SWIZZLE_NONE
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : CU_TENSOR_MAP_SWIZZLE_128B;
}

template <class Integers>
std::string join(const Integers& values) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

}  // namespace

std::string make_tensor_map(CUtensorMap* map, const char* name, const void* base, Element element,
                            std::initializer_list<int64_t> extents, std::initializer_list<int32_t> box, int64_t pitch,
                            int32_t swizzle_bytes, Fetched fetched) {
  const std::string given = "tensor map of " + std::string(name) + ": extents " + join(extents) + ", box " + join(box) +
                            " (innermost first, " + info_of(element).name + ")";
  const std::optional<CUtensorMapDataType> type = copied_as(element);
  if (!type) return given + ". The copy engine is given no such elements.";
  // Those of 4 bits are copied as bytes that hold two.
  const bool packed = info_of(element).bits == 4;
  const int64_t element_bytes = packed ? 1 : info_of(element).bits / 8;
  const int64_t of_byte = packed ? 2 : 1;
  if (extents.size() != box.size() || extents.size() < 1 || extents.size() > kMaxRank) {
    return given + ". It needs as many box sizes as extents, one to five of each.";
  }
  if (reinterpret_cast<uintptr_t>(base) % kAlignment != 0) {
    return given + " begins at an address that is " + std::to_string(reinterpret_cast<uintptr_t>(base) % kAlignment) +
           " bytes past a multiple of 16. It has to begin at one.";
  }
  for (const int64_t extent : extents) {
    if (extent < 1 || extent > int64_t{1} << 32) return given + ". Extents have to be in 1 .. 2^32.";
  }
  for (const int32_t extent : box) {
    if (extent < 1 || extent > kMaxBoxExtent) return given + ". Box sizes have to be in 1 .. 256.";
  }
  if (*box.begin() * element_bytes / of_byte > kSwizzleBytes) {
    return given + ". A row of a box has to be at most 128 bytes.";
  }
  const int64_t multiple = kAlignment * of_byte / element_bytes;
  if (*extents.begin() % multiple != 0) {
    return given + ". The innermost extent has to be a multiple of " + std::to_string(multiple) + "; pad it to " +
           std::to_string(ceil_div(*extents.begin(), multiple) * multiple) + ".";
  }

  std::string error;
  static const Encode encode = find_encode(error);
  if (encode == nullptr) return error.empty() ? "jaxmoe: the CUDA driver has no cuTensorMapEncodeTiled." : error;

  std::vector<cuuint64_t> sizes(extents.begin(), extents.end());
  std::vector<cuuint32_t> box_sizes(box.begin(), box.end());
  sizes[0] /= of_byte;
  box_sizes[0] /= of_byte;
  std::vector<cuuint64_t> strides;  // of all dimensions but the innermost
  cuuint64_t bytes = static_cast<cuuint64_t>(element_bytes);
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
    strides.push_back(bytes *= i == 0 && pitch > 0 ? static_cast<cuuint64_t>(pitch / of_byte) : sizes[i]);
  }
  if (strides.empty()) strides.push_back(bytes);
  const std::vector<cuuint32_t> element_strides(sizes.size(), 1);
  const CUtensorMapL2promotion promotion =
      fetched == Fetched::kTwoLines ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const CUresult status = encode(
      map, *type, static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(base), sizes.data(), strides.data(),
      box_sizes.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle_of(swizzle_bytes), promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    return given + " was refused by the driver (CUresult " + std::to_string(static_cast<int>(status)) +
           "). Strides have to be multiples of 16 bytes and below 2^40.";
  }
  return "";
}

}  // namespace jaxmoe
