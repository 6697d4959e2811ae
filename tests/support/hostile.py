"""Hostile requests beside honest ones: what has to hold for both, and what it may cost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, RequestOutput
from aioengine.errors import AioEngineError, InvalidRequestError
from tests.support.engines import greedy, settled
from tests.support.tiny import tiny_image

MIB = 1 << 20
HANG_S = 60.0
"""Far more than any refusal takes: one that lasts this long never comes."""
MOST_CHARACTERS = 500
"""Of an error's text. A longer one holds what was given."""
INDISCREET = ("0x", " object at ", "<_io", "/tmp", "/home", "/proc", "site-packages", ".py")
"""What the texts of errors show where a library's own words, or a path, come through."""

Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Attack:
    """A request that must fail, and how: the kind of error, and the parameter that it names."""

    prompt: Any
    kind: type[AioEngineError]
    parameter: str
    request: dict[str, Any] = field(default_factory=dict)


async def company(engine: AsyncEngine) -> Tokens:
    """The tokens of three honest requests that run side by side: images, text, and both."""
    image, other = tiny_image(900), tiny_image(901)
    outputs = await asyncio.gather(
        engine.generate("USER: <image>\nWhat is it? ASSISTANT:", greedy(12), images=[image]),
        engine.generate("There is a red circle above", greedy(16)),
        engine.generate("First <image> then <image> so", greedy(10), images=[other, image]),
    )
    return tuple(output.token_ids for output in outputs)


def assert_discreet(error: AioEngineError) -> None:
    """Neither payload nor anything of the machine is in what an application may pass on."""
    shown = f"{error} {getattr(error, 'parameter', '')} {getattr(error, 'value', '')!r}"
    assert len(shown) < MOST_CHARACTERS, shown[:MOST_CHARACTERS]
    assert not [word for word in INDISCREET if word in shown], shown


async def outcome(
    engine: AsyncEngine, prompt: Any, **request: Any
) -> RequestOutput | AioEngineError:
    """What a request ends with: an answer, or the caller's own error, with nothing in its text."""
    # A task of the engine's own coroutine, so that the eye on the loop knows whose work it is.
    ask = asyncio.create_task(engine.generate(prompt, **{"params": greedy(4), **request}))
    try:
        async with asyncio.timeout(HANG_S):
            return await ask
    except AioEngineError as error:
        assert isinstance(error, InvalidRequestError), f"{error!r} from {error.__cause__!r}"
        assert_discreet(error)
        return error


async def fail(engine: AsyncEngine, attack: Attack) -> AioEngineError:
    """The error that an attack ends with, which must be the right one."""
    found = await outcome(engine, attack.prompt, **attack.request)
    assert isinstance(found, AioEngineError), f"served: {found}"
    assert type(found) is attack.kind, f"{found!r} from {found.__cause__!r}"
    assert getattr(found, "parameter", None) == attack.parameter, repr(found)
    return found


async def repel(
    engine: AsyncEngine, expected: Tokens, attacks: Sequence[Attack]
) -> list[AioEngineError]:
    """All attacks at once, beside honest requests whose tokens stay the same; and once more after.

    Caches are cold, so that honest images are being worked on meanwhile; afterwards they are
    cold again, so that honest requests get the memory that hostile ones have used.
    """
    await engine.reset_caches()
    found, *errors = await asyncio.gather(
        company(engine), *(fail(engine, attack) for attack in attacks), return_exceptions=True
    )
    assert found == expected
    for error in errors:
        if not isinstance(error, AioEngineError):
            raise error
    await settled(engine)
    await engine.reset_caches()
    assert await company(engine) == expected
    return [error for error in errors if isinstance(error, AioEngineError)]


@contextmanager
def bounded_memory(most_bytes: int) -> Iterator[None]:
    """Fails if the block's peak of resident memory lies more than this above where it began."""
    status = Path("/proc/self/status")
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():  # only Linux tells
        yield
        return

    def resident(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    gc.collect()
    reset.write_text("5")
    before = resident("VmRSS:")
    yield
    risen = resident("VmHWM:") - before
    assert risen <= most_bytes, f"{risen / MIB:.0f} MiB more than before"
