// Steps of many short operators by our team, by oneTBB or by OpenMP: benchmarks/teams.py builds and runs it.
//
//     ./teams THREADS SECONDS ROWS

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(BY_TEAM)
#include "team.h"
#elif defined(BY_TBB)
#include <tbb/tbb.h>
#endif

namespace {

// As of SmolLM2-135M in bfloat16: 270 MB of weights in 270 operators.
constexpr int64_t NUM_OPERATORS = 270, NUM_PARTS = 16, WIDTH = 16;
constexpr int64_t PART_FLOATS = 270'000'000 / (NUM_OPERATORS * NUM_PARTS * sizeof(float)) / WIDTH * WIDTH;

// A part's outputs: weights summed in lanes, once for each row.
void multiply(const float* weights, int64_t rows, float* out) {
    for (int64_t i = 0; i < WIDTH; ++i) out[i] = 0;
    for (int64_t first = 0; first < PART_FLOATS; first += 1024 * WIDTH)  // stays in the first cache
        for (int64_t row = 0; row < rows; ++row) {
            float sums[WIDTH] = {};
            const int64_t end = first + 1024 * WIDTH < PART_FLOATS ? first + 1024 * WIDTH : PART_FLOATS;
            for (int64_t i = first; i < end; i += WIDTH)
                for (int64_t j = 0; j < WIDTH; ++j) sums[j] += weights[i + j];
            for (int64_t j = 0; j < WIDTH; ++j) out[j] += sums[j];
        }
}

struct Step {
    std::vector<float> weights = std::vector<float>(NUM_OPERATORS * NUM_PARTS * PART_FLOATS, 1.0f);
    std::vector<float> out = std::vector<float>(NUM_OPERATORS * NUM_PARTS * WIDTH);
    int64_t rows;

    void part(int64_t number, float* to) const { multiply(&weights[number * PART_FLOATS], rows, to); }
};

#if defined(BY_TEAM)
struct Multiply {
    Step* step;
    int64_t first;

    void compute(const aioengine::Part& part) const { step->part(first + part.index, part.scratch); }
    void commit(const aioengine::Part& part) const {
        float* to = &step->out[(first + part.index) * WIDTH];
        for (int64_t i = 0; i < WIDTH; ++i) to[i] = part.scratch[i];
    }
};

void run(Step& step, aioengine::Team& team) {
    aioengine::Program& program = team.begin();
    for (int64_t i = 0; i < NUM_OPERATORS; ++i) program.add(Multiply{&step, i * NUM_PARTS}, NUM_PARTS, WIDTH);
    team.run(program);
}
#elif defined(BY_TBB)
void run(Step& step, tbb::task_arena& arena) {
    arena.execute([&] {
        for (int64_t i = 0; i < NUM_OPERATORS; ++i)
            tbb::parallel_for(int64_t{0}, NUM_PARTS, [&](int64_t part) {
                const int64_t number = i * NUM_PARTS + part;
                step.part(number, &step.out[number * WIDTH]);
            });
    });
}
#else
void run(Step& step, int threads) {
    for (int64_t i = 0; i < NUM_OPERATORS; ++i) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t part = 0; part < NUM_PARTS; ++part) {
            const int64_t number = i * NUM_PARTS + part;
            step.part(number, &step.out[number * WIDTH]);
        }
    }
}
#endif

}  // namespace

int main(int, char** words) {
    const int threads = std::atoi(words[1]);
    const double seconds = std::atof(words[2]);
    Step step{.rows = std::atoi(words[3])};
#if defined(BY_TEAM)
    aioengine::Team team(threads);
#elif defined(BY_TBB)
    tbb::task_arena team(threads);
#else
    const int team = threads;
#endif
    run(step, team);
    const auto clock = [] { return std::chrono::steady_clock::now(); };
    const auto began = clock();
    int64_t count = 0;
    double taken = 0;
    while (taken < seconds) {
        run(step, team);
        ++count;
        taken = std::chrono::duration<double>(clock() - began).count();
    }
    std::printf("%.3f\n", count / taken);
}
