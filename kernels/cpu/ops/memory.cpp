#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "system.h"

#if AIOENGINE_LINUX
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
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
// Of the system, not of the allocator: glibc's keeps blocks of this size once it has been given some back.
class Slab {
public:
    explicit Slab(size_t bytes) : bytes_(bytes) {
        void* mapped = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        STD_TORCH_CHECK(mapped != MAP_FAILED, "out of memory");
        mapped_ = static_cast<char*>(mapped);
        const auto at = reinterpret_cast<uintptr_t>(mapped_);
        memory_ = mapped_ + (HUGE_PAGE - at % HUGE_PAGE) % HUGE_PAGE;
    }
    ~Slab() { munmap(mapped_, bytes_ + HUGE_PAGE); }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    // Null where no room is left.
    void* take(size_t bytes) {
        if (bytes > bytes_ - used_) return nullptr;
        void* taken = memory_ + used_;
        used_ += bytes;
        return taken;
    }

    char* memory() const { return memory_; }
    // Of pages that weights fill.
    size_t whole_bytes() const { return used_ / HUGE_PAGE * HUGE_PAGE; }

private:
    char *mapped_, *memory_;
    size_t bytes_, used_ = 0;
};

using Slabs = std::vector<std::weak_ptr<Slab>>;

struct SlabInUse {
    std::mutex mutex;
    std::shared_ptr<Slab> slab;
    Slabs all;  // of this load
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
    SlabInUse& in_use = slab_in_use();
    const std::lock_guard<std::mutex> guard(in_use.mutex);
    const auto begin = [&](size_t size) {
        const auto slab = std::make_shared<Slab>(size);
        in_use.all.push_back(slab);
        return slab;
    };
    if (bytes > SLAB_BYTES / 2) {
        const auto own = begin(whole_pages(bytes));
        return {own->take(bytes), own};
    }
    void* memory = in_use.slab ? in_use.slab->take(bytes) : nullptr;
    if (!memory) {
        in_use.slab = begin(SLAB_BYTES);
        memory = in_use.slab->take(bytes);
    }
    return {memory, in_use.slab};
}

// Has the system move slabs into huge pages, for half of the time that this thread has. A page takes it up to 5 ms.
// Asked for before weights are written they would take a start that much longer, and by itself the system
// moves 16 MB in ten seconds.
void gather_pages([[maybe_unused]] const Slabs& slabs) {
#if AIOENGINE_LINUX && defined(MADV_HUGEPAGE)
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, since Linux 6.1; headers may be older
    constexpr size_t AT_ONCE = 4 * HUGE_PAGE;
    constexpr int NICENESS = 5;
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), NICENESS);
    bool is_known = true;
    for (const std::weak_ptr<Slab>& each : slabs)
        for (size_t at = 0;; at += AT_ONCE) {
            const std::shared_ptr<Slab> slab = each.lock();
            if (!slab || at >= slab->whole_bytes()) break;
            char* memory = slab->memory() + at;
            const size_t bytes = std::min(AT_ONCE, slab->whole_bytes() - at);
            const auto began = std::chrono::steady_clock::now();
            if (is_known && madvise(memory, bytes, COLLAPSE) != 0) is_known = errno != EINVAL;
            if (!is_known) madvise(memory, bytes, MADV_HUGEPAGE);
            std::this_thread::sleep_for(std::chrono::steady_clock::now() - began);
        }
#endif
}

void gather_beside(Slabs slabs) {
    // Signals are for the threads of whoever uses this.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread([slabs = std::move(slabs)] { gather_pages(slabs); }).detach();
    } catch (const std::system_error&) {
        // There may be no more threads: weights stay where they are.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
    shrink(MOST_BYTES);
}

void MemoryPool::clear() {
    const std::lock_guard<std::mutex> guard(mutex_);
    shrink(0);
}

void MemoryPool::shrink(size_t most_bytes) {
    while (bytes_ > most_bytes) {  // the oldest goes
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

void end_load() {
    Slabs slabs;
    {
        SlabInUse& in_use = slab_in_use();
        const std::lock_guard<std::mutex> guard(in_use.mutex);
        in_use.slab.reset();
        slabs.swap(in_use.all);
    }
    std::erase_if(slabs, [](const std::weak_ptr<Slab>& each) {
        const std::shared_ptr<Slab> slab = each.lock();
        return !slab || !slab->whole_bytes();
    });
    if (!slabs.empty()) gather_beside(std::move(slabs));
    memory_pool().clear();  // of what a model was tried with
#if AIOENGINE_LINUX && defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace aioengine
