// The formats that kernels are compiled for, under names that the host knows as well.
#pragma once

namespace jaxmoe {

enum class ElementType { kBf16, kF16 };  // 2 bytes each

}  // namespace jaxmoe
