// The formats of numbers that tensors come in.

#pragma once

namespace aioengine {

enum class DType { Float32, BFloat16, Float16 };

}  // namespace aioengine
