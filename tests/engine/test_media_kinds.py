"""Every kind of media item that people have gives the tokens of its plain form."""

from __future__ import annotations

import array
import io
import mmap
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import django.conf
import IPython.display
import litestar.datastructures
import numpy as np
import pytest
import pytest_asyncio
import starlette.datastructures
import torch
from aiohttp.web import FileField
from matplotlib.figure import Figure
from multidict import CIMultiDict, CIMultiDictProxy
from PIL import Image

from aioengine import AsyncEngine, Prompt
from aioengine.errors import MediaError
from tests.engine.test_modalities import FILM, frames, mkv, samples, save_media_family
from tests.parity.audio_families import RATE, sound, wav
from tests.parity.listener_families import save_listener, tokenizer_for
from tests.support.engines import encoded, greedy, running_engine
from tests.support.grids import rest_is_slow
from tests.support.tiny import save_tiny_llava, tiny_image

if not django.conf.settings.configured:
    django.conf.settings.configure(
        ALLOWED_HOSTS=["*"], ROOT_URLCONF="tests.asgi.test_http", SECRET_KEY="tests only"
    )
from django.core.files.uploadedfile import SimpleUploadedFile, TemporaryUploadedFile

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, TWO = "USER: <image>\nWhat is it? ASSISTANT:", "<image> and <image>"
PICTURE, OTHER = tiny_image(70), tiny_image(71)
PNG = encoded(PICTURE)
PIXELS = np.asarray(PICTURE)
SOUND = sound(3, 0.7)
WAV = wav(SOUND)
SAMPLE = samples(9)
MKV = mkv(frames(9))

Make = Callable[[Path], Any]
"""A value of `images=`, `audios=` or `videos=` made of a file's path."""
Keep = Callable[[Any], Any]
"""Closes a file when the test is over."""


def arrow() -> Any:
    return pytest.importorskip("pyarrow")


class Picture(Image.Image):
    """A subclass of an application's own."""


def subclass() -> Picture:
    picture = Picture()
    picture.im, picture._mode, picture._size = PICTURE.im, PICTURE.mode, PICTURE.size
    return picture


def rolled(data: bytes, max_size: int) -> Any:
    file = tempfile.SpooledTemporaryFile(max_size)  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


def at_offset(data: bytes) -> io.BytesIO:
    file = io.BytesIO(b"something before it" + data)
    file.seek(len(b"something before it"))
    return file


def temporary_upload(data: bytes) -> Any:
    upload = TemporaryUploadedFile("a", "image/png", len(data), None)
    upload.write(data)
    upload.seek(0)
    return upload


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Pipe(io.RawIOBase):
    """A file that cannot seek, and gives a byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._rest = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._rest.read(1 if size else 0)


class Column:
    """Looks as a Series or a column of datasets does: one dimension of objects."""

    ndim, dtype = 1, np.dtype(object)

    def __init__(self, *items: Any) -> None:
        self._items = items

    def __iter__(self) -> Any:
        return iter(self._items)


FILES: dict[str, Make] = {
    "path": lambda path: path,
    "text": str,
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "memoryview": lambda path: memoryview(path.read_bytes()),
    "numpy's bytes": lambda path: np.bytes_(path.read_bytes()),
    "numpy array of no dimensions": lambda path: np.array(path.read_bytes()),
    "object array of no dimensions": lambda path: np.array(path, dtype=object),
    "array of bytes": lambda path: array.array("B", path.read_bytes()),
    "open file": lambda path: path.open("rb"),
    "unbuffered file": lambda path: path.open("rb", buffering=0),
    "BytesIO": lambda path: io.BytesIO(path.read_bytes()),
    "file at an offset": lambda path: at_offset(path.read_bytes()),
    "spooled in memory": lambda path: rolled(path.read_bytes(), 1 << 20),
    "spooled on disk": lambda path: rolled(path.read_bytes(), 10),
    "mmap": mapped,
    "pipe of single bytes": lambda path: Pipe(path.read_bytes()),
    "Starlette upload": lambda path: starlette.datastructures.UploadFile(path.open("rb")),
    "Litestar upload": lambda path: litestar.datastructures.UploadFile(
        "image/png", "a", file_data=path.read_bytes()
    ),
    "Django upload": lambda path: SimpleUploadedFile("a", path.read_bytes()),
    "Django upload on disk": lambda path: temporary_upload(path.read_bytes()),
    "aiohttp upload": lambda path: FileField(
        "a", "a", path.open("rb"), "image/png", CIMultiDictProxy(CIMultiDict())
    ),
    "datasets, bytes": lambda path: {"bytes": path.read_bytes(), "path": "nowhere.png"},
    "datasets, path": lambda path: {"bytes": None, "path": str(path)},
    "Arrow binary": lambda path: arrow().scalar(path.read_bytes()),
    "Arrow large binary": lambda path: arrow().scalar(path.read_bytes(), arrow().large_binary()),
    "Arrow binary of fixed size": lambda path: arrow().scalar(
        path.read_bytes(), arrow().binary(len(path.read_bytes()))
    ),
    "Arrow buffer": lambda path: arrow().py_buffer(path.read_bytes()),
    "Arrow text": lambda path: arrow().scalar(str(path)),
    "Arrow struct, bytes": lambda path: arrow().scalar(
        {"bytes": path.read_bytes(), "path": "nowhere.png"}
    ),
    "Arrow struct, path": lambda path: arrow().scalar({"bytes": None, "path": str(path)}),
    "Arrow array": lambda path: arrow().array([path.read_bytes()]),
    "Arrow array of structs": lambda path: arrow().array([{"bytes": path.read_bytes()}]),
    "chunked Arrow array": lambda path: arrow().chunked_array([[path.read_bytes()]]),
    "list": lambda path: [path],
    "tuple": lambda path: (path,),
    "generator": lambda path: (each for each in [path]),
    "view of a mapping": lambda path: {"a": path}.values(),
    "object array": lambda path: np.array([path], dtype=object),
    "array of texts": lambda path: np.array([str(path)]),
    "column": lambda path: Column(path.read_bytes()),
}
"""Of images, audio and videos."""

IMAGES: dict[str, Make] = {
    "notebook's image": lambda path: IPython.display.Image(data=path.read_bytes()),
    "notebook's image of a file": lambda path: IPython.display.Image(filename=str(path)),
    "Pillow": lambda path: PICTURE,
    "Pillow, not read yet": Image.open,
    "Pillow, a subclass": lambda path: subclass(),
    "pixels": lambda path: PIXELS,
    "tensor": lambda path: torch.from_numpy(PIXELS.copy()).movedim(-1, 0),
    "tensor with a gradient": lambda path: (
        torch.from_numpy(PIXELS.copy()).movedim(-1, 0).double().div(255).requires_grad_()
    ),
    "batch of arrays": lambda path: PIXELS[None],
    "batch of tensors": lambda path: torch.from_numpy(PIXELS.copy()).movedim(-1, 0)[None],
}

AUDIOS: dict[str, Make] = {
    "pair": lambda path: (SOUND, RATE),
    "pair in a list": lambda path: [[SOUND, RATE]],
    "pair with numpy's rate": lambda path: (SOUND, np.int64(RATE)),
    "pair with a gradient": lambda path: (torch.from_numpy(SOUND).requires_grad_(), RATE),
    "datasets, samples": lambda path: {"path": "none", "array": SOUND, "sampling_rate": RATE},
    "decoder": lambda path: SimpleNamespace(
        get_all_samples=lambda: SimpleNamespace(
            data=torch.from_numpy(SOUND)[None], sample_rate=RATE
        )
    ),
}

VIDEOS: dict[str, Make] = {
    "array": lambda path: frames(9),
    "tensor": lambda path: torch.from_numpy(frames(9)).movedim(-1, 1),
    "list of images in a list": lambda path: [[Image.fromarray(each) for each in frames(9)]],
    "batch": lambda path: frames(9)[None],
}


async def tokens(engine: AsyncEngine, prompt: Any, **media: Any) -> tuple[int, ...]:
    """Nothing is taken from a cache: the item has to be read, decoded and processed."""
    await engine.reset_caches()
    return (await engine.generate(prompt, greedy(8), **media)).token_ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models, and one file of each modality."""
    llava, whisper, family, files = map(
        tmp_path_factory.mktemp, ("llava", "whisper", "family", "files")
    )
    save_tiny_llava(llava)
    save_listener("whisper", whisper, tokenizer_for("whisper"))
    save_media_family(family)
    found = {"llava": llava, "whisper": whisper, "family": family}
    for name, data in (("a.png", PNG), ("a.wav", WAV), ("a.mkv", MKV)):
        found[name] = files / name
        found[name].write_bytes(data)
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["thread:2", "process:1"])
async def llava(request: Any, folders: dict[str, Path]) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folders["llava"], processor_workers=request.param) as engine:
        yield engine


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=rest_is_slow(["thread:2", "process:1"], ["thread:2"]),
)
async def whisper(request: Any, folders: dict[str, Path]) -> AsyncIterator[AsyncEngine]:
    async with running_engine(
        folders["whisper"], max_model_len=64, processor_workers=request.param
    ) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def family(folders: dict[str, Path]) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folders["family"]) as engine:
        yield engine


@pytest.fixture
def keep() -> Iterator[Keep]:
    with ExitStack() as stack:

        def keep_one(item: Any) -> Any:
            file = getattr(item, "file", item)
            if hasattr(file, "read"):
                stack.enter_context(closing(file))
            return item

        yield keep_one


@pytest.mark.parametrize("name", [*FILES, *IMAGES])
async def test_images(llava: AsyncEngine, folders: dict[str, Path], keep: Keep, name: str) -> None:
    item = {**FILES, **IMAGES}[name](folders["a.png"])
    keep(item)
    expected = await tokens(llava, TEXT, images=[PICTURE])
    assert await tokens(llava, TEXT, images=item) == expected
    assert await tokens(llava, TEXT, images=[OTHER]) != expected


@pytest.mark.parametrize("name", [*FILES, *AUDIOS])
async def test_audio_of_an_encoder_decoder(
    whisper: AsyncEngine, folders: dict[str, Path], keep: Keep, name: str
) -> None:
    item = {**FILES, **AUDIOS}[name](folders["a.wav"])
    keep(item)
    expected = await tokens(whisper, "", audios=[WAV])
    assert await tokens(whisper, "", audios=item) == expected
    assert await tokens(whisper, "", audios=[wav(sound(4, 0.7))]) != expected


async def test_audio_that_makes_no_numbers(whisper: AsyncEngine) -> None:
    """Samples that are numbers, whose squares are none."""
    with pytest.raises(MediaError, match="could not be processed"):
        await whisper.generate("", greedy(2), audios=[(SOUND.astype(np.float32) * 1e25, RATE)])


@pytest.mark.parametrize("name", [*FILES, *VIDEOS])
async def test_videos(family: AsyncEngine, folders: dict[str, Path], keep: Keep, name: str) -> None:
    item = {**FILES, **VIDEOS}[name](folders["a.mkv"])
    keep(item)
    expected = await tokens(family, FILM, videos=[MKV])
    assert await tokens(family, FILM, videos=item) == expected
    assert await tokens(family, FILM, videos=[frames(8)]) != expected


@pytest.mark.parametrize("name", ["Starlette upload", "generator", "list", "text", "BytesIO"])
async def test_media_of_a_prompt(
    llava: AsyncEngine, folders: dict[str, Path], keep: Keep, name: str
) -> None:
    item = keep(FILES[name](folders["a.png"]))
    prompt = Prompt(text=TEXT, media={"image": item}, uuids={"image": "mine"})
    assert await tokens(llava, prompt) == await tokens(llava, TEXT, images=[PICTURE])


async def test_a_figure_is_as_a_notebook_shows_it(llava: AsyncEngine) -> None:
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([1, 3, 2])
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    expected = await tokens(llava, TEXT, images=[drawn.getvalue()])
    assert await tokens(llava, TEXT, images=figure) == expected


async def test_a_batch_is_as_many_images(llava: AsyncEngine) -> None:
    expected = await tokens(llava, TWO, images=[PICTURE, OTHER])
    both = np.stack([PIXELS, np.asarray(OTHER)])
    assert await tokens(llava, TWO, images=both) == expected
    assert await tokens(llava, TWO, images=both[::-1]) != expected


async def test_no_images_in_every_form(llava: AsyncEngine) -> None:
    expected = await tokens(llava, "just text")
    for none in (None, (), [], iter(()), np.array([], dtype=object)):
        assert await tokens(llava, "just text", images=none) == expected


@pytest.mark.parametrize("make", [io.BytesIO, lambda data: rolled(data, 10)])
async def test_a_file_is_left_as_it_was(llava: AsyncEngine, keep: Keep, make: Any) -> None:
    """Open and where it stood, so that it may be given twice, at once or one after the other."""
    file = keep(make(b"xx" + PNG))
    file.seek(2)
    expected = await tokens(llava, TWO, images=[PICTURE, PICTURE])
    for _ in range(2):
        assert await tokens(llava, TWO, images=[file, file]) == expected
        assert not file.closed and file.tell() == 2


# ---- prompts as vLLM takes them


@pytest.mark.parametrize(
    "more",
    [
        {"multi_modal_data": {"image": PICTURE}},
        {"multi_modal_data": {"image": [PNG]}, "multi_modal_uuids": {"image": ["one"]}},
        {"multi_modal_data": {"image": io.BytesIO(PNG)}, "mm_processor_kwargs": {}},
        {"multi_modal_data": {"image": PIXELS}, "cache_salt": "salt", "prompt_token_ids": None},
    ],
)
async def test_prompts_in_vllms_form(llava: AsyncEngine, more: dict[str, Any]) -> None:
    expected = await llava.generate(TEXT, greedy(8), images=[PICTURE])
    assert await tokens(llava, {"prompt": TEXT, **more}) == expected.token_ids
    ids = llava.tokenizer(TEXT)["input_ids"]
    given = {"prompt": "is not read", **more, "prompt_token_ids": ids}
    assert await tokens(llava, given) == await tokens(llava, ids, images=[PICTURE])


async def test_two_prompts_in_vllms_form(whisper: AsyncEngine) -> None:
    text = "<|startoftranscript|><|de|>"
    expected = await tokens(whisper, text, audios=[WAV])
    half = {"prompt": "", "multi_modal_data": {"audio": (SOUND, RATE)}}
    given = {"encoder_prompt": half, "decoder_prompt": text}
    assert await tokens(whisper, given) == expected
    assert await tokens(whisper, {"prompt": text, **{"multi_modal_data": {"audio": [WAV]}}}) == (
        expected
    )
