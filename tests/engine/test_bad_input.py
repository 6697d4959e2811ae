"""Whatever a request brings: the right typed error for it alone, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from aioengine import AsyncEngine, Embeddings, MediaConfig, Prompt, SamplingParams
from aioengine.errors import (
    AioEngineError,
    InvalidRequestError,
    MediaError,
    MediaUnavailableError,
    PlaceholderMismatchError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from tests.support.engines import encoded, greedy, running_engine, settled
from tests.support.tiny import IMAGE, NUM_IMAGE_TOKENS, VOCAB_SIZE, save_tiny_llava, tiny_image

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN_SIZE = 48
GOOD_PROMPT = "USER: <image>\nWhat is it? ASSISTANT:"
GOOD = {"params": greedy(12), "images": [tiny_image(100)]}
PNG = encoded(tiny_image(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folder, limit_mm_per_prompt={"image": 3}) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(engine: AsyncEngine) -> tuple[int, ...]:
    """The good request's tokens when it runs alone."""
    return (await engine.generate(GOOD_PROMPT, **GOOD)).token_ids


async def refused(
    engine: AsyncEngine, prompt: Any, kind: type[AioEngineError], parameter: str, **request: Any
) -> AioEngineError:
    """The error of a bad request; exactly of that kind, about that parameter, and discreet."""
    with pytest.raises(AioEngineError) as caught:
        async with asyncio.timeout(10):
            await engine.generate(prompt, **request)
    error = caught.value
    assert type(error) is kind, repr(error)
    assert isinstance(error, InvalidRequestError)
    assert error.parameter == parameter, repr(error)
    assert "0x" not in str(error) and len(str(error)) < 500
    return error


async def check(
    engine: AsyncEngine,
    expected: tuple[int, ...],
    cases: Sequence[tuple[Any, type[AioEngineError], str, dict[str, Any]]],
) -> None:
    """Bad requests all at once, beside a good one whose tokens must not change; cold caches."""
    await engine.reset_caches()
    good, *_ = await asyncio.gather(
        engine.generate(GOOD_PROMPT, **GOOD),
        *(refused(engine, prompt, kind, name, **more) for prompt, kind, name, more in cases),
    )
    assert good.token_ids == expected
    await settled(engine)


async def aiter_of(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


# ---- images


def bomb_png(width: int, height: int) -> bytes:
    """A PNG header that promises pixels by the billion, and next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
async def test_images_cut_short_anywhere(
    engine: AsyncEngine, expected: tuple[int, ...], image_format: str
) -> None:
    data = encoded(tiny_image(2), image_format)
    cuts = sorted({1, 2, 8, 16, 30, 60, *(len(data) * k // 12 for k in range(1, 11))})
    await check(
        engine,
        expected,
        [
            (GOOD_PROMPT, MediaError, "images[0]", {"images": [data[:cut]]})
            for cut in cuts
            if cut < len(data)
        ],
    )


def flipped(data: bytes, seed: int) -> bytes:
    """The image with its middle overwritten by noise."""
    noise = np.random.default_rng(seed).integers(0, 256, len(data) // 2, dtype=np.uint8).tobytes()
    return data[: len(data) // 4] + noise + data[len(data) // 4 + len(noise) :]


BAD_IMAGES: dict[str, Callable[[], Any]] = {
    "empty": lambda: b"",
    "text": lambda: b"this is no image at all, whatever its name says",
    "corrupt": lambda: flipped(PNG, 1),
    "bomb": lambda: bomb_png(50_000, 50_000),
    "bomb in one row": lambda: bomb_png(2**31 - 1, 1),
    "no pixels": lambda: bomb_png(0, 10),
    "format not allowed": lambda: encoded(tiny_image(3), "PPM"),
    "JPEG 2000": lambda: b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64),
    "number": lambda: 17,
    "None": lambda: None,
    "list of numbers": lambda: [1, 2, 3],
    "mapping": lambda: {"url": "x"},
    "object array": lambda: np.array([[object()]]),
    "integer array": lambda: np.zeros((8, 8, 3), np.int64),
    "five channels": lambda: np.zeros((8, 8, 5), np.uint8),
    "no height": lambda: np.zeros((0, 8, 3), np.uint8),
    "four dimensions": lambda: np.zeros((1, 8, 8, 3), np.uint8),
    "floats out of range": lambda: np.full((8, 8, 3), 1.5),
    "not a number": lambda: torch.full((3, 8, 8), torch.nan),
    "sparse tensor": lambda: torch.zeros(3, 8, 8).to_sparse(),
    "meta tensor": lambda: torch.zeros(3, 8, 8, device="meta"),
    "no such file": lambda: "no/such/image.png",
    "no such path": lambda: Path("no/such/image.png"),
    "folder": lambda: Path.cwd(),
    "null in a path": lambda: "a\0b",
    "very long path": lambda: "x" * 100_000,
    "data URL without base64": lambda: "data:image/png,hello",
    "data URL, bad base64": lambda: "data:image/png;base64,@@@@",
    "data URL, no comma": lambda: "data:image/png;base64",
    "data URL, empty": lambda: data_url(b""),
    "data URL, cut short": lambda: data_url(PNG[:40]),
    "data URL of a video": lambda: data_url(b"\0" * 100, "video/jpeg"),
    "http without a fetcher": lambda: "http://127.0.0.1/image.png",
    "https without a fetcher": lambda: "HTTPS://example.com/image.png",
    "file URL without roots": lambda: "file:///etc/passwd",
    "another scheme": lambda: "ftp://example.com/image.png",
}


@pytest.mark.parametrize("name", BAD_IMAGES)
async def test_bad_images(engine: AsyncEngine, expected: tuple[int, ...], name: str) -> None:
    """As the first image and as the second of two, so that the name has to be the right one."""
    bad = BAD_IMAGES[name]
    await check(
        engine,
        expected,
        [
            (GOOD_PROMPT, MediaError, "images[0]", {"images": [bad()]}),
            ("<image> <image>", MediaError, "images[1]", {"images": [tiny_image(4), bad()]}),
        ],
    )


async def test_a_image_over_the_limits_of_the_configuration(folder: Path) -> None:
    limits = MediaConfig(max_image_pixels=1000, max_image_bytes=5000)
    async with running_engine(folder, media=limits) as engine:
        small = tiny_image(5, 20, 20)
        await engine.generate("<image>", greedy(), images=[small])
        for bad in (tiny_image(5, 40, 36), b"\xff\xd8" + bytes(6000), data_url(bytes(6000))):
            await refused(engine, "<image>", MediaError, "images[0]", images=[bad])


async def test_one_broken_image_in_two_requests_has_two_names(
    engine: AsyncEngine, expected: tuple[int, ...]
) -> None:
    """The header is fine, so both are admitted and share one decoding, which fails."""
    broken = encoded(tiny_image(6, 200, 200))
    broken = broken[: len(broken) // 2]
    await check(
        engine,
        expected,
        [
            ("<image> A", MediaError, "images[0]", {"images": [broken]}),
            ("<image> B <image>", MediaError, "images[1]", {"images": [tiny_image(7), broken]}),
        ],
    )


async def test_the_error_says_which_image_in_chat_messages(
    engine: AsyncEngine, expected: tuple[int, ...]
) -> None:
    def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    good = {"type": "image", "image": tiny_image(8)}
    text = {"type": "text", "text": "and?"}
    name = "messages[0].content[2]"
    await check(
        engine,
        expected,
        [
            (chat(good, text, bad), MediaError, name, {})
            for bad in (
                {"type": "image", "image": b""},
                {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
                {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
                {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}},
                {"type": "image_url", "image_url": {"url": data_url(PNG[:50])}},
            )
        ],
    )


# ---- placeholders and counts


async def test_placeholders_and_images_have_to_match(
    engine: AsyncEngine, expected: tuple[int, ...]
) -> None:
    pil_image = tiny_image(9)
    await check(
        engine,
        expected,
        [
            ("no place", PlaceholderMismatchError, "prompt", {"images": [pil_image]}),
            ("<image>", PlaceholderMismatchError, "prompt", {"images": [pil_image] * 2}),
            ("<image><image>", PlaceholderMismatchError, "prompt", {"images": [pil_image]}),
            ("<image>", PlaceholderMismatchError, "prompt", {}),
            ([1, 5, IMAGE, 6], PlaceholderMismatchError, "prompt", {}),
            ([1, 5, 6], PlaceholderMismatchError, "prompt", {"images": [pil_image]}),
        ],
    )


async def test_too_many_images_and_other_modalities(
    engine: AsyncEngine, expected: tuple[int, ...]
) -> None:
    pil_image = tiny_image(10)
    await check(
        engine,
        expected,
        [
            ("<image>" * 4, UnsupportedModalityError, "images", {"images": [pil_image] * 4}),
            ("hello", UnsupportedModalityError, "audios", {"audios": [b"x"]}),
            ("hello", UnsupportedModalityError, "videos", {"videos": [b"x"]}),
        ],
    )


@pytest.mark.parametrize("images", [{PNG}, aiter_of(PNG), repeat(PNG)])
async def test_images_have_to_be_in_order_and_to_end(engine: AsyncEngine, images: Any) -> None:
    await refused(engine, "<image>", InvalidRequestError, "images", images=images)


@pytest.mark.parametrize("image", [b"no image", "a.png", {"a": 1}, 3, np.float64(3)])
async def test_one_bad_image_without_a_list(engine: AsyncEngine, image: Any) -> None:
    await refused(engine, "<image>", MediaError, "images[0]", images=image)


# ---- prompts

BAD_PROMPTS: dict[str, tuple[Callable[[], Any], type[AioEngineError], str]] = {
    "negative id": (lambda: [1, -1, 5], InvalidRequestError, "prompt"),
    "id beyond the vocabulary": (lambda: [1, VOCAB_SIZE], InvalidRequestError, "prompt"),
    "huge id": (lambda: [1, 2**70], InvalidRequestError, "prompt"),
    "float id": (lambda: [1, 5.0], InvalidRequestError, "prompt"),
    "text as an id": (lambda: [1, "5"], InvalidRequestError, "prompt"),
    "None as an id": (lambda: [1, None], InvalidRequestError, "prompt"),
    "no ids": (lambda: [], InvalidRequestError, "prompt"),
    "no ids in a tensor": (lambda: torch.zeros(0, dtype=torch.long), InvalidRequestError, "prompt"),
    "matrix of ids": (lambda: torch.ones(2, 2, dtype=torch.long), InvalidRequestError, "prompt"),
    "float array": (lambda: np.ones(3), InvalidRequestError, "prompt"),
    "single id": (lambda: torch.tensor(5), InvalidRequestError, "prompt"),
    "number": (lambda: 5, InvalidRequestError, "prompt"),
    "None": (lambda: None, InvalidRequestError, "prompt"),
    "bytes": (lambda: b"hello", InvalidRequestError, "prompt"),
    "mapping": (lambda: {"role": "user"}, InvalidRequestError, "prompt"),
    "nothing in a Prompt": (lambda: Prompt(), InvalidRequestError, "prompt"),
    "two in a Prompt": (lambda: Prompt(text="a", token_ids=[1]), InvalidRequestError, "prompt"),
    "text that is no text": (lambda: Prompt(text=5), InvalidRequestError, "prompt"),
    "ids that are no list": (lambda: Prompt(token_ids=5), InvalidRequestError, "prompt"),
    "encoder text": (
        lambda: Prompt(text="a", encoder_text="b"),
        InvalidRequestError,
        "encoder_text",
    ),
    "uuids that do not match": (
        lambda: Prompt(text="<image>", media={"image": [PNG]}, uuids={"image": ["a", "b"]}),
        InvalidRequestError,
        "uuids",
    ),
    "too long": (lambda: [5] * 512, PromptTooLongError, "prompt"),
    "too long by its image": (
        lambda: Prompt(token_ids=[5] * 500 + [IMAGE], media={"image": [PNG]}),
        PromptTooLongError,
        "prompt",
    ),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
async def test_bad_prompts(engine: AsyncEngine, expected: tuple[int, ...], name: str) -> None:
    make, kind, parameter = BAD_PROMPTS[name]
    await check(engine, expected, [(make(), kind, parameter, {})] * 2)


# Each has an engine of its own, which it might take down.
ODD_PROMPTS: dict[str, tuple[Callable[[], Any], type[AioEngineError], str]] = {
    "bool id": (lambda: [1, True, 5], InvalidRequestError, "prompt"),
    "messages that are none": (lambda: Prompt(messages=5), InvalidRequestError, "prompt"),
    "media that are no mapping": (
        lambda: Prompt(text="a", media=[b""]),
        InvalidRequestError,
        "media",
    ),
    "uuids that are no mapping": (
        lambda: Prompt(text="<image>", media={"image": [PNG]}, uuids=["a"]),
        InvalidRequestError,
        "uuids",
    ),
    "uuid that is no text": (
        lambda: Prompt(text="<image>", media={"image": [PNG]}, uuids={"image": [7]}),
        InvalidRequestError,
        "uuids",
    ),
    "salt that is no text": (
        lambda: Prompt(text="a", cache_salt=7),
        InvalidRequestError,
        "cache_salt",
    ),
    "options that are no mapping": (
        lambda: Prompt(text="a", mm_processor_kwargs=7),
        InvalidRequestError,
        "mm_processor_kwargs",
    ),
}


@pytest.mark.parametrize("name", ODD_PROMPTS)
async def test_odd_prompts(folder: Path, name: str) -> None:
    make, kind, parameter = ODD_PROMPTS[name]
    async with running_engine(folder) as engine:
        await refused(engine, make(), kind, parameter)


async def test_ids_in_arrays_and_other_sequences_are_fine(engine: AsyncEngine) -> None:
    ids = [1, 20, 30]
    outputs = await asyncio.gather(
        *(
            engine.generate(prompt, greedy())
            for prompt in (
                ids,
                tuple(ids),
                np.array(ids),
                torch.tensor(ids),
                Prompt(token_ids=ids),
                Prompt(token_ids=range(1, 2)),
            )
        )
    )
    assert len({output.token_ids for output in outputs[:-1]}) == 1


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
async def test_ids_in_arrays_in_a_prompt_are_fine(engine: AsyncEngine, kind: Any) -> None:
    prompt = Prompt(token_ids=kind([1, 20, 30]))
    assert (await engine.generate(prompt, greedy())).prompt_token_ids == (1, 20, 30)


async def test_the_longest_prompt_that_fits_gets_one_token(engine: AsyncEngine) -> None:
    output = await engine.generate([5] * 511, greedy(100))
    assert len(output.token_ids) == 1
    await settled(engine)


# ---- arguments


async def test_bad_arguments(engine: AsyncEngine, expected: tuple[int, ...]) -> None:
    await check(
        engine,
        expected,
        [
            ("a", InvalidRequestError, "params", {"params": {"temperature": 0}}),
            ("a", InvalidRequestError, "priority", {"priority": "high"}),
            ("a", InvalidRequestError, "priority", {"priority": 1.5}),
        ],
    )


@pytest.mark.parametrize("request_id", [7, ["a"], b"a"])
async def test_a_request_id_has_to_be_text(engine: AsyncEngine, request_id: Any) -> None:
    await refused(engine, "a", InvalidRequestError, "request_id", request_id=request_id)


async def test_a_live_request_id_cannot_be_used_again(engine: AsyncEngine) -> None:
    async with engine.stream([1, 20], greedy(8), request_id="mine") as stream:
        with pytest.raises(InvalidRequestError) as caught:
            engine.stream([1, 21], greedy(8), request_id="mine")
        assert caught.value.parameter == "request_id"
        first = await stream.result()
    again = await engine.generate([1, 20], greedy(8), request_id="mine")
    assert again.token_ids == first.token_ids
    await settled(engine)


# ---- embeddings

BAD_ROWS: dict[str, Callable[[], Any]] = {
    "wrong width": lambda: torch.zeros(4, HIDDEN_SIZE + 1),
    "no rows": lambda: torch.zeros(0, HIDDEN_SIZE),
    "one dimension": lambda: torch.zeros(HIDDEN_SIZE),
    "three dimensions": lambda: torch.zeros(1, 4, HIDDEN_SIZE),
    "not a number": lambda: torch.full((4, HIDDEN_SIZE), torch.nan),
    "infinite": lambda: np.full((4, HIDDEN_SIZE), np.inf, np.float32),
    "integers": lambda: torch.zeros(4, HIDDEN_SIZE, dtype=torch.long),
    "sparse, indices out of range": lambda: torch.sparse_coo_tensor(
        torch.tensor([[10**6], [10**6]]), torch.ones(1), (4, HIDDEN_SIZE), check_invariants=False
    ),
    "sparse rows": lambda: torch.zeros(4, HIDDEN_SIZE).to_sparse_csr(),
    "meta": lambda: torch.zeros(4, HIDDEN_SIZE, device="meta"),
    "objects": lambda: np.array([[None] * HIDDEN_SIZE]),
    "list": lambda: [[0.0] * HIDDEN_SIZE],
    "None": lambda: None,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("name", BAD_ROWS)
async def test_bad_embeddings(engine: AsyncEngine, expected: tuple[int, ...], name: str) -> None:
    bad = Embeddings(BAD_ROWS[name]())
    good = Embeddings(torch.zeros(3, HIDDEN_SIZE))
    await check(
        engine,
        expected,
        [
            ("<image>", MediaError, "images[0]", {"images": [bad]}),
            ("<image><image>", MediaError, "images[1]", {"images": [good, bad]}),
        ],
    )


async def test_bad_embeddings_beside_images(engine: AsyncEngine, expected: tuple[int, ...]) -> None:
    images = [tiny_image(11), Embeddings(torch.full((3, HIDDEN_SIZE), torch.nan)), tiny_image(12)]
    await check(engine, expected, [("<image>" * 3, MediaError, "images[1]", {"images": images})])


# ---- too large for this engine


async def test_an_item_larger_than_the_encoder_cache(folder: Path) -> None:
    row_bytes = HIDDEN_SIZE * 8
    async with running_engine(folder, encoder_cache_bytes=(NUM_IMAGE_TOKENS - 1) * row_bytes) as e:
        expected = await e.generate([1, 20], greedy())
        text, _ = await asyncio.gather(
            e.generate([1, 20], greedy()),
            refused(e, "<image>", MediaError, "images[0]", images=[tiny_image(1)]),
        )
        assert text.token_ids == expected.token_ids


async def test_an_item_larger_than_a_step_that_must_take_it_whole(folder: Path) -> None:
    options = {"disable_chunked_mm_input": True, "max_num_batched_tokens": NUM_IMAGE_TOKENS - 1}
    async with running_engine(folder, **options) as engine:
        await refused(engine, "<image>", PromptTooLongError, "prompt", images=[tiny_image(1)])
        await engine.generate([1, 20], greedy())


async def test_unlimited_images_until_the_model_is_full(folder: Path) -> None:
    async with running_engine(folder, max_model_len=64) as engine:
        images = [tiny_image(seed) for seed in range(4)]
        await refused(engine, "<image>" * 4, PromptTooLongError, "prompt", images=images)
        await engine.generate("<image>" * 3, greedy(), images=images[:3])


# ---- fetching


async def _raise(url: str) -> bytes:
    raise ConnectionResetError("secret host 10.0.0.1")


async def _hang(url: str) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def _rubbish(url: str) -> bytes:
    return b"<html>404</html>"


async def _no_bytes(url: str) -> Any:
    return "text"


async def _mixed_up(url: str) -> bytes:
    """As a client library that mixes up its own time limit with a cancellation."""
    raise asyncio.CancelledError


class _Outcome(BaseException):
    """As the errors of some libraries, which `except Exception` is not to catch."""


async def _no_exception(url: str) -> bytes:
    raise _Outcome


async def _no_exception_in_a_group(url: str) -> bytes:
    async with asyncio.TaskGroup() as tasks:
        await tasks.create_task(_no_exception(url))
    raise AssertionError


@pytest.mark.parametrize(
    ("fetcher", "kind"),
    [
        (_raise, MediaUnavailableError),
        (_hang, MediaUnavailableError),
        (_rubbish, MediaError),
        (_no_bytes, MediaError),
        (_mixed_up, MediaError),
        (_no_exception, MediaError),
        (_no_exception_in_a_group, MediaError),
    ],
)
async def test_a_fetcher_that_fails(folder: Path, fetcher: Any, kind: type[MediaError]) -> None:
    media = MediaConfig(fetcher=fetcher, fetch_timeout_s=0.05)
    async with running_engine(folder, media=media) as engine:
        expected = await engine.generate(GOOD_PROMPT, **GOOD)
        url = "https://example.com/a.png"
        good, first, second = await asyncio.gather(
            engine.generate(GOOD_PROMPT, **GOOD),
            refused(engine, "<image>", kind, "images[0]", images=[url]),
            refused(engine, "<image><image>", kind, "images[1]", images=[PNG, url]),
        )
        assert good.token_ids == expected.token_ids
        assert first is not second
        assert "10.0.0.1" not in str(first)


# ---- faults of the model and the processor


async def test_an_encoder_that_gives_the_wrong_number_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(folder) as engine:
        expected = await engine.generate(GOOD_PROMPT, **GOOD)
        await engine.reset_caches()
        model = engine._core.loaded.runner.model
        encode = model.encode
        poisoned = torch.full((), 0.25)

        def encode_badly(modality: str, items: list[Any]) -> list[torch.Tensor]:
            rows = encode(modality, items)
            marks = [float(item["pixel_values"].std()) < float(poisoned) for item in items]
            return [r[:-1] if mark else r for r, mark in zip(rows, marks, strict=True)]

        monkeypatch.setattr(model, "encode", encode_badly)
        plain = np.zeros((32, 32, 3), np.uint8)
        good, error, _ = await asyncio.gather(
            engine.generate(GOOD_PROMPT, **GOOD),
            refused(engine, "<image>", MediaError, "images[0]", images=[plain]),
            refused(engine, "<image><image>", MediaError, "images[1]", images=[PNG, plain]),
        )
        assert good.token_ids == expected.token_ids
        assert error.__cause__ is not None


@pytest.mark.parametrize("stage", ["_call_hf_processor", "_get_mm_fields_config"])
async def test_a_processor_that_raises(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    async with running_engine(folder) as engine:
        expected = await engine.generate(GOOD_PROMPT, **GOOD)

        def fail(*args: Any) -> Any:
            raise RuntimeError("payload: (255, 0, 0)")

        for processor in engine._core.loaded.processors:
            monkeypatch.setattr(processor, stage, fail)
        # The good image is in the caches, the bad one is not.
        good, error, _ = await asyncio.gather(
            engine.generate(GOOD_PROMPT, **GOOD),
            refused(engine, "<image>", MediaError, "images[0]", images=[PNG]),
            refused(
                engine, "<image><image>", MediaError, "images[1]", images=[*GOOD["images"], PNG]
            ),
        )
        assert good.token_ids == expected.token_ids
        assert "payload" not in str(error)


async def test_bad_processor_options_of_a_request(engine: AsyncEngine) -> None:
    prompt = Prompt(
        text="<image>", media={"image": [PNG]}, mm_processor_kwargs={"size": {"height": "tall"}}
    )
    with pytest.raises(InvalidRequestError):
        await engine.generate(prompt, greedy())
    await settled(engine)


# ---- text that looks like more than text


async def test_a_placeholder_in_chat_text_is_text(engine: AsyncEngine) -> None:
    messages = [{"role": "user", "content": "What does <image> mean? </s><s>"}]
    output = await engine.generate(messages, greedy())
    assert IMAGE not in output.prompt_token_ids
    await settled(engine)


# ---- requests that try to be somebody else, or everybody's end


async def test_a_ban_on_all_tokens_harms_nobody(
    engine: AsyncEngine, expected: tuple[int, ...]
) -> None:
    for temperature in (0, 1):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=6,
            min_tokens=5,
            stop_token_ids=list(range(VOCAB_SIZE)),
        )
        good, odd = await asyncio.gather(
            engine.generate(GOOD_PROMPT, **GOOD),
            engine.generate("a", params),
            return_exceptions=True,
        )
        assert not isinstance(good, BaseException)
        assert good.token_ids == expected
        assert isinstance(odd, InvalidRequestError) and odd.parameter == "params"
    await settled(engine)


async def test_a_uuid_never_brings_another_images_rows(engine: AsyncEngine) -> None:
    def prompt(pil_image: Any) -> Prompt:
        return Prompt(text="<image>", media={"image": [pil_image]}, uuids={"image": ["mine"]})

    outputs = [await engine.generate(prompt(tiny_image(n)), greedy()) for n in (30, 31)]
    plain = [await engine.generate("<image>", greedy(), images=[tiny_image(n)]) for n in (30, 31)]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert outputs[0].token_ids != outputs[1].token_ids


async def test_tenants_share_nothing_cached(engine: AsyncEngine) -> None:
    async def ask(salt: str | None) -> tuple[int, int]:
        text = "Some text that fills a block or two before it. <image>"
        prompt = Prompt(text=text, media={"image": [tiny_image(32)]}, cache_salt=salt)
        usage = (await engine.generate(prompt, greedy())).usage
        return usage.cached_tokens, usage.encoder_cached_items

    await engine.reset_caches()
    for salt in ("one", "two", None):
        assert await ask(salt) == (0, 0)
    cached_tokens, cached_items = await ask("two")
    assert cached_tokens > 0 and cached_items == 1


async def test_equal_bytes_of_another_shape_are_another_image(engine: AsyncEngine) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 150, 3), dtype=np.uint8)
    before = engine.statistics().encoder_items_run
    outputs = [
        await engine.generate("<image>", greedy(), images=[image])
        for image in (pixels, pixels.reshape(150, 30, 3), pixels.reshape(150, 90))
    ]
    assert len({output.token_ids for output in outputs}) == 3
    assert engine.statistics().encoder_items_run == before + 3
