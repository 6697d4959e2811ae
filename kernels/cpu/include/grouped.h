// Weights of 4 or 8 bits in groups of inputs, each with a scale for each output.
//
// Numbers of 8 bits may be floats too (e4m3, without NaN), which are multiplied with full inputs only. Those of 4
// bits may be places in a list of 16 levels, numbers of 8 bits, which are what is meant.
//
// A weight is scale * number or scale * number + least for 8 bits, which have a sign, and for 4 bits one of: scale *
// (number - 8), scale * (number - zero / 16), scale * number + least. Scales and leasts are float16, zeros 8 bits without a sign, and
// all is relative to a factor of the output's own (Linear::scales).
//
// In memory: a head of one line, then panel by panel the scales of its outputs, group by group, their zeros or
// leasts if there are any, and at the next line the numbers, four inputs at a time. Of these, 4 bits take a
// line: the lower halves of its bytes are those of the first 16 outputs, an output's four side by side, the
// upper halves those of the others; 8 bits take two lines, 16 outputs each.

#pragma once

#include <stdint.h>

namespace aioengine {

constexpr int64_t GROUPED_PANEL = 32;  // outputs, as of all panels
constexpr int64_t QUAD = 4;            // inputs that lie together
constexpr int64_t GROUPED_LINE = 64;   // bytes
constexpr int32_t MIDDLE = 8;          // of numbers of 4 bits
constexpr float ZERO_STEP = 1.0f / 16;
constexpr int64_t NUM_LEVELS = 16;

// What a number of 0 stands for. E4m3: numbers are floats, which need none; what scales have lost as float16
// lies in its place.
enum class Lowest : int32_t { Middle, Zeros, Leasts, E4m3 };

struct GroupedHead {
    char name[8];  // GROUPED_NAME
    int64_t outputs, depth, group;
    int32_t bits;
    Lowest lowest;
    // Inputs are multiplied as they are; otherwise they are rounded to 8 bits, with a scale for each group.
    int32_t has_full_inputs;
    int32_t has_levels;
    int8_t levels[NUM_LEVELS];
};

static_assert(sizeof(GroupedHead) == GROUPED_LINE, "one line");
constexpr char GROUPED_NAME[8] = "grouped";

// How numbers lie, as a matmul is told it.
struct Groups {
    const void* first;  // of the first panel
    int64_t group, count;  // inputs of a group, groups of a panel
    int32_t bits;
    Lowest lowest;
    bool has_full_inputs;
    const int8_t* levels;  // or null

    int64_t lowest_bytes() const {
        if (lowest == Lowest::Leasts || lowest == Lowest::E4m3) return GROUPED_PANEL * 2;
        return lowest == Lowest::Zeros ? GROUPED_PANEL : 0;
    }
    int64_t head_bytes() const {
        const int64_t bytes = count * (GROUPED_PANEL * 2 + lowest_bytes());
        return (bytes + GROUPED_LINE - 1) / GROUPED_LINE * GROUPED_LINE;
    }
    int64_t quad_bytes() const { return GROUPED_PANEL * QUAD * bits / 8; }
    int64_t group_bytes() const { return group / QUAD * quad_bytes(); }
    int64_t panel_bytes() const { return head_bytes() + count * group_bytes(); }
    // Inputs, those included that fill the last group.
    int64_t depth() const { return count * group; }

    const uint8_t* panel(int64_t index) const { return (const uint8_t*)first + index * panel_bytes(); }
};

// A panel's groups, one after the other.
struct GroupAt {
    const uint8_t *scales, *lowest, *numbers;

    GroupAt(const Groups& g, const uint8_t* panel, int64_t index)
        : scales(panel + index * GROUPED_PANEL * 2),
          lowest(panel + g.count * GROUPED_PANEL * 2 + index * g.lowest_bytes()),
          numbers(panel + g.head_bytes() + index * g.group_bytes()) {}
};

}  // namespace aioengine
