#include "parallel.h"

#include <memory>
#include <utility>

#include <torch/csrc/stable/ops.h>

#include "processors.h"

namespace aioengine {

Team& own_team() {
    thread_local std::unique_ptr<Team> team;
    thread_local const int64_t usable = usable_processors("/sys/fs/cgroup", "/proc/self/cgroup");
    const int64_t wanted = std::min<int64_t>(torch::stable::get_num_threads(), usable);
    if (!team || team->num_wanted() != wanted || !team->is_of_this_process())
        team = std::make_unique<Team>(wanted);
    return *team;
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
