// Memory for outputs, weights and a thread's scratch.

#pragma once

#include <cstddef>
#include <deque>
#include <initializer_list>
#include <mutex>

#include "tensors.h"

namespace aioengine {

// Large blocks of memory that were freed, for the next who allocate. malloc gives back to the system what
// lies at the end of a heap, and then a step of many tokens waits for fresh pages again and again.
class MemoryPool {
public:
    // `bytes`: as `rounded`. Small blocks are left to malloc, which keeps them.
    void* take(size_t bytes);
    void give(void* memory, size_t bytes);
    void clear();

    static constexpr size_t LARGE = 1 << 18;

    // Sizes that blocks come in: four to each power of two.
    static size_t rounded(size_t bytes);

private:
    static constexpr size_t PAGE = 4096, MOST_BYTES = 64 << 20;
    struct Block {
        void* memory;
        size_t bytes;
    };
    std::mutex mutex_;
    std::deque<Block> blocks_;
    size_t bytes_ = 0;

    void shrink(size_t most_bytes);
};

MemoryPool& memory_pool();

// An uninitialised tensor of the dtype of `like`.
Tensor new_output(const Tensor& like, std::initializer_list<int64_t> sizes);

// An uninitialised tensor for a weight. It lies beside others of a load; the memory is freed when all of these
// are gone.
Tensor new_weight(const Tensor& like, std::initializer_list<int64_t> sizes);

// Behind a load: has the allocators give back to the system what is free, where they keep it otherwise, and a thread
// gather weights into huge pages meanwhile: all of them are read at every step, and few addresses have to be
// looked up then.
void end_load();

}  // namespace aioengine
