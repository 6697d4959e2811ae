#include "team.h"

#include "system.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <system_error>

namespace aioengine {

namespace {

constexpr size_t LINE = 64;
constexpr size_t FIRST_BYTES = 1 << 20, MOST_BYTES = 64 << 20;  // of a program's memory that is kept

// A part's word is its epoch and one of these; progress is an epoch and a number of parts.
enum State : uint64_t { TAKEN = 1, COMMITTING = 2, DONE = 3 };
constexpr int STATE_BITS = 2, COUNT_BITS = 24;
constexpr uint64_t MOST_EPOCHS = uint64_t{1} << 38;  // after which their numbers begin anew

constexpr uint64_t word(uint64_t epoch, State state) { return epoch << STATE_BITS | state; }

// Nanoseconds: that a thread spins for the next program, that it waits for a part before it computes it
// again, at least, or where it has not seen how long one takes, and that it waits for anything before it
// gives others its core.
constexpr int64_t SPIN = 30'000, PATIENCE = 5'000, BLIND_PATIENCE = 100'000, COURTESY = 20'000;
constexpr int CHECKS = 32;  // between two looks at the clock

int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch().count();
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// What was written past the caches becomes visible to others before what is written after this.
inline void finish_streaming() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

#if AIOENGINE_LINUX
int current_processor() {
    return sched_getcpu();
}

// Has this thread go on elsewhere, if it runs on `processor` and may run on others; where, is the kernel's
// choice, as before.
void leave(int processor) {
    if (processor < 0 || sched_getcpu() != processor) return;
    cpu_set_t own;
    if (sched_getaffinity(0, sizeof own, &own) != 0) return;
    cpu_set_t others = own;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof own, &own);
}
#else
int current_processor() {
    return -1;
}

void leave(int) {}
#endif

void* aligned(size_t bytes) {
    void* memory = std::aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    if (!memory) throw std::bad_alloc();
    return memory;
}

}  // namespace

void Scratch::Free::operator()(void* memory) const {
    std::free(memory);
}

void Scratch::grow(int64_t num_floats) {
    if (num_floats <= num_floats_) return;
    num_floats_ = 0;
    memory_.reset();
    memory_.reset(static_cast<float*>(aligned(num_floats * sizeof(float))));
    num_floats_ = num_floats;
}

float* Scratch::clear() {
    if (num_floats_) std::memset(memory_.get(), 0, std::min(LINE, num_floats_ * sizeof(float)));
    return memory_.get();
}

void Program::Free::operator()(void* memory) const {
    std::free(memory);
}

void* Program::take(size_t bytes) {
    bytes = (bytes + LINE - 1) / LINE * LINE;
    if (chunks_.empty() || used_ + bytes > chunks_.back().bytes) {
        const size_t size = std::max(bytes, FIRST_BYTES);
        chunks_.push_back({std::unique_ptr<char, Free>(static_cast<char*>(aligned(size))), size});
        used_ = 0;
    }
    void* found = chunks_.back().memory.get() + used_;
    used_ += bytes;
    return found;
}

void Program::begin() {
    operations_.clear();
    kept_.clear();
    used_ = 0;
    if (chunks_.size() < 2) return;
    size_t bytes = 0;
    for (const Chunk& chunk : chunks_) bytes += chunk.bytes;
    chunks_.clear();
    take(bytes);
    used_ = 0;
}

// What a long prompt took is given back.
void Program::end() {
    size_t bytes = 0;
    for (const Chunk& chunk : chunks_) bytes += chunk.bytes;
    if (bytes > MOST_BYTES) chunks_.clear();
    kept_.clear();
}

void Program::prepare() {
    most_parts_ = most_floats_ = 0;
    for (const Operation& operation : operations_) {
        most_parts_ = std::max(most_parts_, operation.num_parts);
        most_floats_ = std::max(most_floats_, operation.scratch_floats);
    }
    const bool is_worn = progress_.load(std::memory_order_relaxed) >> COUNT_BITS > MOST_EPOCHS;
    if (most_parts_ > num_parts_ || is_worn) {
        num_parts_ = std::max(most_parts_, num_parts_);
        parts_.reset(new std::atomic<uint64_t>[num_parts_]());
    }
    if (is_worn) progress_.store(0, std::memory_order_relaxed);
    first_epoch_ = (progress_.load(std::memory_order_relaxed) >> COUNT_BITS) + 1;
    progress_.store(first_epoch_ << COUNT_BITS, std::memory_order_release);
}

bool Program::is_done() const {
    return (progress_.load(std::memory_order_acquire) >> COUNT_BITS) - first_epoch_ >= operations_.size();
}

void Program::work(int64_t thread, int64_t num_threads, Scratch& scratch) {
    for (;;) {
        const uint64_t epoch = progress_.load(std::memory_order_acquire) >> COUNT_BITS;
        const uint64_t index = epoch - first_epoch_;
        if (index >= operations_.size()) return;
        const Operation& operation = operations_[index];
        const int64_t first =
            operation.is_ordered ? 0 : thread * operation.num_parts / num_threads;
        float* memory = scratch.clear();
        const int64_t start = now();
        const int64_t count = take_parts(operation, epoch, first, memory);
        const int64_t patience =
            count ? std::max(PATIENCE, 2 * (now() - start) / count) : BLIND_PATIENCE;
        wait(operation, epoch, first, memory, patience);
    }
}

// Computes what nobody has begun, from the part `first` on. Returns how many parts those were.
int64_t Program::take_parts(
    const Operation& operation, uint64_t epoch, int64_t first, float* scratch) {
    const int64_t num_parts = operation.num_parts;
    const auto is_free = [&](int64_t index) {
        return parts_[index].load(std::memory_order_relaxed) < word(epoch, TAKEN);
    };
    int64_t count = 0;
    for (int64_t i = 0; i < num_parts; ++i) {
        const int64_t index = first + i < num_parts ? first + i : first + i - num_parts;
        uint64_t before = parts_[index].load(std::memory_order_relaxed);
        if (before >= word(epoch, TAKEN) ||
            !parts_[index].compare_exchange_strong(before, word(epoch, TAKEN)))
            continue;
        const bool has_next = index + 1 < num_parts && i + 1 < num_parts && is_free(index + 1);
        compute_part(operation, epoch, {index, has_next, scratch});
        ++count;
    }
    return count;
}

// Of a part that was taken, by whomever. Returns whether this has done it.
bool Program::compute_part(const Operation& operation, uint64_t epoch, const Part& part) {
    if (operation.compute) operation.compute(operation.arguments, part);
    uint64_t taken = word(epoch, TAKEN);
    if (!parts_[part.index].compare_exchange_strong(taken, word(epoch, COMMITTING))) return false;
    operation.commit(operation.arguments, part);
    finish_streaming();
    parts_[part.index].store(word(epoch, DONE), std::memory_order_release);
    progress_.fetch_add(1, std::memory_order_acq_rel);
    return true;
}

// Returns when all of an operator is done.
void Program::wait(
    const Operation& operation, uint64_t epoch, int64_t first, float* scratch, int64_t patience) {
    int64_t since = 0;
    const uint64_t all = epoch << COUNT_BITS | static_cast<uint64_t>(operation.num_parts);
    for (int checks = 0;; ++checks) {
        uint64_t progress = progress_.load(std::memory_order_acquire);
        if (progress >> COUNT_BITS != epoch) return;
        if (progress == all) {  // whoever sees it first goes on to the next
            progress_.compare_exchange_strong(progress, (epoch + 1) << COUNT_BITS);
            return;
        }
        pause();
        if (checks % CHECKS) continue;
        const int64_t time = now();
        if (!since) since = time;
        if (operation.compute && time - since > patience) {
            repeat_parts(operation, epoch, first, scratch);
            since = now();
            patience *= 2;
        } else if (time - since > COURTESY) {
            sched_yield();
        }
    }
}

// Computes parts that others have begun and have not done.
void Program::repeat_parts(
    const Operation& operation, uint64_t epoch, int64_t first, float* scratch) {
    for (int64_t i = operation.num_parts; i-- > 0;) {
        const int64_t index = (first + i) % operation.num_parts;
        if (parts_[index].load(std::memory_order_relaxed) == word(epoch, TAKEN))
            compute_part(operation, epoch, {index, false, scratch});
    }
}

Team::Team(int64_t num_threads) : num_wanted_(num_threads), process_(getpid()) {
    // Signals are for the threads of whoever uses this.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    helpers_.reserve(std::max<int64_t>(0, num_threads - 1));
    num_threads_ = 1;
    try {
        for (int64_t i = 1; i < num_threads; ++i) helpers_.emplace_back(&Team::help, this, i);
    } catch (const std::system_error&) {
        // There may be no more threads: then these are all.
    }
    num_threads_ = 1 + static_cast<int64_t>(helpers_.size());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Team::~Team() {
    close();
}

std::vector<std::shared_ptr<const void>> Team::close() {
    is_closed_ = true;
    posted_.fetch_add(1);
    posted_.notify_all();
    for (std::thread& helper : helpers_) {
        // A forked process has none of them.
        if (is_of_this_process())
            helper.join();
        else
            helper.detach();
    }
    helpers_.clear();
    std::vector<std::shared_ptr<const void>> kept;
    for (const std::unique_ptr<Program>& program : programs_)
        std::move(program->kept_.begin(), program->kept_.end(), std::back_inserter(kept));
    programs_.clear();
    return kept;
}

bool Team::is_of_this_process() const {
    return process_ == getpid();
}

Program& Team::begin() {
    for (const std::unique_ptr<Program>& program : programs_) {
        if (program->num_inside_.load()) continue;
        program->begin();
        return *program;
    }
    programs_.push_back(std::make_unique<Program>());
    return *programs_.back();
}

void Team::run(Program& program) {
    program.prepare();
    // Nobody is woken where there is nothing to share.
    const bool is_shared = program.most_parts_ > 1;
    if (is_shared) {
        processor_.store(current_processor(), std::memory_order_relaxed);
        current_.store(&program);
        posted_.fetch_add(1);
        posted_.notify_all();
    }
    work(program, 0, scratch_);
    current_.store(nullptr);
    finish(program);
}

void Team::work(Program& program, int64_t thread, Scratch& scratch) {
    try {
        scratch.grow(program.most_floats_);
    } catch (const std::bad_alloc&) {
        return;
    }
    program.work(thread, num_threads_, scratch);
}

void Team::finish(Program& program) {
    const bool is_done = program.is_done();
    if (!program.num_inside_.load()) program.end();
    if (!is_done) throw std::bad_alloc();
}

void Team::help(int64_t thread) {
    Scratch scratch;
    uint32_t seen = 0;
    while (!is_closed_) {
        const int64_t since = now();
        for (int checks = 1; posted_.load() == seen; ++checks) {
            pause();
            if (checks % CHECKS == 0 && now() - since > SPIN) posted_.wait(seen);
        }
        seen = posted_.load();
        Program* program = current_.load();
        if (!program) continue;
        // Beside the thread that it helps it would only take that one's time.
        leave(processor_.load(std::memory_order_relaxed));
        // It is not used again while somebody is inside; and who was inside in time sees it still here.
        program->num_inside_.fetch_add(1);
        if (current_.load() == program) work(*program, thread, scratch);
        program->num_inside_.fetch_sub(1);
    }
}

}  // namespace aioengine
