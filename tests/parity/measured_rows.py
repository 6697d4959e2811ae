"""What is measured of the tests' models: fixtures, and what they ask. See measure.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Gemma4ForConditionalGeneration

from aioengine import Prompt
from tests.parity import families, omni_family, test_encdec, test_molmo2, test_text_families
from tests.parity.audio_families import FAMILIES as AUDIO_FAMILIES
from tests.parity.audio_families import RATE, sound
from tests.support.tiny import tiny_image

BUDGET = 13
"""Tokens of one step, for most: fewer than an image and its text, and than two prompts."""


@dataclass(frozen=True)
class Ask:
    """What the engine is asked, and the tokens that the reference answers."""

    prompt: Prompt | str
    media: Mapping[str, Sequence[Any]]
    expected: Sequence[int]


def of_cases(module: Any, made: Any) -> list[Ask]:
    """Of a fixture with `cases`, and perhaps `videos`, which are run before them."""
    model = made[0] if isinstance(made, tuple) else made
    return [
        Ask(case.text, _media(case), case.expected)
        for case in (*getattr(model, "videos", ()), *model.cases)
    ]


def _media(case: Any) -> dict[str, Sequence[Any]]:
    found = getattr(case, "media", None)
    return found or {"images": case.images, "videos": getattr(case, "videos", ())}


def of_llava(module: Any, made: Any) -> list[Ask]:
    """Its cases name their images by seed."""
    return [
        Ask(case.text, {"images": [tiny_image(seed) for seed in case.images]}, case.expected)
        for case in made.cases
    ]


def of_films(module: Any, made: Any) -> list[Ask]:
    """Without the last two, which transformers' `generate` cannot be asked."""
    return of_cases(module, made)[:-2]


def of_texts(module: Any, made: Any) -> list[Ask]:
    return [Ask(text, {}, tokens) for text, tokens in zip(module.PROMPTS, made[1], strict=True)]


def of_halves(module: Any, made: Any) -> list[Ask]:
    """Of encoder-decoder models of text."""
    asked = zip(module.prompts(), made.expected, strict=True)
    return [Ask(prompt, {}, tokens) for prompt, tokens in asked]


def of_listeners(module: Any, made: Any) -> list[Ask]:
    return [
        Ask(text, {"audios": [(module.SOUNDS[index], RATE)]}, tokens)
        for (text, index), tokens in zip(made.asked, made.expected, strict=True)
    ]


def of_readers(module: Any, made: Any) -> list[Ask]:
    """Of encoder-decoder models that read an image."""
    return [
        Ask(text, {"images": module.images(index)}, tokens)
        for (text, index), tokens in zip(module.ASKED, made.expected, strict=True)
    ]


def of_gemma4(module: Any, made: Any) -> list[Ask]:
    """The cases with images, and where it hears, clips; that part runs in float32 only."""
    asked = of_cases(module, made)
    if made.name == "small":
        build = Gemma4ForConditionalGeneration.from_pretrained
        reference, processor = build(made.folder, dtype=torch.float32).eval(), module.processor()
        for index, seconds in enumerate((0.9, 1.3)):
            text, samples = "say what <|audio|> is", sound(index, seconds)
            inputs = dict(processor(text=text, audio=[samples], return_tensors="pt"))
            media = {"audios": [(samples, RATE)]}
            asked.append(Ask(text, media, module.greedy(reference, inputs)))
    return asked


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fixture of `tests/parity/<module>.py`, for one of its parameters.

    `definition`: module and class of a model that is defined here, whose reference is itself.
    """

    module: str
    param: str = ""
    fixture: str = "model"
    asks: Callable[[Any, Any], list[Ask]] = of_cases
    budget: int = BUDGET
    options: Mapping[str, Any] = field(default_factory=dict)
    definition: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.module}[{self.param}]" if self.param else self.module


SHORT = {"max_model_len": 60}
QWEN_VL = ("aioengine.models.qwen_vl.modeling", "QwenLMHeadModel")
DEEPSEEK_VL2 = ("aioengine.models.deepseek_vl2.modeling", "DeepseekVLV2ForCausalLM")
MOLMO = ("aioengine.models.molmo.modeling", "MolmoForCausalLM")
ROWS = (
    *(
        Row(module="test_families", param=name, budget=max(BUDGET, family.least_budget))
        for name, family in families.FAMILIES.items()
    ),
    Row(module="test_llava", param="clip", asks=of_llava),
    Row(module="test_llava", param="siglip", asks=of_llava),
    Row(module="test_glm4v", asks=of_films),
    Row(module="test_smolvlm"),
    Row(module="test_fuyu", fixture="reference"),
    *(
        Row(module="test_internvl_chat", param=kind)
        for kind in ("internlm2", "qwen2-6b", "qwen3", "llama")
    ),
    Row(module="test_molmo2", budget=test_molmo2.LEAST_BUDGET),
    Row(module="test_qwen_vl", definition=QWEN_VL),
    *(
        Row(module="test_deepseek_vl2", param=size, definition=DEEPSEEK_VL2)
        for size in ("tiny", "small", "base")
    ),
    *(Row(module="test_molmo", param=base, definition=MOLMO) for base in ("qwen", "olmo")),
    *(Row(module="test_audio_families", param=name) for name in AUDIO_FAMILIES),
    Row(module="test_voxtral_realtime"),
    *(Row(module="test_omni", param=kind) for kind in omni_family.KINDS),
    *(
        Row(module="test_encdec", param=name, fixture="saved", asks=of_halves, options=SHORT)
        for name in test_encdec.FAMILIES
    ),
    *(
        Row(module="test_blip2_t5", param=kind, fixture="saved", asks=of_readers, options=SHORT)
        for kind in ("t5", "flan-t5")
    ),
    Row(module="test_florence2", fixture="saved", asks=of_readers),
    *(
        Row(module="test_gemma_n4", param=name, fixture="text_model")
        for name in ("gpt-oss", "gemma3n", "gemma4", "gemma4-dense", "gemma4-experts")
    ),
    Row(module="test_gemma_n4", param="small", fixture="whole", asks=of_gemma4),
    Row(module="test_gemma_n4", param="large", fixture="whole", asks=of_gemma4, budget=70),
    Row(module="test_gemma4_videos", param="small", fixture="saved"),
    Row(module="test_gemma4_videos", param="large", fixture="saved", budget=70),
    Row(module="test_listeners", param="whisper", fixture="saved", asks=of_listeners),
    Row(module="test_listeners", param="moonshine", fixture="saved", asks=of_listeners),
    *(
        Row(
            module="test_text_families", param=name, fixture="saved", asks=of_texts,
            options={"max_model_len": 256},
        )
        for name in test_text_families.FAMILIES
    ),
)  # fmt: skip

# Other names of checkpoints of the same model, with their tests in tests/parity/.
SAME = {
    "BartModel": "BartForConditionalGeneration",
    "MBartModel": "MBartForConditionalGeneration",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "T5Model": "T5ForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}

UNMEASURED = ("Gemma4UnifiedForConditionalGeneration",)
"""Classes of ours whose processors need torchvision; the sweep with it compares their tokens."""
