// Threads that share out the operators of a step between them.
//
// Whoever is there goes on: no operator waits for a thread, but for its parts alone. A thread that is late
// with one, as another process has its core, is not waited for either: somebody else computes the part
// again. So a part's result is made in memory of the thread's own, and goes to where it belongs at the end,
// once: by who first says so in the part's word. Herlihy's helping ("Wait-free synchronization", 1991) of
// parts that give the same bits whoever computes them.
//
// Nothing of torch is known here.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace aioengine {

// What a thread is asked for. `has_next`: the part behind it is likely to be this thread's next one.
// `scratch`: aligned, the thread's own; its first 64 bytes are zero before the operator's first part.
struct Part {
    int64_t index;
    bool has_next;
    float* scratch;
};

// Some parts, each of which any thread may compute, in any order.
struct Operation {
    const void* arguments;
    // Makes a part's result in the scratch and writes nothing else: it may be done twice, and in vain. Null:
    // all is done by `commit`.
    void (*compute)(const void* arguments, const Part&);
    // Puts the result where it belongs; called once for each part, and quick.
    void (*commit)(const void* arguments, const Part&);
    int64_t num_parts, scratch_floats;
    // Parts get shorter from the first on: all threads begin there. Else each has its own range.
    bool is_ordered;
};

// A thread's own working memory.
class Scratch {
public:
    // Makes room for so many numbers. Raises std::bad_alloc.
    void grow(int64_t num_floats);
    // The memory, of which the first 64 bytes are zero.
    float* clear();

private:
    struct Free {
        void operator()(void* memory) const;
    };
    std::unique_ptr<float, Free> memory_;
    int64_t num_floats_ = 0;
};

// Operators, one after the other, and the memory that they want. It stays as it is until no thread is
// left in it, even one that is late and works in vain.
class Program {
public:
    // Uninitialised memory, aligned to 64 bytes, that lives as long as the program.
    void* take(size_t bytes);

    template <class T>
    T* copy(const T* from, size_t count) {
        static_assert(std::is_trivially_copyable_v<T>);
        T* to = static_cast<T*>(take(count * sizeof(T)));
        for (size_t i = 0; i < count; ++i) to[i] = from[i];
        return to;
    }

    // Keeps something that the operators read, as long as the program.
    void keep(std::shared_ptr<const void> kept) { kept_.push_back(std::move(kept)); }

    // Adds an operator: `Kernel` has `compute(const Part&) const` and `commit(const Part&) const`, or the
    // latter alone. Of no parts it is none.
    template <class Kernel>
    void add(
        const Kernel& kernel, int64_t num_parts, int64_t scratch_floats = 0, bool is_ordered = false) {
        if (num_parts == 0) return;
        Operation operation{copy(&kernel, 1), nullptr, nullptr, num_parts, scratch_floats, is_ordered};
        if constexpr (requires(const Part& part) { kernel.compute(part); })
            operation.compute = [](const void* arguments, const Part& part) {
                static_cast<const Kernel*>(arguments)->compute(part);
            };
        operation.commit = [](const void* arguments, const Part& part) {
            static_cast<const Kernel*>(arguments)->commit(part);
        };
        operations_.push_back(operation);
    }

private:
    friend class Team;

    struct Free {
        void operator()(void* memory) const;
    };
    struct Chunk {
        std::unique_ptr<char, Free> memory;
        size_t bytes;
    };

    void begin();
    void end();
    void prepare();
    bool is_done() const;
    void work(int64_t thread, int64_t num_threads, Scratch& scratch);
    int64_t take_parts(const Operation&, uint64_t epoch, int64_t first, float* scratch);
    void wait(const Operation&, uint64_t epoch, int64_t first, float* scratch, int64_t patience);
    void repeat_parts(const Operation&, uint64_t epoch, int64_t first, float* scratch);
    bool compute_part(const Operation&, uint64_t epoch, const Part& part);

    std::vector<Operation> operations_;
    std::vector<std::shared_ptr<const void>> kept_;
    std::vector<Chunk> chunks_;
    size_t used_ = 0;  // of the last chunk
    // Each operator that this object ever ran has a number of its own, its epoch, from 1 on.
    uint64_t first_epoch_ = 1;
    // The epoch of the operator that is being computed, and how many of its parts are done.
    alignas(64) std::atomic<uint64_t> progress_{0};
    // For each part the last epoch that it was taken in, and how far it is. What is of an earlier epoch
    // is as good as not taken.
    std::unique_ptr<std::atomic<uint64_t>[]> parts_;
    int64_t num_parts_ = 0;
    int64_t most_parts_ = 0, most_floats_ = 0;  // of one operator
    alignas(64) std::atomic<int64_t> num_inside_{0};  // helpers
};

// The thread that makes one, and its helpers. They spin for a moment behind a program, then sleep.
class Team {
public:
    explicit Team(int64_t num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Ends the helpers, and with them all use of the team. Returns what programs keep, that somebody was still
    // inside of when they had been run.
    std::vector<std::shared_ptr<const void>> close();

    int64_t num_threads() const { return num_threads_; }
    int64_t num_wanted() const { return num_wanted_; }
    bool is_of_this_process() const;

    // An empty program, to be added to and to be run. To be called by the team's own thread, as `run`.
    Program& begin();
    // Computes all of a program, whose memory is not to be read after that. Raises std::bad_alloc.
    void run(Program& program);
    // The same by threads of somebody else's. `share_out(work)` calls work(i) for each i below
    // num_threads(), and returns when all calls have.
    template <class ShareOut>
    void run_by(const ShareOut& share_out, Program& program) {
        program.prepare();
        share_out([&](int64_t thread) {
            thread_local Scratch scratch;
            work(program, thread, scratch);
        });
        finish(program);
    }

private:
    void help(int64_t thread);
    // Takes part in a program, if there is memory for it.
    void work(Program& program, int64_t thread, Scratch& scratch);
    void finish(Program& program);

    std::vector<std::unique_ptr<Program>> programs_;
    alignas(64) std::atomic<Program*> current_{nullptr};
    alignas(64) std::atomic<uint32_t> posted_{0};
    std::atomic<bool> is_closed_{false};
    std::atomic<int> processor_{-1};  // that the team's own thread ran on when it began the program
    const int64_t num_wanted_;
    const int process_;
    std::atomic<int64_t> num_threads_;
    Scratch scratch_;
    std::vector<std::thread> helpers_;
};

}  // namespace aioengine
