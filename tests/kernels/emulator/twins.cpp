// The kernels of one instruction set beside those of another on random problems, without PyTorch.
// As the first process of an emulated machine it tries an instruction set that this machine lacks.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/reboot.h>
#include <unistd.h>

#include <vector>

#include "attention.h"
#include "linear.h"

using namespace aioengine;

#define JOIN(a, b) a##b
#define TABLE(prefix, name) JOIN(prefix, name)

static uint64_t state = 88172645463325252ull;

static uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static int64_t pick(int64_t low, int64_t high) {
    return low + (int64_t)(next() % (uint64_t)(high - low + 1));
}

static float drawn() {
    return (float)(next() % 2000001) / 1000000.0f - 1.0f;
}

static void put(DType dtype, void* at, int64_t i, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == DType::Float32) ((float*)at)[i] = x;
    else ((uint16_t*)at)[i] = (uint16_t)(bits >> 16);
}

static float get(DType dtype, const void* at, int64_t i) {
    if (dtype == DType::Float32) return ((const float*)at)[i];
    const uint32_t bits = (uint32_t)((const uint16_t*)at)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

struct Array {
    std::vector<char> bytes;
    Array(DType dtype, int64_t count, bool is_drawn = true)
        : bytes(count * (dtype == DType::Float32 ? 4 : 2)) {
        for (int64_t i = 0; is_drawn && i < count; ++i) put(dtype, bytes.data(), i, drawn());
    }
};

static float largest_error(DType dtype, const Array& a, const Array& b, int64_t count) {
    float worst = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float x = get(dtype, a.bytes.data(), i), y = get(dtype, b.bytes.data(), i);
        const float error = fabsf(x - y);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

static bool compare_attention(const AttentionKernels& one, const AttentionKernels& other, DType dtype) {
    const int64_t kv_heads = pick(1, 3), group = pick(1, 5), heads = kv_heads * group;
    const int64_t dims[] = {64, 128, 80, 16, 7, 33};
    const int64_t key_dim = dims[pick(0, 5)], value_dim = dims[pick(0, 5)];
    const int64_t block_size = pick(1, 40), length = pick(1, 700);
    const int64_t num_new = pick(1, length < 9 ? length : 9);
    const int64_t blocks = (length + block_size - 1) / block_size;
    Array query(dtype, num_new * heads * key_dim);
    Array keys(dtype, blocks * block_size * kv_heads * key_dim);
    Array values(dtype, blocks * block_size * kv_heads * value_dim);
    Array out1(dtype, num_new * heads * value_dim), out2(dtype, num_new * heads * value_dim);
    std::vector<int32_t> table(blocks), starts = {0, (int32_t)num_new}, lens = {(int32_t)length};
    for (int64_t i = 0; i < blocks; ++i) table[i] = (int32_t)(blocks - 1 - i);
    std::vector<float> sinks(heads), bias(heads * 5);
    for (float& x : sinks) x = drawn();
    for (float& x : bias) x = drawn();
    std::vector<int32_t> ids(num_new);
    for (int32_t& id : ids) id = (int32_t)pick(-1, 1);
    Attention a{};
    a.dtype = dtype;
    a.query = query.bytes.data();
    a.key_cache = keys.bytes.data();
    a.value_cache = values.bytes.data();
    a.query_strides[0] = heads * key_dim;
    a.query_strides[1] = key_dim;
    const int64_t key_strides[] = {block_size * kv_heads * key_dim, key_dim, block_size * key_dim};
    const int64_t value_strides[] = {
        block_size * kv_heads * value_dim, value_dim, block_size * value_dim};
    memcpy(a.key_strides, key_strides, sizeof key_strides);
    memcpy(a.value_strides, value_strides, sizeof value_strides);
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.key_dim = key_dim;
    a.value_dim = value_dim;
    a.block_size = block_size;
    a.query_start = starts.data();
    a.seq_lens = lens.data();
    a.block_table = table.data();
    a.table_width = blocks;
    a.block_ids = pick(0, 3) ? nullptr : ids.data();
    a.sinks = pick(0, 1) ? nullptr : sinks.data();
    a.distance_bias = pick(0, 1) ? nullptr : bias.data();
    a.num_distances = 5;
    a.scale = 1.0f / sqrtf((float)key_dim) * 3;
    a.softcap = pick(0, 1) ? 0 : 1.5f;
    a.window = pick(0, 1) ? 0 : pick(1, 90);
    a.is_causal = pick(0, 4) != 0;
    const int64_t parts = (length - 1) / SEGMENT + 1;
    std::vector<float> partial(parts * num_new * group * (2 + value_dim));
    a.partial = partial.data();
    const bool is_split = pick(0, 1);
    for (int which = 0; which < 2; ++which) {
        const AttentionKernels& kernels = which ? other : one;
        a.out = which ? out2.bytes.data() : out1.bytes.data();
        const int64_t floats = kernels.scratch_floats(a, num_new * group);
        float* scratch = (float*)aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64);
        for (int64_t head = 0; head < kv_heads; ++head) {
            Piece piece = {0, head, 0, num_new, 0, length, is_split ? 0 : -1};
            kernels.attend(a, piece, scratch);
            if (is_split) kernels.merge(a, {piece, parts}, scratch);
            kernels.write(a, piece, scratch);
        }
        free(scratch);
    }
    const float error = largest_error(dtype, out1, out2, num_new * heads * value_dim);
    const float bound = dtype == DType::Float32 ? 2e-5f : 2e-2f;
    if (error <= bound) return true;
    printf("attention differs by %g: dims %ld %ld, length %ld\n", error, (long)key_dim,
           (long)value_dim, (long)length);
    return false;
}

static bool compare_products(const LinearKernels& one, const LinearKernels& other, DType dtype) {
    const int64_t rows = pick(1, 40), depth = pick(1, 300);
    const bool is_gated = pick(0, 2) == 0;
    const int64_t outputs = is_gated ? 2 * PANEL * pick(1, 2) : pick(1, 100);
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    Array x(dtype, rows * depth), packed(dtype, panels * depth * PANEL);
    std::vector<int8_t> small(panels * depth * PANEL);
    for (int8_t& w : small) w = (int8_t)pick(-127, 127);
    Array out1(dtype, rows * outputs), out2(dtype, rows * outputs);
    std::vector<float> scales(outputs), bias(outputs), input(rows * depth);
    for (float& v : scales) v = drawn() / 100;
    for (float& v : bias) v = drawn();
    const bool is_small = pick(0, 1);
    Linear a{};
    a.dtype = dtype;
    a.weights = is_small                       ? Weights::Int8
                : dtype == DType::Float32 ? Weights::Float32
                                            : Weights::BFloat16;
    a.x = x.bytes.data();
    a.stride = depth;
    a.input = dtype == DType::Float32 ? (const float*)a.x : input.data();
    a.input_stride = depth;
    a.packed = is_small ? (void*)small.data() : packed.bytes.data();
    a.scales = is_small ? scales.data() : nullptr;
    a.bias = pick(0, 1) ? nullptr : bias.data();
    a.rows = rows;
    a.depth = depth;
    a.outputs = outputs;
    a.activation = (Activation)(is_gated ? pick(1, 3) : pick(0, 3));
    a.gate_panels = is_gated ? panels / 2 : 0;
    for (int which = 0; which < 2; ++which) {
        const LinearKernels& kernels = which ? other : one;
        a.out = which ? out2.bytes.data() : out1.bytes.data();
        const int64_t floats = kernels.scratch_floats(a);
        float* scratch = (float*)aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64);
        if (dtype != DType::Float32) kernels.widen(a, 0, rows, input.data());
        for (int64_t panel = 0; panel < (is_gated ? panels / 2 : panels); ++panel) {
            kernels.multiply(a, {panel, 0, rows}, scratch);
            kernels.write(a, {panel, 0, rows}, scratch);
        }
        free(scratch);
    }
    const float error = largest_error(dtype, out1, out2, rows * (is_gated ? outputs / 2 : outputs));
    // Products of two outputs are as large as 300 here.
    const float bound = (dtype == DType::Float32 ? 1e-4f : 0.3f) * (is_gated ? 10 : 1);
    if (error <= bound) return true;
    printf("products differ by %g: %ld rows, %ld deep, %ld outputs\n", error, (long)rows,
           (long)depth, (long)outputs);
    return false;
}

int main(int argc, char** argv) {
    const int count = getpid() == 1 ? 120 : argc > 1 ? atoi(argv[1]) : 300;  // emulated, it takes long
    int failures = 0;
    for (int i = 0; i < count; ++i) {
        const DType dtype = i % 2 ? DType::BFloat16 : DType::Float32;
        failures += !compare_attention(kernels_generic, TABLE(kernels_, INSTRUCTION_SET), dtype);
        failures += !compare_products(linear_generic, TABLE(linear_, INSTRUCTION_SET), dtype);
    }
    printf("%d problems, %d failures\n", 2 * count, failures);
    fflush(stdout);
    if (getpid() == 1) {
        sync();
        sleep(1);
        reboot(RB_POWER_OFF);
    }
    return failures != 0;
}
