// A step's attention, cut into pieces of work.

#include <algorithm>
#include <utility>
#include <vector>

#include "operators.h"

namespace aioengine {

namespace {

// Which keys the tokens [first, last) of a sequence see between them.
std::pair<int64_t, int64_t> keys_seen(
    const Attention& a, int64_t length, int64_t num_new, int64_t first, int64_t last) {
    if (!a.is_causal) return {0, length};
    const int64_t start = length - num_new;
    int64_t begin = a.window ? std::max<int64_t>(0, start + first - a.window + 1) : 0;
    int64_t end = start + last;
    if (a.block_ids && num_new > 1) {  // all of a block's tokens are in this step
        begin = std::min(begin, start);
        end = length;
    }
    return {begin, end};
}

// Of a piece, or a part of one.
int64_t segments_of(const Piece& piece) {
    return (piece.key_end - 1) / SEGMENT + 1 - piece.key_begin / SEGMENT;
}

}  // namespace

AttentionWork cut_attention(
    Program& program, const Attention& a, int64_t num_sequences, int64_t num_threads) {
    const AttentionKernels& kernels = *dispatch_table().attention;
    const int64_t group = a.heads / a.kv_heads, max_rows = kernels.max_rows(a);
    const int64_t max_tokens = std::max<int64_t>(1, max_rows / group);
    std::vector<Piece> pieces;
    int64_t total = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
        const int64_t num_new = a.query_start[s + 1] - a.query_start[s];
        for (int64_t first = 0; first < num_new; first += max_tokens) {
            const int64_t last = std::min(first + max_tokens, num_new);
            const auto [begin, end] = keys_seen(a, a.seq_lens[s], num_new, first, last);
            for (int64_t h = 0; h < a.kv_heads; ++h)
                pieces.push_back({s, h, first, last - first, begin, end, -1});
            total += a.kv_heads * (last - first) * (end - begin);
        }
    }
    AttentionWork work{};
    work.scratch_floats = kernels.scratch_floats(a, std::max(max_rows, group));
    std::vector<Parts> parts;
    // A piece that would keep one thread busy while the others wait is split by keys.
    const int64_t fair = std::max<int64_t>(1, total / std::max<int64_t>(1, 4 * num_threads));
    if (num_threads > 1 && pieces.size() < static_cast<size_t>(4 * num_threads)) {
        std::vector<Piece> split;
        for (Piece& piece : pieces) {
            const int64_t keys = piece.key_end - piece.key_begin;
            const int64_t first = piece.key_begin / SEGMENT, segments = segments_of(piece);
            const int64_t count = std::min((piece.num_tokens * keys + fair - 1) / fair, segments);
            if (count < 2) {
                split.push_back(piece);
                continue;
            }
            const int64_t size = piece.num_tokens * group * (2 + a.value_dim);
            piece.partial = work.num_partial;
            parts.push_back({piece, segments});
            for (int64_t i = 0; i < count; ++i) {
                const int64_t from = segments * i / count, to = segments * (i + 1) / count;
                Piece part = piece;
                part.key_begin = std::max(piece.key_begin, (first + from) * SEGMENT);
                part.key_end = std::min(piece.key_end, (first + to) * SEGMENT);
                part.partial = work.num_partial + from * size;
                work.partial_floats = std::max(work.partial_floats, (to - from) * size);
                split.push_back(part);
            }
            work.num_partial += segments * size;
        }
        pieces = std::move(split);
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) {
        return x.num_tokens * (x.key_end - x.key_begin) > y.num_tokens * (y.key_end - y.key_begin);
    });
    work.pieces = program.copy(pieces.data(), pieces.size());
    work.num_pieces = pieces.size();
    work.parts = program.copy(parts.data(), parts.size());
    work.num_parts = parts.size();
    return work;
}

}  // namespace aioengine
