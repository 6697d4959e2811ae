"""The page where a person asks the model, in headless Chromium."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from selenium.webdriver.common.keys import Keys

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model
from aioengine.asgi import service_app
from tests.asgi.browsing import OVERLAPS, SHOOTS, SIZES, TEXT_COLOURS, Browser, contrast
from tests.asgi.serving import serving
from tests.asgi.test_media_parts import TEMPLATE
from tests.asgi.trying import KEY, Impostor, TryPage, opened, run
from tests.engine.test_modalities import frames, mkv, samples, save_media_family, wav
from tests.parity.listener_families import WORDS, save_listener, tokenizer_for
from tests.support.engines import encoded, greedy, running_engine, until
from tests.support.tiny import save_tiny_llava, tiny_image

DESCRIBE = "Describe the picture."
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
GREEDY = SamplingParams(temperature=0, max_tokens=512)

PARTS = (
    "h1, nav *, article p, article img, figcaption, article button, article small, summary, "
    ".spans *, textarea, #composer .row > *"
)
"""Elements that may not lie upon each other."""


@pytest.fixture
async def demo() -> AsyncIterator[AsyncEngine]:
    async with running_engine(demo_model(), dtype="auto", max_model_len=2048) as engine:
        yield engine


async def described(engine: AsyncEngine, data: bytes, text: str = DESCRIBE) -> Any:
    """What the API says of an image."""
    content = [{"type": "image", "image": data}, {"type": "text", "text": text}]
    return await engine.generate([{"role": "user", "content": content}], GREEDY)


# ---- asking


async def test_images_however_they_come(demo: AsyncEngine, browser: Browser) -> None:
    """Dropped, pasted and chosen; the answer and its tokens are the API's."""
    paths = list(demo_images())[:3]
    async with opened(service_app(demo), browser) as page:
        for path, how in zip(paths, ("drop", "paste", "choose"), strict=True):
            data = path.read_bytes()
            kind = f"image/{path.suffix[1:].replace('jpg', 'jpeg')}"
            if how == "choose":
                await page.choose(path)
            else:
                await (page.drop if how == "drop" else page.paste)(data, path.name, kind)
            await browser.until("return document.querySelector('#attached img').naturalWidth > 0")
            await page.ask(DESCRIBE)
            found, expected = await page.answer(), await described(demo, data)
            assert found["text"] == expected.text.strip() and len(expected.text) > 20
            assert found["figures"].startswith(f"{expected.usage.completion_tokens} tokens · ")
            assert "first token after" in found["figures"] and "tokens/s" in found["figures"]
            assert f"{expected.usage.prompt_tokens} prompt tokens" in found["figures"]
            assert found["spans"][-3:] == ["Encode", "Prefill", "Generate"]
            assert found["error"] is None
            await page.click("new")
        assert browser.complaints() == []


async def test_a_chat_goes_on(demo: AsyncEngine, browser: Browser) -> None:
    async with opened(service_app(demo), browser) as page:
        path = list(demo_images())[1]
        await page.choose(path)
        await page.ask(DESCRIBE)
        first = await page.answer()
        await page.ask("How many objects are there?")
        second = await page.answer()
        if SHOOTS:
            await shoot(page)
        message = {"type": "image", "image": path.read_bytes()}, {"type": "text", "text": DESCRIBE}
        expected = await demo.generate(
            [
                {"role": "user", "content": [*message]},
                {"role": "assistant", "content": first["text"]},
                {"role": "user", "content": "How many objects are there?"},
            ],
            GREEDY,
        )
        assert second["text"] == expected.text.strip()
        assert "cached)" in second["figures"], "the first turn was not computed again"
        await page.click("new")
        await page.ask("How many objects are there?")
        alone = [{"role": "user", "content": "How many objects are there?"}]
        output = await demo.generate(alone, GREEDY)
        assert f"{output.usage.prompt_tokens} prompt tokens" in (await page.answer())["figures"]


async def test_audio_and_videos_beside_images(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    save_media_family(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    image, sound, film = encoded(tiny_image(1)), wav(samples(1)), mkv(frames(2))
    async with running_engine(folder) as engine, opened(service_app(engine), browser) as page:
        for words in ("images", "audio", "videos"):
            assert words in await browser.text("takes")
        assert await browser.run("return !element('record').hidden")
        await page.drop(image)
        await page.drop(sound, "a.wav", "audio/wav")
        await page.paste(film, "a.mkv", "video/x-matroska")
        views = "return [...document.querySelectorAll('#attached figure > :first-child')]"
        shown = await browser.run(f"{views}.map(view => view.localName)")
        assert shown == ["img", "audio", "video"]
        await browser.run("facts.sampling.ignore_eos = true; element('max_tokens').value = '10'")
        await page.ask("What is this?")
        await page.answer()
        parts = {"image": image, "audio": sound, "video": film}
        content: list[Any] = [{"type": kind, kind: data} for kind, data in parts.items()]
        content.append({"type": "text", "text": "What is this?"})
        expected = await engine.generate([{"role": "user", "content": content}], greedy(10))
        assert await browser.run("return history.at(-1).content") == expected.text
        assert expected.usage.encoder_items == 3
        remove = page.browser.driver.find_elements("css selector", "#attached button")
        assert remove == [], "what was sent is no longer attached"
        await page.drop(image, "b.png")
        await browser.run("document.querySelector('#attached button').click()")
        assert await browser.run("return attached.length") == 0
        assert browser.complaints() == []


async def shoot(page: TryPage) -> None:
    """Make the images in docs/."""
    browser = page.browser
    for name, size in (
        ("try_page.png", (1440, 900, "light")),
        ("try_page_phone.png", (390, 844, "dark", 2)),
    ):
        await browser.show(*size)
        await browser.until("return innerWidth === arguments[0]", size[0])
        await browser.run("scroll(true)")
        await browser.shoot(name)


async def test_settings_and_keys(engine: AsyncEngine, browser: Browser) -> None:
    async with opened(service_app(engine), browser) as page:
        assert await browser.run("return document.activeElement.id") == "text"
        await page.type("one")
        await page.type(Keys.ENTER, held=Keys.SHIFT)
        await page.type("two")
        assert await browser.run("return element('text').value") == "one\ntwo"
        for name in ("files", "send"):
            await page.type(Keys.TAB)
            assert await browser.run("return document.activeElement.id") == name
        await page.type(Keys.TAB)
        assert await browser.run("return document.activeElement.tagName") == "SUMMARY"
        await page.type(Keys.ENTER, Keys.TAB)
        assert await browser.run("return document.activeElement.id") == "temperature"
        await browser.run(
            "element('temperature').value = '0'; element('max_tokens').value = '3';"
            "element('system').value = ' Be brief. '; facts.sampling.ignore_eos = true;"
        )
        await page.ask("")
        found = await page.answer()
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one\ntwo"},
        ]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        expected = await engine.generate(messages, params)
        assert await browser.run("return history.at(-1).content") == expected.text
        assert found["figures"].startswith("3 tokens · ")
        assert found["figures"].endswith("ended at the most tokens allowed")
        assert browser.complaints() == []


@pytest.mark.parametrize("how", ["button", "escape", "new chat", "leaving"])
async def test_a_stopped_answer_ends_its_request(browser: Browser, how: str) -> None:
    async with (
        running_engine(demo_model(), max_model_len=4096, kv_cache_bytes=64 << 20) as engine,
        opened(service_app(engine), browser) as page,
    ):
        await browser.run("facts.sampling.ignore_eos = true; element('max_tokens').value = '3900'")
        await page.ask("Hello?")
        await browser.until("return document.querySelector('article.answer p')")
        assert engine.statistics().running == 1
        if how == "escape":
            await page.type(Keys.ESCAPE)
        elif how == "leaving":
            await browser.open("about:blank")
        else:
            await page.click("stop" if how == "button" else "new")
        await until(lambda: engine.statistics().aborted == 1)
        assert engine.statistics().running == 0
        if how in ("button", "escape"):
            found = await page.answer()
            assert found["figures"] == "stopped" and found["error"] is None
            assert await browser.run("return history.length") == 2
        if how == "new chat":
            assert await browser.run("return history.length") == 0
            assert await browser.run("return !element('intro').hidden")
            await browser.until("return element('stop').hidden")


async def test_errors_stand_at_their_message(engine: AsyncEngine, browser: Browser) -> None:
    async with opened(service_app(engine, max_body_bytes=1 << 20), browser) as page:
        await page.drop(b"no image", "broken.png")
        await page.ask("What is this?")
        found = await page.answer()
        assert found["error"].startswith("broken.png is not a usable image: ")
        assert found["text"] == ""
        assert await browser.run("return element('text').value") == "What is this?"
        assert await browser.run("return [attached.length, history.length]") == [1, 0]
        await page.click("new")
        for name, kind, data, words in (
            ("a.wav", "audio/wav", b"a", "a.wav: the model takes only image files."),
            ("a", "", b"a", "a: the model takes only image files."),
            ("large.png", "image/png", bytes(1 << 20), "does not fit into a request of 1.0 MiB"),
        ):
            await page.drop(data, name, kind)
            assert words in await browser.text("refusal")
            assert await browser.run("return attached.length") == 0
        await page.drop(encoded(tiny_image(0)))
        assert await browser.text("refusal") == ""
    await page.browser.open("about:blank")


async def test_an_engine_that_does_not_run_yet(folder: Path, browser: Browser) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    app = service_app(engine)
    app.router.lifespan_context = asynccontextmanager(_no_lifespan)
    async with serving(app) as url:
        await browser.open(f"{url}/try")
        await browser.until("return element('takes').innerText.includes('Trying again')")
        assert "not been started" in await browser.text("takes")
        async with engine:
            await browser.until("return facts !== null")
            assert "Drop, paste or choose images" in await browser.text("takes")
            await browser.open("about:blank")


async def _no_lifespan(_app: Any) -> AsyncIterator[None]:
    yield


# ---- what is shown


async def test_what_comes_from_outside_is_text(engine: AsyncEngine, browser: Browser) -> None:
    said = f"{HOSTILE}\n```html\n{HOSTILE}\n  two\n```\nthe **end** 🎈"
    count = "return document.querySelectorAll('img, script, b, strong').length"
    async with opened(Impostor(service_app(engine), said), browser) as page:
        before = await browser.run(count)
        await page.drop(encoded(tiny_image(0)), f"{HOSTILE}.png")
        assert HOSTILE in await browser.text("attached")
        await page.drop(b"", f"{HOSTILE}.txt", "text/plain")
        assert HOSTILE in await browser.text("refusal")
        await page.ask(HOSTILE)
        found = await page.answer()
        assert await browser.run("return document.querySelector('article.user p').innerText") == (
            HOSTILE
        )
        assert await browser.run("return document.querySelector('pre').innerText") == (
            f"{HOSTILE}\n  two"
        )
        assert HOSTILE in found["text"] and "the **end** 🎈" in found["text"]
        assert await browser.run(count) == before + 1, "the image that was dropped"
        assert browser.complaints() == []


async def test_a_question_waits_for_its_files(engine: AsyncEngine, browser: Browser) -> None:
    """Sent while a file is read, it would go without; what cannot be read hides nothing."""
    slow = (
        "const blob = new Blob([new Uint8Array(1 << 24)]); element('text').value = 'a';"
        "window.reads = attach([new File([blob], 'big.png', { type: 'image/png' })]);"
        "submit(); return [document.querySelectorAll('article').length, element('send').disabled]"
    )
    async with opened(service_app(engine), browser) as page:
        assert await browser.run(slow) == [0, True]
        await browser.until("return !element('send').disabled && attached.length === 1")
        await page.click("new")
        await browser.run(
            "const read = FileReader.prototype.readAsDataURL;"
            "FileReader.prototype.readAsDataURL = function (file) {"
            "  if (file.name === 'gone.png') this.onerror(); else read.call(this, file); };"
            "attach(['gone.png', 'here.png'].map(n => new File(['x'], n, { type: 'image/png' })))"
        )
        await browser.until("return !element('refusal').hidden")
        assert await browser.text("refusal") == "gone.png: it cannot be read."
        shown = (
            "return [...document.querySelectorAll('#attached figcaption')].map(n => n.innerText)"
        )
        assert await browser.run(shown) == ["here.png"]


async def test_code_and_text_are_kept_whole(engine: AsyncEngine, browser: Browser) -> None:
    cases = {
        "```print(1)```\nrest": [["P", "```print(1)```\nrest"]],
        "````\na\n```\nb\n````\nend": [["PRE", "a\n```\nb"], ["P", "end"]],
        "- x\n  ```py\n  y\n  ```\nz": [["P", "- x"], ["PRE", "  y"], ["P", "z"]],
        "a\n```x\nopen": [["P", "a"], ["PRE", "open"]],
    }
    script = "return blocks(arguments[0]).map(node => [node.tagName, node.textContent])"
    async with opened(service_app(engine), browser):
        for text, expected in cases.items():
            assert await browser.run(script, text) == expected


async def test_many_files_leave_room(engine: AsyncEngine, browser: Browser) -> None:
    name = "a photograph of the family at the beach in summer 2024 (copy 2).png"
    async with opened(service_app(engine), browser) as page:
        for width, height in ((320, 568), (390, 844), (768, 900)):
            await browser.show(width, height, "light")
            for number in range(12):
                await page.drop(encoded(tiny_image(number, 300, 200)), name)
            await browser.until("return attached.length === 12")
            assert await browser.run("return document.documentElement.scrollWidth") <= width
            assert await browser.run("return element('main').clientHeight") > 80
            await page.click("new")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_screen_fits(engine: AsyncEngine, browser: Browser, scheme: str) -> None:
    name = "a-rather-long-name-" * 10 + ".png"
    async with opened(service_app(engine), browser) as page:
        for width, height in SIZES:
            await browser.show(width, height, scheme)
            await browser.until("return innerWidth === arguments[0]", width)
            assert await browser.run(OVERLAPS, PARTS) == []
            await browser.run("element('settings').open = true; facts.sampling.ignore_eos = true")
            await page.drop(encoded(tiny_image(0, 300, 200)), name)
            await browser.until("return document.querySelector('#attached img').naturalWidth > 0")
            await page.ask("longer-than-a-line " + "x" * 300)
            await page.answer()
            assert await browser.run(OVERLAPS, PARTS) == []
            wide = "return [document.documentElement, element('main')].map(n => n.scrollWidth)"
            assert max(await browser.run(wide)) <= width, f"{width} x {height} scrolls sideways"
            high = await browser.run("return document.documentElement.scrollHeight")
            assert high <= height, "the page itself does not scroll"
            await page.click("new")
        assert browser.complaints() == []


async def test_contrast_is_enough(engine: AsyncEngine, browser: Browser) -> None:
    """4.5 to 1 for all text, as WCAG 2 asks for at level AA; what is disabled is let off."""
    async with opened(service_app(engine), browser) as page:
        await page.drop(b"no image", "a.png")
        await page.ask("What is this?")
        await page.answer()
        await browser.run(
            "element('settings').open = true; refuse('No.');"
            "document.querySelectorAll('[disabled]').forEach(node => { node.disabled = false; });"
        )
        for scheme in ("light", "dark"):
            await browser.show(*SIZES[0], scheme)
            pairs = await browser.run(TEXT_COLOURS)
            assert len(pairs) > 12
            found = [(text, contrast(ink, ground)) for text, ink, ground in pairs]
            assert [pair for pair in found if pair[1] < 4.5] == [], scheme


# ---- elsewhere


@pytest.mark.parametrize("has_key", [False, True], ids=["open", "key"])
async def test_what_is_copied_runs(
    demo: AsyncEngine, browser: Browser, tmp_path: Path, has_key: bool
) -> None:
    """A question in text that a shell or Python might take for its own, and images small and
    large."""
    large = encoded(Image.effect_noise((1300, 1300), 90))
    assert len(large) > 1 << 20
    name = 'it\'s "large" $HOME.png'
    (tmp_path / name).write_bytes(large)
    async with serving(service_app(demo, api_key=KEY if has_key else None)) as url:
        page = TryPage(browser, url)
        if has_key:
            secret = KEY.replace(" ", "%20")
            await browser.open(f"{url.replace('://', f'://me:{secret}@')}/try")
        await page.open()
        for data, file, text in (
            (None, "", "Say 'hello' to \"$HOME\" \\n `true` \u2028 🎈"),
            (next(iter(demo_images())).read_bytes(), "a.jpg", DESCRIBE),
            (large, name, DESCRIBE),
        ):
            await page.click("new")
            if data is not None:
                await page.drop(data, file, f"image/{'jpeg' if file == 'a.jpg' else 'png'}")
            await browser.run("element('text').value = arguments[0]; showSend(); submit()", text)
            await page.answer()
            answer = await browser.run("return history.at(-1).content")
            code = await page.copied("Copy as Python")
            assert KEY not in code and len(code) < 1 << 17
            assert await run([sys.executable, "-c"], code, tmp_path) == answer + "\n"
            if data is large:
                assert await browser.run("return document.querySelector('article button').disabled")
                continue
            command = await page.copied("Copy as curl")
            assert KEY not in command
            (tmp_path / "command.sh").write_text(command)
            out = await run(["sh"], "command.sh", tmp_path)
            assert json.loads(out)["choices"][0]["message"]["content"] == answer
        await browser.open(f"{url}/")
        await browser.until_text("state", "Running")  # its feed comes with the password, too
        await browser.until("return facts !== null")
        assert browser.complaints() == []
        await browser.open("about:blank")


async def test_without_a_chat_template_it_goes_on_with_a_text(
    tmp_path: Path, browser: Browser
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    save_tiny_llava(folder)
    for path in folder.glob("*.jinja"):
        path.unlink()
    async with running_engine(folder) as engine, opened(service_app(engine), browser) as page:
        assert await browser.run("return facts.answers") == "completion"
        assert "no chat template" in await browser.text("takes")
        await browser.run("facts.sampling.ignore_eos = true; element('max_tokens').value = '9'")
        await page.ask("The quick brown fox")
        await page.answer()
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        expected = await engine.generate("The quick brown fox", params)
        assert await browser.run("return history.at(-1).content") == expected.text
        code = await page.copied("Copy as Python")
        assert (await run([sys.executable, "-c"], code, tmp_path)) == expected.text + "\n"
        assert browser.complaints() == []


# ---- speech


async def test_a_wav_file_is_made_of_samples(engine: AsyncEngine, browser: Browser) -> None:
    samples = np.random.default_rng(0).uniform(-1.2, 1.2, (2, 400)).astype(np.float32)
    async with opened(service_app(engine), browser):
        made = await browser.run(
            "const shape = { length: 400, numberOfChannels: 2, sampleRate: 16000 };"
            "const sound = new AudioBuffer(shape);"
            "arguments[0].forEach((row, n) => sound.copyToChannel(Float32Array.from(row), n));"
            "return [...new Uint8Array(wav(sound).buffer)];",
            samples.tolist(),
        )
    heard, rate = soundfile.read(io.BytesIO(bytes(made)))
    assert rate == 16000 and heard.shape == (400,)
    assert np.allclose(heard, np.clip(samples.mean(0), -1, 1), atol=1e-4)


async def test_what_is_said_into_the_microphone(tmp_path: Path, browser: Browser) -> None:
    """Chromium's own one, which beeps, and a model that only writes down speech."""
    folder = tmp_path / "listener"
    save_listener("whisper", folder, tokenizer_for("whisper", (*WORDS, "<|startofprev|>")))
    async with (
        running_engine(folder, max_model_len=None) as engine,
        opened(service_app(engine), browser) as page,
    ):
        assert await browser.run("return facts.answers") == "transcription"
        assert await browser.run("return element('text').hidden && element('settings').hidden")
        await page.click("record")
        await browser.until("return recording?.state === 'recording'")
        await browser.run("window.began = performance.now()")
        await browser.until("return performance.now() - began > 1200")
        await page.click("record")
        await browser.until("return attached.length === 1")
        data = base64.b64decode((await browser.run("return attached[0].url")).split(",")[1])
        recorded, rate = soundfile.read(io.BytesIO(data))
        assert rate == 16000 and recorded.ndim == 1 and len(recorded) > rate / 2
        assert np.abs(recorded).max() > 0.01, "the beep"
        await page.click("send")
        found = await page.answer()
        assert found["error"] is None and found["text"]
        assert found["figures"].startswith(f"{len(recorded) / rate:.1f} s of audio in ")
        (tmp_path / "recording.wav").write_bytes(data)
        code = await page.copied("Copy as Python")
        assert (await run([sys.executable, "-c"], code, tmp_path)).split() == found["text"].split()
        (tmp_path / "command.sh").write_text(await page.copied("Copy as curl"))
        out = await run(["sh"], "command.sh", tmp_path)
        assert json.loads(out)["text"].split() == found["text"].split()
        await page.drop(wav(recorded[: rate // 2], rate), "short.wav", "audio/wav")
        await page.click("send")
        found = await page.answer()
        assert {"Decode", "Encode", "Generate"} <= {*found["spans"]}, "one request has a timeline"
        assert browser.complaints() == []
