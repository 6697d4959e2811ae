// Pieces of work for torch's own threads.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "memory.h"

namespace aioengine {

// What a thread wrote past the caches becomes visible to others before what it writes after this.
inline void finish_streaming() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

// Runs `work(i, has_next, scratch)` for each i in [0, count) on torch's threads. Each goes through a part
// of its own, in order (`has_next`: i + 1 is likely to follow), so that what lies behind each other is
// read by one; who has done takes from the others' parts. Each has `num_floats` of scratch, aligned,
// which begin with 64 bytes of zeros.
template <class Work>
void share_out(int64_t count, int64_t num_floats, const Work& work) {
    struct alignas(64) Part {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const int64_t num_parts = std::min<int64_t>(count, torch::stable::get_num_threads());
    std::unique_ptr<Part[]> parts(new Part[num_parts]);
    for (int64_t i = 0; i < num_parts; ++i) {
        parts[i].next = i * count / num_parts;
        parts[i].end = (i + 1) * count / num_parts;
    }
    torch::stable::parallel_for(0, num_parts, 1, [&](int64_t begin, int64_t end) {
        const size_t bytes = MemoryPool::rounded(num_floats * sizeof(float));
        const auto give_back = [bytes](void* memory) { memory_pool().give(memory, bytes); };
        std::unique_ptr<void, decltype(give_back)> memory(memory_pool().take(bytes), give_back);
        std::memset(memory.get(), 0, std::min<size_t>(bytes, 64));
        for (int64_t thread = begin; thread < end; ++thread) {
            for (int64_t offset = 0; offset < num_parts; ++offset) {
                Part& part = parts[(thread + offset) % num_parts];
                for (int64_t i = part.next++; i < part.end; i = part.next++)
                    work(i, i + 1 < part.end, static_cast<float*>(memory.get()));
            }
        }
        finish_streaming();
    });
}

}  // namespace aioengine
