"""A step of a few tokens, by which a device shows that it runs these kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.reference import ReferenceBackend
from aioengine.kernels.triton import sample
from aioengine.kernels.triton.backend import TritonBackend

__all__ = ["run_trial"]

NEARNESS = 1e-2


def run_trial(device: torch.device) -> None:
    """Attend to a prompt and to a long context on the device, in float16, and choose tokens.

    Raises RuntimeError where it differs from the reference there, and whatever the kernels raise.
    """
    meta = build_metadata(
        block_size=32,
        device=device,
        block_tables=[[*range(3)], [3]],
        starts=[90, 0],
        ends=[91, 20],
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    pages = draw(4, 32, 2, 64), draw(4, 32, 2, 64)
    query, new = draw(21, 4, 64), (draw(21, 2, 64), draw(21, 2, 64))
    found, expected = (
        backend.attend(query, pages, meta, AttentionArgs(scale=0.125), new=new)
        for backend in (TritonBackend(), ReferenceBackend())
    )
    if not torch.allclose(found, expected, atol=NEARNESS, rtol=NEARNESS):
        raise RuntimeError("attention differs from the reference")
    logits = draw(2, 3000).float()
    choices = torch.tensor([[0.0, 0, 1, 0, 0], [1.0, 1, 0.9, 0, 0.5]], dtype=torch.float64)
    if not torch.equal(sample.draw(logits, choices.to(device)), logits.argmax(-1)):
        raise RuntimeError("the most probable tokens are others")
