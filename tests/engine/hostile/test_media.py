"""Hostile media: a typed error for their request, nothing about them in it, nobody else disturbed.

Which incident is held by which test. Without a file: here; "names", "requests" and "urls" are
test_*.py beside this one, "bad" is test_bad_input.py.

Identity
  CVE-2025-46722       names: test_equal_bytes_that_mean_other_pixels; test_image.py: test_identity
  vllm#49975           names: test_options_are_part_of_what_an_item_is
  vllm#55547           names: test_one_name_for_many_payloads, test_a_name_for_rows_is_no_name_...
  aliases by uuid      names: test_a_name_is_never_content, test_a_name_in_two_modalities
  smg#2371             names: test_a_suffix_is_no_option; test_hasher.py: test_framing
  sglang-omni#471      names: test_sampling_of_a_video_is_part_of_its_identity
  ATOM#1358            names: test_images_in_turn_under_one_text
  CVE-2025-46570       names: test_tenants_share_no_features; bad: test_tenants_share_nothing_cached
  vllm#12621           test_hasher.py: test_every_part_of_the_key_counts (SHA-256)
Robustness
  vllm#55546, sglang#38022        test_rows_and_places; bad: test_an_encoder_that_gives_...,
                       test_placeholders_and_images_have_to_match
  CVE-2025-62372       test_odd_rows, test_rows_that_numpy..., test_extras...; bad: BAD_ROWS
  CVE-2025-62164       test_rows_larger_than_their_memory, EXTRAS; bad: BAD_ROWS (sparse, meta)
  CVE-2026-44222       requests: test_marks_in_plain_text, test_marks_in_the_answer
  CVE-2026-5497        test_frames_without_number
  bombs                test_bombs, test_long_files_are_one_image; test_effort.py, test_image.py
  CVE-2026-22778       `assert_discreet` in every test; bad: test_images_cut_short_anywhere
  CVE-2025-6242, CVE-2026-24779, CVE-2026-33626
                       urls: test_addresses_inside_the_network, test_redirects_inside; test_http.py
  CVE-2026-3059, -3060, -7301     test_pickles_stay_bytes; test_imports.py: test_nothing_dangerous_*
  CVE-2025-61620, -62426          requests: test_messages_bring_no_template; test_chat.py
  options              requests: test_options_*, test_sizes_that_are_none, test_odd_options
  sizes of a request   requests: test_very_many_*, test_odd_messages, test_odd_lists_of_messages
  schemas, n, stops    test_config.py; test_structured.py
  token ids, rows of integers     bad: BAD_PROMPTS, BAD_ROWS
  HTTP                 urls: test_servers_that_never_end; test_http.py
  files, data: URLs    urls: test_files_that_are_none_of_a_users_business, test_data_urls_of_...
"""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from gzip import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioengine import AsyncEngine, Embeddings, MediaConfig, Prompt
from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    PlaceholderMismatchError,
)
from tests.engine.test_modalities import FILM, SOUND, mkv
from tests.processors.media.test_image import bombs
from tests.support.engines import encoded, greedy, running_engine
from tests.support.hostile import MIB, Attack, Tokens, bounded_memory, company, repel
from tests.support.tiny import IMAGE, tiny_image

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN = 48
ROWS = torch.full((4, HIDDEN), 0.25)


def image(item: Any, parameter: str = "images[0]") -> Attack:
    return Attack("<image>", MediaError, parameter, {"images": [item]})


# ---- embeddings


def quantized() -> torch.Tensor:
    scale, zero = torch.tensor(0.1), torch.tensor(0)
    return torch.quantize_per_tensor(ROWS, scale, zero, torch.quint8)


ODD_ROWS: dict[str, Callable[[], Any]] = {
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4, HIDDEN)]),
    "complex": lambda: torch.zeros(4, HIDDEN, dtype=torch.complex64),
    "eight bits": lambda: ROWS.to(torch.float8_e4m3fn).view(torch.int8),
    "too large for float32": lambda: ROWS.double() * 1e300,
    "records": lambda: np.zeros((4, HIDDEN), [("a", "f4")]),
    "dates": lambda: np.zeros((4, HIDDEN), "M8[s]"),
    "texts": lambda: np.full((4, HIDDEN), "0.5"),
    "a pickle": lambda: pickle.dumps(np.zeros((4, HIDDEN), np.float32)),
    "pixels of the encoder": lambda: torch.zeros(3, 32, 32),
}


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
async def test_odd_rows(engine: AsyncEngine, expected: Tokens) -> None:
    rows = [make() for make in ODD_ROWS.values()]
    await repel(engine, expected, [image(Embeddings(each)) for each in rows])


async def test_rows_that_numpy_or_torch_store_in_their_own_way(
    engine: AsyncEngine, expected: Tokens
) -> None:
    """Each is served as the plain rows are, or refused as what it is; never the engine's fault."""
    # Numbers that eight bits hold too.
    plain = np.resize(np.array([0.25, -1.5, 0.75, -0.5, 1, 2, -0.125], np.float32), (4, HIDDEN))
    tensor = torch.from_numpy(plain.copy())
    usual = await engine.generate("<image>", greedy(4), images=[Embeddings(tensor)])
    odd = {
        "wide": plain.astype(np.longdouble),
        "swapped": plain.astype(">f4"),
        "read-only": np.frombuffer(plain.tobytes(), np.float32).reshape(4, HIDDEN),
        "backwards": plain[::-1, ::-1][::-1, ::-1],
        "negated": torch._neg_view(-tensor),
        "graph": tensor.clone().requires_grad_(),
        "eight bits": tensor.to(torch.float8_e4m3fn),
    }
    wrong = {}
    for name, rows in odd.items():
        try:
            output = await engine.generate("<image>", greedy(4), images=[Embeddings(rows)])
            if output.token_ids != usual.token_ids:
                wrong[name] = repr(output.token_ids)
        except MediaError as error:
            assert error.parameter == "images[0]"
        except Exception as error:
            wrong[name] = f"{error!r} from {error.__cause__!r}"
    assert not wrong
    assert await company(engine) == expected


@pytest.mark.parametrize("kind", ["rows", "numpy rows", "extra"])
async def test_rows_larger_than_their_memory(
    engine: AsyncEngine, expected: Tokens, kind: str
) -> None:
    """One number, repeated by its strides. Nobody may write it all out, to look at it or ever."""
    count = 1_000_000
    rows: Any = torch.zeros(1, 1).expand(count, HIDDEN)
    if kind == "numpy rows":
        rows = np.broadcast_to(np.float32(0), (count, HIDDEN))
    extra = {"grid": torch.zeros(1).expand(40 * count)} if kind == "extra" else {}
    item = Embeddings(ROWS if extra else rows, **extra)
    with bounded_memory(64 * MIB), pytest.raises(InvalidRequestError) as caught:
        await engine.generate("<image>", greedy(2), images=[item])
    assert caught.value.parameter in ("prompt", "images[0]", "images[0].grid")
    assert await company(engine) == expected


EXTRAS: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.sparse_coo_tensor(
        torch.tensor([[10**9]]), torch.ones(1), (4,), check_invariants=False
    ),
    "meta": lambda: torch.zeros(3, device="meta"),
    "not a number": lambda: [1.0, float("nan")],
    "objects": lambda: np.array([object()]),
    "text": lambda: "1",
    "a pickle": lambda: pickle.dumps(1),
    "itself": lambda: (entries := [], entries.append(entries), entries)[-1],
    "ten thousand deep": lambda: nested(10_000),
    "huge number": lambda: 10**400,
    "wide": lambda: np.full(2, np.longdouble("1e4000")),
    "swapped": lambda: np.array([2**40, np.nan], ">f8"),
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", EXTRAS)
async def test_extras_are_checked_like_rows(
    engine: AsyncEngine, expected: Tokens, name: str
) -> None:
    item = Embeddings(ROWS, grid=EXTRAS[name]())
    await repel(engine, expected, [image(item, "images[0].grid")])


async def test_extras_do_not_stand_for_rows(engine: AsyncEngine, expected: Tokens) -> None:
    """An extra that bears the rows' own name would be what the encoder is given."""
    for rows in (torch.zeros(4, HIDDEN + 1), torch.zeros(9, HIDDEN), torch.zeros(4, 2, HIDDEN)):
        await repel(engine, expected, [image(Embeddings(ROWS, image_embeds=rows))])


async def test_rows_and_places(engine: AsyncEngine, expected: Tokens) -> None:
    """A prompt of ids with as many places as some other number of rows."""
    ids = [1, 20, *[IMAGE] * 5, 21]
    wrong = [
        Attack(ids, PlaceholderMismatchError, "prompt", {"images": [Embeddings(rows)]})
        for rows in (ROWS, torch.zeros(6, HIDDEN))
    ]
    await repel(engine, expected, wrong)
    fitting = Embeddings(torch.zeros(5, HIDDEN))
    output = await engine.generate(ids, greedy(2), images=[fitting])
    assert output.prompt_token_ids == tuple(ids)


async def test_rows_at_the_edge_of_their_type_harm_nobody(folder: Path) -> None:
    """In float32 their squares are infinite, and what follows is no number any more."""
    async with running_engine(folder, dtype="float32") as engine:
        expected = await company(engine)
        for value in (3.4e38, -3.4e38, 1e-45):
            rows = torch.full((40, HIDDEN), value)
            try:
                await engine.generate("<image> a", greedy(40), images=[Embeddings(rows)])
            except MediaError as error:
                assert error.parameter == "images[0]"
            await engine.reset_caches()
            assert await company(engine) == expected


# ---- pixels and samples

NO_PIXELS: dict[str, Callable[[], Any]] = {
    "complex": lambda: torch.zeros(3, 8, 8, dtype=torch.complex64).conj(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(8, 8)]),
    "bits": lambda: torch.zeros(3, 8, 8, dtype=torch.uint8).view(torch.bits8),
    "records": lambda: np.zeros((8, 8), "V3"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("name", NO_PIXELS)
async def test_tensors_that_are_no_images(engine: AsyncEngine, expected: Tokens, name: str) -> None:
    item = NO_PIXELS[name]()
    sound = {"audios": [(item if name == "nested" else item[0], 1600)]}
    film = {"videos": [item if name == "nested" else item[None]]}
    attacks = [
        image(item),
        Attack(SOUND, MediaError, "audios[0]", sound),
        Attack(FILM, MediaError, "videos[0]", film),
    ]
    await repel(engine, expected, attacks)


async def test_pixels_and_samples_larger_than_their_memory(
    engine: AsyncEngine, expected: Tokens
) -> None:
    byte, number = np.uint8(0), torch.zeros(1)
    sounds = [np.broadcast_to(np.float32(0), 10**12), number.expand(10**12)]
    attacks = [
        image(np.broadcast_to(byte, (10**6, 10**6, 3))),
        image(number.expand(3, 10**6, 10**6)),
        *(Attack(SOUND, MediaError, "audios[0]", {"audios": [(each, 1600)]}) for each in sounds),
        Attack(FILM, MediaError, "videos[0]", {"videos": [number.expand(9, 3, 10**6, 10**6)]}),
        Attack(FILM, MediaError, "videos[0][0]", {"videos": [[image_of(10**5)] * 10**5]}),
    ]
    with bounded_memory(32 * MIB):
        await repel(engine, expected, attacks)


def image_of(side: int) -> Any:
    return np.broadcast_to(np.uint8(0), (side, side, 3))


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
async def test_half_floats_larger_than_their_memory(
    folder: Path, expected: Tokens, kind: str
) -> None:
    """Types that numpy lacks have to be converted: once it is known that they are small enough."""
    number = torch.zeros(1, dtype=torch.bfloat16)
    media: dict[str, Any] = {
        "image": {"images": [number.expand(3, 10_000, 10_000)]},
        "audio": {"audios": [(number.expand(200_000_000), 1600)]},
        "video": {"videos": [number.expand(9, 3, 8000, 8000)]},
    }
    text = {"image": "<image>", "audio": SOUND, "video": FILM}[kind]
    limits = MediaConfig(max_video_pixels=10**7)
    async with running_engine(folder, media=limits) as engine:
        assert await company(engine) == expected
        with bounded_memory(64 * MIB):
            await repel(engine, expected, [Attack(text, MediaError, f"{kind}s[0]", media[kind])])


# ---- files


def png_with(kind: bytes, packed_bytes: int) -> bytes:
    """An image with a chunk that unpacks to so much."""
    data = encoded(tiny_image(1))
    body = kind + b"name\0\0" + zlib.compress(bytes(packed_bytes), 9)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    where = data.index(b"IDAT") - 4
    return data[:where] + chunk + data[where:]


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps(bytes(32 * MIB)))
    return buffer.getvalue()


async def test_bombs(engine: AsyncEngine, expected: Tokens) -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="50000" height="50000"/>'
    other_formats = {
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypjp2 \0\0\0\0jp2 " + bytes(64),
        "JPEG 2000 code stream": b"\xff\x4f\xff\x51\0\x2f\0\0" + b"\0\0\xc3\x50" * 2 + bytes(64),
        "SVG": svg,
        "packed SVG": compress(svg + bytes(64 * MIB)),
        "icon": encoded(tiny_image(1, 16, 16), "ICO"),
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50000 50000\nshowpage\n",
        "archive": archive(),
    }
    files = [*bombs(encoded), *other_formats.values()]
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    with bounded_memory(64 * MIB):
        await repel(engine, expected, [image(item) for item in (*files, *urls)])
    with bounded_memory(160 * MIB):
        for kind in (b"zTXt", b"iCCP"):
            await repel(engine, expected, [image(png_with(kind, 64 * MIB))])


async def test_long_files_are_one_image(engine: AsyncEngine, expected: Tokens) -> None:
    """A hundred thousand frames, or hundreds of pages, cost what the first one does."""
    first, second = (tiny_image(seed, 8, 8).quantize(16) for seed in (1, 2))
    one = encoded(first, "GIF")
    start = 13 + 3 * (2 << (one[10] & 7))
    gif = one[:start] + one[start:-1] * 100_000 + b";"
    tiff = encoded(first, "TIFF", save_all=True, append_images=[second] * 200)
    served = await engine.generate("<image>", greedy(4), images=[first])
    await engine.reset_caches()
    with bounded_memory(192 * MIB):
        for data in (gif, tiff):
            output = await engine.generate("<image>", greedy(4), images=[data])
            assert output.token_ids == served.token_ids
    assert await company(engine) == expected


class Trap:
    """Leaves a mark when somebody unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


async def test_pickles_stay_bytes(engine: AsyncEngine, expected: Tokens, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "mark")
    npy, pt = io.BytesIO(), io.BytesIO()
    np.save(npy, np.array([trap], object), allow_pickle=True)
    torch.save({"rows": trap}, pt)
    head = b'{"rows":{"dtype":"OBJECT","shape":[1],"data_offsets":[0,8]}}'
    tensors = struct.pack("<Q", len(head)) + head + bytes(8)
    files = [pickle.dumps(trap), npy.getvalue(), pt.getvalue(), tensors]
    (tmp_path / "trap.npy").write_bytes(npy.getvalue())
    attacks = [image(tmp_path / "trap.npy")]
    for data in files:
        attacks += [image(data), image(Embeddings(data))]
        attacks.append(Attack(SOUND, MediaError, "audios[0]", {"audios": [data]}))
        attacks.append(Attack(FILM, MediaError, "videos[0]", {"videos": [data]}))
    await repel(engine, expected, attacks)
    assert not trap.mark.exists()


async def test_frames_without_number(engine: AsyncEngine, expected: Tokens) -> None:
    """Ten thousand frames, by every way in: sampled, or refused by the limit of frames."""
    frame = tiny_image(1)
    jpegs = ",".join([base64.b64encode(encoded(frame, "JPEG")).decode()] * 10_000)
    urls = [f"data:video/jpeg;base64,{jpegs}", f"data:video/jpeg;base64,{jpegs[:2000]}"]
    attacks = [Attack(FILM, MediaError, "videos[0]", {"videos": [url]}) for url in urls]
    films = [[frame] * 10_000, np.broadcast_to(np.uint8(9), (10**9, 32, 48, 3))]
    wanted: tuple[Any, ...] = (10**9, -1, 0, 0.5, "1", True, [3])
    for film in films:
        attacks += [
            Attack(sampled(film, num_frames=number), MediaError, "videos[0]") for number in wanted
        ]
    attacks.append(Attack(sampled(films[0], fps=1e308), MediaError, "videos[0]"))
    no_number = sampled(films[0], fps=float("nan"))
    attacks.append(Attack(no_number, InvalidRequestError, "mm_processor_kwargs"))
    with bounded_memory(64 * MIB):
        await repel(engine, expected, attacks)
        for film in films:
            output = await engine.generate(FILM, greedy(2), videos=[film])
            assert output.usage.prompt_tokens < 100
    short = mkv(np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), dtype=np.uint8))
    for options in ({"num_frames": 10**9}, {"fps": 1e308}, {"fps": 5e-324}):
        output = await engine.generate(sampled(short, **options), greedy(2))
        assert output.usage.encoder_items == 1


def sampled(film: Any, **options: Any) -> Prompt:
    return Prompt(text=FILM, media={"video": [film]}, mm_processor_kwargs=options)
