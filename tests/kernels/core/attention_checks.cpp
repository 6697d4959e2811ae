// Attention over pages, beside a softmax in double precision.

#include <algorithm>

#include "byte_rows.h"
#include "problems.h"

namespace checks {

namespace {

constexpr int64_t DISTANCES = 5;

// Sequences that lie in pages behind each other's, and what attention is asked for.
struct Problem {
    DType dtype;
    int64_t kv_heads, group, key_dim, value_dim, block_size;
    std::vector<int32_t> starts, lengths, table, ids;
    int64_t width;  // of the table
    Numbers query, keys, values;
    std::vector<float> sinks, bias;
    float scale, softcap;
    int64_t window;
    bool is_causal, blocks_in_window;
    // Where keys and values are kept in 8 bits; `keys` and `values` are then what these stand for.
    std::vector<char> key_bytes = {}, value_bytes = {};

    int64_t heads() const { return kv_heads * group; }
    int64_t tokens() const { return starts.back(); }
    int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
};

Problem draw_problem(DType dtype, Random& random) {
    const int64_t kv_heads = random.pick(1, 3), group = random.pick(1, 5);
    const int64_t key_dim = random.one_of<int64_t>({64, 128, 80, 16, 7, 33}), block_size = random.pick(1, 40);
    const int64_t value_dim = random.one_of<int64_t>({key_dim, 64, 16, 5});
    std::vector<int32_t> starts = {0}, lengths;
    int64_t width = 1;
    for (int64_t i = random.pick(1, 3); i > 0; --i) {
        const int64_t length = random.one_of<int64_t>({random.pick(1, 70), random.pick(1, 70), random.pick(500, 1100)});
        const int64_t fresh = std::min(length, random.one_of<int64_t>({1, 1, 2, 9, 32}));
        lengths.push_back(static_cast<int32_t>(length));
        starts.push_back(static_cast<int32_t>(starts.back() + fresh));
        width = std::max(width, (length + block_size - 1) / block_size);
    }
    const int64_t blocks = width * static_cast<int64_t>(lengths.size()), slots = blocks * block_size * kv_heads;
    Problem p{
        dtype, kv_heads, group, key_dim, value_dim, block_size, starts, lengths, {}, {}, width,
        Numbers(dtype, starts.back() * kv_heads * group * key_dim, random), Numbers(dtype, slots * key_dim, random),
        Numbers(dtype, slots * value_dim, random), {}, {},
        (random.pick(0, 5) ? 3.0f : -3.0f) / std::sqrt(static_cast<float>(key_dim)), random.pick(0, 2) ? 0 : 1.5f,
        random.pick(0, 2) ? 0 : random.pick(1, 90), random.pick(0, 4) != 0, random.coin()};
    for (int64_t i = 0; i < blocks; ++i) p.table.push_back(static_cast<int32_t>(blocks - 1 - i));
    if (random.pick(0, 2) == 0)
        for (int64_t i = 0; i < p.tokens(); ++i) p.ids.push_back(static_cast<int32_t>(random.pick(-1, 1)));
    if (random.pick(0, 2) == 0)
        for (int64_t i = 0; i < p.heads(); ++i) p.sinks.push_back(random.number());
    if (random.pick(0, 2) == 0)
        for (int64_t i = 0; i < p.heads() * DISTANCES; ++i) p.bias.push_back(random.number());
    return p;
}

// Rows of numbers in 8 bits, as the kernels pack them; `rows` become what is left of them.
std::vector<char> pack(Report& report, Numbers& rows, int64_t dim) {
    const int64_t count = rows.count() / dim, bytes = row_bytes(dim);
    std::vector<char> packed(count * bytes);
    dispatch_table().attention->pack_rows(rows.dtype(), rows.data(), dim, count, dim, packed.data());
    Numbers found(DType::Float32, rows.count());
    bool is_right = true;
    for (int64_t i = 0; i < rows.count(); ++i) {
        const char* row = packed.data() + i / dim * bytes;
        const int64_t d = i % dim, group = d / ROW_GROUP, first = i - d % ROW_GROUP;
        float most = 0;
        for (int64_t k = 0; k < std::min(ROW_GROUP, dim - group * ROW_GROUP); ++k)
            most = std::max(most, std::abs(rows.at(first + k)));
        uint16_t scale;
        std::memcpy(&scale, row + dim + 2 * group, sizeof scale);
        found.set(i, static_cast<float>(static_cast<int8_t>(row[d])) * float_of(uint32_t{scale} << 16));
        // A number is rounded, and its scale to bfloat16.
        is_right = is_right && is_near(found.at(i), rows.at(i), most / 127);
    }
    report.check(is_right, text("rows of %s in 8 bits, %ld wide: off by more than a step", name_of(rows.dtype()), (long)dim));
    rows = std::move(found);
    return packed;
}

// Of the sequences from `first` on.
Attention attention_of(const Problem& p, int64_t first) {
    Attention a{};
    a.dtype = p.dtype;
    a.query = p.query.data();
    a.key_cache = p.keys.data();
    a.value_cache = p.values.data();
    a.query_strides[0] = p.heads() * p.key_dim;
    a.query_strides[1] = p.key_dim;
    a.has_byte_rows = !p.key_bytes.empty();
    if (a.has_byte_rows) {
        a.key_cache = p.key_bytes.data();
        a.value_cache = p.value_bytes.data();
    }
    const int64_t key_row = a.has_byte_rows ? row_bytes(p.key_dim) : p.key_dim;
    const int64_t value_row = a.has_byte_rows ? row_bytes(p.value_dim) : p.value_dim;
    const int64_t in_block[] = {p.block_size * p.kv_heads, 1, p.block_size};
    for (int i = 0; i < 3; ++i) {
        a.key_strides[i] = in_block[i] * key_row;
        a.value_strides[i] = in_block[i] * value_row;
    }
    a.heads = p.heads();
    a.kv_heads = p.kv_heads;
    a.key_dim = p.key_dim;
    a.value_dim = p.value_dim;
    a.block_size = p.block_size;
    a.query_start = p.starts.data() + first;
    a.seq_lens = p.lengths.data() + first;
    a.block_table = p.table.data() + first * p.width;
    a.table_width = p.width;
    a.block_ids = p.ids.empty() ? nullptr : p.ids.data();
    a.sinks = p.sinks.empty() ? nullptr : p.sinks.data();
    a.distance_bias = p.bias.empty() ? nullptr : p.bias.data();
    a.num_distances = DISTANCES;
    a.scale = p.scale;
    a.softcap = p.softcap;
    a.window = p.window;
    a.is_causal = p.is_causal;
    a.blocks_in_window = p.blocks_in_window;
    return a;
}

void add_to(Program& program, Attention a, int64_t sequences, int64_t threads, void* out) {
    a.out = out;
    a.num_sequences = sequences;
    const AttentionWork work = cut_attention(program, a, sequences, threads);
    a.partial = static_cast<float*>(program.take(work.num_partial * sizeof(float)));
    add_attention(program, a, work);
}

// Whether the query token at `position` of a sequence sees a key.
bool sees(const Problem& p, int64_t sequence, int64_t position, int64_t key) {
    if (!p.is_causal) return true;
    const int64_t length = p.lengths[sequence], first = p.starts[sequence];
    const int64_t start = length - (p.starts[sequence + 1] - first);
    const bool is_near = !p.window || key > position - p.window, is_before = key <= position;
    if (p.ids.empty() || p.ids[first + position - start] < 0) return is_near && is_before;
    const bool is_block =
        key >= start && p.ids[first + key - start] == p.ids[first + position - start];
    return p.blocks_in_window ? is_near && (is_before || is_block) : (is_near && is_before) || is_block;
}

double score_of(const Problem& p, int64_t sequence, int64_t token, int64_t head, int64_t position, int64_t key) {
    const int64_t block = p.table[sequence * p.width + key / p.block_size];
    const int64_t row = (block * p.kv_heads + head / p.group) * p.block_size + key % p.block_size;
    double score = 0;
    for (int64_t d = 0; d < p.key_dim; ++d)
        score += static_cast<double>(p.query.at((token * p.heads() + head) * p.key_dim + d)) *
                 p.keys.at(row * p.key_dim + d);
    score *= p.scale;
    if (p.softcap != 0) score = p.softcap * std::tanh(score / p.softcap);
    if (p.bias.empty()) return score;
    const int64_t distance = std::max<int64_t>(0, position - key);
    return score + p.bias[head * DISTANCES + std::min(distance, DISTANCES - 1)];
}

std::vector<double> reference(const Problem& p, int64_t sequence, int64_t token, int64_t head) {
    const int64_t length = p.lengths[sequence];
    const int64_t position = length - p.starts[sequence + 1] + token;
    double total = p.sinks.empty() ? 0 : std::exp(p.sinks[head]);
    std::vector<double> out(p.value_dim);
    for (int64_t key = 0; key < length; ++key) {
        if (!sees(p, sequence, position, key)) continue;
        const double weight = std::exp(score_of(p, sequence, token, head, position, key));
        const int64_t block = p.table[sequence * p.width + key / p.block_size];
        const int64_t row = (block * p.kv_heads + head / p.group) * p.block_size + key % p.block_size;
        total += weight;
        for (int64_t d = 0; d < p.value_dim; ++d) out[d] += weight * p.values.at(row * p.value_dim + d);
    }
    for (double& each : out) each = total > 0 ? each / total : 0;
    return out;
}

std::string describe(const Problem& p) {
    return text(
        "attention of %s%s, dims %ld and %ld, heads %ld/%ld, window %ld, %ld sequences, the first of %d", name_of(p.dtype),
        p.key_bytes.empty() ? "" : " over 8 bits", (long)p.key_dim, (long)p.value_dim, (long)p.heads(), (long)p.kv_heads, (long)p.window, (long)p.sequences(),
        (int)p.lengths[0]);
}

// A sequence alone, and its last token alone, come to the bits that they come to in company.
void check_alone(Report& report, const Problem& p, const Numbers& out, const std::string& what) {
    const int64_t width = p.heads() * p.value_dim;
    for (int64_t s = 0; s < p.sequences(); ++s) {
        const int64_t first = p.starts[s], last = p.starts[s + 1];
        const Numbers alone = compute(
            report, what, p.dtype, out.count(), [&](Program& program, int64_t threads, void* to) {
                add_to(program, attention_of(p, s), 1, threads, to);
            });
        report.check(
            alone.has_same_bits(out, first * width, (last - first) * width), what + ": other bits without the others");
        if (!p.ids.empty()) continue;
        const int32_t start[] = {static_cast<int32_t>(last - 1), static_cast<int32_t>(last)};
        const Numbers newest = compute(
            report, what, p.dtype, out.count(), [&](Program& program, int64_t threads, void* to) {
                Attention a = attention_of(p, s);
                a.query_start = start;
                add_to(program, a, 1, threads, to);
            });
        report.check(
            newest.has_same_bits(out, (last - 1) * width, width), what + ": the last token has other bits alone");
    }
}

void check_problem(Report& report, const Problem& p) {
    const std::string what = describe(p);
    const int64_t heads = p.heads();
    const Numbers out = compute(
        report, what, p.dtype, p.tokens() * heads * p.value_dim,
        [&](Program& program, int64_t threads, void* to) {
            add_to(program, attention_of(p, 0), p.sequences(), threads, to);
        });
    // Where matmuls are in bfloat16 the weights are rounded to it too.
    const double bound = p.dtype == DType::Float32 ? 1e-5 : unit_of(p.dtype, 1);
    for (int64_t s = 0; s < p.sequences(); ++s)
        for (int64_t token = p.starts[s]; token < p.starts[s + 1]; ++token)
            for (int64_t head = 0; head < heads; ++head) {
                const std::vector<double> wanted = reference(p, s, token, head);
                bool is_right = true;
                for (int64_t d = 0; d < p.value_dim; ++d)
                    is_right = is_right &&
                               is_near(out.at((token * heads + head) * p.value_dim + d), wanted[d], bound);
                report.check(is_right, what + ": not the reference");
            }
    check_alone(report, p, out, what);
}

}  // namespace

void check_attention(Report& report, Random& random) {
    constexpr int problems = 16;
    for (DType dtype : dtypes())
        for (int i = 0; i < problems; ++i) {
            Problem p = draw_problem(dtype, random);
            if (random.pick(0, 3) == 0) {
                p.key_bytes = pack(report, p.keys, p.key_dim);
                p.value_bytes = pack(report, p.values, p.value_dim);
            }
            check_problem(report, p);
        }
}

}  // namespace checks
