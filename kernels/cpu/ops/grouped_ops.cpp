// Weights of 4 or 8 bits in groups (grouped.h): packed, told to a matmul, and read by rows.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "memory.h"
#include "ops.h"

namespace aioengine {

static_assert(GROUPED_PANEL == PANEL);

namespace {

float float_of_half(uint16_t half) {
    const uint32_t bits = (uint32_t{half} & 0x7fff) << 13;
    const float size = std::bit_cast<float>(bits) * 0x1p112f;
    return half & 0x8000 ? -size : size;
}

// See floats_of_e4m3 in linear.cpp.
float float_of_e4m3(uint8_t code) {
    const float size = (code & 0x78 ? (8 | (code & 7)) << ((code >> 3 & 15) - 1) : code & 7) * 0x1p-9f;
    return code & 0x80 ? -size : size;
}

// Where the numbers of an input of a panel's output begin, and whether 4 bits are the upper ones of a byte.
struct Place {
    int64_t byte;
    bool is_upper;
};

Place place_of(const Groups& g, int64_t column, int64_t input) {
    constexpr int64_t half = PANEL / 2;
    const int64_t at = g.head_bytes() + input / QUAD * g.quad_bytes() + input % QUAD;
    if (g.bits == 4) return {at + column % half * QUAD, column >= half};
    return {at + column * QUAD, false};
}

const char* check_groups(const Tensor& tensor, int64_t outputs, int64_t count, ScalarType type, const char* name) {
    STD_TORCH_CHECK(
        tensor.is_cpu() && tensor.is_contiguous() && tensor.dim() == 2 && tensor.size(0) == outputs &&
            tensor.size(1) == count && tensor.scalar_type() == type,
        name, " must be contiguous float16 (zeros: uint8) [outputs, groups] on the CPU");
    return static_cast<const char*>(tensor.const_data_ptr());
}

void read_grouped_row(const Groups& g, const float* factors, int64_t output, int64_t depth, float* to) {
    const float factor = factors ? factors[output] : 1.0f;
    const uint8_t* panel = g.panel(output / PANEL);
    const int64_t column = output % PANEL;
    for (int64_t first = 0; first < depth; first += g.group) {
        const GroupAt at(g, panel, first / g.group);
        uint16_t half, least = 0;
        std::memcpy(&half, at.scales + column * 2, 2);
        const float scale = float_of_half(half);
        float low = g.bits == 4 && !g.levels ? -MIDDLE * scale : 0;
        if (g.lowest == Lowest::Zeros) low = at.lowest[column] * (scale * -ZERO_STEP);
        if (g.lowest == Lowest::Leasts || g.lowest == Lowest::E4m3) {
            std::memcpy(&least, at.lowest + column * 2, 2);
            low = float_of_half(least);
        }
        for (int64_t k = first; k < std::min(first + g.group, depth); ++k) {
            const auto [byte, is_upper] = place_of(g, column, k);
            const uint8_t bits = panel[byte];
            if (g.lowest == Lowest::E4m3) {
                to[k] = float_of_e4m3(bits) * (scale + low) * factor;
                continue;
            }
            int number = g.bits == 8 ? static_cast<int8_t>(bits) : (is_upper ? bits >> 4 : bits & 15);
            if (g.levels) number = g.levels[number];
            to[k] = (number * scale + low) * factor;
        }
    }
}

// Raises for forms that no matmul knows.
void check_form(int64_t bits, int64_t group, Lowest lowest, bool has_full_inputs) {
    const bool is_known = lowest == Lowest::Middle || lowest == Lowest::Leasts ||
        (lowest == Lowest::Zeros && bits == 4) || (lowest == Lowest::E4m3 && bits == 8 && has_full_inputs);
    STD_TORCH_CHECK(
        is_known && (bits == 4 || bits == 8) && (group == 16 || group == 32 || group == 64 || group == 128),
        "groups are of 16, 32, 64 or 128 numbers of 4 bits, or 8 bits without zeros; floats have full inputs");
}

// For each byte the first of 16 levels that it is, -1 where it is none.
std::array<int8_t, 256> places_of(const int8_t* levels) {
    std::array<int8_t, 256> places;
    places.fill(-1);
    for (int8_t i = NUM_LEVELS - 1; i >= 0; --i) places[static_cast<uint8_t>(levels[i])] = i;
    return places;
}

}  // namespace

Tensor pack_groups(
    const Tensor& numbers, const Tensor& scales, const std::optional<Tensor>& lowest, int64_t bits,
    int64_t group, bool has_full_inputs, const std::optional<Tensor>& levels) {
    check_close(numbers, 2, "numbers");
    const bool is_float = numbers.scalar_type() == ScalarType::Byte;
    STD_TORCH_CHECK(
        (numbers.scalar_type() == ScalarType::Char || is_float) && numbers.is_contiguous() && numbers.numel() > 0,
        "numbers must be contiguous int8, or uint8 for the codes of e4m3");
    const bool has_zeros = lowest && lowest->scalar_type() == ScalarType::Byte;
    const Lowest kind = is_float ? Lowest::E4m3 : !lowest ? Lowest::Middle : (has_zeros ? Lowest::Zeros : Lowest::Leasts);
    STD_TORCH_CHECK(!is_float || (lowest && !has_zeros), "scales of floats have two parts");
    check_form(bits, group, kind, has_full_inputs);
    std::array<int8_t, 256> places{};
    if (levels) {
        check_close(*levels, 1, "levels");
        STD_TORCH_CHECK(
            bits == 4 && !lowest && levels->scalar_type() == ScalarType::Char && levels->is_contiguous() &&
                levels->numel() == NUM_LEVELS,
            "levels are 16 int8, of weights of 4 bits that have nothing else");
        places = places_of(static_cast<const int8_t*>(levels->const_data_ptr()));
        const auto* number = static_cast<const uint8_t*>(numbers.const_data_ptr());
        STD_TORCH_CHECK(
            std::all_of(number, number + numbers.numel(), [&](uint8_t each) { return places[each] >= 0; }),
            "numbers must be levels");
    }
    const int64_t outputs = numbers.size(0), depth = numbers.size(1);
    const int64_t panels = (outputs + PANEL - 1) / PANEL, count = (depth + group - 1) / group;
    Groups g{nullptr, group, count, static_cast<int32_t>(bits), kind, has_full_inputs, nullptr};
    const char* scale = check_groups(scales, outputs, count, ScalarType::Half, "scales");
    const ScalarType type = has_zeros ? ScalarType::Byte : ScalarType::Half;
    const char* least = lowest ? check_groups(*lowest, outputs, count, type, "lowest") : nullptr;
    const int64_t size = lowest ? lowest->element_size() : 0;
    Tensor packed = new_weight(numbers, {static_cast<int64_t>(sizeof(GroupedHead)) + panels * g.panel_bytes()});
    char* memory = static_cast<char*>(packed.mutable_data_ptr());
    GroupedHead head{{}, outputs, depth, group, g.bits, kind, has_full_inputs, levels.has_value(), {}};
    if (levels) std::memcpy(head.levels, levels->const_data_ptr(), NUM_LEVELS);
    std::memcpy(head.name, GROUPED_NAME, sizeof head.name);
    std::memcpy(memory, &head, sizeof head);
    g.first = memory + sizeof head;
    const int8_t* from = static_cast<const int8_t*>(numbers.const_data_ptr());
    // What fills a group stands for 0, or is multiplied by an input of 0.
    const int8_t nothing = levels ? head.levels[0] : bits == 4 && !lowest ? MIDDLE : 0;
    share_out(outputs, panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            char* to = memory + sizeof head + panel * g.panel_bytes();
            std::memset(to, 0, g.panel_bytes());
            for (int64_t column = 0; column < PANEL; ++column) {
                const int64_t output = panel * PANEL + column;
                const bool is_there = output < outputs;
                for (int64_t i = 0; i < count && is_there; ++i) {
                    std::memcpy(to + (i * PANEL + column) * 2, scale + (output * count + i) * 2, 2);
                    if (!least) continue;
                    char* lows = to + count * PANEL * 2 + i * g.lowest_bytes() + column * size;
                    std::memcpy(lows, least + (output * count + i) * size, size);
                }
                for (int64_t k = 0; k < g.depth(); ++k) {
                    const int8_t number = is_there && k < depth ? from[output * depth + k] : nothing;
                    const auto [byte, is_upper] = place_of(g, column, k);
                    const uint8_t bits_of = static_cast<uint8_t>(number);
                    const uint8_t wanted = levels ? places[bits_of] : bits_of & (bits == 4 ? 15 : 255);
                    to[byte] |= static_cast<char>(wanted << (is_upper ? 4 : 0));
                }
            }
        }
    });
    return packed;
}

std::pair<Groups, GroupedHead> groups_of(const Tensor& packed) {
    check_close(packed, 1, "packed");
    STD_TORCH_CHECK(
        packed.is_contiguous() && packed.element_size() == 1 &&
            packed.numel() >= static_cast<int64_t>(sizeof(GroupedHead)),
        "packed is not packed");
    GroupedHead head;
    const char* memory = static_cast<const char*>(packed.const_data_ptr());
    std::memcpy(&head, memory, sizeof head);
    STD_TORCH_CHECK(
        std::memcmp(head.name, GROUPED_NAME, sizeof head.name) == 0 && head.outputs > 0 && head.depth > 0 &&
            head.group > 0,
        "packed is not packed");
    check_form(head.bits, head.group, head.lowest, head.has_full_inputs != 0);
    STD_TORCH_CHECK(
        !head.has_levels || (head.bits == 4 && head.lowest == Lowest::Middle), "packed is not packed");
    const Groups g{
        memory + sizeof head, head.group, (head.depth + head.group - 1) / head.group, head.bits,
        head.lowest, head.has_full_inputs != 0,
        head.has_levels ? reinterpret_cast<const int8_t*>(memory) + offsetof(GroupedHead, levels) : nullptr};
    const int64_t panels = (head.outputs + PANEL - 1) / PANEL;
    STD_TORCH_CHECK(
        packed.numel() == static_cast<int64_t>(sizeof head) + panels * g.panel_bytes(), "packed is not packed");
    return {g, head};
}

WeightRows::WeightRows(const Tensor& weight, const std::optional<Tensor>& scales, int64_t outputs)
    : outputs_(outputs), scales_(read_floats(scales, 1, "scales")), type_(weight.scalar_type()),
      dims_(weight.dim()) {
    STD_TORCH_CHECK(!scales_ || scales->numel() == outputs, "scales are of outputs");
    if (dims_ == 1) {
        const auto [groups, head] = groups_of(weight);
        groups_ = groups;
        depth_ = head.depth;
        STD_TORCH_CHECK(head.outputs == outputs, "packed has other outputs");
        return;
    }
    STD_TORCH_CHECK(
        weight.is_cpu() && weight.is_contiguous() && 2 <= dims_ && dims_ <= 4 &&
            (type_ == ScalarType::Float || type_ == ScalarType::BFloat16 || type_ == ScalarType::Half),
        "a weight must be packed, or contiguous float32, bfloat16 or float16 on the CPU");
    const int64_t rows = weight.size(0) * (dims_ == 2 ? 1 : PANEL);
    STD_TORCH_CHECK(
        0 < outputs && outputs <= rows && (dims_ == 2 || weight.size(2) == PANEL) &&
            (dims_ < 4 || weight.size(3) == 2),
        "packed has other outputs");
    depth_ = weight.size(1) * (dims_ == 4 ? 2 : 1);
    numbers_ = static_cast<const char*>(weight.const_data_ptr());
}

int64_t WeightRows::place(int64_t output, int64_t input) const {
    if (dims_ == 2) return output * depth_ + input;
    const int64_t pair = dims_ == 4 ? 2 : 1, panel = output / PANEL, column = output % PANEL;
    return (panel * depth_ + input / pair * pair) * PANEL + column * pair + input % pair;
}

void WeightRows::read(int64_t output, float* to) const {
    if (!numbers_) return read_grouped_row(groups_, scales_, output, depth_, to);
    for (int64_t k = 0; k < depth_; ++k) {
        const int64_t at = place(output, k);
        if (type_ == ScalarType::Float) {
            to[k] = reinterpret_cast<const float*>(numbers_)[at];
            continue;
        }
        const uint16_t bits = reinterpret_cast<const uint16_t*>(numbers_)[at];
        to[k] = type_ == ScalarType::Half ? float_of_half(bits)
                                          : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
}

void WeightRows::copy(int64_t output, void* to) const {
    if (dims_ == 2) {
        const int64_t bytes = depth_ * (type_ == ScalarType::Float ? 4 : 2);
        std::memcpy(to, numbers_ + output * bytes, bytes);
        return;
    }
    for (int64_t k = 0; k < depth_; ++k) {
        const int64_t at = place(output, k);
        if (type_ == ScalarType::Float)
            static_cast<uint32_t*>(to)[k] = reinterpret_cast<const uint32_t*>(numbers_)[at];
        else
            static_cast<uint16_t*>(to)[k] = reinterpret_cast<const uint16_t*>(numbers_)[at];
    }
}

Tensor read_outputs(
    const Tensor& packed, const std::optional<Tensor>& scales, int64_t outputs, const Tensor& rows) {
    const WeightRows weights(packed, scales, outputs);
    check_close(rows, 1, "rows");
    const int64_t* which = read_rows(rows, outputs);
    const int64_t count = rows.numel(), depth = weights.depth();
    Tensor out = torch::stable::new_empty(rows, {count, depth}, ScalarType::Float);
    float* to = static_cast<float*>(out.mutable_data_ptr());
    share_out(count, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) weights.read(which[i], to + i * depth);
    });
    return out;
}

}  // namespace aioengine
