"""`Engine`: what a script, a thread, a notebook and an interrupt get from the blocking facade."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, Engine, EngineState, MediaConfig, Prompt, RequestOutput
from aioengine.engine.bulk import HELD
from aioengine.errors import (
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    PlaceholderMismatchError,
    RequestAbortedError,
    WrongLoopError,
)
from tests.support.engines import DEADLINE_S, encoded, engine_threads, greedy, is_at_rest
from tests.support.grids import rest_is_slow
from tests.support.tiny import save_tiny_llava, tiny_image

SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 512,
    "kv_cache_bytes": 8 << 20,
    "block_size": 16,
}
PROMPTS = [f"tell me of number {index}" for index in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """Tokens of the asynchronous engine for each of PROMPTS, and for an image."""

    async def ask() -> list[tuple[int, ...]]:
        async with AsyncEngine.from_pretrained(folder, **SIZES) as engine:
            outputs = [await engine.generate(prompt, greedy()) for prompt in PROMPTS]
            outputs.append(await engine.generate("<image> a", greedy(), images=[tiny_image(0)]))
            return [output.token_ids for output in outputs]

    return asyncio.run(ask())


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    """One that has to be at rest, and to leave no thread, at the end."""
    with Engine.from_pretrained(folder, **SIZES) as engine:
        yield engine
        wait_until(lambda: is_at_rest(engine.statistics()))
    assert engine_threads() == []


def wait_until(condition: Any) -> None:
    """Wait for what nobody announces to a thread."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


# ---- calls


def test_the_same_tokens(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    assert engine.generate(PROMPTS[0], greedy()).token_ids == expected[0]
    output = engine.generate("<image> a", greedy(), images=[tiny_image(0)])
    assert output.token_ids == expected[-1]
    stream = engine.stream("<image> a", greedy(), images=[tiny_image(0)], request_id="mine")
    assert stream.request_id == "mine"
    tokens = [token for delta in stream for token in delta.token_ids]
    assert tuple(tokens) == stream.result().token_ids == expected[-1]
    with engine.stream(PROMPTS[1], greedy()) as unread:
        assert unread.result().token_ids == expected[1]
    tokenizer = engine.tokenizer
    assert engine.generate(tokenizer.encode(PROMPTS[0]), greedy()).token_ids == expected[0]
    engine.reset_caches()
    assert engine.statistics().kv_blocks_cached == 0


def test_it_starts_with_the_first_call_and_once(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    engine = Engine.from_pretrained(folder, **SIZES)
    assert engine.state is EngineState.NEW and engine_threads() == []
    with pytest.raises(EngineClosedError, match="not been started"):
        engine.statistics()
    with ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(lambda prompt: engine.generate(prompt, greedy()), PROMPTS))
    assert [output.token_ids for output in outputs] == expected[:-1]
    assert engine.statistics().finished == len(PROMPTS)
    with engine:  # it may be entered still
        assert engine.generate(PROMPTS[0], greedy()).token_ids == expected[0]
    engine.close()
    assert engine.state is EngineState.CLOSED and engine_threads() == []
    assert engine.statistics().finished == len(PROMPTS) + 1
    for call in (lambda: engine.generate("a"), lambda: engine.stream("a"), engine.start):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()
    with pytest.raises(EngineClosedError):
        next(engine.map(["a"]))
    with pytest.raises(EngineClosedError), engine:
        pass


def test_one_that_is_closed_before_its_first_call_stays_closed(folder: Path) -> None:
    engine = Engine(folder)
    engine.close()
    assert engine.state is EngineState.CLOSED and engine_threads() == []
    for call in (lambda: engine.generate("a"), engine.__enter__, engine.start):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()


def test_arguments_that_are_none(engine: Engine) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.generate("a", timeout="5"),  # type: ignore[arg-type]
        lambda: engine.generate("a", timeout=math.nan),
        lambda: engine.stream("a").result("x"),  # type: ignore[arg-type]
        lambda: engine.map(prompts_of_a_loop()),  # type: ignore[call-overload]
        lambda: engine.generate("a", image=b""),  # type: ignore[call-arg]
        lambda: engine.stream("a", max_tokens=3),  # type: ignore[call-arg]
        lambda: engine.map("a", return_exception=True),  # type: ignore[call-overload]
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError):
            call()
    for timeout in (math.inf, 1e12):
        assert engine.generate("a", greedy(2), timeout=timeout).token_ids


async def prompts_of_a_loop() -> AsyncIterator[str]:
    yield "a"


def test_errors_are_those_of_the_asynchronous_engine(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="max_seqs"):
        Engine.from_pretrained(tmp_path, max_seqs=4)
    with pytest.raises(InvalidRequestError, match="max_seqs"):
        Engine(tmp_path, max_seqs=4)
    assert Engine(tmp_path, max_num_seqs=4).config == AsyncEngine(tmp_path, max_num_seqs=4).config
    with pytest.raises(PlaceholderMismatchError):
        engine.generate("<image> without one")
    with pytest.raises(PlaceholderMismatchError):  # where it is called, not where it is read
        engine.stream("<image> without one")
    with pytest.raises(InvalidRequestError, match="temperature="):
        engine.generate("a", greedy(), temprature=0)  # type: ignore[call-arg]
    empty = Engine.from_pretrained(tmp_path)
    with pytest.raises(ModelLoadError):
        empty.start()
    with pytest.raises(EngineClosedError):
        empty.generate("a")
    empty.close()


def test_a_timeout_ends_the_request(engine: Engine) -> None:
    with pytest.raises(TimeoutError):
        engine.generate("a", greedy(400), timeout=0.05)
    wait_until(lambda: engine.statistics().aborted == 1)
    stream = engine.stream("a", greedy(400))
    with pytest.raises(TimeoutError):
        stream.result(timeout=0.01)
    assert next(stream).token_ids  # it goes on
    stream.close()
    stream.close()
    assert list(stream) == []
    with pytest.raises(RequestAbortedError):
        stream.result()


def test_a_stream_that_is_dropped_ends_its_request(engine: Engine) -> None:
    for _ in engine.stream("a", greedy(400)):
        break
    wait_until(lambda: engine.statistics().aborted == 1)


def test_requests_of_a_closed_engine_end_where_they_are_waited_for(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, **SIZES)
    stream = engine.stream("a", greedy(450))
    with ThreadPoolExecutor(3) as threads:
        waiting = [
            threads.submit(engine.generate, "b", greedy(450)),
            threads.submit(stream.result),
            threads.submit(lambda: list(engine.map(["c"] * 9, greedy(450)))),
        ]
        wait_until(lambda: engine.statistics().running >= 3)
        closers = [threads.submit(engine.close) for _ in range(2)]
        engine.close()
        for future in waiting:
            error = future.exception(DEADLINE_S)
            assert isinstance(error, RequestAbortedError | EngineClosedError), error
        assert [closer.result(DEADLINE_S) for closer in closers] == [None, None]
    assert engine_threads() == []


def test_closing_may_wait_for_live_requests(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, **SIZES)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, "b", greedy(30))
        wait_until(lambda: engine.state is EngineState.RUNNING and engine.statistics().running)
        engine.close(timeout=None)
        assert len(waiting.result(DEADLINE_S).token_ids) == 30


async def test_within_a_running_loop(folder: Path, expected: list[tuple[int, ...]]) -> None:
    """In a notebook the caller's thread has a loop; the engine's is another."""
    with Engine.from_pretrained(folder, **SIZES) as engine:
        assert engine.generate(PROMPTS[0], greedy()).token_ids == expected[0]
        outputs = list(engine.map(PROMPTS, greedy()))
        assert [output.token_ids for output in outputs] == expected[:-1]
        (output,) = await asyncio.gather(asyncio.to_thread(engine.generate, PROMPTS[1], greedy()))
        assert output.token_ids == expected[1]


def test_a_call_from_its_own_loop_is_refused(folder: Path) -> None:
    """It would wait for itself."""
    caught: list[BaseException] = []

    async def fetch(_: str) -> bytes:
        with pytest.raises(WrongLoopError) as error:
            engine.generate("a")
        caught.append(error.value)
        return encoded(tiny_image(0))

    media = MediaConfig(allowed_hosts=("example.com",), fetcher=fetch)
    with Engine.from_pretrained(folder, media=media, **SIZES) as engine:
        engine.generate("<image> a", greedy(), images=["https://example.com/a.png"])
    assert len(caught) == 1


def test_what_it_shows_of_itself(engine: Engine, folder: Path) -> None:
    assert repr(engine) == f"<Engine {folder.name} is running: 0 requests run, 0 wait>"
    output = engine.generate("a", greedy(3), request_id="x")
    shown = repr(output)
    assert repr(output.text) in shown and "3 tokens out" in shown and len(shown) < 600
    stream = engine.stream("a", greedy(3), request_id="x")
    stream.result()
    assert repr(stream) == "<BlockingStream 'x' is finished: 0 deltas read>"
    new = Engine.from_pretrained(folder)
    assert repr(new) == f"<Engine {folder.name} is new>"


# ---- many prompts


def test_map(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    outputs = engine.map(PROMPTS, greedy())
    assert [output.token_ids for output in outputs] == expected[:-1]
    pairs = dict(engine.map(iter(PROMPTS), [greedy()] * len(PROMPTS), ordered=False))
    seen = [pairs[index] for index in range(len(PROMPTS))]
    assert [each.token_ids for each in seen if isinstance(each, RequestOutput)] == expected[:-1]
    assert list(engine.map([])) == []
    (output,) = engine.map([Prompt(text="<image> a", media={"image": [tiny_image(0)]})], greedy())
    assert output.token_ids == expected[-1]


def test_errors_in_a_map(engine: Engine) -> None:
    bad = [*PROMPTS[:3], "<image> without one", *PROMPTS[3:]]
    outputs = []
    with pytest.raises(PlaceholderMismatchError):
        for output in engine.map(bad, greedy()):
            outputs.append(output)  # noqa: PERF402 - what came before the error is kept
    assert len(outputs) == 3
    outcomes = list(engine.map(bad, greedy(), return_exceptions=True))
    assert [isinstance(each, PlaceholderMismatchError) for each in outcomes].index(True) == 3
    assert len(outcomes) == len(bad)

    def source() -> Iterator[str]:
        yield from PROMPTS[:2]
        raise OSError("the disk is gone")

    outputs = []
    with pytest.raises(OSError, match="the disk is gone"):
        for output in engine.map(source(), greedy()):
            outputs.append(output)
    assert len(outputs) == 2
    with pytest.raises(InvalidRequestError, match="params has 3 entries"):
        list(engine.map(PROMPTS, [greedy()] * 3))


def test_a_map_that_is_left_early_leaves_nothing(engine: Engine) -> None:
    for _ in engine.map(PROMPTS, greedy(100)):
        break
    assert engine.statistics().running == engine.statistics().waiting == 0
    outputs = engine.map(PROMPTS, greedy(100))
    next(outputs)
    del outputs
    assert engine.statistics().running == engine.statistics().waiting == 0


@pytest.mark.parametrize("count", rest_is_slow([2_000, 10_000], [2_000]))
def test_prompts_are_drawn_on_the_callers_thread_as_there_is_room(
    engine: Engine, count: int
) -> None:
    drawn = taken = most = 0

    def source() -> Iterator[list[int]]:
        nonlocal drawn, most
        for index in range(count):
            assert threading.current_thread() is threading.main_thread()
            drawn += 1
            most = max(most, drawn - taken)
            yield [20 + index % 100, 20 + index // 100]

    num_bytes = []
    for output in engine.map(source(), greedy(1)):
        assert len(output.token_ids) == 1
        taken += 1
        if taken % (count // 5) == 0:
            gc.collect()
            num_bytes.append(resident_bytes())
    assert taken == drawn == count
    assert most <= 2 * engine.config.max_num_seqs * HELD
    assert num_bytes[-1] - num_bytes[0] < 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_prompt_does_not_wait_for_the_next(engine: Engine) -> None:
    def source() -> Iterator[str]:
        yield PROMPTS[0]
        wait_until(lambda: engine.statistics().finished == 1)
        yield PROMPTS[1]

    assert len(list(engine.map(source(), greedy()))) == 2


BAD = Prompt(text="<image> a", media={"image": [b"no image"]})


def broken() -> Iterator[str]:
    yield "a"
    raise OSError("gone")


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(BAD, greedy()),
        lambda engine: list(engine.map([BAD], greedy())),
        lambda engine: list(engine.map([BAD, BAD], greedy(), return_exceptions=True)),
        lambda engine: list(engine.map(broken(), greedy())),
    ],
    ids=["generate", "map", "errors in a map", "a source that fails"],
)
def test_an_error_keeps_nothing_alive(folder: Path, call: Callable[[Engine], object]) -> None:
    """Without a collection of cycles: media are large, and an engine is larger."""
    engine = Engine.from_pretrained(folder, **SIZES)
    engine.start()
    gc.collect()
    gc.disable()
    try:
        with suppress(InvalidRequestError, OSError):
            call(engine)
        del engine
        wait_until(lambda: engine_threads() == [])
    finally:
        gc.enable()


def test_a_progress_bar(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    list(engine.map(PROMPTS, greedy()))
    assert capsys.readouterr().err == ""
    threads = threading.enumerate()
    assert len(list(engine.map(PROMPTS, greedy(), progress=True))) == len(PROMPTS)
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in capsys.readouterr().err
    assert not [each for each in threading.enumerate() if each not in threads]


# ---- ends


def test_one_that_is_dropped_is_closed(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, **SIZES)
    engine.generate("a", greedy())
    assert engine_threads()
    del engine
    gc.collect()
    wait_until(lambda: engine_threads() == [])


async def test_an_asynchronous_one_that_is_dropped_is_closed(folder: Path) -> None:
    """A notebook's cell that is run twice binds its name to a second engine."""
    engine = AsyncEngine.from_pretrained(folder, **SIZES)
    await engine.start()
    await engine.generate("a", greedy())
    with pytest.warns(ResourceWarning, match="dropped before its end"):
        del engine
    async with asyncio.timeout(DEADLINE_S):
        while engine_threads():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


SCRIPT = """
    import os, signal, sys, threading
    from aioengine import Engine, SamplingParams
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where this was begun without it
    folder, how = sys.argv[1:]
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    engine = Engine.from_pretrained(folder, device="cpu", max_model_len=512, kv_cache_bytes=8 << 20)
    engine.generate("a", SamplingParams(max_tokens=1))
    if how == "idle":
        pass
    elif how == "streaming":
        stream = engine.stream("a", params)
        next(stream)
    elif how == "mapping":
        outputs = engine.map(["a"] * 300, params)
        next(outputs)
    elif how == "interrupted":
        def source():
            for index in range(100_000):
                if index == 200:
                    signal.raise_signal(signal.SIGINT)
                yield "a"
        try:
            for output in engine.map(source(), SamplingParams(max_tokens=2)):
                pass
        except KeyboardInterrupt:
            found = engine.statistics()
            print("interrupted", found.running, found.waiting, flush=True)
            engine.generate("a", SamplingParams(max_tokens=1))
    elif how == "waiting":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for output in engine.map(["a"] * 300, params):
                pass
        except KeyboardInterrupt:
            found = engine.statistics()
            print("interrupted", found.running, found.waiting, flush=True)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            engine.generate("a", SamplingParams(max_tokens=480, n=64, ignore_eos=True))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    elif how == "loading":
        other = Engine.from_pretrained(folder, device="cpu")
        def interrupt(progress):
            if progress.stage == "weights":
                os.kill(os.getpid(), signal.SIGINT)
        try:
            other.start(progress=interrupt)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        other.close()
    elif how == "outlived":
        from aioengine.errors import EngineClosedError
        def work():
            try:
                for _ in range(100_000):
                    engine.generate("a", SamplingParams(max_tokens=1))
            except EngineClosedError as error:
                print("closed", flush=True)
        threading.Thread(target=work).start()
    elif how == "forked":
        from aioengine.errors import EngineError
        child = os.fork()
        if child == 0:
            try:
                engine.generate("a")
            except EngineError as error:
                print(error, flush=True)
            sys.exit(0)
        print(os.waitpid(child, 0)[1])
        engine.generate("a", SamplingParams(max_tokens=1))
    elif how == "forked in a load":
        from aioengine.errors import EngineError
        other = Engine(folder, device="cpu")
        begun, forked = threading.Event(), threading.Event()
        def hold(_):
            begun.set()
            forked.wait()
        loading = threading.Thread(target=other.start, kwargs={"progress": hold})
        loading.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            try:
                other.generate("a")
            except EngineError as error:
                print(error, flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        forked.set()
        loading.join()
    print("end")
"""

ENDINGS = {
    "idle": "end\n",
    "streaming": "end\n",
    "mapping": "end\n",
    "interrupted": "interrupted 0 0\nend\n",
    "waiting": "interrupted 0 0\ninterrupted\nend\n",
    "loading": "interrupted\nend\n",
    "outlived": "end\nclosed\n",
    "forked": "an engine does not follow a fork; make one in the new process\n0\nend\n",
    "forked in a load": "an engine does not follow a fork; make one in the new process\n0\nend\n",
}


@pytest.mark.parametrize("how", rest_is_slow(ENDINGS, ["streaming", "waiting", "forked"]))
def test_a_process_ends_quietly(folder: Path, how: str) -> None:
    """An engine that nobody has closed, with requests or without, and what Ctrl-C leaves."""
    # Python warns of a fork beside threads, rightly, from 3.12 on.
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [*python, "-c", textwrap.dedent(SCRIPT), str(folder), how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stderr, done.stdout, done.returncode) == ("", ENDINGS[how], 0)


def test_an_interrupt_ends_a_script(folder: Path) -> None:
    """Ctrl-C in a script that does not expect it: Python's own last lines, and no more."""
    script = """
        import os, signal, sys, threading
        from aioengine import Engine, SamplingParams
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = Engine.from_pretrained(sys.argv[1], device="cpu", max_model_len=512)
        engine.start()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        list(engine.map(["a"] * 3000, SamplingParams(max_tokens=400, ignore_eos=True)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGINT and done.stdout == ""
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert done.stderr.count("Traceback") == 1
