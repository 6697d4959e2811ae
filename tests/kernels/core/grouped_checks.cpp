// Matmuls with weights of 4 and 8 bits in groups: beside sums in double precision, and to the last integer where
// nothing else is added up.

#include <algorithm>
#include <iterator>

#include "experts.h"
#include "problems.h"

namespace checks {

namespace {

struct Form {
    int32_t bits;
    int64_t group;
    Lowest lowest;
    const int8_t* levels = nullptr;

    bool is_float() const { return lowest == Lowest::E4m3; }
};

constexpr int8_t LEVELS[NUM_LEVELS] = {-128, 127, -104, -83, -65, -49, -35, 0, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr Form FORMS[] = {
    {4, 32, Lowest::Zeros},   {4, 64, Lowest::Leasts},  {4, 128, Lowest::Middle}, {4, 16, Lowest::Middle},
    {4, 128, Lowest::Zeros},  {8, 32, Lowest::Middle},  {8, 128, Lowest::Middle}, {8, 16, Lowest::Leasts},
    {8, 64, Lowest::Leasts},  {4, 32, Lowest::Middle, LEVELS}, {8, 32, Lowest::E4m3}, {8, 128, Lowest::E4m3}};

// The number that a code of e4m3 is, which is not NaN.
double float_of_e4m3(int code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return code & 128 ? -size : size;
}

// A weight [outputs, depth], and its scales and lowest numbers [outputs, groups].
struct Weight {
    Form form;
    int64_t outputs, depth, count;
    std::vector<int> numbers;
    std::vector<uint16_t> scales, lowest;

    float scale(int64_t output, int64_t group) const { return float_of_half(scales[output * count + group]); }
    // What a number of 0 stands for.
    double least(int64_t output, int64_t group) const {
        if (form.is_float() || form.levels) return 0;
        if (form.lowest == Lowest::Leasts) return float_of_half(lowest[output * count + group]);
        if (form.lowest == Lowest::Zeros) return -lowest[output * count + group] / 16.0 * scale(output, group);
        return form.bits == 4 ? -MIDDLE * static_cast<double>(scale(output, group)) : 0;
    }
    // Of an input's group.
    double number(int64_t output, int64_t input) const {
        const int code = numbers[output * depth + input];
        const int64_t group = input / form.group;
        double factor = scale(output, group);
        if (form.is_float()) factor += float_of_half(lowest[output * count + group]);
        return (form.is_float() ? float_of_e4m3(code) : form.levels ? form.levels[code] : code) * factor;
    }
};

Weight draw_weight(const Form& form, int64_t outputs, int64_t depth, bool is_exact, Random& random) {
    Weight w{form, outputs, depth, (depth + form.group - 1) / form.group, {}, {}, {}};
    for (int64_t i = 0; i < outputs * depth; ++i) {
        int number = static_cast<int>(form.bits == 4 ? random.pick(0, 15) : random.pick(-128, 127));
        if (form.is_float()) number = (number & 127) == 127 ? 0 : number & 255;
        w.numbers.push_back(number);
    }
    for (int64_t i = 0; i < outputs * w.count; ++i) {
        w.scales.push_back(is_exact ? half_of(1) : static_cast<uint16_t>(random.pick(0x0200, 0x3c00)));
        if (form.is_float()) w.lowest.push_back(static_cast<uint16_t>(random.pick(0x0200, 0x1000)));
        if (form.lowest == Lowest::Leasts) w.lowest.push_back(half_of(is_exact ? 0 : random.number()));
        if (form.lowest == Lowest::Zeros)
            w.lowest.push_back(static_cast<uint16_t>(is_exact ? 16 * random.pick(0, 15) : random.pick(0, 255)));
    }
    return w;
}

Memory pack(const Weight& w, Groups& g) {
    const int64_t panels = (w.outputs + PANEL - 1) / PANEL;
    Memory memory(panels * g.panel_bytes());
    std::memset(memory.data(), 0, memory.size());
    g.first = memory.data();
    for (int64_t o = 0; o < w.outputs; ++o) {
        char* panel = memory.data() + o / PANEL * g.panel_bytes();
        const int64_t column = o % PANEL;
        for (int64_t i = 0; i < w.count; ++i) {
            std::memcpy(panel + (i * PANEL + column) * 2, &w.scales[o * w.count + i], 2);
            char* lows = panel + w.count * PANEL * 2 + i * g.lowest_bytes();
            if (g.lowest_bytes() == PANEL * 2) std::memcpy(lows + column * 2, &w.lowest[o * w.count + i], 2);
            if (g.lowest == Lowest::Zeros) lows[column] = static_cast<char>(w.lowest[o * w.count + i]);
        }
        for (int64_t k = 0; k < w.depth; ++k) {
            char* quad = panel + g.head_bytes() + k / QUAD * g.quad_bytes();
            const int number = w.numbers[o * w.depth + k];
            if (g.bits == 8)
                quad[column * QUAD + k % QUAD] = static_cast<char>(number);
            else
                quad[column % 16 * QUAD + k % QUAD] |= static_cast<char>(number << (column < 16 ? 0 : 4));
        }
    }
    return memory;
}

// A row as it is multiplied: whole numbers with a scale for each group, or what it was with a scale of 1.
struct Row {
    std::vector<double> numbers;
    std::vector<double> scales;
};

Row row_of(const Weight& w, const Numbers& x, int64_t first, bool has_full_inputs) {
    Row row;
    for (int64_t i = 0; i < w.count; ++i) {
        const int64_t begin = i * w.form.group, end = std::min(begin + w.form.group, w.depth);
        float top = 0;
        for (int64_t k = begin; k < end; ++k) top = std::max(top, std::abs(x.at(first + k)));
        const float turn = 127.0f / top;
        row.scales.push_back(has_full_inputs ? 1 : (top == 0 ? 0 : top / 127.0f));
        for (int64_t k = begin; k < end; ++k) {
            const volatile float turned = x.at(first + k) * turn;  // a number of its own, to no more digits
            row.numbers.push_back(has_full_inputs ? x.at(first + k) : (top == 0 ? 0 : std::nearbyint(turned)));
        }
    }
    return row;
}

struct Sum {
    double value, bound;  // which it may be off by
};

Sum sum_of(const Weight& w, const Row& row, int64_t output) {
    double sum = 0, size = 0;
    for (int64_t k = 0; k < w.depth; ++k) {
        const int64_t group = k / w.form.group;
        const double x = row.numbers[k] * row.scales[group];
        const double number = w.number(output, k);
        const double least = w.least(output, group);
        sum += x * (number + least);
        size += std::abs(x) * (std::abs(number) + std::abs(least));
    }
    return {sum, 2e-6 * size};
}

Linear linear_of(const Groups& g, const Numbers& x, int64_t rows, int64_t depth, int64_t outputs) {
    Linear a{};
    a.dtype = x.dtype();
    a.weights = Weights::Grouped;
    a.groups = g;
    a.x = x.data();
    a.stride = a.depth = depth;
    a.rows = rows;
    a.outputs = outputs;
    a.places_at_once = places_at_once();
    return a;
}

// Whole numbers are rounded to themselves, as each group's largest is 127; halfway lie those that are about
// between two whole numbers once they are scaled.
enum class Inputs { Any, Whole, Halfway };

Numbers draw_inputs(DType dtype, int64_t rows, int64_t depth, Inputs inputs, Random& random) {
    Numbers x(dtype, rows * depth, random);
    for (int64_t i = 0; i < x.count() && inputs != Inputs::Any; ++i) {
        const bool is_top = i % depth % 16 == 0;  // every group has one
        const float whole = static_cast<float>(random.pick(-126, 125));
        if (inputs == Inputs::Whole) x.set(i, is_top ? 127.0f : whole);
        if (inputs == Inputs::Halfway) x.set(i, is_top ? 0.7f : (whole + 0.5f) * (0.7f / 127));
    }
    return x;
}

void check_form(Report& report, const Form& form, DType dtype, Inputs inputs, bool has_full_inputs, Random& random) {
    const int64_t rows = random.one_of<int64_t>({1, 2, 3, 5, 9, 32, 53});
    const int64_t depth = random.one_of<int64_t>({1, 3, 48, 128, 201, 320});
    const int64_t outputs = random.one_of<int64_t>({1, 31, 32, 33, 70});
    const bool is_exact = inputs == Inputs::Whole;
    const Weight w = draw_weight(form, outputs, depth, is_exact, random);
    Groups g{nullptr, form.group, w.count, form.bits, form.lowest, has_full_inputs, form.levels};
    const Memory packed = pack(w, g);
    const Numbers x = draw_inputs(dtype, rows, depth, inputs, random);
    const std::string what = text(
        "matmul of %s with %d bits in groups of %ld, lowest %d%s, %ld rows, %ld deep%s", name_of(dtype), form.bits,
        (long)form.group, (int)form.lowest, form.levels ? ", levels" : "", (long)rows, (long)depth,
        has_full_inputs ? ", full inputs" : "");
    const auto outputs_of = [&](int64_t count) {
        return compute(report, what, dtype, count * outputs, [&](Program& program, int64_t, void* to) {
            Linear a = linear_of(g, x, count, depth, outputs);
            a.out = to;
            add_linear(program, a);
        });
    };
    const Numbers out = outputs_of(rows);
    for (int64_t row = 0; row < rows; ++row) {
        const Row known = row_of(w, x, row * depth, has_full_inputs);
        bool is_right = true;
        for (int64_t o = 0; o < outputs; ++o) {
            const auto [sum, bound] = sum_of(w, known, o);
            const double rounding = dtype == DType::Float32 ? 0 : unit_of(dtype, sum);
            is_right = is_right && is_near(out.at(row * outputs + o), sum, is_exact ? 0 : bound + rounding);
        }
        report.check(is_right, what + (is_exact ? ": not the same integers" : ": not the reference"));
    }
    for (int64_t count : {int64_t{1}, rows / 2, rows - 1})
        if (0 < count && count < rows)
            report.check(outputs_of(count).has_same_bits(out, 0, count * outputs), what + ": other bits in other company");
}

// Experts' rows and weights, one's behind the other's, beside a matmul for each.
void check_expert_matmuls(Report& report, const Form& form, DType dtype, Random& random) {
    constexpr int64_t EXPERTS = 4;
    const int64_t depth = random.one_of<int64_t>({48, 128, 201}), outputs = random.one_of<int64_t>({32, 64});
    int64_t ends[EXPERTS], rows = 0;
    for (int64_t& end : ends) end = rows += random.one_of<int64_t>({0, 1, 5, 53});
    if (!rows) return;
    const Weight w = draw_weight(form, EXPERTS * outputs, depth, false, random);
    Groups g{nullptr, form.group, w.count, form.bits, form.lowest, form.is_float(), form.levels};
    const Memory packed = pack(w, g);
    const Numbers x = draw_inputs(dtype, rows, depth, Inputs::Any, random);
    const bool is_gated = outputs == 64 && random.pick(0, 1);
    const int64_t width = is_gated ? outputs / 2 : outputs, size = size_of(dtype);
    const std::string what = text("experts of %s with %d bits, %ld deep", name_of(dtype), form.bits, (long)depth);
    const auto outputs_of = [&](bool is_together) {
        return compute(report, what, dtype, rows * width, [&](Program& program, int64_t, void* to) {
            Linear a = linear_of(g, x, rows, depth, outputs);
            a.gate_panels = is_gated ? 1 : 0;
            a.activation = is_gated ? Activation::SiLU : Activation::None;
            a.out = to;
            if (is_together) return add_expert_linear(program, a, ends, EXPERTS);
            for (int64_t expert = 0, first = 0; expert < EXPERTS; first = ends[expert++]) {
                Linear own = a;
                own.groups.first = g.panel(expert * outputs / PANEL);
                own.x = static_cast<const char*>(a.x) + first * depth * size;
                own.out = static_cast<char*>(to) + first * width * size;
                own.rows = ends[expert] - first;
                if (own.rows) add_linear(program, own);
            }
        });
    };
    report.check(outputs_of(true).has_same_bits(outputs_of(false), 0, rows * width), what + ": not matmuls of their own");
}

}  // namespace

void check_grouped(Report& report, Random& random) {
    constexpr int rounds = 3;
    for (const Form& form : FORMS)
        for (int i = 0; i < rounds; ++i) {
            for (DType dtype : dtypes()) {
                for (bool has_full_inputs : {false, true})
                    if (has_full_inputs || !form.is_float())
                        check_form(report, form, dtype, Inputs::Any, has_full_inputs, random);
                check_expert_matmuls(report, form, dtype, random);
            }
            if (form.is_float()) continue;
            check_form(report, form, DType::Float32, Inputs::Halfway, false, random);
            check_form(report, form, DType::Float32, Inputs::Whole, false, random);
        }
}

}  // namespace checks
