// What a device says about itself: four int32 words, written by the host in host/device_info.cc and by the GPU in
// cuda/host/device_info.cu, read by jaxmoe/machine.py. Plain C++20, no CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jaxmoe {

// Name of the XLA FFI target, the same on every platform. Its only result is int32[4].
inline constexpr char kDeviceInfoTarget[] = "jaxmoe_device_info";

struct DeviceInfo {
  int32_t compiled_arch;       // __CUDA_ARCH__ of the code that ran (900 for sm_90a); 0 on the host
  int32_t num_processors;      // streaming multiprocessors, or hardware threads on the host
  int32_t block_shared_bytes;  // most shared memory that one thread block may ask for; 0 on the host
  int32_t compute_capability;  // 90 for 9.0; 0 on the host
};

inline constexpr std::size_t kDeviceInfoWords = sizeof(DeviceInfo) / sizeof(int32_t);

// The words by name, in memory order. Python's DeviceInfo is checked against this list.
inline constexpr std::array<std::string_view, kDeviceInfoWords> kDeviceInfoFields = {
    "compiled_arch", "num_processors", "block_shared_bytes", "compute_capability"};

// What to say about a result of `given` words; empty when it is the size both handlers write.
inline std::string device_info_size_error(std::size_t given) {
  if (given == kDeviceInfoWords) return "";
  return "jaxmoe_device_info: the result has " + std::to_string(given) + " words. It needs int32[" +
         std::to_string(kDeviceInfoWords) + "].";
}

}  // namespace jaxmoe
