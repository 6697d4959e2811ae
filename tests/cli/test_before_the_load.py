"""What flags alone show to be wrong: refused before a model is loaded, in terms of flags."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from aioengine import AsyncEngine, demo_model
from aioengine.cli import main
from aioengine.cli.checks import in_flags
from aioengine.cli.options import model_source
from aioengine.cli.server import warnings_logged
from aioengine.errors import InvalidRequestError, ModelLoadError
from tests.cli.conftest import Command

URL = "https://a.example/b.png"


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model would have been loaded")

    monkeypatch.setattr(AsyncEngine, "start", load)
    monkeypatch.setattr("aioengine.engine.async_engine.load_model", load)


USAGE = [
    ("generate m x --temprature 0", "--temprature 0; did you mean '--temperature'?"),
    ("generate m x --max-new-tokens 4", "--max-new-tokens 4; did you mean '--max-tokens'?"),
    ("serve m --alowed-hosts=a", "--alowed-hosts=a; did you mean '--allowed-hosts'?"),
    ("serve m --prot 80", "--prot 80; did you mean '--port'?"),
    ("bench m --model-max-length 9", "--model-max-length 9; did you mean '--max-model-len'?"),
    ("serve /nope/model", "there is no folder or file '/nope/model', and a hub id has the form "),
    ("chat a/b/c", "there is no folder or file 'a/b/c', and a hub id has the form OWNER/NAME"),
    ("generate m x --image none.png", "there is no file 'none.png'"),
    ("demo none.png", "there is no file 'none.png'"),
    ("demo --max-tokens 0", "'0' is not a positive number"),
]
REFUSED = [
    ("generate m x --kv-cache-bytes 0",
     "--kv-cache-bytes must be a positive number of bytes, such as 4GiB, or None, not 0"),
    ("serve m --device tpu", "--device must be"),
    ("bench m --dtype int4", "--dtype must be one of auto, float64"),
    ("chat m --top-p 2", "--top-p must be a number above 0 and at most 1, not 2.0"),
    ("generate m x --min-tokens 9 --max-tokens 3", "--min-tokens must be at most --max-tokens (3)"),
    ("serve m --allowed-hosts a/b", "--allowed-hosts must be a host, *.host or *"),
    ("serve m --limit-mm-per-prompt {\"imgae\":1}", "--limit-mm-per-prompt must be keyed by"),
    (f"generate m x --image {URL}",
     f"{URL} is an http(s) URL, and fetching is off; name the hosts that may be asked with "
     '--allowed-hosts (or "*" for any public one)'),
    (f"generate m x --image {URL} --allowed-hosts b.example",
     f"{URL} cannot be fetched: its host, or one that it redirects to, is not in --allowed-hosts; "
     "name it there, with :port where that is not the usual one\n"),
    (f"generate m x --image {__file__}", "is not a usable image: it is not one of PNG, JPEG"),
    (f"demo {__file__}", "is not a usable image: it is not one of PNG, JPEG"),
    ("generate m x --raw --system s", "--system is for chat messages, and --raw is plain text"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "told"), USAGE)
def test_usage(command: Command, line: str, told: str) -> None:
    done = command(*line.split())
    assert (done.status, done.out) == (2, "")
    assert told in done.err
    assert done.err.startswith(f"usage: aioengine {line.split()[0]} "), "the command's own"


@pytest.mark.parametrize(("line", "told"), REFUSED)
def test_refused(command: Command, line: str, told: str) -> None:
    done = command(*line.split())
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("aioengine: ")
    assert told in done.err
    assert len(done.err.splitlines()) == 1


def test_a_url_that_is_covered_goes_on(command: Command) -> None:
    with pytest.raises(AssertionError, match="would have been loaded"):
        command("generate", "m", "x", "--image", URL, "--allowed-hosts", "*.example")


def test_without_arguments_the_first_steps(command: Command) -> None:
    done = command()
    assert (done.status, done.out) == (2, "")
    for line in ("aioengine demo ", "aioengine chat demo ", "aioengine serve demo "):
        assert f"  {line}" in done.err


def test_the_word_for_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_source("demo") == str(demo_model())
    (tmp_path / "demo").mkdir()
    assert model_source("demo") == "demo", "a folder of one's own"
    assert model_source("owner/name-1.5B") == "owner/name-1.5B"
    seen: list[object] = []

    async def start(engine: AsyncEngine, **_: object) -> None:
        seen.append(engine.model)
        raise ModelLoadError("enough")

    monkeypatch.chdir("/")
    monkeypatch.setattr(AsyncEngine, "start", start)
    for name in ("serve", "chat", "generate", "bench"):
        arguments = ["hello"] if name == "generate" else ["--port", "0"] * (name == "serve")
        assert main([name, "demo", *arguments]) == 1
    assert seen == [str(demo_model())] * 4


@pytest.mark.parametrize(
    ("text", "parameter", "told"),
    [
        ("dtype must be one of", "dtype", "--dtype must be one of"),
        ("media.max_image_pixels must be", "media.max_image_pixels", "--max-image-pixels must be"),
        ("a.png has 9 bytes, more than media.max_image_bytes (4)", "images[0]",
         "a.png has 9 bytes, more than --max-image-bytes (4)"),
        ("x; raise limit_mm_per_prompt['image']", "images", "x; raise --limit-mm-per-prompt"),
        ("or set check_model=False to use it", None, "or set --no-check-model to use it"),
        ("the model does not know seed or dtype", None, "the model does not know seed or dtype"),
        ("give it audio: audios=[...]", None, "give it audio: --audio FILE"),
        ("num_hidden_layers is 3", None, "num_hidden_layers is 3"),
    ],
)  # fmt: skip
def test_errors_in_terms_of_flags(text: str, parameter: str | None, told: str) -> None:
    error = ModelLoadError(text)
    if parameter is not None:
        assert in_flags(InvalidRequestError(text, parameter=parameter)) == told
    else:
        assert in_flags(error) == told


def test_warnings_of_libraries_are_no_lines_of_the_service(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG", "aioengine")
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with warnings_logged():
            warnings.warn("Corrupt EXIF data", UserWarning, stacklevel=1)
        assert warnings.showwarning is before
    assert capsys.readouterr().err == ""
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("DEBUG", "UserWarning: Corrupt EXIF data")
