// Checks of an operator's tensors, which name the one at fault, and how they are read.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "attention.h"

namespace aioengine {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Raises unless the tensor is on the CPU, has `dims` dimensions and is contiguous in the last one.
void check_close(const Tensor& tensor, int64_t dims, const char* name);

const int32_t* read_ints(const Tensor& tensor, const char* name);
// int64, each of them one of so many rows.
const int64_t* read_rows(const Tensor& tensor, int64_t num_rows);
const float* read_floats(const std::optional<Tensor>& tensor, int64_t dims, const char* name);
void copy_strides(const Tensor& tensor, int64_t count, int64_t* strides);
DType dtype_of(const Tensor& tensor, const AttentionKernels& kernels);

}  // namespace aioengine
