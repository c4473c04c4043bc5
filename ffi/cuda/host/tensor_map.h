// Tensor maps: what the copy engine knows of a tensor in global memory and of the boxes it is read in. Made on the host
// when a kernel is enqueued, passed to it as __grid_constant__ parameters. The driver is asked at run time: nothing
// links to libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/formats.h"

namespace jaxmoe {

// What L2 fetches for a miss: a line of 128 bytes, or that and its neighbour.
enum class Fetched { kLine, kTwoLines };

// Fills `map` for the tensor at `base` with these extents and boxes, innermost dimension first; what a box holds outside
// the tensor is read as zeros. Its elements lie side by side, but for lines that are part of longer ones: those begin
// `pitch` elements apart. Boxes are swizzled in lines of 128 or 64 bytes, or not (0). Returns what is wrong, empty where
// nothing is.
std::string make_tensor_map(CUtensorMap* map, const char* name, const void* base, Element element,
                            std::initializer_list<int64_t> extents, std::initializer_list<int32_t> box,
                            int64_t pitch = 0, int32_t swizzle_bytes = 128, Fetched fetched = Fetched::kLine);

}  // namespace jaxmoe
