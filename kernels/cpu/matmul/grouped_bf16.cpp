// Matmuls of bfloat16 with weights of 4 and 8 bits in groups, whose inputs stay what they are: numbers become
// bfloat16, which holds each of them exactly, and are multiplied two inputs at a time (AVX512-BF16). A group's sum
// is scaled then. Of few rows numbers are multiplied where they were unpacked, of many in the first cache; either
// way a row's products are added up in the same order.

#include "linear.h"

#include "grouped_numbers.h"
#include "ready_rows.h"
#include "vector.h"

namespace {

using aioengine::GroupAt;
using aioengine::Groups;
using aioengine::Linear;
using aioengine::Lowest;
using aioengine::MIDDLE;
using aioengine::PANEL;
using aioengine::QUAD;

constexpr int64_t UNIT_ROWS = 12;  // whose sums fill the registers
constexpr int64_t FEW_ROWS = 4;
constexpr int64_t MOST_DEPTH = 128;  // of a group

// How numbers are stored: places in a table of 16, bytes with a sign, floats of a byte.
enum class Kind { Table, Bytes, E4m3 };

// Of a row: its inputs, zeros up to a whole group, and the sums of its groups.
static int64_t row_bytes(const Groups& g) {
    const int64_t bytes = g.depth() * (int64_t)sizeof(BFloat16) + g.count * (int64_t)sizeof(float);
    return (bytes + LINE - 1) / LINE * LINE;
}

// Whether a number of 0 stands for something that is added for all inputs at once.
static bool has_least(const Groups& g) {
    return !g.levels && (g.lowest == Lowest::Zeros || g.lowest == Lowest::Leasts);
}

static void copy_rows(const Linear& a, int64_t first, int64_t last, char* to) {
    const Groups& g = a.groups;
    for (int64_t r = first; r < last; ++r, to += row_bytes(g)) {
        BFloat16* row = (BFloat16*)to;
        memcpy(row, (const BFloat16*)a.x + r * a.stride, a.depth * sizeof(BFloat16));
        memset(row + a.depth, 0, (g.depth() - a.depth) * sizeof(BFloat16));
        if (!has_least(g)) continue;
        float* sums = (float*)(row + g.depth());
        for (int64_t i = 0; i < g.count; ++i) {
            Floats all = Floats{};
            for (int64_t k = 0; k < g.group; k += WIDTH) all += load(row + i * g.group + k);
            sums[i] = sum(all);
        }
    }
}

// What unpacks a weight's numbers.
struct Unpacking {
    __m512i low, high;  // the bytes of a table's numbers, of 16 each, four times

    explicit Unpacking(const Groups& g) {
        uint8_t bytes[2][16];
        for (int i = 0; i < 16; ++i) {
            const bool is_middle = g.bits == 4 && g.lowest == Lowest::Middle;
            const float number = (float)(g.levels ? g.levels[i] : i - (is_middle ? MIDDLE : 0));
            uint32_t bits;
            memcpy(&bits, &number, sizeof bits);
            bytes[0][i] = (uint8_t)(bits >> 16);
            bytes[1][i] = (uint8_t)(bits >> 24);
        }
        low = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes[0]));
        high = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes[1]));
    }
};

// The first and the last two inputs of 16 outputs.
struct Pairs {
    __m512bh first, last;
};

// Of words that the lower and the upper halves of 16 bytes became.
static inline Pairs pairs_of(__m512i lower, __m512i upper) {
    const __m512 x = (__m512)lower, y = (__m512)upper;
    return {(__m512bh)_mm512_shuffle_ps(x, y, 0x88), (__m512bh)_mm512_shuffle_ps(x, y, 0xdd)};
}

static inline Pairs look_up(const Unpacking& u, __m512i places) {
    const __m512i low = _mm512_shuffle_epi8(u.low, places), high = _mm512_shuffle_epi8(u.high, places);
    return pairs_of(_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
}

// Integers of 8 bits are floats whose lower half is empty.
static inline __m512bh pair_of(Ints first, Ints second) {
    const __m512i x = (__m512i)_mm512_cvtepi32_ps((__m512i)first);
    const __m512i y = (__m512i)_mm512_cvtepi32_ps((__m512i)second);
    return (__m512bh)_mm512_mask_mov_epi16(_mm512_srli_epi32(x, 16), 0xaaaaaaaa, y);
}

// Codes of e4m3, S EEEE MMM, as bfloat16: S, EEEE + 120 in 8 bits, MMM 0000. So the lower half of a code is the upper
// half of the lower byte, and three bits of its exponent make the upper byte, but for the seven without a leading 1:
// M times 2^-9.
static inline Pairs widen_e4m3(__m512i codes) {
    const __m512i upper = _mm512_set1_epi64(0x43424140'3f3e3d3c);  // by the exponent's upper bits
    const __m512i small_upper = _mm512_broadcast_i32x4(_mm_set_epi64x(0x3c3c3c3c'3c3c3c3c, 0x3c3c3c3c'3b3b3b00));
    const __m512i small_lower = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)0xf0e0d0c0'b0a09080, 0x60402000'c0800000));
    const __m512i half = _mm512_set1_epi8(0x0f);
    const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(7));
    const __m512i rest = _mm512_and_si512(codes, half);
    const __mmask64 is_small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x70));
    __m512i high = _mm512_shuffle_epi8(upper, exponents), low = _mm512_slli_epi16(rest, 4);
    high = _mm512_mask_shuffle_epi8(high, is_small, small_upper, rest);
    low = _mm512_mask_shuffle_epi8(low, is_small, small_lower, rest);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8);  // with the sign
    return pairs_of(_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
}

// Four inputs of a panel's outputs, 16 and 16.
template <Kind KIND>
static inline void unpack(const Unpacking& u, const uint8_t* numbers, Pairs* to) {
    if (KIND == Kind::Table) {
        const __m512i line = _mm512_loadu_si512(numbers), low_bits = _mm512_set1_epi8(0x0f);
        to[0] = look_up(u, _mm512_and_si512(line, low_bits));
        to[1] = look_up(u, _mm512_and_si512(_mm512_srli_epi16(line, 4), low_bits));
        return;
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
        const __m512i line = _mm512_loadu_si512(numbers + h * LINE);
        if (KIND == Kind::E4m3) {
            to[h] = widen_e4m3(line);
            continue;
        }
        const Ints x = (Ints)line;
        to[h] = {pair_of(x << 24 >> 24, x << 16 >> 24), pair_of(x << 8 >> 24, x >> 24)};
    }
}

template <Kind KIND>
constexpr int64_t QUAD_BYTES = (KIND == Kind::Table ? 1 : 2) * LINE;

// Lines of weights that are prefetched, as in int8_gemm.cpp.
template <Kind KIND>
static inline void prefetch_after(const uint8_t* numbers) {
    constexpr int64_t lines = KIND == Kind::Table ? 256 : 36;
    __builtin_prefetch(numbers + lines * LINE, 0, 2);
    if (KIND != Kind::Table) __builtin_prefetch(numbers + (lines + 1) * LINE, 0, 2);
}

// How a group's sums become part of an output: of 16 outputs.
struct Scaling {
    __m512 scale, least;

    Scaling(const Groups& g, const GroupAt& at, int half) {
        const int64_t first = half * WIDTH;
        Floats factor = load_halves(at.scales + first * 2), lowest = Floats{};
        if (g.lowest == Lowest::E4m3)
            factor += load_lowest<Lowest::Leasts>(at.lowest, first, factor);
        else if (g.lowest == Lowest::Leasts)
            lowest = load_lowest<Lowest::Leasts>(at.lowest, first, factor);
        else if (g.lowest == Lowest::Zeros)
            lowest = load_lowest<Lowest::Zeros>(at.lowest, first, factor);
        scale = (__m512)factor;
        least = (__m512)lowest;
    }
};

// sums [ROWS, PANEL] = few rows, as `copy_rows` leaves them, times a panel.
template <Kind KIND, int ROWS>
static void multiply_few(
    const char* rows, const Groups& g, const uint8_t* panel, const Unpacking& u, float* sums) {
    const int64_t bytes = row_bytes(g), sums_at = g.depth() * (int64_t)sizeof(BFloat16);
    const bool is_shifted = has_least(g);
    __m512 f[ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) f[r][0] = f[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < g.count; ++i) {
        const GroupAt at(g, panel, i);
        const Scaling scaling[2] = {{g, at, 0}, {g, at, 1}};
        const uint8_t* numbers = at.numbers;
        __m512 s[ROWS][2];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
        for (int64_t k = 0; k < g.group; k += QUAD) {
            Pairs w[2];
            unpack<KIND>(u, numbers, w);
            prefetch_after<KIND>(numbers);
            numbers += QUAD_BYTES<KIND>;
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const BFloat16* x = (const BFloat16*)(rows + r * bytes) + i * g.group + k;
                const __m512bh before = splat_pair(x), behind = splat_pair(x + 2);
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h) {
                    s[r][h] = _mm512_dpbf16_ps(s[r][h], before, w[h].first);
                    s[r][h] = _mm512_dpbf16_ps(s[r][h], behind, w[h].last);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
            for (int h = 0; h < 2; ++h) f[r][h] = _mm512_fmadd_ps(s[r][h], scaling[h].scale, f[r][h]);
        for (int r = 0; r < ROWS && is_shifted; ++r) {
            const __m512 all = _mm512_set1_ps(((const float*)(rows + r * bytes + sums_at))[i]);
            for (int h = 0; h < 2; ++h) f[r][h] = _mm512_fmadd_ps(all, scaling[h].least, f[r][h]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) _mm512_storeu_ps(sums + r * PANEL + h * WIDTH, f[r][h]);
}

// sums [ROWS, PANEL] += rows' next `depth` inputs, `stride` bytes from one row to the next, times unpacked numbers
// [depth / 2, PANEL, 2], scaled.
template <int ROWS>
static void add_group(
    const char* rows, int64_t stride, const BFloat16* numbers, int64_t depth, const Scaling* scaling,
    float* sums) {
    __m512 s[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2, numbers += 2 * PANEL) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(numbers);
        const __m512bh high = (__m512bh)_mm512_loadu_si512(numbers + PANEL);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh x = splat_pair((const BFloat16*)(rows + r * stride) + k);
            s[r][0] = _mm512_dpbf16_ps(s[r][0], x, low);
            s[r][1] = _mm512_dpbf16_ps(s[r][1], x, high);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) {
            float* sum = sums + r * PANEL + h * WIDTH;
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(s[r][h], scaling[h].scale, _mm512_loadu_ps(sum)));
        }
}

using AddGroup = void(const char*, int64_t, const BFloat16*, int64_t, const Scaling*, float*);
constexpr AddGroup* ADD_GROUP[] = {
    add_group<1>, add_group<2>, add_group<3>, add_group<4>,  add_group<5>,  add_group<6>,
    add_group<7>, add_group<8>, add_group<9>, add_group<10>, add_group<11>, add_group<12>};
static_assert(sizeof ADD_GROUP / sizeof *ADD_GROUP == UNIT_ROWS, "one for each number of rows");

// The same as `multiply_few` for any number of rows. `unpacked`: room for a group of a panel.
template <Kind KIND>
static void multiply_many(
    const char* rows, int64_t count, const Groups& g, const uint8_t* panel, const Unpacking& u,
    BFloat16* unpacked, float* sums) {
    const int64_t bytes = row_bytes(g), sums_at = g.depth() * (int64_t)sizeof(BFloat16);
    const int64_t times = (count + UNIT_ROWS - 1) / UNIT_ROWS;
    memset(sums, 0, count * PANEL * sizeof(float));
    for (int64_t i = 0; i < g.count; ++i) {
        const GroupAt at(g, panel, i);
        const Scaling scaling[2] = {{g, at, 0}, {g, at, 1}};
        const uint8_t* numbers = at.numbers;
        BFloat16* to = unpacked;
        for (int64_t k = 0; k < g.group; k += QUAD, to += QUAD * PANEL) {
            Pairs w[2];
            unpack<KIND>(u, numbers, w);
            prefetch_after<KIND>(numbers);
            numbers += QUAD_BYTES<KIND>;
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                _mm512_storeu_si512(to + h * PANEL, (__m512i)w[h].first);
                _mm512_storeu_si512(to + (2 + h) * PANEL, (__m512i)w[h].last);
            }
        }
        for (int64_t t = 0; t < times; ++t) {
            const int64_t begin = t * count / times, end = (t + 1) * count / times;
            const char* x = rows + begin * bytes + i * g.group * (int64_t)sizeof(BFloat16);
            ADD_GROUP[end - begin - 1](x, bytes, unpacked, g.group, scaling, sums + begin * PANEL);
        }
        for (int64_t r = 0; r < count && has_least(g); ++r) {
            const __m512 all = _mm512_set1_ps(((const float*)(rows + r * bytes + sums_at))[i]);
            for (int h = 0; h < 2; ++h) {
                float* sum = sums + r * PANEL + h * WIDTH;
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(all, scaling[h].least, _mm512_loadu_ps(sum)));
            }
        }
    }
}

template <Kind KIND>
static void add_up_as(
    const char* rows, int64_t count, const Groups& g, const uint8_t* panel, BFloat16* unpacked, float* sums) {
    using Few = void(const char*, const Groups&, const uint8_t*, const Unpacking&, float*);
    constexpr Few* FEW[] = {
        multiply_few<KIND, 1>, multiply_few<KIND, 2>, multiply_few<KIND, 3>, multiply_few<KIND, 4>};
    static_assert(sizeof FEW / sizeof *FEW == FEW_ROWS, "one for each number of rows");
    const Unpacking u(g);
    if (count <= FEW_ROWS)
        FEW[count - 1](rows, g, panel, u, sums);
    else
        multiply_many<KIND>(rows, count, g, panel, u, unpacked, sums);
}

// sums [count, PANEL] = rows times one panel, scaled and shifted.
static void add_up(
    const Linear& a, const char* rows, int64_t count, int64_t panel, BFloat16* unpacked, float* sums) {
    const Groups& g = a.groups;
    const uint8_t* at = g.panel(panel);
    if (g.bits == 4)
        add_up_as<Kind::Table>(rows, count, g, at, unpacked, sums);
    else if (g.lowest == Lowest::E4m3)
        add_up_as<Kind::E4m3>(rows, count, g, at, unpacked, sums);
    else
        add_up_as<Kind::Bytes>(rows, count, g, at, unpacked, sums);
    scale_and_shift(a, panel, count, sums);
}

struct Kernel {
    static constexpr int64_t BLOCK_ROWS = 96;  // for which a group is unpacked once
    static constexpr int64_t PIECE_BYTES = 5 << 17, INPUT_BYTES = sizeof(BFloat16);
    static constexpr int64_t OWN_FLOATS = MOST_DEPTH * PANEL / 2;
    static constexpr bool IS_NARROW = true;

    static int64_t row_bytes(const Groups& g) { return ::row_bytes(g); }

    static void make_ready(const Linear& a, int64_t first, int64_t last, char* to) {
        copy_rows(a, first, last, to);
    }

    static void add_up(
        const Linear& a, const char* rows, int64_t count, int64_t panel, float* own, float* sums) {
        ::add_up(a, rows, count, panel, (BFloat16*)own, sums);
    }
};

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(grouped_bf16_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_TABLE(AIOENGINE_KERNELS) = ReadyRows<Kernel>::table(UNIT_ROWS);
}
