// What the checks of the kernels' core share: random numbers in the formats of tensors, teams that have to come to
// the same bits, and a report.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "operators.h"

namespace checks {

using namespace aioengine;

// What `printf` would write, up to a line.
__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
    char line[200];
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    return line;
}

struct Report {
    int64_t checks = 0, failures = 0;

    void check(bool is_right, const std::string& what) {
        constexpr int64_t most_lines = 10;
        ++checks;
        if (is_right) return;
        if (++failures <= most_lines) std::printf("  wrong: %s\n", what.c_str());
    }
};

class Random {
public:
    explicit Random(uint64_t seed) : state_(88172645463325252ull + seed * 2862933555777941757ull) {}

    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ >> 11;
    }
    int64_t pick(int64_t low, int64_t high) {
        return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
    }
    template <class T>
    T one_of(std::initializer_list<T> all) {
        return all.begin()[pick(0, static_cast<int64_t>(all.size()) - 1)];
    }
    bool coin() { return pick(0, 1) != 0; }
    float number() { return static_cast<float>(pick(-1'000'000, 1'000'000)) / 1'000'000; }

private:
    uint64_t state_;
};

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of_half(uint16_t half) {
    const float size = float_of((half & 0x7fffu) << 13) * 0x1p112f;
    return half & 0x8000 ? -size : size;
}

// Of a number that float16 has as a normal one, or 0; what does not fit is cut off.
inline uint16_t half_of(float x) {
    const uint32_t bits = bits_of(x / 0x1p112f);
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | (bits >> 13 & 0x7fff));
}

// A unit in the last place of a number, at most: twice of what it is rounded by.
inline double unit_of(DType dtype, double x) {
    if (dtype == DType::Float16) return std::max(0x1p-10 * std::abs(x), 0x1p-24);
    return (dtype == DType::Float32 ? 0x1p-23 : 0x1p-7) * std::abs(x);
}

inline const char* name_of(DType dtype) {
    return dtype == DType::Float32 ? "float32" : (dtype == DType::BFloat16 ? "bfloat16" : "float16");
}

// Memory that is aligned as torch's and ours are, and is no number until something is written.
class Memory {
public:
    explicit Memory(size_t bytes)
        : bytes_(bytes), chunk_(new char[bytes + LINE]), at_(chunk_.get()) {
        at_ += (LINE - reinterpret_cast<uintptr_t>(at_) % LINE) % LINE;
        std::memset(at_, 0xff, bytes);
    }
    char* data() { return at_; }
    const char* data() const { return at_; }
    size_t size() const { return bytes_; }

private:
    static constexpr size_t LINE = 64;
    size_t bytes_;
    std::unique_ptr<char[]> chunk_;
    char* at_;
};

// Numbers as a tensor has them.
class Numbers {
public:
    Numbers(DType dtype, int64_t count)
        : dtype_(dtype), count_(count), memory_(static_cast<size_t>(count * size_of(dtype))) {}
    Numbers(DType dtype, int64_t count, Random& random) : Numbers(dtype, count) {
        for (int64_t i = 0; i < count; ++i) set(i, random.number());
    }

    float at(int64_t i) const {
        if (dtype_ == DType::Float32) return reinterpret_cast<const float*>(data())[i];
        const uint16_t bits = reinterpret_cast<const uint16_t*>(data())[i];
        return dtype_ == DType::BFloat16 ? float_of(uint32_t{bits} << 16) : float_of_half(bits);
    }
    // Digits that the format does not have are cut off.
    void set(int64_t i, float x) {
        if (dtype_ == DType::Float32) reinterpret_cast<float*>(data())[i] = x;
        else
            reinterpret_cast<uint16_t*>(data())[i] =
                dtype_ == DType::BFloat16 ? static_cast<uint16_t>(bits_of(x) >> 16) : half_of(x);
    }
    char* data() { return memory_.data(); }
    const char* data() const { return memory_.data(); }
    DType dtype() const { return dtype_; }
    int64_t count() const { return count_; }

    bool has_same_bits(const Numbers& other, int64_t first, int64_t count) const {
        const int64_t size = size_of(dtype_);
        return std::memcmp(data() + first * size, other.data() + first * size, count * size) == 0;
    }

private:
    DType dtype_;
    int64_t count_;
    Memory memory_;
};

// Runs what `build(program, num_threads, out)` adds. A thread that is late may still read what the operators have
// read, so the team ends before that does.
template <class Build>
Numbers run_on(int64_t threads, DType dtype, int64_t count, const Build& build) {
    Numbers out(dtype, count);
    Team team(threads);
    Program& program = team.begin();
    build(program, team.num_threads(), out.data());
    team.run(program);
    return out;
}

// The outputs that `build` makes operators for: on one thread, which three have to come to as well, to the bit.
template <class Build>
Numbers compute(Report& report, const std::string& what, DType dtype, int64_t count, const Build& build) {
    Numbers one = run_on(1, dtype, count, build);
    const Numbers three = run_on(3, dtype, count, build);
    report.check(one.has_same_bits(three, 0, count), what + ": three threads come to other bits");
    return one;
}

// Whether x is `wanted` within `bound`, and a number where that is one.
inline bool is_near(double x, double wanted, double bound) {
    return std::isnan(wanted) ? std::isnan(x) : std::abs(x - wanted) <= bound;
}

std::vector<DType> dtypes();  // those that the kernels in use have

void check_attention(Report&, Random&);
void check_linear(Report&, Random&);
void check_grouped(Report&, Random&);
void check_rows(Report&, Random&);
void check_experts(Report&, Random&);

}  // namespace checks
