// The team of the calling thread, and programs for it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "team.h"
#include "tensors.h"

namespace aioengine {

// The calling thread's team: as many threads as torch says that operators have, and no more than there are
// processors for them.
Team& own_team();

// Ends it; the next operator has another one. Frees what programs of threads that have ended still keep.
void end_team();

// Runs a program of one operator on so many rows, between others of torch.
//
// Few rows are for the team, as torch's operators need no second thread for them. Where there are many,
// torch's threads are awake: they spin for milliseconds behind each operator, and our own beside them would
// be too many for the cores.
void run_between(Team& team, Program& program, int64_t rows);

// The same of what `build` adds to an empty program.
template <class Build>
void run_between(int64_t rows, const Build& build) {
    Team& team = own_team();
    Program& program = team.begin();
    build(program);
    run_between(team, program, rows);
}

// Calls `work(first, last)` for ranges of [0, count) of `grain` at most; `rows`: as above.
template <class Work>
struct Ranges {
    const Work* work;
    int64_t count, grain;

    void commit(const Part& part) const {
        const int64_t first = part.index * grain;
        (*work)(first, std::min(first + grain, count));
    }
};

template <class Work>
void share_out(int64_t rows, int64_t count, int64_t grain, const Work& work) {
    run_between(rows, [&](Program& program) {
        program.add(Ranges<Work>{&work, count, grain}, (count + grain - 1) / grain);
    });
}

// Keeps tensors that a program reads as long as it.
void keep(Program& program, std::vector<Tensor> tensors);

}  // namespace aioengine
