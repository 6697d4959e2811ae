"""What the simulated device counts and refuses: run on it by test_simulated.py, not by itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioengine import SamplingParams
from aioengine.core.plan import StepPlan
from aioengine.execution.memory_profiler import peak_bytes
from aioengine.execution.model_runner import ModelRunner
from aioengine.kernels.transfer import to_device, to_host
from aioengine.sampling.sampler import Sampler, Sampling
from tests.simulated.device import DEVICE, LAUNCH_THREAD, MixedDevicesError, SimulatedMode
from tests.simulated.queues import DeviceFailedError
from tests.support.engines import running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _as_the_launch_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.current_thread(), "name", LAUNCH_THREAD)


def taken_waits() -> set[str]:
    """The kinds of waits so far, which are forgotten."""
    found = {what for what, _ in DEVICE.waits}
    DEVICE.waits.clear()
    return found


def test_numbers_are_real_and_say_where_they_are() -> None:
    with SimulatedMode():
        made = torch.arange(6, device=CUDA, dtype=torch.float32).view(2, 3)
        assert made.device == CUDA and (made @ made.T).device == CUDA
        (back,) = to_host([made * 2])
        torch.cuda.current_stream().record_event().synchronize()
    assert back.device.type == "cpu" and back.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert not taken_waits()


def test_tensors_of_two_devices_do_not_mix() -> None:
    with SimulatedMode():
        there, here = torch.ones(3, device=CUDA), torch.ones(3)
        with pytest.raises(MixedDevicesError):
            there + here
        assert (there + torch.tensor(2.0)).device == CUDA  # a number, by value


def test_what_makes_the_host_wait_is_counted() -> None:
    with SimulatedMode():
        there = torch.tensor([0.0, 1.0, 2.0], device=CUDA)
        taken_waits()
        asked = {
            "item()": lambda: there.sum().item(),
            "tolist()": lambda: there.tolist(),
            "nonzero()": lambda: there.nonzero(),
            "a mask as an index": lambda: there[there > 0],
            "an index on the host": lambda: there[torch.tensor([0])],
            "to the host, by .to() or .cpu()": lambda: there.cpu(),
        }
        for kind, ask in asked.items():
            ask()
            assert kind in taken_waits(), kind


def test_copies_from_pinned_memory_are_not_waited_for() -> None:
    with SimulatedMode():
        before = DEVICE.copies["to the device"]
        to_device(torch.ones(3), CUDA)
        assert DEVICE.copies["to the device"] == before + 1 and not taken_waits()
        torch.ones(3).to(CUDA, non_blocking=True)
        assert len(taken_waits()) == 1


def test_a_greedy_step_uploads_nothing_to_choose_its_tokens() -> None:
    with SimulatedMode():
        logits = torch.randn(3, 50, device=CUDA)
        before = DEVICE.copies["to the device"]
        Sampler().sample(logits, [Sampling()] * 3, [0] * 3)
        assert DEVICE.copies["to the device"] == before and not taken_waits()


def test_memory_is_counted() -> None:
    with SimulatedMode():
        before = DEVICE.num_bytes

        def work() -> None:
            large = torch.ones(1 << 20, device=CUDA)
            assert DEVICE.num_bytes == before + (4 << 20)
            large.view(2, -1)[0].add_(1)

        assert 4 << 20 <= peak_bytes(CUDA, work) <= 6 << 20
        assert DEVICE.num_bytes == before
    taken_waits()


def test_views_share_their_memory_and_freed_memory_is_seen() -> None:
    with SimulatedMode():
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(one):
            made = torch.ones(8, device=CUDA) + 1
        event = one.record_event()
        other.wait_event(event)
        with torch.cuda.stream(other):
            read = made[2:].view(2, 3) * 2
        assert not DEVICE.order.findings
        del made
        assert [each.kind for each in DEVICE.order.findings] == ["freed while read"]
        DEVICE.order.findings.clear()
        del read


def test_results_come_when_they_are_waited_for() -> None:
    """The host sees nothing before an event, and copies what pinned memory holds when they run."""
    before = DEVICE.order.queues
    for seed in range(8):
        DEVICE.run_later(seed)
        with SimulatedMode():
            side = torch.cuda.Stream()
            source = torch.ones(4, pin_memory=True).fill_(1)
            with torch.cuda.stream(side):
                made = source[1:].to(CUDA, non_blocking=True) + 1
                (back,) = to_host([made])
                event = side.record_event()
            assert event.query() or back.isnan().all()
            event.synchronize()
            assert event.query() and back.tolist() == [2, 2, 2] and made.sum().item() == 6
    DEVICE.order.queues = before
    taken_waits()


def test_freed_memory_is_poisoned_in_its_streams_turn() -> None:
    before, found = DEVICE.order.queues, set[bool]()
    for seed in range(16):
        DEVICE.run_later(seed)
        with SimulatedMode():
            one, other = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(one):
                made = torch.ones(8, device=CUDA) + 1
            other.wait_stream(one)
            with torch.cuda.stream(other):
                (back,) = to_host([made * 2])
            del made
            torch.cuda.synchronize()
            found.add(bool(back.isnan().any()))
    DEVICE.order.queues = before
    DEVICE.order.findings.clear()
    taken_waits()
    assert found == {True, False}


def test_an_operator_that_fails_is_told_of_at_the_next_wait() -> None:
    before = DEVICE.order.queues
    DEVICE.run_later(0)
    with SimulatedMode():
        table = torch.zeros(3, 2, device=CUDA)
        table[to_device(torch.tensor([7]), CUDA)] * 2
        with pytest.raises(DeviceFailedError, match=r"IndexError.*aten.index.Tensor"):
            torch.cuda.synchronize()
    DEVICE.order.queues.failure = None
    DEVICE.order.queues = before
    taken_waits()


STEPS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 1},
    "top-k and top-p": {"temperature": 0.8, "seed": 1, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
    "top-p": {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "bias and bad words": {"temperature": 0, "logit_bias": {3: 1.0}, "bad_words": ["a b"]},
    "log probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("kind", STEPS)
async def test_a_step_is_one_copy_in_and_one_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_llava(tmp_path, torch.float32)
    step, copies = ModelRunner.step, []

    def counted(self: ModelRunner, plan: StepPlan) -> Any:
        before = DEVICE.copies.copy()
        found = step(self, plan)
        copies.append(dict(DEVICE.copies - before))
        return found

    monkeypatch.undo()  # the launch thread is the engine's own
    monkeypatch.setattr(ModelRunner, "step", counted)
    params = SamplingParams(max_tokens=6, ignore_eos=True, **STEPS[kind])
    async with running_engine(tmp_path, device="cuda", dtype="float32") as engine:
        copies.clear()
        prompts = ["USER: tell a story. ASSISTANT:", "USER: what? ASSISTANT:", "USER: a"]
        await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    assert len(copies) >= 6
    for found in copies:
        assert found == {"to the device": 1, "to the host": 1}, copies


async def test_pixels_in_the_memory_of_the_device(tmp_path: Path) -> None:
    """They are copied to the host for the processor, beside the steps of others."""
    save_tiny_llava(tmp_path)
    text, params = "USER: <image>\nWhat is it?", SamplingParams(temperature=0, max_tokens=6)
    with SimulatedMode(), DEVICE.waiting_allowed():
        there = torch.from_numpy(np.array(tiny_image(3))).movedim(-1, 0).to(CUDA)
    async with running_engine(tmp_path, device="cuda", dtype="float32") as engine:
        wanted = await engine.generate(text, params, images=[tiny_image(3)])
        for images in (there, [there]):
            await engine.reset_caches()
            found = await engine.generate(text, params, images=images)
            assert found.token_ids == wanted.token_ids


async def test_embeddings_beside_steps(tmp_path: Path) -> None:
    """What is pooled is read once its step is done, beside tokens of others."""
    save_tiny_llava(tmp_path)
    text, params = "USER: <image>\nWhat is it?", SamplingParams(temperature=0, max_tokens=6)
    found = []
    for device in ("cuda", "cpu"):
        async with running_engine(tmp_path, device=device, dtype="float32") as engine:
            others = [asyncio.create_task(engine.generate(text[8:], params)) for _ in range(2)]
            asked = [
                ("last", [tiny_image(3)]),
                ("mean", [tiny_image(3)]),
                ("mean", [tiny_image(4)]),
            ]
            found.append(
                await asyncio.gather(
                    *(engine.embed(text, images=images, pooling=kind) for kind, images in asked)
                )
            )
            await asyncio.gather(*others)
    for ours, wanted in zip(*found, strict=True):
        assert np.abs(ours - wanted).max() < 1e-4
