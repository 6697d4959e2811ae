#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <ctime>
#include <memory>
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

constexpr size_t HUGE_PAGE = 2 << 20, SLAB_BYTES = 16 << 20, LINE = 64;

size_t whole_pages(size_t bytes) {
    return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

// That this thread has had a processor for.
[[maybe_unused]] double thread_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

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

// Whole huge pages, in which weights lie side by side: most of a small model's are smaller than one.
class Slab {
public:
    explicit Slab(size_t bytes)
        : memory_(static_cast<char*>(std::aligned_alloc(HUGE_PAGE, bytes))), bytes_(bytes) {
        STD_TORCH_CHECK(memory_ != nullptr, "out of memory");
    }
    ~Slab() { std::free(memory_); }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    // Null where no room is left.
    void* take(size_t bytes) {
        if (bytes > bytes_ - used_) return nullptr;
        void* taken = memory_ + used_;
        ask_for_huge_pages(whole_pages(used_), whole_pages(used_ + bytes));
        used_ += bytes;
        return taken;
    }

private:
    void ask_for_huge_pages(size_t first, size_t last);

    char* memory_;
    size_t bytes_, used_ = 0;
};

// Fresh huge pages are one fault for 512, but a system whose memory is in pieces may take long to make
// them: from then on weights get theirs when they have been written (`gather_pages`).
void Slab::ask_for_huge_pages([[maybe_unused]] size_t first, [[maybe_unused]] size_t last) {
#if AIOENGINE_LINUX && defined(MADV_HUGEPAGE)
    constexpr double MOST_SECONDS = 3e-3;  // ten times what it takes to fill one with zeros
    static std::atomic<bool> is_slow{false};
    for (char* page = memory_ + first; page < memory_ + last && !is_slow; page += HUGE_PAGE) {
        madvise(page, HUGE_PAGE, MADV_HUGEPAGE);
        const double start = thread_seconds();
        *static_cast<volatile char*>(page) = 0;
        is_slow = thread_seconds() - start > MOST_SECONDS;
    }
#endif
}

struct SlabInUse {
    std::mutex mutex;
    std::shared_ptr<Slab> slab;
};

// Never destroyed, as `memory_pool`.
SlabInUse& slab_in_use() {
    static SlabInUse& kept = *new SlabInUse;
    return kept;
}

struct OfSlab {
    void* memory;
    std::shared_ptr<Slab> slab;
};

OfSlab take_of_slab(size_t bytes) {
    bytes = (bytes + LINE - 1) / LINE * LINE;
    if (bytes > SLAB_BYTES / 2) {
        const auto own = std::make_shared<Slab>(whole_pages(bytes));
        return {own->take(bytes), own};
    }
    SlabInUse& in_use = slab_in_use();
    const std::lock_guard<std::mutex> guard(in_use.mutex);
    void* memory = in_use.slab ? in_use.slab->take(bytes) : nullptr;
    if (!memory) {
        in_use.slab = std::make_shared<Slab>(SLAB_BYTES);
        memory = in_use.slab->take(bytes);
    }
    return {memory, in_use.slab};
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
    auto [memory, slab] = take_of_slab(bytes_of(like, sizes));
    return torch::stable::from_blob(
        memory, sizes, strides_of(sizes), like.device(), like.scalar_type(), [slab](void*) {});
}

void gather_pages([[maybe_unused]] Tensor& weight) {
#if AIOENGINE_LINUX && defined(MADV_HUGEPAGE)
    const auto address = reinterpret_cast<uintptr_t>(weight.mutable_data_ptr());
    const uintptr_t first = address / HUGE_PAGE * HUGE_PAGE;
    const size_t bytes = address + weight.numel() * weight.element_size() - first;
    madvise(reinterpret_cast<void*>(first), whole_pages(bytes), MADV_HUGEPAGE);
#endif
}

void trim_heap() {
    {
        SlabInUse& in_use = slab_in_use();
        const std::lock_guard<std::mutex> guard(in_use.mutex);
        in_use.slab.reset();
    }
#if AIOENGINE_LINUX && defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace aioengine
