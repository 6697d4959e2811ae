#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "system.h"

#if AIOENGINE_LINUX
#include <sys/mman.h>
#endif
#if AIOENGINE_LINUX && defined(__GLIBC__)
#include <malloc.h>
#endif

namespace aioengine {

namespace {

constexpr size_t HUGE_PAGE = 2 << 20;

// Of a contiguous tensor.
std::vector<int64_t> strides_of(std::initializer_list<int64_t> sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes.begin()[i];
    return strides;
}

// In a contiguous tensor of the dtype of `like`.
size_t bytes_of(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = like.element_size();
    for (int64_t size : sizes) bytes *= static_cast<size_t>(size);
    return bytes;
}

}  // namespace

void* MemoryPool::take(size_t bytes) {
    if (bytes >= LARGE) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& block) {
            return block.bytes == bytes;
        });
        if (found != blocks_.end()) {
            void* memory = found->memory;
            bytes_ -= bytes;
            blocks_.erase(found);
            return memory;
        }
    }
    void* memory = std::aligned_alloc(PAGE, bytes);
    STD_TORCH_CHECK(memory != nullptr, "out of memory");
    return memory;
}

void MemoryPool::give(void* memory, size_t bytes) {
    if (bytes < LARGE) return std::free(memory);
    const std::lock_guard<std::mutex> guard(mutex_);
    blocks_.push_back({memory, bytes});
    bytes_ += bytes;
    while (bytes_ > MOST_BYTES) {  // the oldest goes
        std::free(blocks_.front().memory);
        bytes_ -= blocks_.front().bytes;
        blocks_.pop_front();
    }
}

size_t MemoryPool::rounded(size_t bytes) {
    size_t step = PAGE;
    while (8 * step < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

// Never destroyed: tensors may be freed when statics are gone.
MemoryPool& memory_pool() {
    static MemoryPool& kept = *new MemoryPool;
    return kept;
}

Tensor new_output(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = bytes_of(like, sizes);
    if (bytes < MemoryPool::LARGE) return torch::stable::new_empty(like, sizes);
    bytes = MemoryPool::rounded(bytes);
    return torch::stable::from_blob(
        memory_pool().take(bytes), sizes, strides_of(sizes), like.device(), like.scalar_type(),
        [bytes](void* memory) { memory_pool().give(memory, bytes); });
}

Tensor new_weight(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = bytes_of(like, sizes);
    if (bytes < HUGE_PAGE) return torch::stable::new_empty(like, sizes);
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void* memory = std::aligned_alloc(HUGE_PAGE, bytes);
    STD_TORCH_CHECK(memory != nullptr, "out of memory");
    return torch::stable::from_blob(
        memory, sizes, strides_of(sizes), like.device(), like.scalar_type(),
        [](void* data) { std::free(data); });
}

void gather_pages([[maybe_unused]] Tensor& weight) {
#if AIOENGINE_LINUX && defined(MADV_HUGEPAGE)
    const size_t bytes = weight.numel() * weight.element_size() / HUGE_PAGE * HUGE_PAGE;
    if (bytes) madvise(weight.mutable_data_ptr(), bytes, MADV_HUGEPAGE);
#endif
}

void trim_heap() {
#if AIOENGINE_LINUX && defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace aioengine
