// The operators as PyTorch sees them, on its stable ABI: one build serves every Python and every
// torch from 2.11. Cuts a step into pieces of work and hands them to torch's own threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"

using aioengine::Attention;
using aioengine::Kernels;
using aioengine::Linear;
using aioengine::LinearKernels;
using aioengine::LinearPiece;
using aioengine::Norm;
using aioengine::Number;
using aioengine::PAIRED_DEPTH;
using aioengine::PANEL;
using aioengine::Parts;
using aioengine::Piece;
using aioengine::Rotary;
using aioengine::SEGMENT;
using aioengine::Weights;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// One instruction set's doors. `pairs`: null where the CPU does not multiply bfloat16.
struct Doors {
    const char* name;
    const Kernels* attention;
    const LinearKernels* linear;
    const LinearKernels* pairs;
    const aioengine::NormKernel* norm;
    const aioengine::RotaryKernel* rotary;
};

#if defined(__x86_64__)
constexpr Doors AMX_BF16 = {
    "amx_bf16", &aioengine::kernels_amx_bf16, &aioengine::linear_avx512_bf16,
    &aioengine::pairs_amx_bf16, &aioengine::norm_avx512_bf16, &aioengine::rotary_avx512_bf16};
constexpr Doors AVX512_BF16 = {
    "avx512_bf16", &aioengine::kernels_avx512_bf16, &aioengine::linear_avx512_bf16,
    &aioengine::pairs_avx512_bf16, &aioengine::norm_avx512_bf16, &aioengine::rotary_avx512_bf16};
constexpr Doors AVX512 = {
    "avx512", &aioengine::kernels_avx512, &aioengine::linear_avx512, nullptr,
    &aioengine::norm_avx512, &aioengine::rotary_avx512};
constexpr Doors AVX2 = {
    "avx2", &aioengine::kernels_avx2, &aioengine::linear_avx2, nullptr, &aioengine::norm_avx2,
    &aioengine::rotary_avx2};

// Whether there are tiles for bfloat16 and Linux lets this process have them.
bool may_use_tiles() {
#if defined(__linux__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & (1u << 22)) || !(d & (1u << 24))) return false;
    constexpr int ask_permission = 0x1023, tile_data = 18;  // asm/prctl.h has them since 5.16
    return syscall(SYS_arch_prctl, ask_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif
constexpr Doors GENERIC = {
    "generic", &aioengine::kernels_generic, &aioengine::linear_generic, nullptr,
    &aioengine::norm_generic, &aioengine::rotary_generic};

const Doors* by_name(const std::string& name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq");
    const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
    static const bool has_tiles = has_bf16 && may_use_tiles();
    if ((name == "best" || name == "amx_bf16") && has_tiles) return &AMX_BF16;
    if ((name == "best" || name == "avx512_bf16") && has_bf16) return &AVX512_BF16;
    if ((name == "best" || name == "avx512") && has_avx512) return &AVX512;
    if ((name == "best" || name == "avx2") && has_avx2) return &AVX2;
#endif
    if (name == "best" || name == "generic") return &GENERIC;
    return nullptr;
}

std::atomic<const Doors*> chosen{by_name("best")};

// The instruction set in use, after taking that of `name` if this CPU has it; "" only tells.
std::string instruction_set(std::string name) {
    if (const Doors* found = name.empty() ? nullptr : by_name(name)) chosen = found;
    return chosen.load()->name;
}

// Places that weights are asked for in at once. Where cores fetch ahead within a page by themselves, as
// Intel's do (Sapphire Rapids), memory gives a third more with eight ends to go on from than where lines
// are asked for one after the other. AMD's (Zen 5) follow the one end further than that, and eight take a
// quarter from it (docs/log.md).
int64_t places_at_once() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") ? 8 : 1;
#else
    return 1;
#endif
}

// Large blocks of memory that were freed, for those who ask next. malloc gives back to the system what
// lies at the end of a heap, and then a step of many tokens waits for fresh pages again and again.
class Spare {
public:
    // `bytes`: as `rounded`. Small blocks are left to malloc, which keeps them.
    void* take(size_t bytes) {
        if (bytes >= LARGE) {
            const std::lock_guard<std::mutex> guard(mutex_);
            const auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& block) {
                return block.bytes == bytes;
            });
            if (found != blocks_.end()) {
                void* memory = found->memory;
                bytes_ -= bytes;
                blocks_.erase(found);
                return memory;
            }
        }
        void* memory = std::aligned_alloc(PAGE, bytes);
        STD_TORCH_CHECK(memory != nullptr, "out of memory");
        return memory;
    }

    void give(void* memory, size_t bytes) {
        if (bytes < LARGE) return std::free(memory);
        const std::lock_guard<std::mutex> guard(mutex_);
        blocks_.push_back({memory, bytes});
        bytes_ += bytes;
        while (bytes_ > MOST_BYTES) {  // the oldest goes
            std::free(blocks_.front().memory);
            bytes_ -= blocks_.front().bytes;
            blocks_.pop_front();
        }
    }

    static constexpr size_t LARGE = 1 << 18;

    // Sizes that blocks come in: four to each power of two.
    static size_t rounded(size_t bytes) {
        size_t step = PAGE;
        while (8 * step < bytes) step *= 2;
        return (bytes + step - 1) / step * step;
    }

private:
    static constexpr size_t PAGE = 4096, MOST_BYTES = 64 << 20;
    struct Block {
        void* memory;
        size_t bytes;
    };
    std::mutex mutex_;
    std::deque<Block> blocks_;
    size_t bytes_ = 0;
};

// Never destroyed: tensors may be freed when statics are gone.
Spare& spare() {
    static Spare& kept = *new Spare;
    return kept;
}

// Of a contiguous tensor.
std::vector<int64_t> strides_of(std::initializer_list<int64_t> sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes.begin()[i];
    return strides;
}

// In a contiguous tensor of the dtype of `like`.
size_t bytes_of(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = like.element_size();
    for (int64_t size : sizes) bytes *= static_cast<size_t>(size);
    return bytes;
}

// An uninitialised tensor of the dtype of `like`.
Tensor new_output(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = bytes_of(like, sizes);
    if (bytes < Spare::LARGE) return torch::stable::new_empty(like, sizes);
    bytes = Spare::rounded(bytes);
    return torch::stable::from_blob(
        spare().take(bytes), sizes, strides_of(sizes), like.device(), like.scalar_type(),
        [bytes](void* memory) { spare().give(memory, bytes); });
}

// What a thread wrote past the caches becomes visible to others before what it writes after this.
void finish_streaming() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

constexpr size_t HUGE_PAGE = 2 << 20;

// An uninitialised tensor for a weight, of whole huge pages as far as it goes.
Tensor new_weight(const Tensor& like, std::initializer_list<int64_t> sizes) {
    size_t bytes = bytes_of(like, sizes);
    if (bytes < HUGE_PAGE) return torch::stable::new_empty(like, sizes);
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void* memory = std::aligned_alloc(HUGE_PAGE, bytes);
    STD_TORCH_CHECK(memory != nullptr, "out of memory");
    return torch::stable::from_blob(
        memory, sizes, strides_of(sizes), like.device(), like.scalar_type(),
        [](void* data) { std::free(data); });
}

// Has the system move a weight that was written into huge pages, in its own time: all of it is read at
// every step, and few of its addresses have to be looked up then. Asked for before it is written, fresh
// ones may take a machine longer than all else of a start.
void gather_pages([[maybe_unused]] Tensor& weight) {
#if defined(MADV_HUGEPAGE)
    const size_t bytes = weight.numel() * weight.element_size() / HUGE_PAGE * HUGE_PAGE;
    if (bytes) madvise(weight.mutable_data_ptr(), bytes, MADV_HUGEPAGE);
#endif
}

// Runs `work(i, has_next, scratch)` for each i in [0, count) on torch's threads. Each goes through a part
// of its own, in order (`has_next`: i + 1 is likely to follow), so that what lies behind each other is
// read by one; who has done takes from the others' parts. Each has `num_floats` of scratch, aligned,
// which begin with 64 bytes of zeros.
template <class Work>
void share_out(int64_t count, int64_t num_floats, const Work& work) {
    struct alignas(64) Part {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const int64_t num_parts = std::min<int64_t>(count, torch::stable::get_num_threads());
    std::unique_ptr<Part[]> parts(new Part[num_parts]);
    for (int64_t i = 0; i < num_parts; ++i) {
        parts[i].next = i * count / num_parts;
        parts[i].end = (i + 1) * count / num_parts;
    }
    torch::stable::parallel_for(0, num_parts, 1, [&](int64_t begin, int64_t end) {
        const size_t bytes = Spare::rounded(num_floats * sizeof(float));
        const auto give_back = [bytes](void* memory) { spare().give(memory, bytes); };
        std::unique_ptr<void, decltype(give_back)> memory(spare().take(bytes), give_back);
        std::memset(memory.get(), 0, std::min<size_t>(bytes, 64));
        for (int64_t thread = begin; thread < end; ++thread) {
            for (int64_t offset = 0; offset < num_parts; ++offset) {
                Part& part = parts[(thread + offset) % num_parts];
                for (int64_t i = part.next++; i < part.end; i = part.next++)
                    work(i, i + 1 < part.end, static_cast<float*>(memory.get()));
            }
        }
        finish_streaming();
    });
}

void check_close(const Tensor& tensor, int64_t dims, const char* name) {
    STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
    STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions");
    STD_TORCH_CHECK(
        tensor.stride(dims - 1) == 1 || tensor.size(dims - 1) <= 1,
        name,
        " must lie close together in its last dimension");
}

const int32_t* read_ints(const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(
        tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Int,
        name,
        " must be contiguous int32 on the CPU");
    return static_cast<const int32_t*>(tensor.const_data_ptr());
}

const float* read_floats(const std::optional<Tensor>& tensor, int64_t dims, const char* name) {
    if (!tensor) return nullptr;
    STD_TORCH_CHECK(
        tensor->is_cpu() && tensor->is_contiguous() && tensor->dim() == dims &&
            tensor->scalar_type() == ScalarType::Float,
        name,
        " must be contiguous float32 on the CPU");
    return static_cast<const float*>(tensor->const_data_ptr());
}

void copy_strides(const Tensor& tensor, int64_t count, int64_t* strides) {
    for (int64_t i = 0; i < count; ++i) strides[i] = tensor.stride(i);
}

// Copies new rows [R, heads, dim] into their slots of a cache.
void write_rows(
    const Tensor& rows, Tensor& cache, const int32_t* blocks, const int32_t* offsets,
    const char* name) {
    check_close(rows, 3, name);
    const int64_t count = rows.size(0), heads = rows.size(1), dim = rows.size(2);
    STD_TORCH_CHECK(
        rows.scalar_type() == cache.scalar_type() && cache.size(2) == heads && cache.size(3) == dim,
        name,
        " must be of its cache's dtype and shape");
    const int64_t size = rows.element_size();
    const char* from = static_cast<const char*>(rows.const_data_ptr());
    char* to = static_cast<char*>(cache.mutable_data_ptr());
    int64_t source[2], target[3];
    copy_strides(rows, 2, source);
    copy_strides(cache, 3, target);
    const bool is_whole = (source[1] == dim && target[2] == dim) || heads == 1;
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, heads * dim * size));
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const char* row = from + i * source[0] * size;
            char* slot = to + (blocks[i] * target[0] + offsets[i] * target[1]) * size;
            if (is_whole) {
                std::memcpy(slot, row, heads * dim * size);
                continue;
            }
            for (int64_t h = 0; h < heads; ++h)
                std::memcpy(slot + h * target[2] * size, row + h * source[1] * size, dim * size);
        }
    });
}

void write_kv(
    const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
    const Tensor& slot_blocks, const Tensor& slot_offsets) {
    const int32_t* blocks = read_ints(slot_blocks, "slot_blocks");
    const int32_t* offsets = read_ints(slot_offsets, "slot_offsets");
    for (const Tensor* slots : {&slot_blocks, &slot_offsets})
        STD_TORCH_CHECK(
            slots->numel() == key.size(0) && slots->numel() == value.size(0),
            "there must be a slot for each row");
    write_rows(key, key_cache, blocks, offsets, "key");
    write_rows(value, value_cache, blocks, offsets, "value");
}

Number number_of(const Tensor& tensor, const Kernels& kernels) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float:
            return Number::Float32;
        case ScalarType::BFloat16:
            return Number::BFloat16;
        case ScalarType::Half:
            if (kernels.has_float16) return Number::Float16;
            break;
        default:
            break;
    }
    STD_TORCH_CHECK(false, "the kernels of this CPU are for float32, bfloat16 and (with F16C) float16");
}

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

// A step's work: pieces, the longest first, and what has to be merged afterwards.
struct Work {
    std::vector<Piece> pieces;
    std::vector<Parts> parts;
    int64_t num_partial = 0;  // floats that partial results take
};

Work cut(const Attention& a, int64_t num_sequences, int64_t max_rows) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t max_tokens = std::max<int64_t>(1, max_rows / group);
    Work work;
    int64_t total = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
        const int64_t num_new = a.query_start[s + 1] - a.query_start[s];
        for (int64_t first = 0; first < num_new; first += max_tokens) {
            const int64_t last = std::min(first + max_tokens, num_new);
            const auto [begin, end] = keys_seen(a, a.seq_lens[s], num_new, first, last);
            for (int64_t h = 0; h < a.kv_heads; ++h)
                work.pieces.push_back({s, h, first, last - first, begin, end, -1});
            total += a.kv_heads * (last - first) * (end - begin);
        }
    }
    // A piece that would keep one thread busy while the others wait is split by keys.
    const int64_t num_threads = torch::stable::get_num_threads();
    const int64_t fair = std::max<int64_t>(1, total / std::max<int64_t>(1, 4 * num_threads));
    std::vector<Piece> split;
    if (num_threads > 1 && work.pieces.size() < static_cast<size_t>(4 * num_threads)) {
        for (Piece& piece : work.pieces) {
            const int64_t keys = piece.key_end - piece.key_begin;
            const int64_t first = piece.key_begin / SEGMENT;
            const int64_t segments = (piece.key_end - 1) / SEGMENT + 1 - first;
            const int64_t count = std::min((piece.num_tokens * keys + fair - 1) / fair, segments);
            if (count < 2) {
                split.push_back(piece);
                continue;
            }
            const int64_t size = piece.num_tokens * group * (2 + a.value_dim);
            piece.partial = work.num_partial;
            work.parts.push_back({piece, segments});
            for (int64_t i = 0; i < count; ++i) {
                const int64_t from = segments * i / count, to = segments * (i + 1) / count;
                Piece part = piece;
                part.key_begin = std::max(piece.key_begin, (first + from) * SEGMENT);
                part.key_end = std::min(piece.key_end, (first + to) * SEGMENT);
                part.partial = work.num_partial + from * size;
                split.push_back(part);
            }
            work.num_partial += segments * size;
        }
        work.pieces = std::move(split);
    }
    std::stable_sort(work.pieces.begin(), work.pieces.end(), [](const Piece& x, const Piece& y) {
        return x.num_tokens * (x.key_end - x.key_begin) > y.num_tokens * (y.key_end - y.key_begin);
    });
    return work;
}

Tensor attend(
    const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
    Tensor& key_cache, Tensor& value_cache, const Tensor& slot_blocks, const Tensor& slot_offsets,
    const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_table,
    const std::optional<Tensor>& block_ids, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& distance_bias, double scale, double softcap, int64_t window,
    bool is_causal, bool blocks_in_window) {
    const Kernels& kernels = *chosen.load()->attention;
    check_close(query, 3, "query");
    check_close(key_cache, 4, "key_cache");
    check_close(value_cache, 4, "value_cache");
    STD_TORCH_CHECK(
        key_cache.scalar_type() == query.scalar_type() &&
            value_cache.scalar_type() == query.scalar_type(),
        "query and caches must be of one dtype");
    const int64_t num_sequences = seq_lens.numel();
    STD_TORCH_CHECK(query_start.numel() == num_sequences + 1, "query_start must have S + 1 entries");
    STD_TORCH_CHECK(block_table.dim() == 2, "block_table must have 2 dimensions");
    if (key && value) write_kv(*key, *value, key_cache, value_cache, slot_blocks, slot_offsets);
    Attention a{};
    a.number = number_of(query, kernels);
    a.query = query.const_data_ptr();
    a.key_cache = key_cache.const_data_ptr();
    a.value_cache = value_cache.const_data_ptr();
    copy_strides(query, 2, a.query_strides);
    copy_strides(key_cache, 3, a.key_strides);
    copy_strides(value_cache, 3, a.value_strides);
    a.heads = query.size(1);
    a.kv_heads = key_cache.size(2);
    a.key_dim = key_cache.size(3);
    a.value_dim = value_cache.size(3);
    a.block_size = key_cache.size(1);
    STD_TORCH_CHECK(
        a.key_dim == query.size(2) && a.kv_heads > 0 && a.heads % a.kv_heads == 0 &&
            value_cache.size(1) == a.block_size && value_cache.size(2) == a.kv_heads,
        "query, key_cache and value_cache do not fit each other");
    a.query_start = read_ints(query_start, "query_start");
    a.seq_lens = read_ints(seq_lens, "seq_lens");
    a.block_table = read_ints(block_table, "block_table");
    a.table_width = block_table.size(1);
    a.block_ids = block_ids ? read_ints(*block_ids, "block_ids") : nullptr;
    a.sinks = read_floats(sinks, 1, "sinks");
    a.distance_bias = read_floats(distance_bias, 2, "distance_bias");
    a.num_distances = distance_bias ? distance_bias->size(1) : 0;
    a.scale = static_cast<float>(scale);
    a.softcap = static_cast<float>(softcap);
    a.window = window;
    a.is_causal = is_causal;
    a.blocks_in_window = blocks_in_window;
    Tensor out = new_output(query, {query.size(0), a.heads, a.value_dim});
    a.out = out.mutable_data_ptr();
    const int64_t max_rows = kernels.max_rows(a);
    const Work work = cut(a, num_sequences, max_rows);
    const std::unique_ptr<float[]> partial(new float[work.num_partial]);
    a.partial = partial.get();
    const int64_t group = a.heads / a.kv_heads;
    const int64_t num_floats = kernels.scratch_floats(a, std::max(max_rows, group));
    share_out(work.pieces.size(), num_floats, [&](int64_t i, bool, float* scratch) {
        kernels.attend(a, work.pieces[i], scratch);
    });
    share_out(work.parts.size(), num_floats, [&](int64_t i, bool, float* scratch) {
        kernels.merge(a, work.parts[i], scratch);
    });
    return out;
}

Weights weights_of(const Tensor& packed, const Kernels& kernels) {
    if (packed.scalar_type() == ScalarType::Char) return Weights::Int8;
    const Number number = number_of(packed, kernels);
    if (number == Number::Float32) return Weights::Float32;
    return number == Number::BFloat16 ? Weights::BFloat16 : Weights::Float16;
}

// Numbers of one size from rows [outputs, depth] to panels; what there is no row for becomes 0.
template <class T>
void copy_to_panels(const T* from, int64_t stride, int64_t outputs, int64_t depth, T* to) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t count = std::min<int64_t>(PANEL, outputs - panel * PANEL);
            const T* rows = from + panel * PANEL * stride;
            T* target = to + panel * depth * PANEL;
            if (count < PANEL) std::fill(target, target + depth * PANEL, T{});
            // A few columns at a time, row by row: rows are often a power of two apart, and a cache
            // would not hold a line of each.
            for (int64_t first = 0; first < depth; first += PANEL) {
                const int64_t last = std::min(first + PANEL, depth);
                for (int64_t row = 0; row < count; ++row)
                    for (int64_t k = first; k < last; ++k)
                        target[k * PANEL + row] = rows[row * stride + k];
            }
        }
    });
}

// A weight [outputs, depth] as [panels, depth, PANEL]; where the CPU multiplies pairs, one of bfloat16
// as [panels, depth / 2, PANEL, 2].
Tensor pack_panels(const Tensor& weight) {
    check_close(weight, 2, "weight");
    const int64_t outputs = weight.size(0), depth = weight.size(1);
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    const bool is_even = depth % PAIRED_DEPTH == 0 && weight.stride(0) % 2 == 0;
    if (weight.scalar_type() == ScalarType::BFloat16 && is_even && chosen.load()->pairs) {
        struct Pair {
            uint16_t first, second;
        };
        Tensor pairs = new_weight(weight, {panels, depth / 2, PANEL, 2});
        copy_to_panels(
            static_cast<const Pair*>(weight.const_data_ptr()), weight.stride(0) / 2, outputs,
            depth / 2, static_cast<Pair*>(pairs.mutable_data_ptr()));
        gather_pages(pairs);
        return pairs;
    }
    Tensor packed = new_weight(weight, {panels, depth, PANEL});
    const void* from = weight.const_data_ptr();
    void* to = packed.mutable_data_ptr();
    const int64_t stride = weight.stride(0);
    switch (weight.element_size()) {
        case 1:
            copy_to_panels((const uint8_t*)from, stride, outputs, depth, (uint8_t*)to);
            break;
        case 2:
            copy_to_panels((const uint16_t*)from, stride, outputs, depth, (uint16_t*)to);
            break;
        case 4:
            copy_to_panels((const uint32_t*)from, stride, outputs, depth, (uint32_t*)to);
            break;
        default:
            STD_TORCH_CHECK(false, "a weight's numbers must take 1, 2 or 4 bytes");
    }
    gather_pages(packed);
    return packed;
}

// A weight as `pack_panels` has made it, of which `outputs` are not padding, or where bfloat16 is
// multiplied as such, a plain one [outputs, depth]; and what goes with it.
struct Weight {
    const Tensor& packed;
    const std::optional<Tensor>&scales, &bias;
    int64_t outputs;
};

// x [rows, depth] times a weight. Where it is gated, the first half of the outputs are gates of the
// second, and there are half as many. `residual`: null, or is added to the outputs once rounded.
Tensor multiply(
    const Tensor& x, const Weight& weight, int64_t activation, bool is_gated,
    const Tensor* residual) {
    const auto& [packed, scales, bias, outputs] = weight;
    const Doors& doors = *chosen.load();
    check_close(x, 2, "x");
    const bool is_plain = packed.dim() == 2, is_paired = is_plain || packed.dim() == 4;
    check_close(packed, is_plain ? 2 : (is_paired ? 4 : 3), "packed");
    STD_TORCH_CHECK(
        packed.is_contiguous() && (is_plain || packed.size(2) == PANEL), "packed is not packed");
    const int64_t panels_of_all = is_plain ? (outputs + PANEL - 1) / PANEL : packed.size(0);
    STD_TORCH_CHECK(
        packed.size(1) * (is_paired && !is_plain ? 2 : 1) == x.size(1) &&
            outputs <= panels_of_all * PANEL && outputs > (panels_of_all - 1) * PANEL &&
            (!is_plain || packed.size(0) == outputs),
        "x and packed do not fit each other");
    STD_TORCH_CHECK(
        !is_plain || (doors.pairs && !is_gated && packed.size(1) % PAIRED_DEPTH == 0 &&
                      packed.scalar_type() == ScalarType::BFloat16),
        "plain weights are of bfloat16, where the CPU multiplies it");
    STD_TORCH_CHECK(
        !is_paired || (doors.pairs && x.scalar_type() == ScalarType::BFloat16),
        "weights in pairs are multiplied with bfloat16, where the CPU has instructions for them");
    const LinearKernels& kernels = is_paired ? *doors.pairs : *doors.linear;
    Linear a{};
    a.number = number_of(x, *doors.attention);
    a.weights = weights_of(packed, *doors.attention);
    a.x = x.const_data_ptr();
    a.stride = x.stride(0);
    a.packed = packed.const_data_ptr();
    a.is_plain = is_plain;
    a.scales = read_floats(scales, 1, "scales");
    a.bias = read_floats(bias, 1, "bias");
    for (const auto* each : {&scales, &bias})
        STD_TORCH_CHECK(!*each || (*each)->numel() == outputs, "scales and bias are of outputs");
    a.rows = x.size(0);
    a.depth = x.size(1);
    a.outputs = outputs;
    STD_TORCH_CHECK(
        0 <= activation && activation <= static_cast<int64_t>(aioengine::Activation::Gelu),
        "unknown activation");
    a.activation = static_cast<aioengine::Activation>(activation);
    STD_TORCH_CHECK(!is_gated || outputs % (2 * PANEL) == 0, "gates must fill whole panels");
    a.gate_panels = is_gated ? panels_of_all / 2 : 0;
    a.places_at_once = places_at_once();
    Tensor out = new_output(x, {a.rows, is_gated ? outputs / 2 : outputs});
    a.out = out.mutable_data_ptr();
    if (residual) {
        check_close(*residual, 2, "residual");
        STD_TORCH_CHECK(
            residual->is_contiguous() && residual->scalar_type() == x.scalar_type() &&
                residual->size(0) == out.size(0) && residual->size(1) == out.size(1),
            "residual must be of the shape and dtype of the outputs");
        a.residual = residual->const_data_ptr();
    }
    a.input = static_cast<const float*>(a.x);
    a.input_stride = a.stride;
    std::unique_ptr<float[]> floats;
    if (a.number != Number::Float32 && !is_paired) {
        floats.reset(new float[a.rows * a.depth]);
        a.input = floats.get();
        a.input_stride = a.depth;
        const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, a.depth));
        torch::stable::parallel_for(0, a.rows, grain, [&](int64_t first, int64_t last) {
            kernels.widen(a, first, last, floats.get());
        });
    }
    // Panel by panel within some rows: these stay in a core's cache, and weights are read once.
    const int64_t panels = is_gated ? a.gate_panels : panels_of_all;
    // All parts but the last are equal and a multiple of the unit, and as few as may be.
    const int64_t max_rows = kernels.max_rows(a.depth), unit = kernels.unit_rows;
    const int64_t even = a.rows / (a.rows / (max_rows + 1) + 1);
    const int64_t rows = std::min(max_rows, (even / unit + 1) * unit);
    const int64_t parts = (a.rows + rows - 1) / rows;
    share_out(panels * parts, kernels.scratch_floats(a), [&](int64_t i, bool has_next, float* scratch) {
        const int64_t first = i / panels * rows, last = std::min(first + rows, a.rows);
        kernels.multiply(a, {i % panels, first, last, has_next && (i + 1) % panels != 0}, scratch);
    });
    return out;
}

Tensor linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& bias, int64_t outputs, int64_t activation, bool is_gated) {
    return multiply(x, {packed, scales, bias, outputs}, activation, is_gated, nullptr);
}

// x [rows, dim] over the root of its rows' mean square plus epsilon, times weight [dim].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
    const Doors& doors = *chosen.load();
    check_close(x, 2, "x");
    check_close(weight, 1, "weight");
    STD_TORCH_CHECK(
        weight.size(0) == x.size(1) && weight.scalar_type() == x.scalar_type(),
        "weight must be of the dtype and width of x");
    Norm a{};
    a.number = number_of(x, *doors.attention);
    a.x = x.const_data_ptr();
    a.stride = x.stride(0);
    a.weight = weight.const_data_ptr();
    a.dim = x.size(1);
    a.epsilon = static_cast<float>(epsilon);
    Tensor out = new_output(x, {x.size(0), a.dim});
    a.out = out.mutable_data_ptr();
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, a.dim));
    torch::stable::parallel_for(0, x.size(0), grain, [&](int64_t first, int64_t last) {
        (*doors.norm)(a, first, last);
    });
    return out;
}

// query [T, Hq, D] and key [T, Hkv, D], turned by cos and sin [T, D].
std::tuple<Tensor, Tensor> rotate(
    const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin) {
    const Doors& doors = *chosen.load();
    check_close(cos, 2, "cos");
    check_close(sin, 2, "sin");
    const int64_t tokens = cos.size(0), dim = cos.size(1);
    const auto describe = [&](const Tensor& x, const char* name) {
        check_close(x, 3, name);
        STD_TORCH_CHECK(
            x.size(0) == tokens && x.size(2) == dim && x.scalar_type() == cos.scalar_type(),
            name,
            " must be of the dtype, the tokens and the width of cos");
        Rotary a{};
        a.number = number_of(x, *doors.attention);
        a.x = x.const_data_ptr();
        copy_strides(x, 2, a.strides);
        a.heads = x.size(1);
        a.dim = dim;
        a.cos = cos.const_data_ptr();
        a.sin = sin.const_data_ptr();
        a.cos_stride = cos.stride(0);
        a.sin_stride = sin.stride(0);
        return a;
    };
    STD_TORCH_CHECK(dim % 2 == 0, "cos must have an even width");
    STD_TORCH_CHECK(
        sin.size(0) == tokens && sin.size(1) == dim && sin.scalar_type() == cos.scalar_type(),
        "sin must be of the dtype and shape of cos");
    Rotary queries = describe(query, "query"), keys = describe(key, "key");
    Tensor turned_query = new_output(query, {tokens, queries.heads, dim});
    Tensor turned_key = new_output(key, {tokens, keys.heads, dim});
    queries.out = turned_query.mutable_data_ptr();
    keys.out = turned_key.mutable_data_ptr();
    const int64_t width = std::max<int64_t>(1, (queries.heads + keys.heads) * dim);
    const int64_t grain = std::max<int64_t>(1, 32768 / width);
    torch::stable::parallel_for(0, tokens, grain, [&](int64_t first, int64_t last) {
        (*doors.rotary)(queries, first, last);
        (*doors.rotary)(keys, first, last);
    });
    return {turned_query, turned_key};
}

// A decoder layer up to its attention: x [T, hidden], normalized, times one weight for queries, keys and
// values, the first two turned. Each [T, heads, D]; values lie where they were written.
std::tuple<Tensor, Tensor, Tensor> project(
    const Tensor& x, const Tensor& norm, double epsilon, const Tensor& packed,
    const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t heads,
    int64_t kv_heads, const Tensor& cos, const Tensor& sin) {
    check_close(cos, 2, "cos");
    const int64_t tokens = x.size(0), dim = cos.size(1);
    const Weight weight{packed, scales, bias, (heads + 2 * kv_heads) * dim};
    const Tensor all = multiply(rms_norm(x, norm, epsilon), weight, 0, false, nullptr);
    const auto part = [&](int64_t first, int64_t count) {
        Tensor whole = all;
        return torch::stable::view(
            torch::stable::narrow(whole, 1, first * dim, count * dim), {tokens, count, dim});
    };
    auto [query, key] = rotate(part(0, heads), part(heads, kv_heads), cos, sin);
    return {query, key, part(heads + kv_heads, kv_heads)};
}

// A decoder layer after its attention: x [T, hidden] and what was attended to, times `out`, are the new
// x; that and the feed-forward layer of it, normalized, are the result.
Tensor feed(
    const Tensor& x, const Tensor& attended, const Tensor& out,
    const std::optional<Tensor>& out_scales, const std::optional<Tensor>& out_bias,
    const Tensor& norm, double epsilon, const Tensor& up, const std::optional<Tensor>& up_scales,
    const std::optional<Tensor>& up_bias, int64_t up_outputs, int64_t activation, bool is_gated,
    const Tensor& down, const std::optional<Tensor>& down_scales,
    const std::optional<Tensor>& down_bias) {
    const int64_t hidden = x.size(1);
    const Tensor sum = multiply(attended, {out, out_scales, out_bias, hidden}, 0, false, &x);
    const Tensor inner = multiply(
        rms_norm(sum, norm, epsilon), {up, up_scales, up_bias, up_outputs}, activation, is_gated,
        nullptr);
    return multiply(inner, {down, down_scales, down_bias, hidden}, 0, false, &sum);
}

// What `run_layers` takes of each layer: see `UsualLayer` in kernels/cpu/fused_layer.py.
constexpr int64_t LAYER_TENSORS = 14, LAYER_SIZES = 6, LAYER_NUMBERS = 4;

// Decoder layers one after the other, one for each pair of caches: x [T, hidden], `project`, attention,
// `feed`, and so on. One operator, as a layer of few tokens takes less than a millisecond, and leaves
// nothing of its caller in the caches.
Tensor run_layers(
    const Tensor& x, const Tensor& cos, const Tensor& sin, std::vector<Tensor> tensors,
    std::vector<int64_t> sizes, std::vector<double> numbers, std::vector<Tensor> caches,
    const Tensor& slot_blocks, const Tensor& slot_offsets, const Tensor& query_start,
    const Tensor& seq_lens, const Tensor& block_table, const std::optional<Tensor>& block_ids,
    bool blocks_in_window) {
    const size_t count = caches.size() / 2, layers = numbers.size() / LAYER_NUMBERS;
    STD_TORCH_CHECK(
        caches.size() == 2 * count && count <= layers && numbers.size() == LAYER_NUMBERS * layers &&
            tensors.size() == LAYER_TENSORS * layers && sizes.size() == LAYER_SIZES * layers,
        "lists must have the same number of layers, one for each pair of caches at least");
    Tensor found = x;
    for (size_t i = 0; i < count; ++i) {
        Tensor* t = tensors.data() + LAYER_TENSORS * i;
        const int64_t* n = sizes.data() + LAYER_SIZES * i;
        const double* f = numbers.data() + LAYER_NUMBERS * i;
        const auto maybe = [&](int64_t at) {
            return t[at].numel() ? std::optional<Tensor>(t[at]) : std::nullopt;
        };
        const auto [query, key, value] =
            project(found, t[0], f[0], t[1], maybe(2), maybe(3), n[0], n[1], cos, sin);
        Tensor attended = attend(
            query, key, value, caches[2 * i], caches[2 * i + 1], slot_blocks, slot_offsets,
            query_start, seq_lens, block_table, block_ids, std::nullopt, std::nullopt, f[2], f[3],
            n[5], true, blocks_in_window);
        attended = torch::stable::view(attended, {attended.size(0), attended.size(1) * attended.size(2)});
        found = feed(
            found, attended, t[4], maybe(5), maybe(6), t[7], f[1], t[8], maybe(9), maybe(10), n[2],
            n[3], n[4] != 0, t[11], maybe(12), maybe(13));
    }
    return found;
}

}  // namespace

STABLE_TORCH_LIBRARY(aioengine_cpu, library) {
    library.def("instruction_set(str name) -> str");
    library.def(
        "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_blocks, Tensor slot_offsets) -> ()");
    library.def(
        "attend(Tensor query, Tensor? key, Tensor? value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_blocks, Tensor slot_offsets, Tensor query_start, "
        "Tensor seq_lens, Tensor block_table, Tensor? block_ids, Tensor? sinks, "
        "Tensor? distance_bias, float scale, float softcap, int window, bool is_causal, "
        "bool blocks_in_window) -> Tensor");
    library.def("pack_panels(Tensor weight) -> Tensor");
    library.def(
        "linear(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int outputs, "
        "int activation=0, bool is_gated=False) -> Tensor");
    library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
    library.def("rotate(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
    library.def(
        "project(Tensor x, Tensor norm, float epsilon, Tensor packed, Tensor? scales, Tensor? bias, "
        "int heads, int kv_heads, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)");
    library.def(
        "feed(Tensor x, Tensor attended, Tensor out, Tensor? out_scales, Tensor? out_bias, "
        "Tensor norm, float epsilon, Tensor up, Tensor? up_scales, Tensor? up_bias, int up_outputs, "
        "int activation, bool is_gated, Tensor down, Tensor? down_scales, Tensor? down_bias) "
        "-> Tensor");
    library.def(
        "run_layers(Tensor x, Tensor cos, Tensor sin, Tensor[] tensors, int[] sizes, float[] numbers, "
        "Tensor(a!)[] caches, Tensor slot_blocks, Tensor slot_offsets, Tensor query_start, "
        "Tensor seq_lens, Tensor block_table, Tensor? block_ids, bool blocks_in_window) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(aioengine_cpu, CPU, library) {
    library.impl("write_kv", TORCH_BOX(&write_kv));
    library.impl("attend", TORCH_BOX(&attend));
    library.impl("pack_panels", TORCH_BOX(&pack_panels));
    library.impl("linear", TORCH_BOX(&linear));
    library.impl("rms_norm", TORCH_BOX(&rms_norm));
    library.impl("rotate", TORCH_BOX(&rotate));
    library.impl("project", TORCH_BOX(&project));
    library.impl("feed", TORCH_BOX(&feed));
    library.impl("run_layers", TORCH_BOX(&run_layers));
}

STABLE_TORCH_LIBRARY_IMPL(aioengine_cpu, CompositeExplicitAutograd, library) {
    library.impl("instruction_set", TORCH_BOX(&instruction_set));
}
