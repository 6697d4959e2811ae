"""Steps that are captured and replayed: their tokens are those of steps that are launched."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from aioengine import Prompt, RequestOutput, SamplingParams
from aioengine.execution.model_runner import ModelRunner
from aioengine.kernels.transfer import StepBuffer
from aioengine.models.runtime.transformers_model import TransformersModel
from tests.parity.test_state_families import PROMPTS as STATE_PROMPTS
from tests.parity.test_state_families import SIZES as STATE_SIZES
from tests.parity.test_state_families import ask as ask_states
from tests.parity.test_state_families import save as save_states
from tests.support.engines import greedy, running_engine
from tests.support.tiny import save_tiny_llava, tiny_image, tiny_tokenizer
from tests.triton.recording import HostReadError, Recording, StaleAddressError
from tests.triton.test_interpreted_engine import tiny_qwen3

pytestmark = pytest.mark.timeout(600)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "check_model": False,
}


def tiny_gemma3() -> Gemma3ForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **sizes, **heads, layer_types=kinds, sliding_window=4, eos_token_id=None, pad_token_id=0
        )
    )


def save(name: str, folder: Path) -> None:
    if name == "llava":
        save_tiny_llava(folder)
        return
    {"qwen3": tiny_qwen3, "gemma3": tiny_gemma3}[name]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


PARAMS = [
    greedy(6),
    greedy(4),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=1, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, min_p=0.05, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, min_tokens=4, logit_bias={3: -100.0}),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2),
]


async def answers(folder: Path, prompts: list[Prompt], **options: Any) -> tuple[Any, list[Any]]:
    """Counts of steps, and tokens."""
    run_ahead = options.pop("run_ahead", 0)
    async with running_engine(folder, attention_backend="triton", **{**SIZES, **options}) as engine:
        engine._core.device.run_ahead = run_ahead
        asked = (
            engine.generate(prompts[i % len(prompts)], params) for i, params in enumerate(PARAMS)
        )
        outputs = await asyncio.gather(*asked)
        captured = engine._core.loaded.runner._captured
        counts = None if captured is None else captured.counts
        return counts, [(output.token_ids, *_logprobs(output)) for output in outputs]


def _logprobs(output: RequestOutput) -> list[Any]:
    """The log probabilities of tokens, as far as another order of sums leaves them."""
    found = output.outputs[0].logprobs or ()
    return [
        {token: pytest.approx(x.logprob, abs=1e-4) for token, x in each.items()} for each in found
    ]


@pytest.mark.parametrize(("name", "run_ahead"), [("llava", 0), ("qwen3", 1), ("gemma3", 1)])
async def test_tokens_are_those_of_launched_steps(
    tmp_path: Path, recording: Recording, name: str, run_ahead: int
) -> None:
    save(name, tmp_path)
    prompts = [Prompt(text="a b c d e"), Prompt(text="a text of some length, and no more")]
    if name == "llava":
        prompts.append(Prompt(text="a <image> b", media={"image": [tiny_image(1)]}))
    counts, expected = await answers(tmp_path, prompts, enforce_eager=True)
    assert counts is None and not recording.graphs
    counts, found = await answers(tmp_path, prompts, run_ahead=run_ahead)
    assert found == expected
    assert len(recording.graphs) == 4, "of 1, 2 and 3 sequences, and of any tokens"
    assert counts.replayed > 5 and not counts.launched


async def test_a_step_is_longer_than_any_text(tmp_path: Path, recording: Recording) -> None:
    """What fills it up stands at positions that the model knows."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 320}
    GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=None)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    more = {**SIZES, "max_num_batched_tokens": 48, "max_model_len": 16}
    async with running_engine(tmp_path, attention_backend="triton", **more) as engine:
        await engine.generate(Prompt(text="a b c"), greedy(3))
        captured = engine._core.loaded.runner._captured
        assert captured is not None and not captured.counts.launched
    assert captured.counts.replayed == 3 and len(recording.graphs) == 4


async def test_layers_that_keep_a_state(tmp_path: Path, recording: Recording) -> None:
    """Steps that are filled up are replayed; those with first tokens or snapshots are launched."""
    folder, _ = await asyncio.to_thread(save_states, "lfm2", tmp_path)
    more = {**STATE_SIZES, "max_num_seqs": 4, "check_model": False, "block_size": 16}
    more |= {"attention_backend": "triton", "dtype": "float32"}
    async with running_engine(folder, **more) as engine:
        found = await ask_states(engine, STATE_PROMPTS[:3])
        captured = engine._core.loaded.runner._captured
        assert captured is not None and captured.counts.replayed > 3
    async with running_engine(folder, enforce_eager=True, **more) as engine:
        assert await ask_states(engine, STATE_PROMPTS[:3]) == found


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 1), (1, 2), (2, 3)])
async def test_steps_of_few_tokens(
    tmp_path: Path, recording: Recording, num_seqs: int, num_tokens: int
) -> None:
    """A prompt of two tokens is no two single ones, though it has as many numbers."""
    save("qwen3", tmp_path)
    sizes = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
    prompts = [Prompt(text="a b c d e"), Prompt(text="a text of some length, and no more")]
    _, expected = await answers(tmp_path, prompts, enforce_eager=True, **sizes)
    counts, found = await answers(tmp_path, prompts, **sizes)
    assert found == expected and counts.replayed > counts.launched


@pytest.mark.parametrize("num_tokens", [12, 24])
async def test_attention_in_chunks(tmp_path: Path, recording: Recording, num_tokens: int) -> None:
    """Contexts that are longer than a chunk, and steps that are."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320}
    layers = {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 0], "attention_chunk_size": 16}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    ends: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = Llama4TextConfig(**sizes, **heads, **layers, **experts, **ends)
    Llama4ForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = {"max_num_batched_tokens": num_tokens, "block_size": 4, "max_model_len": 128}
    prompts = [Prompt(text="a b c"), Prompt(text="a text of some length, and no more than that")]
    _, expected = await answers(tmp_path, prompts, enforce_eager=True, **options)
    counts, found = await answers(tmp_path, prompts, **options)
    assert found == expected and counts.replayed > 5 * counts.launched


def bake_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a step as the host knows them, whatever is sent."""
    stage = ModelRunner._stage_tokens

    def staged(self: ModelRunner, buffer: Any, sequences: Any, *, is_fixed: bool = False) -> Any:
        embed = stage(self, buffer, sequences, is_fixed=is_fixed)
        known = torch.tensor([max(token, 0) for s in sequences for token in s.token_ids])
        return (lambda: self.model.embed_input_ids(known)) if is_fixed else embed

    monkeypatch.setattr(ModelRunner, "_stage_tokens", staged)


def move_the_buffer(monkeypatch: pytest.MonkeyPatch, *, is_hidden: bool = False) -> None:
    """Each step's numbers in memory of their own; `is_hidden`: and nothing says so."""
    fit = StepBuffer._fit

    def fitted(self: StepBuffer, num_bytes: int) -> None:
        self._ring.clear()
        fit(self, num_bytes)
        if is_hidden:
            self.num_moves = 1

    monkeypatch.setattr(StepBuffer, "_fit", fitted)


def read_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose launches depend on what an earlier one computes."""
    compute = TransformersModel.logits

    def computed(self: TransformersModel, hidden: torch.Tensor) -> torch.Tensor:
        return compute(self, hidden) * (1 if hidden[0, 0].item() else 2)

    monkeypatch.setattr(TransformersModel, "logits", computed)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (bake_tokens, "comes to other logits"),
        (move_the_buffer, "lie at different places"),
        (partial(move_the_buffer, is_hidden=True), "comes to other logits"),
        (read_a_number, "HostReadError"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_what_cannot_be_replayed_is_launched(
    tmp_path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch, fault: Any, words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    save("qwen3", tmp_path)
    fault(monkeypatch)
    options = {**SIZES, "max_num_seqs": 2, "attention_backend": "triton"}
    async with running_engine(tmp_path, **options) as engine:
        output = await engine.generate(Prompt(text="a b c"), greedy(3))
        captured = engine._core.loaded.runner._captured
        # Single tokens: the prompt may be replayed, where the fault is none of it.
        assert captured is not None and captured.counts.replayed <= 1
    assert len(output.token_ids) == 3
    warnings = [x.getMessage() for x in caplog.records if "not captured" in x.getMessage()]
    assert any(words in each for each in warnings)


def test_an_input_that_is_given_back_is_found() -> None:
    places = [torch.zeros(3)]
    graph, found = Recording().capture(lambda: places[0] + torch.ones(3))
    graph.replay()
    assert found.tolist() == [1, 1, 1]
    places[0].fill_(4.0)
    graph.replay()
    assert found.tolist() == [5, 5, 5]
    places.clear()
    with pytest.raises(StaleAddressError):
        graph.replay()


def test_a_number_that_is_read_on_the_host_is_found() -> None:
    numbers = torch.arange(3)
    with pytest.raises(HostReadError):
        Recording().capture(lambda: numbers * int(numbers[1]))


def test_nothing_runs_while_it_is_captured() -> None:
    numbers = torch.arange(3.0)
    graph, _ = Recording().capture(lambda: numbers.add_(1))
    assert numbers.tolist() == [0, 1, 2]
    graph.replay()
    assert numbers.tolist() == [1, 2, 3]
