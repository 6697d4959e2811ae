"""Flags and what they become, usage errors, and the exit status."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import aioengine
from aioengine import AsyncEngine, EngineConfig, MediaConfig, SamplingParams, demo_model
from aioengine.cli import options as options_module
from aioengine.cli.options import (
    CommandParser,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    given,
    media_item,
    parse_bytes,
)
from tests.architecture.source import ROOT
from tests.cli.conftest import Command
from tests.support.grids import rest_is_slow

ALL_CLOSED = "<&- >&- 2>&-"
SAID_OTHERWISE = {"media", "fetcher", "tensor_parallel_size", "mm_encoder_tp_mode"}
FOR_OTHERS = {
    *("n", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids"),
    *("detokenize", "structured_outputs", "logits_processors"),
}


def new_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="test", allow_abbrev=False)
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return parser


def parsed(*arguments: str) -> argparse.Namespace:
    return new_parser().parse_args(arguments)


@pytest.mark.parametrize("kind", [EngineConfig, MediaConfig, SamplingParams])
def test_every_field_that_text_can_say_has_a_flag_with_its_meaning(kind: type[Any]) -> None:
    actions = {action.dest: action for action in new_parser()._actions}
    for field in fields(kind):
        if field.name in SAID_OTHERWISE | FOR_OTHERS:
            assert field.name not in actions
        else:
            action = actions[field.name]
            assert action.option_strings[0] == "--" + field.name.replace("_", "-")
            assert len(str(action.help)) > len(field.name), field.name


def test_nothing_given_is_the_default() -> None:
    options = parsed()
    assert engine_config(options) == EngineConfig()
    assert given(options, SamplingParams) == {}


def test_defaults_are_told_where_they_are_the_command_s() -> None:
    helps = {action.dest: str(action.help) for action in new_parser()._actions}
    assert helps["max_num_seqs"].endswith("(default: 64)")
    assert helps["max_tokens"].endswith("(default: 1024)")
    assert helps["enable_prefix_caching"].endswith("(default: on)")
    assert helps["mm_processor_cache_bytes"].endswith("(default: 256MiB)")
    assert helps["video_formats"].endswith("(default: mp4, matroska, avi)")
    for name in ("temperature", "top_p", "top_k", "kv_cache_bytes", "allowed_hosts", "seed"):
        assert "default" not in helps[name], name


def test_every_kind_of_value() -> None:
    options = parsed(
        *("--max-num-seqs", "3", "--dtype", "float32", "--gpu-memory-utilization", "0.5"),
        *("--kv-cache-bytes", "1.5GiB", "--no-enable-prefix-caching", "--trust-remote-code"),
        *("--mm-processor-cache-dir", "kept"),
        *("--limit-mm-per-prompt", '{"image": 4, "video": {"count": 1, "num_frames": 8}}'),
        *("--allowed-hosts", "a.example", "--allowed-hosts", "*.b.example"),
        *("--local-roots", "/srv", "--video-num-frames", "none", "--max-image-bytes", "2MB"),
        *("--stop", "one", "--stop", "two", "--stop-token-ids", "7", "--temperature", "0"),
        *("--max-tokens", "none", "--seed", "-1"),
    )
    assert engine_config(options) == EngineConfig(
        max_num_seqs=3,
        dtype="float32",
        gpu_memory_utilization=0.5,
        kv_cache_bytes=3 << 29,
        enable_prefix_caching=False,
        trust_remote_code=True,
        limit_mm_per_prompt={"image": 4, "video": {"count": 1, "num_frames": 8}},
        mm_processor_cache_dir="kept",
        media=MediaConfig(
            allowed_hosts=["a.example", "*.b.example"],
            local_roots=["/srv"],
            video_num_frames=None,
            max_image_bytes=2_000_000,
        ),
    )
    assert given(options, SamplingParams) == {
        "stop": ["one", "two"],
        "stop_token_ids": [7],
        "temperature": 0.0,
        "max_tokens": None,
        "seed": -1,
    }


def test_without_source_the_flags_are_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(_: object) -> str:
        raise OSError("source code not available")

    monkeypatch.setattr(inspect, "getsource", hidden)
    monkeypatch.setattr(options_module, "_docstrings", options_module._docstrings.__wrapped__)
    assert engine_config(parsed("--max-num-seqs", "3")) == EngineConfig(max_num_seqs=3)
    assert "--max-num-seqs N      (default: 64)" in new_parser().format_help()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096), ("0", 0), ("1k", 1024), ("1kB", 1000), ("512MB", 512 * 10**6),
        ("512 MiB", 512 << 20), ("4G", 4 << 30), ("4GiB", 4 << 30), ("0.5tib", 1 << 39),
        ("12b", 12),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4X", "GiB", "-1", "1.2.3", "4 G B", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write 4096"):
        parse_bytes(text)


def test_what_may_be_given_for_a_file(tmp_path: Any) -> None:
    file = tmp_path / "image.png"
    file.touch()
    assert media_item(str(file)) == file
    for url in ("https://a.example/b.png", "data:image/png;base64,AA==", "file:///srv/a.png"):
        assert media_item(url) == url
    for missing in (str(tmp_path / "none.png"), "c:picture"):
        with pytest.raises(argparse.ArgumentTypeError, match="there is no file"):
            media_item(missing)
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder, not a file"):
        media_item(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explain"], "there is no command 'explain'; the commands are serve, generate, chat"),
        (["generat", "m"], "there is no command 'generat'; did you mean 'generate'?"),
        (["--verion"], "there is no command '--verion'; did you mean '--version'?"),
        (["generate"], "MODEL"),
        (["generate", "m", "one", "two"], "unrecognized arguments: two"),
        (
            ["generate", "m", "--kv-cache-bytes", "4X"],
            "'4X' is not a size; write 4096",
        ),
        (["generate", "m", "--max-num-seqs", "many"], "invalid int value: 'many'"),
        (["generate", "m", "--max-num", "4"], "unrecognized arguments: --max-num 4"),
        (["generate", "m", "--limit-mm-per-prompt", "3"], "'3' is not a JSON object"),
        (["generate", "m", "--image", "none.png"], "there is no file 'none.png'"),
        (["generate", "m", "--chat", "--raw"], "not allowed with"),
        (["bench", "m", "--num-prompts", "0"], "'0' is not a number of 1 or more"),
        (["bench", "m", "--prefix-len", "-1"], "'-1' is not a number of 0 or more"),
        (["bench", "m", "--image-size", "640"], "'640' is not a size; write 640x480"),
        (["bench", "m", "--request-rate", "0"], "'0' is not a positive number"),
        (["bench", "m", "--request-rate", "fast"], "'fast' is not a positive number"),
        (["serve", "m", "--port", "70000"], "'70000' is not a port, 0 to 65535"),
        (["serve", "m", "--drain-timeout", "-1"], "'-1' is not a number of seconds"),
        (["serve", "m", "--drain-timeout", "long"], "'long' is not a number of seconds"),
    ],
)
def test_usage_errors(command: Command, arguments: list[str], told: str) -> None:
    done = command(*arguments)
    assert done.status == 2
    assert told in done.err
    assert len(done.err.splitlines()) <= 3, "the usage, and what is wrong"


@pytest.mark.parametrize("name", ["generate", "chat", "bench", "serve"])
def test_values_out_of_range_are_told_before_anything_is_loaded(
    command: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncEngine, "start", None)
    done = command(name, "model", *(["hello"] if name == "generate" else []), "--dtype", "int4")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("aioengine: --dtype must be one of auto, float64")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_sampling_out_of_range_too(
    command: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncEngine, "start", None)
    done = command(name, "model", "--temperature", "500")
    assert (done.status, done.out) == (1, "")
    assert done.err == "aioengine: --temperature must be a number from 0 to 100, not 500.0\n"


@pytest.mark.parametrize("name", ["generate", "chat", "bench", "serve", "demo"])
def test_help(command: Command, name: str) -> None:
    done = command(name, "--help")
    assert done.status == 0
    assert done.out.startswith(f"usage: aioengine {name} ")


def test_the_documents_name_flags_that_exist(command: Command) -> None:
    known = set[str]()
    for name in ("generate", "chat", "batch", "bench", "serve", "demo"):
        known |= set(re.findall(r"--[a-z][a-z-]+", command(name, "--help").out))
    text = (ROOT / "docs" / "command_line.md").read_text()
    shell = (ROOT / "docs" / "getting_started.md").read_text().partition("## From a shell")[2]
    text += shell.partition("\n## ")[0]
    named = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", text))
    assert len(named) > 20
    assert named <= known


def test_as_a_module_without_loading_torch() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['aioengine', *sys.argv[1:]]\n"
        "try: runpy.run_module('aioengine', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"aioengine {aioengine.__version__}", "[]"]


def test_interrupts_during_a_load_leave_at_once_and_quietly() -> None:
    code = (
        "import signal, sys, threading, aioengine.engine.async_engine\n"
        "from aioengine.cli import run\n"
        # A suite that runs in the background of a shell ignores SIGINT, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def stuck(*_):\n"
        "    print('loading', flush=True)\n"
        "    threading.Event().wait()\n"
        "aioengine.engine.async_engine.load_model = stuck\n"
        "sys.argv = ['aioengine', 'generate', sys.argv[1], 'a prompt']\n"
        "run()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(demo_model())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "loading\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_without_rich_it_says_what_it_lacks() -> None:
    script = "import sys; sys.modules['rich'] = None; from aioengine.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    message = 'aioengine: the command line needs rich: pip install "aioengine[cli]"\n'
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


@pytest.mark.parametrize(
    "how", rest_is_slow([">/dev/full", ">&-", "2>&-", ALL_CLOSED], [">/dev/full", ALL_CLOSED])
)
def test_standard_streams_that_are_full_or_closed(plain_folder: Path, how: str) -> None:
    """One line of words or none, and a status; not the end of a process in native code."""
    arguments = ["-m", "aioengine", "generate", str(plain_folder), "a", "--max-tokens", "2"]
    command = " ".join(map(shlex.quote, [sys.executable, *arguments, "--device", "cpu"]))
    done = subprocess.run(
        ["sh", "-c", f"{command} {how}"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == (1 if how == ">/dev/full" else 0)
    assert "Traceback" not in done.stderr and "Assertion" not in done.stderr
    if how == ">/dev/full":
        assert "standard output cannot be written: No space left" in done.stderr
