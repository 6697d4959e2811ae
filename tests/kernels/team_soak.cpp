// Random programs on a team whose threads stop at random, within a part and between two: each result is
// checked, and no part may be committed twice or write after its operator has ended.
//
//     c++ -std=c++20 -O2 -pthread -I kernels/cpu/program -I kernels/cpu/include
//         tests/kernels/team_soak.cpp kernels/cpu/program/team.cpp
//     ./a.out THREADS SECONDS SEED [MUTANT]

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "team.h"

using namespace aioengine;

namespace {

constexpr int64_t WIDTH = 16, MOST_PARTS = 12;

std::atomic<int64_t> stopped{0}, computed{0};

// Now and then a thread is away, for longer than any part takes.
void stop_sometimes() {
    thread_local std::mt19937 random(std::hash<std::thread::id>()(std::this_thread::get_id()));
    if (random() % 400) return;
    stopped.fetch_add(1, std::memory_order_relaxed);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
}

// Rows are read in vain while others write them, so the sanitizer of threads is told that this is meant.
int64_t read(const int64_t* at) {
    return std::atomic_ref(*const_cast<int64_t*>(at)).load(std::memory_order_relaxed);
}

void copy(const int64_t* from, int64_t* to) {
    for (int64_t i = 0; i < WIDTH; ++i)
        std::atomic_ref(to[i]).store(read(from + i), std::memory_order_relaxed);
}

// Adds what all of one row came to, to each number of another; what two threads commit shows.
struct Mix {
    const int64_t* from;
    int64_t* to;
    std::atomic<int64_t>* commits;
    int64_t parts, number;

    void compute(const Part& part) const {
        stop_sometimes();
        int64_t total = 0;
        for (int64_t i = 0; i < parts * WIDTH; ++i) total = total * 31 + read(from + i);
        int64_t* own = reinterpret_cast<int64_t*>(part.scratch);
        for (int64_t i = 0; i < WIDTH; ++i)
            own[i] = total + read(from + part.index * WIDTH + i) * 7 + number;
        computed.fetch_add(1, std::memory_order_relaxed);
        stop_sometimes();
    }

    void commit(const Part& part) const {
        stop_sometimes();
        copy(reinterpret_cast<const int64_t*>(part.scratch), to + part.index * WIDTH);
        commits[part.index].fetch_add(1, std::memory_order_relaxed);
    }
};

struct Copy {
    const int64_t* from;
    int64_t* to;
    std::atomic<int64_t>* commits;

    void commit(const Part& part) const {
        copy(from + part.index * WIDTH, to + part.index * WIDTH);
        commits[part.index].fetch_add(1, std::memory_order_relaxed);
    }
};

// A helper that has begun a part is still inside of the program when the team's own thread has done all.
struct Late {
    std::thread::id own;
    std::atomic<bool>* has_helper;

    void compute(const Part&) const {
        if (std::this_thread::get_id() == own) {
            has_helper->wait(false);
            return;
        }
        *has_helper = true;
        has_helper->notify_all();
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }

    void commit(const Part&) const {}
};

int check(bool is_right, const char* what) {
    if (!is_right) std::fprintf(stderr, "wrong: %s\n", what);
    return is_right ? 0 : 1;
}

// What late helpers read is handed to whoever closes the team, and to nobody before.
int check_close(int64_t threads) {
    Team team(threads);
    std::atomic<bool> has_helper{threads == 1};
    auto kept = std::make_shared<int>(7);
    const std::weak_ptr<int> seen = kept;
    Program& program = team.begin();
    program.keep(std::move(kept));
    program.add(Late{std::this_thread::get_id(), &has_helper}, MOST_PARTS);
    team.run(program);
    const bool is_left = threads > 1;
    int failed = check(seen.expired() != is_left, "what is kept while a helper is inside");
    const std::vector<std::shared_ptr<const void>> left = team.close();
    failed += check(left.size() == is_left, "what a closed team hands over");
    failed += check(seen.expired() != is_left, "when that is freed");
    return failed;
}

}  // namespace

int main(int count, char** arguments) {
    const int64_t threads = count > 1 ? std::atoll(arguments[1]) : 3;
    const double seconds = count > 2 ? std::atof(arguments[2]) : 2;
    std::mt19937 random(count > 3 ? std::atoll(arguments[3]) : 1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    Team team(threads);
    int64_t programs = 0, operators = 0, parts_of_all = 0;
    std::vector<int64_t> expected, next, result(MOST_PARTS * WIDTH);
    std::vector<std::atomic<int64_t>> commits(MOST_PARTS);
    while (std::chrono::steady_clock::now() < end) {
        Program& program = team.begin();
        const int64_t parts = 1 + random() % MOST_PARTS, length = 1 + random() % 30;
        const int64_t bytes = parts * WIDTH * sizeof(int64_t);
        int64_t* rows[2] = {
            static_cast<int64_t*>(program.take(bytes)), static_cast<int64_t*>(program.take(bytes))};
        for (std::atomic<int64_t>& each : commits) each = 0;
        expected.assign(parts * WIDTH, 0);
        for (int64_t i = 0; i < parts * WIDTH; ++i) expected[i] = rows[0][i] = random();
        for (int64_t number = 0; number < length; ++number) {
            const int64_t *from = rows[number % 2];
            int64_t* to = rows[(number + 1) % 2];
            next.resize(parts * WIDTH);
            if (random() % 4 == 0) {
                program.add(Copy{from, to, commits.data()}, parts);
                continue;
            }
            program.add(Mix{from, to, commits.data(), parts, number}, parts, WIDTH * 2, random() % 2);
            int64_t total = 0;
            for (int64_t value : expected) total = total * 31 + value;
            for (int64_t i = 0; i < parts * WIDTH; ++i) next[i] = total + expected[i] * 7 + number;
            expected = next;
        }
        program.add(Copy{rows[length % 2], result.data(), commits.data()}, parts);
        team.run(program);
        int failed = check(
            std::memcmp(result.data(), expected.data(), bytes) == 0, "what a program came to");
        for (int64_t i = 0; i < parts; ++i)
            failed += check(commits[i] == length + 1, "how often a part was committed");
        if (failed) return 1;
        ++programs;
        operators += length;
        parts_of_all += length * parts;
    }
    if (check_close(threads)) return 1;
    std::printf(
        "%lld programs, %lld operators, %lld parts, %lld computed, %lld stops\n", (long long)programs,
        (long long)operators, (long long)parts_of_all, (long long)computed.load(),
        (long long)stopped.load());
    return 0;
}
