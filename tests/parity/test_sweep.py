"""A sample of the sweep over transformers' architectures, and its rules."""

from __future__ import annotations

import pytest
import transformers as hf

from tests.parity.shrink import shrink
from tests.parity.sweep import MAPPINGS, architectures, judge, table
from tests.support.grids import rest_is_slow
from tests.support.versions import skip_up_to

SAMPLE = {
    "SmolLM3ForCausalLM": ("equal", "text, 4 prompts"),
    # By its cache: what attends, and what chooses what is attended to.
    "DeepseekV32ForCausalLM": ("equal", "text, 4 prompts"),
    "GPTNeoForCausalLM": ("equal", "text, 4 prompts"),
    # A head of its own, and positions that begin behind padding's.
    "RobertaForCausalLM": ("equal", "text, 4 prompts"),
    "QianfanOCRForConditionalGeneration": ("equal", "image, 6 prompts, 6 answers"),
    "GraniteDoclingForConditionalGeneration": ("equal", "image, 6 prompts"),
    # A token's kind chooses its experts.
    "Ernie4_5_VLMoeForConditionalGeneration": ("equal", "image, 6 prompts, 6 answers"),
    # A state of a kind that no cache holds.
    "RwkvForCausalLM": ("refused", "keeps a state between calls that the engine does not hold"),
    # A text begins with what its processor writes; images are padded to each other's size.
    "Emu3ForConditionalGeneration": ("equal", "image, 5 prompts, 5 answers"),
    # Markers around an image have embeddings of their own.
    "Ovis2ForConditionalGeneration": ("equal", "image, 6 prompts"),
}
USUAL = {
    "SmolLM3ForCausalLM",
    "QianfanOCRForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
}
"""Those with nothing that the others lack: `make slow` runs them."""
BY_CACHE = ("DeepseekV32ForCausalLM", "GPTNeoForCausalLM")


@pytest.mark.parametrize("architecture", rest_is_slow(SAMPLE, SAMPLE.keys() - USUAL))
def test_a_sample(architecture: str) -> None:
    skip_up_to(5, 22, "the sweep is of the newest transformers")
    verdict, reason = SAMPLE[architecture]
    row = judge(architecture)
    assert row.verdict == verdict, row.reason
    assert reason in row.reason
    assert (row.way == "by cache") == (architecture in BY_CACHE)
    assert bool(row.way) == (verdict == "equal")


def test_every_mapping_has_architectures() -> None:
    assert all(len(architectures(mapping)) > 10 for mapping in MAPPINGS)


def test_a_shrunk_config_keeps_what_is_no_size() -> None:
    small = shrink(hf.Qwen2ForCausalLM, hf.Qwen2Config(rope_parameters=ROPE), 400, {})
    assert (small.hidden_size, small.num_hidden_layers, small.vocab_size) == (64, 3, 400)
    assert small.rope_parameters["rope_theta"] == 7.0
    assert small.hidden_act == hf.Qwen2Config().hidden_act


ROPE = {"rope_type": "default", "rope_theta": 7.0}


def test_a_table() -> None:
    row = {"architecture": "A", "verdict": "refused", "reason": "x | y", "mappings": ["causal"]}
    assert "| causal | 0 | 1 | 0 | 0 |" in table([row])
    assert "| `A` | causal | refused | x \\| y |" in table([row])
