#include "tensors.h"

namespace aioengine {

void check_close(const Tensor& tensor, int64_t dims, const char* name) {
    STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
    STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions");
    STD_TORCH_CHECK(
        tensor.stride(dims - 1) == 1 || tensor.size(dims - 1) <= 1,
        name,
        " must lie close together in its last dimension");
}

const int32_t* read_ints(const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(
        tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Int,
        name,
        " must be contiguous int32 on the CPU");
    return static_cast<const int32_t*>(tensor.const_data_ptr());
}

const int64_t* read_rows(const Tensor& tensor, int64_t num_rows) {
    STD_TORCH_CHECK(
        tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Long,
        "rows must be contiguous int64 on the CPU");
    const int64_t* rows = static_cast<const int64_t*>(tensor.const_data_ptr());
    for (int64_t i = 0; i < tensor.numel(); ++i)
        STD_TORCH_CHECK(0 <= rows[i] && rows[i] < num_rows, "there is no such row");
    return rows;
}

const float* read_floats(const std::optional<Tensor>& tensor, int64_t dims, const char* name) {
    if (!tensor) return nullptr;
    STD_TORCH_CHECK(
        tensor->is_cpu() && tensor->is_contiguous() && tensor->dim() == dims &&
            tensor->scalar_type() == ScalarType::Float,
        name,
        " must be contiguous float32 on the CPU");
    return static_cast<const float*>(tensor->const_data_ptr());
}

void copy_strides(const Tensor& tensor, int64_t count, int64_t* strides) {
    for (int64_t i = 0; i < count; ++i) strides[i] = tensor.stride(i);
}

DType dtype_of(const Tensor& tensor, const AttentionKernels& kernels) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float:
            return DType::Float32;
        case ScalarType::BFloat16:
            return DType::BFloat16;
        case ScalarType::Half:
            if (kernels.has_float16) return DType::Float16;
            break;
        default:
            break;
    }
    STD_TORCH_CHECK(false, "the kernels of this CPU are for float32, bfloat16 and (with F16C) float16");
}

}  // namespace aioengine
