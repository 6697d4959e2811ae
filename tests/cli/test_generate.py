"""`aioengine generate`: what is asked of the model, and what is written where."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, Prompt, SamplingParams
from aioengine.cli import main
from aioengine.engine.prompts import PromptLike
from tests.cli.conftest import SIZES, Command, Expect
from tests.parity import test_encdec as encdec
from tests.parity.audio_families import sound, wav
from tests.parity.listener_families import save_listener, tokenizer_for

QUESTION = "What is in the picture?"
SHORT = (*SIZES, "--max-tokens", "8")


def message(text: str, *image_files: Path) -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in image_files]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_a_chat_message_with_images(
    command: Command, expect: Expect, folder: Path, image_files: list[Path]
) -> None:
    done = command(
        "generate", folder, "--image", image_files[0], QUESTION, "--image", image_files[1], *SHORT
    )
    output = expect(folder, [message(QUESTION, *image_files)])
    assert (done.status, done.out) == (0, output.text + "\n")
    assert done.err.startswith("loaded in ")
    assert len(done.err.splitlines()) == 1


def test_a_system_message(command: Command, expect: Expect, folder: Path) -> None:
    done = command("generate", folder, QUESTION, "--system", "Please describe.", *SHORT)
    messages = [
        {"role": "system", "content": "Please describe."},
        {"role": "user", "content": QUESTION},
    ]
    assert done.out == expect(folder, messages).text + "\n"


def test_raw_puts_the_placeholders_that_are_missing(
    command: Command, expect: Expect, folder: Path, image_files: list[Path]
) -> None:
    lacking = command("generate", folder, QUESTION, "--raw", "--image", image_files[0], *SHORT)
    output = expect(folder, "<image>" + QUESTION, images=image_files[:1])
    assert lacking.out == output.text + "\n"
    placed = "USER: <image> and <image>: what?"
    both = [argument for image in image_files for argument in ("--image", image)]
    done = command("generate", folder, placed, "--raw", *both, *SHORT)
    assert done.out == expect(folder, placed, images=image_files).text + "\n"


def test_the_whole_output(
    command: Command, expect: Expect, folder: Path, image_files: list[Path]
) -> None:
    arguments = ("generate", folder, QUESTION, "--image", image_files[0], *SHORT)
    done = command(*arguments, "--json", "--verbose", "--ignore-eos")
    told = json.loads(done.out)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    output = expect(folder, [message(QUESTION, image_files[0])], params)
    (completion,) = told["outputs"]
    assert completion["text"] == output.text
    assert tuple(completion["token_ids"]) == output.token_ids
    assert completion["finish_reason"] == "length"
    assert tuple(told["prompt_token_ids"]) == output.prompt_token_ids
    assert told["usage"]["completion_tokens"] == 8
    assert told["usage"]["encoder_items"] == 1
    assert 0 < told["timings"]["first_token"] <= told["timings"]["finished"]
    prompt_tokens = output.usage.prompt_tokens
    summary = done.err.splitlines()[-1]
    assert summary.startswith(f"{prompt_tokens} prompt tokens (0 cached), 8 tokens out, first ")
    assert summary.endswith(" tokens/s, length")


@pytest.mark.parametrize("given", [(), ("-",)])
def test_the_prompt_from_standard_input(
    command: Command, expect: Expect, plain_folder: Path, given: tuple[str, ...]
) -> None:
    done = command("generate", plain_folder, *given, *SHORT, stdin="The quick\nbrown \n")
    assert done.out == expect(plain_folder, "The quick\nbrown ").text + "\n"


def test_media_alone_do_not_wait_for_standard_input(
    command: Command, expect: Expect, folder: Path, image_files: list[Path]
) -> None:
    done = command("generate", folder, "--image", image_files[0], *SHORT)
    parts = [{"type": "image", "image": image_files[0]}]
    assert done.out == expect(folder, [{"role": "user", "content": parts}]).text + "\n"


def test_a_model_without_a_template_is_given_text(
    command: Command, expect: Expect, plain_folder: Path
) -> None:
    done = command("generate", plain_folder, "The quick", *SHORT)
    assert done.out == expect(plain_folder, "The quick").text + "\n"
    done = command("generate", plain_folder, "The quick", "--system", "Please", *SHORT)
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1].startswith("aioengine: --system is for chat messages")
    done = command("generate", plain_folder, "The quick", "--chat", *SHORT)
    assert done.status == 1
    assert "the model has no chat template" in done.err


def test_text_to_text(command: Command, expect: Expect, tmp_path: Path) -> None:
    encdec.save(encdec.FAMILIES["bart"], tmp_path)
    done = command("generate", tmp_path, "tell a story", *SHORT)
    assert done.out.rstrip("\n") == expect(tmp_path, "tell a story").text.rstrip("\n")
    other = command("generate", tmp_path, "one red circle", *SHORT)
    assert other.out != done.out


def test_a_model_that_listens(command: Command, expect: Expect, tmp_path: Path) -> None:
    save_listener("whisper", tmp_path, tokenizer_for("whisper"))
    files = [tmp_path / f"{seed}.wav" for seed in range(2)]
    for seed, file in enumerate(files):
        file.write_bytes(wav(sound(seed, 0.6)))
    heard = [command("generate", tmp_path, "--audio", file, *SHORT).out for file in files]
    for file, text in zip(files, heard, strict=True):
        assert text.rstrip("\n") == expect(tmp_path, "", audios=[file]).text.rstrip("\n")
    assert heard[0] != heard[1]


def test_sampling_is_as_the_checkpoint_recommends(
    command: Command, expect: Expect, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    settings = {**json.loads(file.read_text()), "do_sample": True, "top_k": 5, "temperature": 0.7}
    file.write_text(json.dumps(settings))
    messages = [{"role": "user", "content": QUESTION}]
    params = SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=8)
    recommended = command("generate", tmp_path, QUESTION, "--seed", "3", *SHORT).out
    assert recommended == expect(folder, messages, params).text + "\n"
    greedy = expect(folder, messages).text + "\n"
    assert greedy != recommended
    assert command("generate", tmp_path, QUESTION, "--temperature", "0", *SHORT).out == greedy


def test_media_errors_name_the_file(
    command: Command, folder: Path, image_files: list[Path]
) -> None:
    bad = Path(__file__)
    arguments = ("generate", folder, QUESTION, "--image", image_files[0], "--image", bad, *SHORT)
    for form in ("--chat", "--raw"):
        done = command(*arguments, form)
        assert (done.status, done.out) == (1, "")
        told = done.err.splitlines()[-1]
        assert told.startswith(f"aioengine: {str(bad)[:80]} is not a usable image"), told
    done = command("generate", folder, QUESTION, "--audio", bad, *SHORT)
    assert done.err.splitlines()[-1].endswith(": the model takes no audio items")


def test_a_model_that_is_not_there(command: Command, tmp_path: Path) -> None:
    done = command("generate", tmp_path, QUESTION)
    assert (done.status, done.out) == (1, "")
    assert done.err == f"aioengine: {told_of(tmp_path)}\n"


def told_of(folder: Path) -> str:
    async def start() -> None:
        await AsyncEngine.from_pretrained(folder).start()

    with pytest.raises(Exception, match=r"config\.json") as caught:
        asyncio.run(start())
    return str(caught.value)


def test_nobody_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        status = main(["generate", str(folder), QUESTION, *SHORT])
    assert status == 141


def test_interrupted(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AsyncEngine, "stream", interrupt)
    assert command("generate", folder, QUESTION, *SHORT).status == 130


def test_prompt_with_both_kinds_of_media_keeps_their_order(
    command: Command, folder: Path, image_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PromptLike] = []

    def note(engine: AsyncEngine, prompt: PromptLike, params: SamplingParams) -> None:
        seen.append(prompt)
        raise KeyboardInterrupt

    monkeypatch.setattr(AsyncEngine, "stream", note)
    items = ("--audio", image_files[0], "--image", image_files[1], "--audio", image_files[1])
    command("generate", folder, "Hear", *items, *SHORT)
    command("generate", folder, "Hear", *items, "--raw", *SHORT)
    (chat,), plain = seen
    kinds = [part["type"] for part in chat["content"]]
    assert kinds == ["audio", "image", "audio", "text"]
    assert isinstance(plain, Prompt)
    assert plain.text == "<image>Hear"
    assert plain.media == {"audio": [image_files[0], image_files[1]], "image": [image_files[1]]}
