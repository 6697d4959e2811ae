// Steps of single tokens, one after the other, from token ids to token ids: a queue that the host fills and
// one thread works off.
//
// Between two steps nothing of Python is needed: the thread takes what is queued, and a byte in an event's
// file tells the host's loop that a step is done. What is called from the loop is plain C, for callers that
// keep the interpreter's lock: they wait for nothing but a mutex that is held for a few instructions.

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "draw.h"
#include "layer_builder.h"
#include "memory.h"
#include "numbers.h"

namespace aioengine {

namespace {

// Of a queued step, in front: how many sequences, then how wide the table of each KV group is. Behind that
// SEQUENCE_WORDS for each sequence, the tables, and for each sequence the tokens that may not come.
//   token: an id, or -1 less the place of a sequence in the step before, whose token it is
//   position: of the token, for its angles
//   length: of the sequence's context, the token included
//   shift: 1 where the token's keys and values are there already; they go to where the next one's will
//   memory: rows of an encoder's that cross-attention reads, whose keys and values are there
//   banned: how many tokens may not come
constexpr int64_t SEQUENCE_WORDS = 6;
// Numbers that a choice is made of.
constexpr int64_t CHOICE_NUMBERS = sizeof(Choice) / sizeof(double);
// In front of a step's tokens: when it began and ended, in nanoseconds.
constexpr int64_t RESULT_TIMES = 2;

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

struct Decoder {
    const Decoder* self;  // a copy of the bytes is no decoder
    Tensor plan, table;
    std::optional<Tensor> factors;  // of a table that is packed
    int64_t vocab;
    double scale;  // of embeddings
    std::optional<Tensor> positions;  // whose row is added to a token's embedding
    PlannedMatmul head;
    double cap;  // of logits, or 0
    Tensor like;  // of the dtype of what lies between layers
    std::vector<Tensor> caches, angles;
    std::vector<int64_t> is_cross;  // for each KV group
    Tensor steps, choices, results, last;
    int event;
    // Kept by the program that writes them, as a late thread may read them when more are wanted.
    std::shared_ptr<std::vector<char>> logits = std::make_shared<std::vector<char>>();

    std::mutex mutex = {};
    std::condition_variable changed = {};
    int64_t published = 0, limit = 0, done = 0;  // steps, since the beginning

    DType dtype() const { return dtype_of(like, *dispatch_table().attention); }
    int64_t block_size() const { return caches[0].size(1); }

    void run(int64_t index);
};

// Numbers at x become change(i, number), rounded. Of float32 or bfloat16.
template <class Change>
void change_row(DType dtype, char* x, int64_t count, const Change& change) {
    with_numbers(dtype, x, [&](auto* numbers) {
        for (int64_t i = 0; i < count; ++i) write_number(numbers[i], change(i, read_number(numbers[i])));
    });
}

float number_at(DType dtype, const char* x, int64_t i) {
    float found;
    with_numbers(dtype, x, [&](const auto* numbers) { found = read_number(numbers[i]); });
    return found;
}

Places places_of_group(
    Program& program, const int32_t* sequences, int64_t count, const int32_t* table, int64_t width,
    int64_t block_size, bool is_cross, const int32_t* query_start) {
    int32_t* blocks = static_cast<int32_t*>(program.take(3 * count * sizeof(int32_t)));
    int32_t *offsets = blocks + count, *lengths = offsets + count;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t* sequence = sequences + i * SEQUENCE_WORDS;
        if (is_cross) {
            lengths[i] = sequence[4];
            continue;
        }
        const int64_t place = sequence[2] - 1 + sequence[3];
        STD_TORCH_CHECK(
            0 < sequence[2] && 0 <= place && place / block_size < width,
            "a sequence's table names no block for its token");
        blocks[i] = table[i * width + place / block_size];
        offsets[i] = static_cast<int32_t>(place % block_size);
        lengths[i] = sequence[2];
    }
    Places places{};
    places.slot_blocks = blocks;
    places.slot_offsets = offsets;
    places.query_start = query_start;
    places.seq_lens = lengths;
    places.block_table = program.copy(table, count * width);
    places.num_slots = is_cross ? 0 : count;
    places.num_sequences = count;
    places.table_width = width;
    return places;
}

void Decoder::run(int64_t index) {
    const int64_t began = now_ns();
    const int64_t place = index % steps.size(0), groups = is_cross.size();
    const int32_t* words = static_cast<const int32_t*>(steps.const_data_ptr()) + place * steps.size(1);
    int64_t* result = static_cast<int64_t*>(results.mutable_data_ptr()) + place * results.size(1);
    int64_t* sampled = static_cast<int64_t*>(last.mutable_data_ptr());
    const int64_t count = words[0];
    const int32_t *widths = words + 1, *sequences = widths + groups;
    STD_TORCH_CHECK(0 < count && count <= last.numel(), "a step has too many sequences, or none");
    int64_t num_words = 1 + groups + count * SEQUENCE_WORDS;
    for (int64_t i = 0; i < groups; ++i) num_words += count * std::max(widths[i], 0);
    for (int64_t i = 0; i < count; ++i)
        num_words += std::max(sequences[i * SEQUENCE_WORDS + 5], 0);
    STD_TORCH_CHECK(num_words <= steps.size(1), "a step is larger than its place in the queue");

    const DType type = dtype();
    Team& team = own_team();
    Program& program = team.begin();
    Builder builder(team, program, like);
    const WeightRows embeddings(table, factors, vocab);
    const int64_t hidden = embeddings.depth(), row_bytes = hidden * builder.size();
    float* floats = static_cast<float*>(program.take(hidden * sizeof(float)));
    char* x = static_cast<char*>(program.take(count * row_bytes));
    std::vector<Angles> turned;
    std::vector<char*> rows_of_angles;
    for (const Tensor& each : angles)
        rows_of_angles.push_back(static_cast<char*>(program.take(count * each.size(1) * builder.size())));
    for (int64_t i = 0; i < count; ++i) {
        const int32_t* sequence = sequences + i * SEQUENCE_WORDS;
        const int64_t before = std::min<int64_t>(-1 - int64_t{sequence[0]}, last.numel() - 1);
        const int64_t token = sequence[0] < 0 ? sampled[before] : sequence[0];
        STD_TORCH_CHECK(0 <= token && token < vocab, "there is no such token");
        char* row = x + i * row_bytes;
        if (embeddings.is_grouped()) {
            embeddings.read(token, floats);
            change_row(type, row, hidden, [&](int64_t k, float) { return floats[k]; });
        } else {
            embeddings.copy(token, row);
        }
        if (scale != 1)
            change_row(type, row, hidden, [&](int64_t, float each) { return each * static_cast<float>(scale); });
        if (positions) {
            STD_TORCH_CHECK(
                0 <= sequence[1] && sequence[1] < positions->size(0), "there is no such position");
            const char* more = static_cast<const char*>(positions->const_data_ptr()) + sequence[1] * row_bytes;
            change_row(type, row, hidden, [&](int64_t k, float each) { return each + number_at(type, more, k); });
        }
        for (size_t k = 0; k < angles.size(); ++k) {
            STD_TORCH_CHECK(
                0 <= sequence[1] && sequence[1] < angles[k].size(0), "there are no such angles");
            const int64_t bytes = angles[k].size(1) * builder.size();
            std::memcpy(
                rows_of_angles[k] + i * bytes,
                static_cast<const char*>(angles[k].const_data_ptr()) + sequence[1] * bytes, bytes);
        }
    }
    for (size_t k = 0; k < angles.size(); k += 2) {
        Rotary rotary{};
        rotary.cos = rows_of_angles[k];
        rotary.sin = rows_of_angles[k + 1];
        rotary.cos_stride = rotary.sin_stride = angles[k].size(1);
        turned.push_back({rotary, angles[k].size(1)});
    }
    int32_t* query_start = static_cast<int32_t*>(program.take((count + 1) * sizeof(int32_t)));
    for (int64_t i = 0; i <= count; ++i) query_start[i] = static_cast<int32_t>(i);
    std::vector<Places> places;
    const int32_t* rows = sequences + count * SEQUENCE_WORDS;
    for (int64_t i = 0; i < groups; rows += count * widths[i++])
        places.push_back(places_of_group(
            program, sequences, count, rows, widths[i], block_size(), is_cross[i] != 0, query_start));

    const Plan& layers = plan_of(plan);
    const std::vector<int64_t> no_blocks(groups);
    const LayerStep step{std::move(turned), caches, std::move(places), no_blocks, {}, nullptr, count, {}};
    const auto [found, is_ended] = add_layers(builder, layers, step, 0, {x, count, hidden, hidden});
    STD_TORCH_CHECK(!is_ended, "a module computes a part of a layer");
    char* normed = static_cast<char*>(program.take(count * row_bytes));
    builder.finish(found, layers.norm, normed);
    const size_t logit_bytes = count * head.outputs * builder.size();
    if (logits->size() < logit_bytes) logits = std::make_shared<std::vector<char>>(logit_bytes);
    program.keep(logits);
    builder.multiply({normed, count, hidden, hidden}, head, 0, false, nullptr, logits->data());
    const int64_t stride = head.outputs * builder.size();
    if (cap > 0)
        add_cap(
            program, type, logits->data(), stride, count, head.outputs, static_cast<float>(cap), logits->data(),
            stride);
    int64_t* chosen = static_cast<int64_t*>(program.take(count * sizeof(int64_t)));
    int64_t* num_banned = static_cast<int64_t*>(program.take(count * sizeof(int64_t)));
    const int32_t** banned = static_cast<const int32_t**>(program.take(count * sizeof(int32_t*)));
    for (int64_t i = 0; i < count; ++i) {
        num_banned[i] = std::max(sequences[i * SEQUENCE_WORDS + 5], 0);
        for (int64_t k = 0; k < num_banned[i]; ++k)
            STD_TORCH_CHECK(0 <= rows[k] && rows[k] < head.outputs, "there is no such token to be banned");
        banned[i] = program.copy(rows, num_banned[i]);
        rows += num_banned[i];
    }
    const Choice* drawn = reinterpret_cast<const Choice*>(
        static_cast<const double*>(choices.const_data_ptr()) + place * choices.size(1));
    const bool is_drawn =
        std::any_of(drawn, drawn + count, [](const Choice& each) { return each.temperature > 0; });
    add_choices(
        program, {type, logits->data(), count, head.outputs, stride,
                  is_drawn ? program.copy(drawn, count) : nullptr, banned, num_banned, chosen});
    team.run(program);
    // Its memory stays until another is begun.
    std::copy_n(chosen, count, sampled);
    std::copy_n(chosen, count, result + RESULT_TIMES);
    result[0] = began;
    result[1] = now_ns();
}

Decoder& decoder_of(const Tensor& packed) {
    const bool is_one = packed.is_cpu() && packed.scalar_type() == ScalarType::Byte &&
                        packed.numel() == static_cast<int64_t>(sizeof(Decoder));
    void* memory = is_one ? packed.mutable_data_ptr() : nullptr;
    Decoder* decoder = static_cast<Decoder*>(memory);
    STD_TORCH_CHECK(decoder && decoder->self == decoder, "decoder must be what pack_decoder has returned");
    return *decoder;
}

}  // namespace

Tensor pack_decoder(
    const Tensor& plan, const Tensor& table, const std::optional<Tensor>& factors, int64_t vocab,
    double scale, const std::optional<Tensor>& positions, const Tensor& head, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
    int64_t outputs, double cap, const Tensor& like, std::vector<Tensor> caches, std::vector<Tensor> angles, std::vector<int64_t> is_cross,
    const Tensor& steps, const Tensor& choices, const Tensor& results, const Tensor& last, int64_t event) {
    check_step(plan_of(plan), caches.size(), is_cross.size());
    STD_TORCH_CHECK(!caches.empty(), "there are no caches");
    const DType dtype = dtype_of(like, *dispatch_table().attention);
    const WeightRows embeddings(table, factors, vocab);
    STD_TORCH_CHECK(
        embeddings.is_grouped() || table.scalar_type() == like.scalar_type(),
        "table must be of the dtype of the layers, or in groups");
    STD_TORCH_CHECK(
        (scale == 1 && !positions && !embeddings.is_grouped()) || dtype != DType::Float16,
        "embeddings of float16 are in no groups, and neither scaled nor added to");
    if (positions) {
        check_close(*positions, 2, "positions");
        STD_TORCH_CHECK(
            positions->is_contiguous() && positions->size(1) == embeddings.depth() &&
                positions->scalar_type() == like.scalar_type(),
            "positions must be contiguous, of the table's width and the layers' dtype");
    }
    STD_TORCH_CHECK(angles.size() % 2 == 0, "angles are cosines and sines");
    for (const Tensor& each : angles) {
        check_close(each, 2, "angles");
        STD_TORCH_CHECK(
            each.is_contiguous() && dtype_of(each, *dispatch_table().attention) == dtype,
            "angles must be contiguous and of the dtype of the layers");
    }
    check_close(steps, 2, "steps");
    check_close(choices, 2, "choices");
    check_close(results, 2, "results");
    check_close(last, 1, "last");
    STD_TORCH_CHECK(
        steps.scalar_type() == ScalarType::Int && results.scalar_type() == ScalarType::Long &&
            last.scalar_type() == ScalarType::Long && steps.is_contiguous() && results.is_contiguous() &&
            steps.size(0) > 0 && results.size(0) == steps.size(0) && choices.is_contiguous() &&
            choices.scalar_type() == ScalarType::Double && choices.size(0) == steps.size(0) &&
            choices.size(1) == CHOICE_NUMBERS * last.numel() &&
            results.size(1) == RESULT_TIMES + last.numel(),
        "steps must be int32, choices float64, results and last int64, of one number of steps and sequences");
    std::unique_ptr<Decoder> decoder(new Decoder{
        nullptr, plan, table, factors, vocab, scale, positions, {head, scales, bias, outputs}, cap, like, std::move(caches),
        std::move(angles), std::move(is_cross), steps, choices, results, last, static_cast<int>(event)});
    decoder->self = decoder.get();
    const std::array<int64_t, 1> bytes{sizeof(Decoder)}, strides{1};
    return torch::stable::from_blob(
        decoder.release(), bytes, strides, table.device(), ScalarType::Byte,
        [](void* memory) { delete static_cast<Decoder*>(memory); });
}

int64_t decode(const Tensor& packed, int64_t patience_us) {
    Decoder& decoder = decoder_of(packed);
    const auto is_due = [&] { return decoder.done < std::min(decoder.published, decoder.limit); };
    std::unique_lock<std::mutex> lock(decoder.mutex);
    for (;;) {
        while (is_due()) {
            const int64_t index = decoder.done;
            lock.unlock();
            decoder.run(index);
            lock.lock();
            ++decoder.done;
            const uint64_t one = 1;
            // It is full only where the host has not looked for ages, and then it will.
            [[maybe_unused]] const ssize_t written = write(decoder.event, &one, sizeof one);
        }
        const auto may_go_on = [&] { return is_due() || decoder.done >= decoder.limit; };
        if (decoder.done >= decoder.limit) return decoder.done;
        if (!decoder.changed.wait_for(lock, std::chrono::microseconds(patience_us), may_go_on))
            return decoder.done;
    }
}

Tensor decoder_logits(const Tensor& packed, int64_t count) {
    const Decoder& decoder = decoder_of(packed);
    Tensor out = new_output(decoder.like, {count, decoder.head.outputs});
    const size_t bytes = count * decoder.head.outputs * out.element_size();
    STD_TORCH_CHECK(count >= 0 && bytes <= decoder.logits->size(), "no step has had so many sequences");
    std::memcpy(out.mutable_data_ptr(), decoder.logits->data(), bytes);
    return out;
}

}  // namespace aioengine

// Says how many steps are queued and before which one `decode` stops, unless that is -1. Returns how many are
// done.
extern "C" __attribute__((visibility("default"))) int64_t aioengine_decoder_set(
    void* memory, int64_t published, int64_t limit) {
    auto& decoder = *static_cast<aioengine::Decoder*>(memory);
    int64_t done;
    {
        const std::lock_guard<std::mutex> lock(decoder.mutex);
        if (published >= 0) decoder.published = published;
        if (limit >= 0) decoder.limit = limit;
        done = decoder.done;
    }
    if (limit >= 0) decoder.changed.notify_all();
    return done;
}
