// The operators as PyTorch sees them, on its stable ABI: one build serves every Python and every
// torch from 2.11.

#include <torch/csrc/stable/library.h>

#include "dispatch.h"
#include "memory.h"
#include "ops.h"
#include "processors.h"

STABLE_TORCH_LIBRARY(aioengine_cpu, library) {
    library.def("instruction_set(str name) -> str");
    library.def("usable_processors(str groups, str own) -> int");
    library.def("end_load() -> ()");
    library.def("end_team() -> ()");
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
        "pack_groups(Tensor numbers, Tensor scales, Tensor? lowest, int bits, int group, "
        "bool has_full_inputs, Tensor? levels=None) -> Tensor");
    library.def("read_outputs(Tensor packed, Tensor? scales, int outputs, Tensor rows) -> Tensor");
    library.def(
        "linear(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int outputs, "
        "int activation=0, bool is_gated=False) -> Tensor");
    library.def(
        "expert_linear(Tensor x, Tensor ends, Tensor packed, Tensor? scales, Tensor? bias, int outputs, "
        "int activation=0, bool is_gated=False, float limit=0., float shift=0.) -> Tensor");
    library.def("routed_feed(Tensor x, Tensor[] tensors, int[] sizes, float[] numbers) -> Tensor");
    library.def(
        "expert_feed(Tensor x, Tensor chosen, Tensor shares, Tensor[] tensors, int[] sizes, float[] numbers) "
        "-> Tensor");
    library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
    library.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float epsilon) -> Tensor");
    library.def("argmax(Tensor x) -> Tensor");
    library.def("cap(Tensor x, float cap) -> Tensor");
    library.def("draw(Tensor(a!) logits, Tensor choices, Tensor? banned=None, Tensor? num_banned=None) -> Tensor");
    library.def("widen(Tensor x) -> Tensor");
    library.def("rotate(Tensor query, Tensor key, Tensor cos, Tensor sin, bool in_pairs=False) -> (Tensor, Tensor)");
    library.def(
        "pack_plan(Tensor[] tensors, int[] sizes, float[] numbers, Tensor? norm, Tensor? bias, "
        "float epsilon) -> Tensor");
    library.def(
        "project(Tensor plan, int index, Tensor x, Tensor[] angles) -> (Tensor, Tensor, Tensor)");
    library.def("project_cross(Tensor plan, int index, Tensor x) -> Tensor");
    library.def("project_memory(Tensor plan, int index, Tensor memory) -> (Tensor, Tensor)");
    library.def("add_crossed(Tensor plan, int index, Tensor x, Tensor attended) -> Tensor");
    library.def("add_attended(Tensor plan, int index, Tensor x, Tensor attended) -> Tensor");
    library.def("add_feed(Tensor plan, int index, Tensor x) -> Tensor");
    library.def("finish(Tensor plan, Tensor x, Tensor? wanted, int tokens) -> Tensor");
    library.def(
        "encode_layer(Tensor plan, Tensor x, Tensor[] angles, int[] lengths, bool by_pages) -> Tensor");
    library.def(
        "run_plan(Tensor plan, int first, Tensor x, Tensor[] angles, Tensor(a!)[] caches, "
        "Tensor[] places, int[] blocks_in_window, Tensor[] rows, Tensor? wanted, Tensor? memory) -> Tensor");
    library.def(
        "pack_decoder(Tensor plan, Tensor table, Tensor? factors, int vocab, float scale, Tensor? positions, Tensor head, "
        "Tensor? scales, Tensor? bias, int outputs, float cap, Tensor like, Tensor(a!)[] caches, Tensor[] angles, int[] is_cross, "
        "Tensor steps, Tensor choices, "
        "Tensor(b!) results, Tensor(c!) last, int event) -> Tensor");
    library.def("decode(Tensor(a!) decoder, int patience_us) -> int");
    library.def("decoder_logits(Tensor decoder, int count) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(aioengine_cpu, CPU, library) {
    library.impl("write_kv", TORCH_BOX(&aioengine::write_kv));
    library.impl("attend", TORCH_BOX(&aioengine::attend));
    library.impl("pack_panels", TORCH_BOX(&aioengine::pack_panels));
    library.impl("pack_groups", TORCH_BOX(&aioengine::pack_groups));
    library.impl("read_outputs", TORCH_BOX(&aioengine::read_outputs));
    library.impl("linear", TORCH_BOX(&aioengine::linear));
    library.impl("expert_linear", TORCH_BOX(&aioengine::expert_linear));
    library.impl("routed_feed", TORCH_BOX(&aioengine::routed_feed));
    library.impl("expert_feed", TORCH_BOX(&aioengine::expert_feed));
    library.impl("rms_norm", TORCH_BOX(&aioengine::rms_norm));
    library.impl("layer_norm", TORCH_BOX(&aioengine::layer_norm));
    library.impl("argmax", TORCH_BOX(&aioengine::argmax));
    library.impl("cap", TORCH_BOX(&aioengine::cap));
    library.impl("draw", TORCH_BOX(&aioengine::draw));
    library.impl("widen", TORCH_BOX(&aioengine::widen));
    library.impl("rotate", TORCH_BOX(&aioengine::rotate));
    library.impl("pack_plan", TORCH_BOX(&aioengine::pack_plan));
    library.impl("project", TORCH_BOX(&aioengine::project));
    library.impl("project_cross", TORCH_BOX(&aioengine::project_cross));
    library.impl("project_memory", TORCH_BOX(&aioengine::project_memory));
    library.impl("add_crossed", TORCH_BOX(&aioengine::add_crossed));
    library.impl("add_attended", TORCH_BOX(&aioengine::add_attended));
    library.impl("add_feed", TORCH_BOX(&aioengine::add_feed));
    library.impl("finish", TORCH_BOX(&aioengine::finish));
    library.impl("encode_layer", TORCH_BOX(&aioengine::encode_layer));
    library.impl("run_plan", TORCH_BOX(&aioengine::run_plan));
    library.impl("pack_decoder", TORCH_BOX(&aioengine::pack_decoder));
    library.impl("decode", TORCH_BOX(&aioengine::decode));
    library.impl("decoder_logits", TORCH_BOX(&aioengine::decoder_logits));
}

STABLE_TORCH_LIBRARY_IMPL(aioengine_cpu, CompositeExplicitAutograd, library) {
    library.impl("instruction_set", TORCH_BOX(&aioengine::instruction_set));
    library.impl("usable_processors", TORCH_BOX(&aioengine::usable_processors));
    library.impl("end_load", TORCH_BOX(&aioengine::end_load));
    library.impl("end_team", TORCH_BOX(&aioengine::end_team));
}
