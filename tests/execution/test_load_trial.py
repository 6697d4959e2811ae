"""The trial at load: right models pass, and what computes otherwise than its module is refused."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aioengine import AsyncEngine
from aioengine.errors import ModelLoadError
from aioengine.execution import load_trial, trial_verdicts
from aioengine.kernels import reference
from aioengine.kernels.layer_slot import attach_slot, slot_of
from aioengine.models import register_model
from aioengine.models.bidirectional import Gemma3
from aioengine.models.llava import Llava
from aioengine.models.runtime import registry
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.text import TextModel
from tests.parity.families import FAMILIES, save
from tests.support.engines import greedy
from tests.support.tiny import draw_weights, save_tiny_llava, tiny_image, tiny_llama, tiny_tokenizer

SIZES = {"device": "cpu", "max_model_len": 256, "kv_cache_bytes": 1 << 20, "block_size": 4}
REFUSAL = r"does not compute what the checkpoint's own module does: logits of a prompt with"


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test has trials of its own, and leaves the registry as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_tiny_llava(folder, num_hidden_layers=4)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama(torch.float32, num_hidden_layers=6).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    save(FAMILIES["gemma3"], folder)
    return folder


@pytest.fixture(params=["whole", "few layers"])
def _any_depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of all layers, and of a few of each kind, as of a large model."""
    if request.param == "few layers":
        monkeypatch.setattr(load_trial, "HEAVY_BYTES", -1)


async def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError, match=REFUSAL) as caught:
        async with AsyncEngine.from_pretrained(folder, **{**SIZES, **options}):
            pass
    return str(caught.value)


def middle_layer(model: Any) -> nn.Module:
    module: nn.Module = model.decoder().get_submodule(model.specs[len(model.specs) // 2].name)
    return module


class ForgetsToStore(TextModel):
    """One layer in the middle writes no keys and values."""

    def patch(self) -> None:
        super().patch()
        module: Any = middle_layer(self)
        slot: Any = slot_of(module)
        attach_slot(module, replace(slot, stores=False))


class CountsFromOne(TextModel):
    """Positions are off by one, but for a prompt's first chunk."""

    def positions_for(
        self, starts: Sequence[int], ends: Sequence[int], prompts: Any = None
    ) -> Tensor:
        right = super().positions_for(starts, ends, prompts)
        late = [
            int(start > 0)
            for start, end in zip(starts, ends, strict=True)
            for _ in range(start, end)
        ]
        return right + torch.tensor(late)


class PacksWrongly(TextModel):
    """The heads of one layer's queries change places as weights are packed."""

    def pack(self) -> None:
        module: Any = middle_layer(self)
        module.q_proj.weight.copy_(module.q_proj.weight.roll(module.head_dim, 0))
        super().pack()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mutant", [ForgetsToStore, CountsFromOne, PacksWrongly])
async def test_a_mutant_of_a_decoder_is_refused(
    llama: Path, mutant: type[TextModel], dtype: str
) -> None:
    register_model("LlamaForCausalLM")(mutant)
    text = await refusal(llama, dtype=dtype)
    assert mutant.__name__ in text and "check_model=False" in text and "with text" in text


@pytest.mark.usefixtures("_any_depth")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("shift", [-1, 1])
async def test_a_mask_off_by_one_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, shift: int, dtype: str
) -> None:
    right = reference.visible_mask

    def off_by_one(start: int, end: int, begin: int, *rest: Any) -> Tensor:
        mask = right(start, end, begin, *rest)
        count = mask.sum(-1, keepdim=True)
        # Every query but a first token's misses its newest key, or the oldest one.
        missed = count - 1 if shift < 0 else torch.zeros_like(count)
        return mask.scatter(1, missed, count == 1)

    monkeypatch.setattr(reference, "visible_mask", off_by_one)
    await refusal(llama, dtype=dtype, attention_backend="reference")


class TokenShift(nn.Module):
    """Half of the token before, mixed in: state that no cache shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        out: Tensor = self.inner(hidden + before / 2)
        return out


@pytest.mark.usefixtures("_any_depth")
async def test_state_that_no_cache_shows_is_refused(llama: Path) -> None:
    class Shifts(TextModel):
        @classmethod
        def load_module(cls, path: Any, **options: Any) -> Any:
            module = super().load_module(path, **options)
            layer = module.model.layers[2]
            layer.mlp = TokenShift(layer.mlp)
            return module

    register_model("LlamaForCausalLM")(Shifts)
    await refusal(llama)


class Remembers(nn.Module):
    """A layer that adds the mean of what it saw in the call before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden if self.seen is None else hidden + self.seen / 10)
        self.seen = out.mean((0, 1)).detach()
        return out


@pytest.mark.usefixtures("_any_depth")
async def test_a_module_that_remembers_is_refused(llama: Path) -> None:
    class Keeps(TextModel):
        @classmethod
        def load_module(cls, path: Any, **options: Any) -> Any:
            module = super().load_module(path, **options)
            layer = module.model.layers[2]
            layer.mlp = Remembers(layer.mlp)
            return module

    register_model("LlamaForCausalLM")(Keeps)
    with pytest.raises(ModelLoadError, match="after other prompts, so it keeps state"):
        await start(llama)


@pytest.mark.usefixtures("_any_depth")
async def test_a_mistake_beside_a_prefill_is_refused(llama: Path) -> None:
    class MixedOnly(TextModel):
        """Positions are off where one sequence decodes and another prefills."""

        def positions_for(
            self, starts: Sequence[int], ends: Sequence[int], prompts: Any = None
        ) -> Tensor:
            sizes = {end - start > 1 for start, end in zip(starts, ends, strict=True)}
            return super().positions_for(starts, ends, prompts) + int(len(sizes) == 2)

    register_model("LlamaForCausalLM")(MixedOnly)
    await refusal(llama)


@pytest.mark.usefixtures("_any_depth")
async def test_a_module_that_caches_what_it_computes_is_tried(llama: Path) -> None:
    """In bfloat16, as CTRL does with its positions: what it keeps has to be usable later."""

    class Caches(TextModel):
        @classmethod
        def load_module(cls, path: Any, **options: Any) -> Any:
            module = super().load_module(path, **options)
            norm = module.model.norm
            scale, plain = torch.ones(norm.weight.shape[0]), norm.forward

            def forward(hidden: Tensor) -> Tensor:
                nonlocal scale
                scale = scale.to(hidden.dtype)
                scale += 0  # in place
                out: Tensor = plain(hidden) * scale
                return out

            norm.forward = forward
            return module

    register_model("LlamaForCausalLM")(Caches)
    await start(llama, dtype="bfloat16", packed_layers=False)


async def test_a_window_off_by_one_is_refused(gemma: Path) -> None:
    class WiderWindow(Gemma3):
        def patch(self) -> None:
            super().patch()
            module: Any = middle_layer(self)
            slot: Any = slot_of(module)

            class Wider:
                wanted = None

                def attend(self, *rows: Tensor) -> Tensor:
                    *tensors, args = rows
                    out: Tensor = slot.attend(*tensors, args._replace(window=args.window + 1))
                    return out

            attach_slot(module, Wider())

    register_model("Gemma3ForConditionalGeneration")(WiderWindow)
    await refusal(gemma, dtype="float32")


@pytest.mark.usefixtures("_any_depth")
async def test_an_image_whose_tokens_do_not_see_each_other_is_refused(gemma: Path) -> None:
    class Causal(Gemma3):
        def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> None:
            return None

    register_model("Gemma3ForConditionalGeneration")(Causal)
    assert "with image" in await refusal(gemma, dtype="float32")


@pytest.mark.usefixtures("_any_depth")
async def test_encoder_rows_in_other_places_are_refused(llava: Path) -> None:
    class Shifted(Llava):
        def encode(self, modality: str, items: Any) -> list[Tensor]:
            return [rows.roll(1, 0) for rows in super().encode(modality, items)]

    register_model("LlavaForConditionalGeneration")(Shifted)
    assert "with image" in await refusal(llava)


async def test_a_step_that_fails_is_refused_with_its_cause(llava: Path) -> None:
    class Fails(Llava):
        def logits(self, hidden: Tensor) -> Tensor:
            raise ArithmeticError("no logits today")

    register_model("LlavaForConditionalGeneration")(Fails)
    with pytest.raises(ModelLoadError, match="ArithmeticError: no logits today") as caught:
        async with AsyncEngine.from_pretrained(llava, **SIZES):
            pass
    assert isinstance(caught.value.__cause__, ArithmeticError)


@pytest.mark.usefixtures("_any_depth")
async def test_a_module_that_takes_no_prompt_is_refused(llama: Path) -> None:
    """There is nothing to compare with, which only the flag lets in."""

    class Raises(TextModel):
        @classmethod
        def load_module(cls, path: Any, **options: Any) -> Any:
            def forward(*args: Any, **options: Any) -> Any:
                raise RuntimeError("wants more than tokens")

            module = super().load_module(path, **options)
            module.forward = forward
            return module

    register_model("LlamaForCausalLM")(Raises)
    with pytest.raises(ModelLoadError, match=r"wants more than tokens.*check_model=False"):
        await start(llama)
    async with AsyncEngine.from_pretrained(llama, check_model=False, **SIZES) as engine:
        await engine.generate("hello", greedy(2))


async def test_the_flag_lets_a_mutant_in(llama: Path) -> None:
    register_model("LlamaForCausalLM")(ForgetsToStore)
    async with AsyncEngine.from_pretrained(llama, check_model=False, **SIZES) as engine:
        await engine.generate("hello", greedy(2))


# ---- what is kept


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many references have been asked for so far."""
    asked: list[object] = []
    right = TextModel.reference_logits

    def counted(self: Any, *args: Any) -> Tensor:
        asked.append(self)
        return right(self, *args)

    monkeypatch.setattr(TextModel, "reference_logits", counted)
    return lambda: len(asked)


async def start(folder: Path, **options: Any) -> None:
    async with AsyncEngine.from_pretrained(folder, **{**SIZES, **options}):
        pass


async def test_what_has_passed_is_not_tried_again(llama: Path, trials: Callable[[], int]) -> None:
    await start(llama)
    first = trials()
    assert first > 0
    await start(llama)
    assert trials() == first
    await start(llama, dtype="float64")
    assert trials() == 2 * first
    await start(llama, block_size=8)
    assert trials() == 3 * first


async def test_another_config_is_tried(
    llama: Path, tmp_path: Path, trials: Callable[[], int]
) -> None:
    await start(llama)
    first = trials()
    tiny_llama(torch.float32, num_hidden_layers=6, rope_theta=500.0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    await start(tmp_path)
    assert trials() == 2 * first


async def test_a_class_that_has_changed_is_tried(llama: Path, trials: Callable[[], int]) -> None:
    await start(llama)
    first = trials()

    class Other(TextModel):
        pass

    register_model("LlamaForCausalLM")(Other)
    await start(llama)
    assert trials() == 2 * first


async def test_what_was_not_seen_is_not_kept(llava: Path) -> None:
    class Shifted(Llava):
        def encode(self, modality: str, items: Any) -> list[Tensor]:
            return [rows.roll(1, 0) for rows in super().encode(modality, items)]

    register_model("LlavaForConditionalGeneration")(Shifted)
    await start(llava, limit_mm_per_prompt={"image": 0})
    await start(llava, max_model_len=16)
    await refusal(llava)


async def test_other_processing_is_tried(
    llava: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioengine")
    folder = tmp_path / "model"
    shutil.copytree(llava, folder)
    await start(folder)
    await start(folder)
    assert caplog.text.count("computes what its own module does") == 1
    file = folder / "processor_config.json"
    file.write_text(file.read_text() + " ")
    await start(folder)
    assert caplog.text.count("computes what its own module does") == 2


async def test_what_is_refused_is_not_kept(llama: Path) -> None:
    register_model("LlamaForCausalLM")(ForgetsToStore)
    await refusal(llama)
    await refusal(llama)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
async def test_weights_that_are_no_numbers_are_refused(
    llama: Path, tmp_path: Path, quantization: str | None, number: float, trials: Callable[[], int]
) -> None:
    """Nothing can be compared with what they give, and no other file has passed by it."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][70, 7] = number
    save_file(weights, path, {"format": "pt"})
    reason = "gives no numbers" if quantization is None else "cannot be rounded"
    with pytest.raises(ModelLoadError, match=reason):
        async with AsyncEngine.from_pretrained(folder, quantization=quantization, **SIZES):
            pass
    before = trials()
    await start(llama)
    assert trials() > before


async def test_where_nothing_can_be_written_every_start_has_its_trial(
    llama: Path, tmp_path: Path, trials: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    await start(llama)
    first = trials()
    await start(llama)
    assert trials() == 2 * first > 0


async def test_nothing_is_kept_in_a_folder_that_is_relative(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    await start(llama)
    assert not (tmp_path / "caches").exists()
    assert any((tmp_path / "home/.cache/aioengine/trials").iterdir())


# ---- what is not seen


async def test_the_log_says_what_was_not_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, llava: Path
) -> None:
    caplog.set_level(logging.INFO, "aioengine")
    await start(llava)
    assert "computes what its own module does\n" in caplog.text
    await start(llava, max_model_len=16)  # an image has as many rows
    assert "not seen: image (longer than max_model_len)" in caplog.text


async def test_one_flip_of_an_expert_is_not_a_refusal(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is off in one trial and not in the next was rounding."""
    calls: list[int] = []

    class Sometimes(TextModel):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden) * (2 if len(calls) == 1 else 1)

        def __init__(self, *args: Any, **options: Any) -> None:
            calls.append(1)
            super().__init__(*args, **options)

    register_model("LlamaForCausalLM")(Sometimes)
    await start(llama)
    assert len(calls) == 2


@pytest.mark.usefixtures("_any_depth")
async def test_an_engine_answers_after_its_trial_as_without(llava: Path) -> None:
    answers = []
    for is_tried in (True, False):
        async with AsyncEngine.from_pretrained(llava, check_model=is_tried, **SIZES) as engine:
            text, images = "USER: <image>\nWhat is it?", [tiny_image()]
            output = await engine.generate(text, greedy(6), images=images)
            answers.append((output.token_ids, engine.statistics().kv_blocks_free))
    assert answers[0] == answers[1]


async def test_a_large_model_is_tried_by_a_few_layers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are alike; a layer with a setting of its own is never left out."""
    monkeypatch.setattr(load_trial, "HEAVY_BYTES", -1)

    class Counts(TextModel):
        calls: list[int]

        @classmethod
        def load_module(cls, path: Any, **options: Any) -> Any:
            module = super().load_module(path, **options)
            module.model.layers[3].self_attn.own_setting = True
            cls.calls = [0] * len(module.model.layers)
            for place, layer in enumerate(module.model.layers):
                layer.mlp.register_forward_pre_hook(partial(cls.count, place))
            return module

        @classmethod
        def count(cls, place: int, *_: Any) -> None:
            cls.calls[place] += 1

    register_model("LlamaForCausalLM")(Counts)
    await start(llama, packed_layers=False)
    assert [bool(count) for count in Counts.calls] == [True, False, False, True, False, True]


@pytest.mark.parametrize("kind", ["T5", "MT5"])
async def test_layers_that_read_what_the_first_has_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias for all of them goes from layer to layer, also through those that are left out."""
    monkeypatch.setattr(load_trial, "HEAVY_BYTES", -1)
    tokenizer = tiny_tokenizer()
    config = getattr(hf, f"{kind}Config")(
        vocab_size=len(tokenizer) + 8, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=6,
        num_decoder_layers=6, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    draw_weights(model)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    await start(tmp_path)


def test_a_link_in_place_of_a_verdict_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trial_verdicts.keep("a")
    assert trial_verdicts.is_kept("a")
    (tmp_path / "aioengine" / "trials" / "b").symlink_to(tmp_path / "made")
    trial_verdicts.keep("b")
    assert not (tmp_path / "made").exists()
