#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include <torch/csrc/stable/ops.h>

#include "processors.h"

namespace aioengine {

namespace {

using Kept = std::vector<std::shared_ptr<const void>>;

// What programs of threads that have ended still keep. To free a tensor that Python knows takes the interpreter's
// lock, and asking for it aborts a thread that ends behind the interpreter: so others free it, within an operator.
struct Orphans {
    std::mutex mutex;
    Kept kept;
    std::atomic<bool> are_any{false};

    void add(Kept more) {
        if (more.empty()) return;
        const std::lock_guard<std::mutex> guard(mutex);
        std::move(more.begin(), more.end(), std::back_inserter(kept));
        are_any = true;
    }

    void free() {
        if (!are_any) return;
        Kept freed;
        const std::lock_guard<std::mutex> guard(mutex);
        freed.swap(kept);
        are_any = false;
    }
};

// Never destroyed: threads may end when statics are gone.
Orphans& orphans() {
    static Orphans& all = *new Orphans;
    return all;
}

struct ThreadsOwn {
    std::unique_ptr<Team> team;
    ~ThreadsOwn() {
        if (team) orphans().add(team->close());
    }
};

std::unique_ptr<Team>& kept_team() {
    thread_local ThreadsOwn own;
    return own.team;
}

}  // namespace

Team& own_team() {
    orphans().free();
    std::unique_ptr<Team>& team = kept_team();
    thread_local const int64_t usable = usable_processors("/sys/fs/cgroup", "/proc/self/cgroup");
    const int64_t wanted = std::min<int64_t>(torch::stable::get_num_threads(), usable);
    if (!team || team->num_wanted() != wanted || !team->is_of_this_process())
        team = std::make_unique<Team>(wanted);
    return *team;
}

void end_team() {
    kept_team().reset();
    orphans().free();
}

void run_between(Team& team, Program& program, int64_t rows) {
    constexpr int64_t FEW_ROWS = 64;
    if (rows <= FEW_ROWS) return team.run(program);
    const auto share_out = [&](const auto& work) {
        torch::stable::parallel_for(0, team.num_threads(), 1, [&](int64_t first, int64_t last) {
            for (int64_t thread = first; thread < last; ++thread) work(thread);
        });
    };
    team.run_by(share_out, program);
}

void keep(Program& program, std::vector<Tensor> tensors) {
    program.keep(std::make_shared<std::vector<Tensor>>(std::move(tensors)));
}

}  // namespace aioengine
