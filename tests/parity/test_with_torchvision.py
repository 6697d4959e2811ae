"""Architectures whose processors need torchvision, and some that take it where it is.

`make torchvision-test` has it beside a CPU build of torch.
"""

from __future__ import annotations

import pytest
from transformers.utils import is_torchvision_available

from tests.parity.sweep import judge
from tests.support.versions import skip_up_to

pytestmark = pytest.mark.skipif(not is_torchvision_available(), reason="torchvision is missing")

SAMPLE = (
    "Cohere2VisionForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",  # blocks that windows do not bound
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",  # positions by the sizes of slices
    "MiniMaxM3SparseForConditionalGeneration",  # videos of sizes that patches divide
    "MuseGlimmerForConditionalGeneration",  # logits that are scaled, then bounded
    "PerceptionLMForConditionalGeneration",  # a video as one image
    "Step3p7ForConditionalGeneration",
    # These have another processor without.
    "Cosmos3EdgeForConditionalGeneration",  # asks for no metadata of its videos, and reads them
    "LlavaNextForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)


@pytest.mark.parametrize("architecture", SAMPLE)
def test_tokens_are_those_of_transformers(architecture: str) -> None:
    skip_up_to(5, 22, "the sweep is of the newest transformers")
    row = judge(architecture)
    assert (row.verdict, row.reason[:16]) == ("equal", "image, 6 prompts"), row.reason
