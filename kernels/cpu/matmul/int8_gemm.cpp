// Matmuls of weights of 4 or 8 bits (grouped.h) with inputs that are rounded to 8 bits, in integers: each row
// has a scale for each group of inputs, the largest of which becomes 127. Products are added up within a group
// as integers, which is exact, and groups as floats, in their order, whatever the number of rows.
//
// Compiled once for each instruction set that multiplies bytes in its own way.

#include "linear.h"

#include "grouped_numbers.h"
#include "int8_neon.h"
#include "ready_rows.h"
#include "vector.h"

namespace {

using aioengine::DType;
using aioengine::GroupAt;
using aioengine::Groups;
using aioengine::Linear;
using aioengine::Lowest;
using aioengine::MIDDLE;
using aioengine::PANEL;
using aioengine::QUAD;

// Lines of weights that are prefetched, beyond the page that a core follows by itself; not for a few rows of 8
// bits, where that keeps it from following.
[[maybe_unused]] constexpr int64_t lines_ahead(Stored stored, int rows) {
    return stored != Stored::Bytes ? 256 : (rows > 2 ? 100 : 36);
}

constexpr int COLUMNS = PANEL / WIDTH, HALF = COLUMNS / 2;

// Rows at a time, so that their sums fill the registers.
#if AIOENGINE_WIDTH == 16 || defined(__aarch64__)
#define AIOENGINE_SIX_ROWS 1
constexpr int TILE_ROWS = 6;
#else
constexpr int TILE_ROWS = 3;
#endif

// What 8-bit weights are raised by before they are multiplied, so that they have no sign.
#if defined(__AVX512VNNI__)
constexpr int32_t RAISED = 128;
#else
constexpr int32_t RAISED = 0;
#endif

// A group of a row.
struct Rounded {
    float scale, shift;  // `shift`: the sum of its numbers, times the scale
    int32_t correction;  // what its products with the lowest weight would add up to
};

static int64_t row_bytes(const Groups& g) {
    const int64_t bytes = g.depth() + g.count * (int64_t)sizeof(Rounded);
    return (bytes + LINE - 1) / LINE * LINE;
}

// The nearest integers, the even ones of two. The product before it is a number of its own everywhere, or CPUs
// would come to other integers.
static inline Ints nearest(Floats x) {
#if AIOENGINE_WIDTH == 16
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif AIOENGINE_WIDTH == 8
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__aarch64__)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return (Ints)(x + shift) - (Ints)shift;
#endif
}

// Rounds a row's group at `x`, `count` inputs and zeros up to `group`. What is not finite makes the scale so.
template <class T>
static inline Rounded round_group(const T* x, int64_t count, int64_t group, int32_t lowest, int8_t* to) {
    const int64_t whole = count / WIDTH * WIDTH;
    Floats most = Floats{}, wrong = Floats{};
    float rest[WIDTH] = {};
    for (int64_t k = whole; k < count; ++k) rest[k - whole] = to_float(x[k]);
    for (int64_t k = 0; k < group; k += WIDTH) {
        const Floats v = k < whole ? load(x + k) : (k == whole ? load(rest) : Floats{});
        most = larger(choose(v < Floats{}, -v, v), most);
        wrong += v - v;
    }
    const float top = largest(most), bad = sum(wrong);
    const bool is_zero = top < 1e-30f;
    const float turn = is_zero ? 0.0f : 127.0f / top;
    Ints total = {};
    for (int64_t k = 0; k < group; k += WIDTH) {
        const Floats v = k < whole ? load(x + k) : (k == whole ? load(rest) : Floats{});
        const Ints n = nearest(v * turn);
        total += n;
#if AIOENGINE_WIDTH == 16
        _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8((__m512i)n));
#else
        for (int i = 0; i < WIDTH; ++i) to[k + i] = (int8_t)n[i];
#endif
    }
    int32_t all = 0;
    for (int i = 0; i < WIDTH; ++i) all += total[i];
    const float scale = (is_zero ? 0.0f : top / 127.0f) + bad;
    return {scale, scale * (float)all, all * lowest};
}

// What a number of 0 in the integers that are multiplied stands for.
static int32_t lowest_of(const Groups& g) {
    if (g.bits == 8 || g.levels) return -RAISED;
    return g.lowest == Lowest::Middle ? -MIDDLE : 0;
}

template <class T>
static void round_rows_as(const Linear& a, int64_t first, int64_t last, char* to) {
    const Groups& g = a.groups;
    const int64_t bytes = row_bytes(g);
    const int32_t lowest = lowest_of(g);
    for (int64_t r = first; r < last; ++r, to += bytes) {
        const T* x = (const T*)a.x + r * a.stride;
        Rounded* known = (Rounded*)(to + g.depth());
        for (int64_t i = 0; i < g.count; ++i) {
            const int64_t k = i * g.group;
            known[i] = round_group(x + k, lesser(g.group, a.depth - k), g.group, lowest, (int8_t*)to + k);
        }
    }
}

static void round_rows(const Linear& a, int64_t first, int64_t last, char* to) {
    switch (a.dtype) {
        case DType::Float32:
            round_rows_as<float>(a, first, last, to);
            break;
        case DType::BFloat16:
            round_rows_as<BFloat16>(a, first, last, to);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            round_rows_as<Float16>(a, first, last, to);
#endif
            break;
    }
}

// sums[r][h] += products of ROWS rows' next `count` inputs with the numbers of 2 * WIDTH outputs: those of the
// vector `v` of each 16. Inputs of a row lie `stride` bytes after those of the row before it.
#if defined(__AVX512VNNI__)

template <Stored STORED, int ROWS>
static inline void add_products(
    const int8_t* x, int64_t stride, const uint8_t* numbers, const int8_t* levels, int, int64_t count,
    Ints sums[][2]) {
    const __m512i low_bits = _mm512_set1_epi8(0x0f), sign = _mm512_set1_epi8((char)0x80);
    __m512i raised{};  // levels
    if (STORED == Stored::Levels)
        raised = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)levels)), sign);
    __m512i s[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) s[r][0] = (__m512i)sums[r][0], s[r][1] = (__m512i)sums[r][1];
    for (int64_t k = 0; k < count; k += QUAD, numbers += quad_bytes(STORED)) {
        __m512i low = _mm512_loadu_si512(numbers), high;
        if (STORED != Stored::Bytes) {
            high = _mm512_and_si512(_mm512_srli_epi16(low, 4), low_bits);
            low = _mm512_and_si512(low, low_bits);
            if (STORED == Stored::Levels) {
                high = _mm512_shuffle_epi8(raised, high);
                low = _mm512_shuffle_epi8(raised, low);
            }
        } else {
            high = _mm512_xor_si512(_mm512_loadu_si512(numbers + LINE), sign);
            low = _mm512_xor_si512(low, sign);
        }
        __builtin_prefetch(numbers + lines_ahead(STORED, ROWS) * LINE, 0, 2);
        if (STORED == Stored::Bytes) __builtin_prefetch(numbers + (lines_ahead(STORED, ROWS) + 1) * LINE, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            int32_t quad;
            memcpy(&quad, x + r * stride + k, sizeof quad);
            const __m512i four = _mm512_set1_epi32(quad);
            s[r][0] = _mm512_dpbusd_epi32(s[r][0], low, four);
            s[r][1] = _mm512_dpbusd_epi32(s[r][1], high, four);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r][0] = (Ints)s[r][0], sums[r][1] = (Ints)s[r][1];
}

#elif defined(__AVX2__)

// Pairs of products are added in 16 bits, which two of 127 * 127 fit into, and eight of 15 * 127 * 2.
template <Stored STORED, int ROWS>
static inline void add_products(
    const int8_t* x, int64_t stride, const uint8_t* numbers, const int8_t* levels, int v, int64_t count,
    Ints sums[][2]) {
    constexpr bool IS_HALVES = STORED == Stored::Halves;
    __m256i list{};
    if (STORED == Stored::Levels) list = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)levels));
    const __m256i low_bits = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
    numbers += v * 4 * WIDTH;
    for (int64_t first = 0; first < count; first += 8 * QUAD) {
        __m256i s[ROWS][2];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = _mm256_setzero_si256();
        for (int64_t k = first; k < lesser(first + 8 * QUAD, count); k += QUAD, numbers += quad_bytes(STORED)) {
            __m256i w[2] = {_mm256_loadu_si256((const __m256i*)numbers), {}};
            if (STORED == Stored::Bytes) {
                w[1] = _mm256_loadu_si256((const __m256i*)(numbers + LINE));
            } else {
                w[1] = _mm256_and_si256(_mm256_srli_epi16(w[0], 4), low_bits);
                w[0] = _mm256_and_si256(w[0], low_bits);
            }
            if (STORED == Stored::Levels)
                for (__m256i& each : w) each = _mm256_shuffle_epi8(list, each);
            __builtin_prefetch(numbers + lines_ahead(STORED, ROWS) * LINE, 0, 2);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                int32_t quad;
                memcpy(&quad, x + r * stride + k, sizeof quad);
                const __m256i four = _mm256_set1_epi32(quad);
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h) {
                    if (IS_HALVES) {
                        s[r][h] = _mm256_add_epi16(s[r][h], _mm256_maddubs_epi16(w[h], four));
                        continue;
                    }
                    const __m256i pairs =
                        _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(four, w[h]));
                    s[r][h] = _mm256_add_epi32(s[r][h], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h)
                sums[r][h] += (Ints)(IS_HALVES ? _mm256_madd_epi16(s[r][h], ones) : s[r][h]);
    }
}

#elif !defined(__aarch64__)  // whose are in int8_neon.h

template <Stored STORED, int ROWS>
static inline void add_products(
    const int8_t* x, int64_t stride, const uint8_t* numbers, const int8_t* levels, int v, int64_t count,
    Ints sums[][2]) {
    const auto number = [&](const uint8_t* at, bool is_high) -> int32_t {
        if (STORED == Stored::Bytes) return (int8_t)at[is_high ? LINE : 0];
        const int half = is_high ? *at >> 4 : *at & 15;
        return STORED == Stored::Levels ? levels[half] : half;
    };
    numbers += v * 4 * WIDTH;
    for (int64_t k = 0; k < count; k += QUAD, numbers += quad_bytes(STORED))
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < WIDTH; ++i)
                for (int j = 0; j < QUAD; ++j)
                    for (int h = 0; h < 2; ++h)
                        sums[r][h][i] += x[r * stride + k + j] * number(numbers + i * QUAD + j, h);
}

#endif

// sums [ROWS, PANEL] = rows, as `round_rows` leaves them, times a panel.
template <Stored STORED, Lowest LOWEST, int ROWS>
static void multiply_tile(const char* rows, const Groups& g, const uint8_t* panel, float* sums) {
    const int64_t bytes = row_bytes(g);
    for (int v = 0; v < HALF; ++v) {
        Floats f[ROWS][2];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) f[r][0] = f[r][1] = Floats{};
        GroupAt at(g, panel, 0);
        const int64_t group_bytes = g.group_bytes(), lowest_bytes = g.lowest_bytes();
        const char* known = rows + g.depth();
        for (int64_t i = 0; i < g.count; ++i) {
            Ints s[ROWS][2];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
                s[r][0] = s[r][1] = ((const Rounded*)(known + r * bytes))->correction - Ints{};
            add_products<STORED, ROWS>(
                (const int8_t*)rows + i * g.group, bytes, at.numbers, g.levels, v, g.group, s);
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                const int64_t first = (v + h * HALF) * WIDTH;
                const Floats scale = load_halves(at.scales + first * 2);
                const Floats least = load_lowest<LOWEST>(at.lowest, first, scale);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const Rounded& of_row = *(const Rounded*)(known + r * bytes);
                    f[r][h] += __builtin_convertvector(s[r][h], Floats) * (scale * of_row.scale);
                    if (LOWEST != Lowest::Middle) f[r][h] += least * of_row.shift;
                }
            }
            at.scales += PANEL * 2;
            at.lowest += lowest_bytes;
            at.numbers += group_bytes;
            known += sizeof(Rounded);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
            for (int h = 0; h < 2; ++h) store(sums + r * PANEL + (v + h * HALF) * WIDTH, f[r][h]);
    }
}

template <Stored STORED, Lowest LOWEST>
static void add_up_as(const char* rows, int64_t count, const Groups& g, const uint8_t* panel, float* sums) {
    using Tile = void(const char*, const Groups&, const uint8_t*, float*);
    constexpr Tile* TILES[] = {
        multiply_tile<STORED, LOWEST, 1>, multiply_tile<STORED, LOWEST, 2>,
        multiply_tile<STORED, LOWEST, 3>,
#if AIOENGINE_SIX_ROWS
        multiply_tile<STORED, LOWEST, 4>, multiply_tile<STORED, LOWEST, 5>,
        multiply_tile<STORED, LOWEST, 6>
#endif
    };
    static_assert(sizeof TILES / sizeof *TILES == TILE_ROWS, "one for each number of rows");
    const int64_t times = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t i = 0; i < times; ++i) {
        const int64_t first = i * count / times, last = (i + 1) * count / times;
        TILES[last - first - 1](rows + first * row_bytes(g), g, panel, sums + first * PANEL);
    }
}

// sums [count, PANEL] = rows times one panel, scaled and shifted.
static void add_up(const Linear& a, const char* rows, int64_t count, int64_t panel, float* sums) {
    const Groups& g = a.groups;
    const uint8_t* at = g.panel(panel);
    if (g.levels)
        add_up_as<Stored::Levels, Lowest::Middle>(rows, count, g, at, sums);
    else if (g.bits == 8 && g.lowest == Lowest::Leasts)
        add_up_as<Stored::Bytes, Lowest::Leasts>(rows, count, g, at, sums);
    else if (g.bits == 8)
        add_up_as<Stored::Bytes, Lowest::Middle>(rows, count, g, at, sums);
    else if (g.lowest == Lowest::Zeros)
        add_up_as<Stored::Halves, Lowest::Zeros>(rows, count, g, at, sums);
    else if (g.lowest == Lowest::Leasts)
        add_up_as<Stored::Halves, Lowest::Leasts>(rows, count, g, at, sums);
    else
        add_up_as<Stored::Halves, Lowest::Middle>(rows, count, g, at, sums);
    scale_and_shift(a, panel, count, sums);
}

struct Kernel {
    static constexpr int64_t BLOCK_ROWS = 48, PIECE_BYTES = 5 << 17, INPUT_BYTES = 1, OWN_FLOATS = 0;
    static constexpr bool IS_NARROW = false;

    static int64_t row_bytes(const Groups& g) { return ::row_bytes(g); }

    static void make_ready(const Linear& a, int64_t first, int64_t last, char* to) {
        round_rows(a, first, last, to);
    }

    static void add_up(
        const Linear& a, const char* rows, int64_t count, int64_t panel, float*, float* sums) {
        ::add_up(a, rows, count, panel, sums);
    }
};

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(int8_gemm_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_TABLE(AIOENGINE_KERNELS) = ReadyRows<Kernel>::table(TILE_ROWS);
}
