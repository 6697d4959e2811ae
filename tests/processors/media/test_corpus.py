"""A thousand image files, many broken on purpose: each is decoded or refused, and soon.

`corpus.py` fetches them, `make test` calls it, and AIOENGINE_IMAGES says where they are.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from aioengine.config import MediaConfig
from aioengine.errors import MediaError
from aioengine.processors.items import ImageHeader
from aioengine.processors.media.image import open_image
from tests.processors.media import corpus

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("AIOENGINE_IMAGES") or ROOT / ".cache" / "pillow-images")
HANG_CPU_S = 5.0
"""What one file may cost its thread, in CPU time."""
HANG_S = 60.0
"""When a file is given up; its thread may have waited for a processor meanwhile."""
BYTES_PER_PIXEL = 16
SPARE_BYTES = 64 << 20

needs_images = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"NO IMAGES IN {FOLDER}; run: python tests/processors/media/corpus.py {FOLDER}",
)
# Readers warn about what they do not like; in production nobody makes errors of that.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Outcome:
    """What became of one file."""

    header: ImageHeader | None = None
    pil_image: Image.Image | None = None
    refusal: str = ""
    cpu_s: float = 0.0


def use(data: bytes, config: MediaConfig) -> Outcome:
    """As the engine does it; whatever is no MediaError comes out."""
    outcome = Outcome()
    start = time.thread_time()
    try:
        source = open_image(data, config, parameter="images[3]")
        outcome.header = source.header()
        assert len(source.identity()) == 32
        outcome.pil_image = source.decode()
        source.verify()
    except MediaError as error:
        assert error.parameter == "images[3]" and str(error).startswith("images[3] ")
        assert error.__cause__ is None and error.__context__ is None
        text = f"{error} {error.value!r}"
        assert "0x" not in text and "<" not in text and len(text) < 500
        outcome.refusal = str(error)
    outcome.cpu_s = time.thread_time() - start
    return outcome


class Memory:
    """The largest size of this process since `reset`, where the system tells."""

    def __init__(self) -> None:
        self._before = 0

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = self._peak()

    def grown(self) -> int:
        return self._peak() - self._before

    def _peak(self) -> int:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0


def bound(outcome: Outcome) -> int:
    """Bytes that the file may have taken.

    What is not allowed by default may have images inside that only Pillow's own limit is for.
    """
    if outcome.header is None:
        return SPARE_BYTES + BYTES_PER_PIXEL * 4_000_000
    width, height = outcome.header.size
    is_default = outcome.header.format in {*MediaConfig().image_formats, "MPO"}
    pixels = width * height if is_default else 2 * (Image.MAX_IMAGE_PIXELS or 0)
    return SPARE_BYTES + BYTES_PER_PIXEL * pixels


def run(config: MediaConfig, *, share: float = 1.0) -> Iterator[tuple[Path, bytes, Outcome]]:
    """Every file, or the first share of each, one after the other in a worker thread."""
    memory = Memory()
    with ThreadPoolExecutor(1) as worker:
        for path in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
            data = path.read_bytes()
            data = data[: int(len(data) * share)]
            memory.reset()
            try:
                outcome = worker.submit(use, data, config).result(HANG_S)
            except TimeoutError:
                pytest.fail(f"{path.name} hangs")
            assert outcome.cpu_s < HANG_CPU_S, f"{path.name} took {outcome.cpu_s} s"
            grown = memory.grown()
            assert grown < bound(outcome), f"{path.name} took {grown >> 20} MiB"
            if outcome.pil_image is not None and outcome.header is not None:
                assert outcome.pil_image.mode == "RGB", path.name
                assert outcome.pil_image.size == outcome.header.size, path.name
            yield path, data, outcome


def shown_by_pillow(data: bytes) -> Image.Image | None:
    """The image as Pillow shows it, if that is a matter of course: no alpha, eight bits."""
    image = Image.open(io.BytesIO(data), formats=MediaConfig().image_formats)
    image = ImageOps.exif_transpose(image)
    if image.mode not in ("1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB"):
        return None
    return image.convert("RGB") if image.info.get("transparency") is None else None


@needs_images
def test_formats_that_are_allowed() -> None:
    decoded: Counter[str | None] = Counter()
    num_refused = num_compared = 0
    for path, data, outcome in run(MediaConfig()):
        if outcome.pil_image is None or outcome.header is None:
            num_refused += 1
            continue
        decoded[outcome.header.format] += 1
        expected = shown_by_pillow(data)
        if expected is not None:
            num_compared += 1
            assert outcome.pil_image.size == expected.size, path.name
            assert outcome.pil_image.tobytes() == expected.tobytes(), path.name
    assert set(decoded) == {"PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF"}
    assert decoded.total() > 600 and num_refused > 300 and num_compared > 400


@pytest.fixture
def every_format(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Pillow's name of every format that it can open; PostScript without a program to run it."""
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", False)
    Image.init()
    return tuple(Image.OPEN)


@needs_images
def test_every_format_that_pillow_knows(every_format: tuple[str, ...]) -> None:
    config = MediaConfig(image_formats=every_format, max_image_pixels=4_000_000)
    formats = {outcome.header.format for _, _, outcome in run(config) if outcome.header}
    assert len(formats) > 30 and "TGA" in formats  # which has no mark to know it by


@needs_images
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_cut_short(every_format: tuple[str, ...], share: float) -> None:
    config = MediaConfig(image_formats=every_format, max_image_pixels=4_000_000)
    outcomes = [outcome for _, _, outcome in run(config, share=share)]
    assert sum(bool(outcome.refusal) for outcome in outcomes) > 300


def test_unpacking_takes_the_images_only(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("p-1/Tests/images/a.png", "p-1/Tests/images/b/c.png", "p-1/setup.py",
                     "p-1/Tests/images.py", "p-1/Tests/images/link"):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE if name.endswith("link") else tarfile.REGTYPE
            info.linkname = "/etc/passwd"
            tar.addfile(info)
    corpus.unpack(archive, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert found == {"a.png", "b/c.png"}
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("p-1/Tests/images/../../../escaped.png"))
    with pytest.raises(tarfile.OutsideDestinationError):
        corpus.unpack(archive, tmp_path / "out" / "deep")
