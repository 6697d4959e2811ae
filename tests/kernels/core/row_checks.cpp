// Norms, rotations, largest numbers, weights of tokens, and rows on their way into pages.

#include <algorithm>
#include <limits>

#include "draw.h"
#include "problems.h"

namespace checks {

namespace {

std::string describe(const char* what, DType dtype, int64_t size) {
    return text("%s of %s, %ld wide", what, name_of(dtype), (long)size);
}

struct NormProblem {
    DType dtype;
    int64_t rows, heads, dim;
    Numbers x, weight, bias, residual;
    bool has_weight, has_bias, has_residual;

    int64_t width() const { return heads * dim; }
    Norm norm() const {
        Norm a{};
        a.dtype = dtype;
        a.x = x.data();
        a.strides[0] = width();
        a.strides[1] = dim;
        a.heads = heads;
        a.weight = has_weight ? weight.data() : nullptr;
        a.bias = has_bias ? bias.data() : nullptr;
        a.has_float_weight = weight.dtype() != dtype;
        a.residual = has_residual ? residual.data() : nullptr;
        a.residual_stride = width();
        a.dim = dim;
        a.epsilon = 1e-5f;
        return a;
    }
};

NormProblem draw_norm(DType dtype, Random& random) {
    const int64_t rows = random.one_of<int64_t>({1, 2, 9, 32}), heads = random.one_of<int64_t>({1, 1, 3});
    const int64_t dim = random.one_of<int64_t>({1, 3, 16, 64, 65, 100, 576});
    const DType weights = random.coin() ? DType::Float32 : dtype;
    const bool has_weight = random.pick(0, 5) != 0, has_bias = has_weight && random.coin();
    return {
        dtype, rows, heads, dim, Numbers(dtype, rows * heads * dim, random), Numbers(weights, dim, random),
        Numbers(weights, dim, random), Numbers(dtype, rows * heads * dim, random), has_weight, has_bias,
        !has_weight || random.coin()};
}

// What a row of a head comes to, and how far from it rounding may lead.
bool is_normalized(const NormProblem& p, const Numbers& out, int64_t first) {
    double mean = 0, squares = 0;
    for (int64_t d = 0; d < p.dim; ++d) mean += p.x.at(first + d);
    mean = p.has_bias ? mean / static_cast<double>(p.dim) : 0;
    for (int64_t d = 0; d < p.dim; ++d) squares += (p.x.at(first + d) - mean) * (p.x.at(first + d) - mean);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(p.dim) + 1e-5);
    for (int64_t d = 0; d < p.dim; ++d) {
        double y = p.x.at(first + d);
        if (p.has_weight) y = (y - mean) * factor * p.weight.at(d) + (p.has_bias ? p.bias.at(d) : 0);
        const double whole = y + (p.has_residual ? p.residual.at(first + d) : 0);
        const double bound = 1e-6 * (1 + factor) + unit_of(p.dtype, y) + unit_of(p.dtype, whole);
        if (!is_near(out.at(first + d), whole, bound)) return false;
    }
    return true;
}

void check_norm(Report& report, DType dtype, Random& random) {
    const NormProblem p = draw_norm(dtype, random);
    const std::string what = describe("norm", dtype, p.dim);
    const auto rows_of = [&](int64_t rows) {
        return compute(report, what, dtype, rows * p.width(), [&](Program& program, int64_t, void* to) {
            Norm a = p.norm();
            a.out = to;
            add_norm(program, a, rows);
        });
    };
    const Numbers out = rows_of(p.rows);
    for (int64_t i = 0; i < p.rows * p.heads; ++i)
        report.check(is_normalized(p, out, i * p.dim), what + ": not the reference");
    report.check(rows_of(1).has_same_bits(out, 0, p.width()), what + ": other bits in other company");
}

void check_rotary(Report& report, DType dtype, Random& random) {
    const int64_t tokens = random.one_of<int64_t>({1, 2, 9}), heads = random.pick(1, 3);
    const int64_t dim = random.one_of<int64_t>({2, 6, 16, 64, 80, 128}), half = dim / 2;
    const DType angles = random.coin() ? DType::Float32 : dtype;
    const bool is_halved = random.coin(), in_pairs = random.coin();
    const int64_t width = is_halved ? half : dim;  // of angles
    const Numbers x(dtype, tokens * heads * dim, random);
    const Numbers cos(angles, tokens * width, random), sin(angles, tokens * width, random);
    Numbers out(dtype, x.count());
    const Rotary a{dtype, x.data(), {heads * dim, dim}, heads, dim, cos.data(), sin.data(), width, width,
                   angles != dtype || dtype == DType::Float32, out.data(), is_halved, in_pairs};
    (*dispatch_table().rotary)(a, 0, tokens);
    bool is_right = true;
    for (int64_t i = 0; i < x.count(); ++i) {
        const int64_t d = i % dim, angle = i / (heads * dim) * width + d % width, first = i - d;
        // Where the halves' numbers are that are rotated against each other.
        const int64_t low = first + d % half * (in_pairs ? 2 : 1), high = low + (in_pairs ? 1 : half);
        const double own = x.at(d < half ? low : high), other = d < half ? -x.at(high) : x.at(low);
        const double wanted = own * cos.at(angle) + other * sin.at(angle);
        is_right = is_right && is_near(out.at(i), wanted, 3e-7 + unit_of(dtype, wanted));
    }
    report.check(is_right, describe("rotation", dtype, dim) + ": not the reference");
}

void check_argmax(Report& report, DType dtype, Random& random) {
    const int64_t count = random.one_of<int64_t>({1, 2, 3, 7, 16, 65, 1000, 4099});
    Numbers x(dtype, count, random);
    const int64_t place = random.pick(0, count - 1), kind = random.pick(0, 3);
    if (kind == 1) x.set(place, 2);
    if (kind == 2) x.set(place, std::numeric_limits<float>::quiet_NaN());
    for (int64_t i = 0; i < count && kind == 3; ++i) x.set(i, 0.5f);  // the first of equal ones
    int64_t wanted = 0;
    for (int64_t i = count; i-- > 0;)
        if (!(x.at(i) < x.at(wanted))) wanted = i;
    if (kind == 2 && dtype != DType::Float16) wanted = place;  // `set` has no such number of float16
    if (kind == 2 && dtype == DType::Float16) return;
    const int64_t found = (*dispatch_table().argmax)(dtype, x.data(), count);
    report.check(found == wanted, describe("largest number", dtype, count) + ": at another place");
}

void check_weights(Report& report, DType dtype, Random& random) {
    const int64_t count = random.one_of<int64_t>({1, 2, 7, 16, 65, 1000});
    const Numbers x(dtype, count, random);
    const float temperature = random.one_of<float>({1, 0.7f, 0.01f});
    float top = x.at(0);
    for (int64_t i = 0; i < count; ++i) top = std::max(top, x.at(i));
    Numbers weights(DType::Float32, count);
    dispatch_table().weights->weights(
        dtype, x.data(), count, temperature, reinterpret_cast<float*>(weights.data()));
    bool is_right = true;
    for (int64_t i = 0; i < count; ++i) {
        const double power = (static_cast<double>(x.at(i)) - top) / temperature, wanted = std::exp(power);
        const double bound = 1e-37 + wanted * 3e-7 * (1 - power);  // a quotient is as exact as a float
        is_right = is_right && is_near(weights.at(i), wanted, bound);
    }
    report.check(is_right, describe("weights of tokens", dtype, count) + ": not the reference");
}

void check_caps(Report& report, DType dtype, Random& random) {
    const int64_t count = random.one_of<int64_t>({1, 2, 7, 16, 65, 1000});
    const Numbers x(dtype, count, random);
    const float cap = random.one_of<float>({0.5f, 2, 30});
    Numbers capped(dtype, count);
    dispatch_table().weights->cap(dtype, x.data(), count, cap, capped.data());
    bool is_right = true;
    for (int64_t i = 0; i < count; ++i) {
        const double wanted = std::tanh(static_cast<double>(x.at(i)) / cap) * cap;
        const double rounding = dtype == DType::Float32 ? 0 : unit_of(dtype, wanted);
        is_right = is_right && is_near(capped.at(i), wanted, 5e-7 * cap + rounding);
    }
    report.check(is_right, describe("soft caps", dtype, count) + ": not the reference");
}

// Queries, keys and values behind their matmul: rotated and put into pages, as the kernels by themselves do it.
void check_heads(Report& report, DType dtype, Random& random) {
    const int64_t tokens = random.one_of<int64_t>({1, 5, 40}), kv_heads = random.pick(1, 2), heads = 2 * kv_heads;
    const int64_t dim = random.one_of<int64_t>({16, 64, 80}), block = 16, blocks = 4;
    const int64_t width = (heads + 2 * kv_heads) * dim;
    const Numbers x(dtype, tokens * width, random), cos(dtype, tokens * dim, random), sin(dtype, tokens * dim, random);
    Numbers rotated(dtype, tokens * (heads + kv_heads) * dim), values(dtype, blocks * block * kv_heads * dim);
    const Rotary angles{dtype, x.data(), {width, dim}, heads + kv_heads, dim, cos.data(), sin.data(), dim, dim,
                        dtype == DType::Float32, rotated.data(), false, false};
    (*dispatch_table().rotary)(angles, 0, tokens);
    std::vector<int32_t> places, offsets;
    for (int64_t t = 0; t < tokens; ++t) {
        places.push_back(static_cast<int32_t>(blocks - 1 - t / block));
        offsets.push_back(static_cast<int32_t>(t % block));
    }
    const int64_t size = size_of(dtype), query_count = tokens * heads * dim, page = block * kv_heads * dim;
    const Numbers out = compute(
        report, "heads", dtype, query_count + blocks * page, [&](Program& program, int64_t, char* to) {
            Heads h{};
            h.dtype = dtype;
            h.tokens = tokens;
            h.heads = heads;
            h.kv_heads = kv_heads;
            h.key_dim = h.value_dim = dim;
            for (int i = 0; i < 3; ++i) {
                h.x[i] = x.data() + (i ? heads + (i - 1) * kv_heads : 0) * dim * size;
                h.strides[i][0] = width;
                h.strides[i][1] = dim;
            }
            h.angles = angles;
            h.query = to;
            h.pages = Pages{};
            h.pages->keys = to + query_count * size;
            h.pages->values = values.data();
            for (int64_t* strides : {h.pages->key_strides, h.pages->value_strides}) {
                strides[0] = page;
                strides[1] = kv_heads * dim;
                strides[2] = dim;
            }
            h.pages->blocks = program.copy(places.data(), places.size());
            h.pages->offsets = program.copy(offsets.data(), offsets.size());
            add_heads(program, h);
        });
    bool is_right = true;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t from = t * (heads + kv_heads) * dim, slot = places[t] * page + offsets[t] * kv_heads * dim;
        for (int64_t i = 0; i < heads * dim; ++i)
            is_right = is_right && out.at(t * heads * dim + i) == rotated.at(from + i);
        for (int64_t i = 0; i < kv_heads * dim; ++i)
            is_right = is_right && out.at(query_count + slot + i) == rotated.at(from + heads * dim + i) &&
                       values.at(slot + i) == x.at(t * width + (heads + kv_heads) * dim + i);
    }
    report.check(is_right, describe("heads", dtype, dim) + ": not what the kernels by themselves come to");
}

}  // namespace

void check_rows(Report& report, Random& random) {
    constexpr int rounds = 40;
    for (DType dtype : dtypes())
        for (int i = 0; i < rounds; ++i) {
            check_norm(report, dtype, random);
            check_rotary(report, dtype, random);
            check_argmax(report, dtype, random);
            check_weights(report, dtype, random);
            check_caps(report, dtype, random);
            check_heads(report, dtype, random);
        }
}

}  // namespace checks
