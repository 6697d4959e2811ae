"""Where a request starts behind a cached prefix, if tokens see each other both ways."""

from __future__ import annotations

import pytest

from aioengine.core.plan import Limits
from tests.support.world import Image, World, make_request

SEEN = Image("seen", 7, ((0, 7),), 3, bidirectional=True)


@pytest.mark.parametrize(("starts_outside", "start"), [(False, 8), (True, 0)])
def test_a_prefix_does_not_end_inside_what_a_window_would_hide(
    starts_outside: bool, start: int
) -> None:
    w = World(
        Limits(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=40,
            block_size=4,
            num_blocks=20,
            encoder_cache_bytes=6,
            max_num_encoder_input_tokens=8,
            enable_prefix_caching=True,
        )
    )
    for name in ("first", "second"):
        # The second block of four ends behind six of the image's seven tokens.
        prompt = [1, 2, SEEN, 9]
        w.submit(make_request(name, prompt, max_tokens=1, eos=False, starts_outside=starts_outside))
        w.plan_media()
        for key in list(w.decoding):
            w.pixels(key)
        w.plan_media()
        while w.encodes:
            w.encoded()
        while name in w.live:
            w.plan()
            w.commit()
    assert w.requests["second"].num_cached_tokens == start
