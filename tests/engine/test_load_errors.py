"""Checkpoints that cannot be served: which file, token or architecture it is, and the way out, told
before anything that takes long is begun."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine import AsyncEngine
from aioengine.errors import ModelLoadError
from aioengine.models.runtime import checkpoint, transformers_model
from tests.support.engines import greedy
from tests.support.tiny import save_tiny_llava, tiny_llama, tiny_llava, tiny_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_S = 1.0
"""The acceptance bound on the check itself. Measured: 1 to 60 ms."""

Damage = Callable[[Path], None]


async def start(folder: str | Path, **options: Any) -> None:
    sizes = {"device": "cpu", "max_model_len": 256, "kv_cache_bytes": 1 << 20, **options}
    async with AsyncEngine.from_pretrained(folder, **sizes):
        pass


async def refused(folder: str | Path, **options: Any) -> str:
    """What the error says, which has no folders in it but the checkpoint's own."""
    with pytest.raises(ModelLoadError) as caught:
        await start(folder, **options)
    text = str(caught.value)
    assert str(Path(folder).parent) not in text or not Path(folder).is_absolute()
    assert "object at 0x" not in text
    return text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind, folders that can be served: "llava", in one file; "shards", in several; "llama"."""
    root = tmp_path_factory.mktemp("saved")
    folders = {kind: root / kind for kind in ("llava", "shards", "llama")}
    save_tiny_llava(folders["llava"])
    save_tiny_llava(folders["shards"])
    (folders["shards"] / WEIGHTS).unlink()
    tiny_llava(torch.float32).save_pretrained(folders["shards"], max_shard_size="60KB")
    tiny_llama(torch.float32).save_pretrained(folders["llama"])
    tiny_tokenizer().save_pretrained(folders["llama"])
    return folders


@pytest.fixture
async def warm(saved: dict[str, Path]) -> None:
    """torch, transformers and the family are imported."""
    await start(saved["llava"])


@pytest.fixture
def damaged(saved: dict[str, Path], tmp_path: Path) -> Callable[[str, Damage], Path]:
    """A copy of a folder, after something was done to it."""

    def make(kind: str, damage: Damage) -> Path:
        folder = tmp_path / "checkpoint"
        shutil.copytree(saved[kind], folder)
        damage(folder)
        return folder

    return make


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error must come before the model is built, if only of shapes."""

    def build(*arguments: object) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(transformers_model, "build_on_meta", build)


# ---- what is done to folders


def change(name: str, **entries: Any) -> Damage:
    """Sets entries of a JSON file; None takes one out."""

    def damage(folder: Path) -> None:
        settings = json.loads((folder / name).read_text())
        settings.update(entries)
        kept = {key: value for key, value in settings.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def append(name: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(content)

    return damage


def remove(*patterns: str) -> Damage:
    def damage(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return damage


def cut(name: str, num_bytes: int) -> Damage:
    """Takes bytes from the end, or leaves so many of the start, if positive."""

    def damage(folder: Path) -> None:
        (file,) = folder.glob(name)
        file.write_bytes(file.read_bytes()[:num_bytes])

    return damage


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def reshaped(name: str) -> Damage:
    """Another shape for one weight of a file."""

    def damage(folder: Path) -> None:
        (file,) = folder.glob(name)
        weights = load_file(file)
        weights[next(iter(weights))] = torch.zeros(3, 5)
        save_file(weights, file, metadata={"format": "pt"})

    return damage


def deepened(folder: Path) -> None:
    """A config that has one layer more than there are weights for."""
    text_config = json.loads((folder / "config.json").read_text())["text_config"]
    text_config["num_hidden_layers"] += 1
    change("config.json", text_config=text_config)(folder)


def emptied(folder: Path) -> None:
    """A shard that is whole, and holds nothing of what the index says."""
    (file,) = folder.glob("model-00002-*")
    save_file({"other": torch.zeros(1)}, file, metadata={"format": "pt"})


def without_placeholder(folder: Path) -> None:
    """The tokenizer of a text model, in the place of the checkpoint's."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["content"] != "<image>"
    ]
    del tokenizer["model"]["vocab"]["<image>"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    change("tokenizer_config.json", image_token=None, extra_special_tokens=None)(folder)


POINTER = b"version 1 of git-lfs\noid sha256:0\nsize 12\n"

# Kind of folder, what is done to it, and the words that the message must have.
EARLY: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    "architecture": (
        "llava", change("config.json", architectures=["FooForBar"]),
        ("FooForBar", "none either", "register_model"),
    ),
    "architecture_and_type": (
        "llava", change("config.json", architectures=["FooForBar"], model_type="foo"),
        ("FooForBar", "Known: ", "register_model"),
    ),
    "model_type": (
        "llava", change("config.json", model_type="foo"), ("'foo'", "transformers", "config.json"),
    ),
    "no_architectures": (
        "llava", change("config.json", architectures=None), ("names no architectures", "add"),
    ),
    "architectures_no_list": (
        "llava", change("config.json", architectures="Llava"), ("names no architectures", "add"),
    ),
    "no_config": ("llava", remove("config.json"), ("no config.json", "save_pretrained")),
    "malformed_config": (
        "llava", write("config.json", b'{\n"a":'), ("config.json", "not valid JSON (line 2)"),
    ),
    "config_no_object": ("llava", write("config.json", b"[]"), ("config.json", "no JSON object")),
    "malformed_generation_config": (
        "llava", write("generation_config.json", b"{"), ("generation_config.json", "fetch"),
    ),
    "no_weights": ("llava", remove("*.safetensors"), ("no model.safetensors", "fetch")),
    "truncated": ("llava", cut(WEIGHTS, -100), (WEIGHTS, "cut short", "fetch")),
    "truncated_header": ("llava", cut(WEIGHTS, 100), (WEIGHTS, "cut short, with 100 of")),
    "empty": ("llava", cut(WEIGHTS, 0), (WEIGHTS, "cut short, with 0 of 8 bytes")),
    "too_long": (
        "llava", append(WEIGHTS, b"more"), (WEIGHTS, "damaged", "fetch"),
    ),
    "a_page": ("llava", write(WEIGHTS, b"<html>gone</html>"), (WEIGHTS, "not in the safetensors")),
    "damaged_header": (
        "llava", write(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), (WEIGHTS, "damaged header"),
    ),
    "pointer": ("llava", write(WEIGHTS, POINTER), (WEIGHTS, "git lfs pull")),
    "pickle": ("llava", pickled, ("pytorch_model.bin", "run code", "save_pretrained")),
    "other_format": (
        "llava", lambda folder: (folder / WEIGHTS).rename(folder / "model.gguf") and None,
        ("model.gguf", "not a whole GGUF file"),
    ),
    "no_shard": ("shards", remove("model-00002-*"), ("model-00002-of-", INDEX, "fetch")),
    "truncated_shard": ("shards", cut("model-00003-*", -1), ("model-00003-of-", "cut short")),
    "other_shard": ("shards", emptied, ("model-00002-of-", "are not in their files", "fetch")),
    "malformed_index": ("shards", write(INDEX, b"{"), (INDEX, "not valid JSON")),
    "index_without_map": ("shards", write(INDEX, b"{}"), (INDEX, "no weight_map")),
    "index_outside": (
        "shards", write(INDEX, b'{"weight_map": {"a": "../llava/model.safetensors"}}'),
        (INDEX, "not beside it"),
    ),
    "no_index": ("shards", remove(INDEX), (INDEX, "model-00001-of-")),
    "no_placeholder": (
        "llava", without_placeholder, ("'<image>'", "tokenizer.json", "copy"),
    ),
    "no_placeholder_id": (
        "llava", change("config.json", image_token_id=70_000, image_token_index=70_000),
        ("70000", "image_token_id", "copy"),
    ),
    "no_tokenizer": ("llava", remove("tokenizer*"), ("no tokenizer files", "tokenizer.json")),
    "no_tokenizer_for_text": ("llama", remove("tokenizer*"), ("no tokenizer files",)),
    "malformed_tokenizer": (
        "llava", write("tokenizer.json", b"{"), ("tokenizer.json", "not valid JSON", "fetch"),
    ),
    "no_vocabulary": ("llama", write("tokenizer.json", b"{}"), ("tokenizer.json", "fetch")),
    "no_image_processor": (
        "llava", remove("*processor_config.json"), ("no preprocessor_config.json", "copy"),
    ),
    "image_processor_left_out": (
        "llava", change("processor_config.json", image_processor=None),
        ("no preprocessor_config.json", "processor_config.json that says", "copy"),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("case", EARLY)
async def test_before_the_model_is_built(case: str, damaged: Callable[[str, Damage], Path]) -> None:
    kind, damage, words = EARLY[case]
    text = await refused(damaged(kind, damage))
    for word in words:
        assert word in text
    assert "'checkpoint'" in text or case.startswith(("architecture", "other_format"))


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("llava", reshaped(WEIGHTS), ("other shapes", "[3, 5]", "config.json")),
        ("shards", reshaped("model-00004-*"), ("other shapes", "[3, 5]", "config.json")),
        ("llava", deepened, ("are not in the checkpoint", "layers.2.", "config.json")),
    ],
)
async def test_weights_that_do_not_fit(
    kind: str, damage: Damage, words: tuple[str, ...], damaged: Callable[[str, Damage], Path]
) -> None:
    text = await refused(damaged(kind, damage))
    for word in words:
        assert word in text


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("case", ["architecture", "no_weights", "truncated", "no_placeholder"])
async def test_within_a_second(case: str, damaged: Callable[[str, Damage], Path]) -> None:
    kind, damage, _ = EARLY[case]
    folder = damaged(kind, damage)
    begin = time.perf_counter()
    await refused(folder)
    assert time.perf_counter() - begin < MAX_S


HOSTILE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "layers": ({"num_hidden_layers": 10**9}, ("num_hidden_layers is 1000000000", "not be over")),
    "more_layers": ({"num_hidden_layers": 9000}, ("more than", "weights", "hidden_layers 9000")),
    "no_layers": ({"num_hidden_layers": 0}, ("num_hidden_layers is 0", "positive")),
    "text_for_layers": ({"num_hidden_layers": "x"}, ("num_hidden_layers", "expected int, got str")),
    "negative_heads": ({"num_attention_heads": -4}, ("num_attention_heads is -4", "not be negat")),
    "no_heads": ({"num_attention_heads": 0}, ("num_attention_heads is 0", "positive")),
    "vocabulary": ({"vocab_size": 10**9}, ("numbers", "vocab_size 1000000000")),
    "vast_vocabulary": ({"vocab_size": 10**18}, ("cannot be built of this config.json", "size")),
    "width": ({"hidden_size": 10**6}, ("numbers", "hidden_size 1000000")),
    "positions": (
        {"max_position_embeddings": 10**12}, ("max_position_embeddings is 10000", "not be over"),
    ),
    "list": ({"eos_token_id": [1] * 10**6}, ("eos_token_id is a list of 1000000", "not be over")),
    "list_in_a_list": ({"more": {"of": [[1] * 10**6]}}, ("more.of is a list of 1000000",)),
    "activation": ({"hidden_act": "foo"}, ("cannot be built of this config.json", "foo")),
}  # fmt: skip


async def test_settings_of_an_architecture_that_is_served_by_its_kind(tmp_path: Path) -> None:
    """Its name is not what is wrong, though the registry does not have it."""
    settings = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"}
    settings["vision_config"] = {"hidden_size": "wide"}  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    text = await refused(tmp_path)
    assert "no model class" not in text
    assert "hidden_size" in text


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("case", HOSTILE)
async def test_sizes_that_no_checkpoint_has(
    case: str, damaged: Callable[[str, Damage], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a second and before weights are read: their memory would be the config's."""
    monkeypatch.setattr(transformers_model, "load_pretrained", None)
    settings, words = HOSTILE[case]
    folder = damaged("llama", change("config.json", **settings))
    begin = time.perf_counter()
    text = await refused(folder)
    assert time.perf_counter() - begin < MAX_S
    for word in words:
        assert word in text


@pytest.mark.parametrize("case", ["truncated", "no_placeholder"])
async def test_an_engine_beside_it_goes_on(
    case: str, saved: dict[str, Path], damaged: Callable[[str, Damage], Path]
) -> None:
    kind, damage, _ = EARLY[case]
    async with AsyncEngine.from_pretrained(saved["llama"], device="cpu") as engine:
        before = await engine.generate("The quick", greedy())
        await refused(damaged(kind, damage))
        assert (await engine.generate("The quick", greedy())).token_ids == before.token_ids


async def test_what_is_no_folder(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "no folder 'nowhere'" in await refused(tmp_path / "nowhere")
    assert "no folder 'nowhere'" in await refused(str(tmp_path / "nowhere"))
    assert "'config.json' is a file" in await refused(saved["llava"] / "config.json")
    assert "no config.json" in await refused(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("some-team/some-model", "nowhere"):
        text = await refused(name)
        assert name in text and "local cache" in text and "hf download" in text


@pytest.mark.parametrize("is_cached", [True, False])
async def test_without_a_network_the_hub_is_asked_once(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_cached: bool
) -> None:
    asked = []

    class Session:
        def head(self, url: str, **_: object) -> None:
            asked.append(url)
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoint, "get_session", Session)
    entry = tmp_path / "models--some-team--some-model"
    if is_cached:
        (entry / "refs").mkdir(parents=True)
        (entry / "refs" / "main").write_text("0" * 40)
        shutil.copytree(saved["llama"], entry / "snapshots" / ("0" * 40))
        async with AsyncEngine.from_pretrained("some-team/some-model", device="cpu") as engine:
            output = await engine.generate("The quick", greedy())
        async with AsyncEngine.from_pretrained(saved["llama"], device="cpu") as engine:
            assert (await engine.generate("The quick", greedy())).token_ids == output.token_ids
    else:
        text = await refused("some-team/some-model")
        assert "'some-team/some-model'" in text and "hf download" in text
    assert len(asked) == 1 and asked[0].endswith("/some-team/some-model/resolve/main/config.json")


def test_a_hub_id_is_checked_as_far_as_it_is_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, damaged: Callable[[str, Damage], Path]
) -> None:
    folder = damaged("shards", remove("model-00002-*"))

    def cached(source: str, name: str, **options: Any) -> str | None:
        assert source == "some-team/some-model" and options["local_files_only"]
        return str(folder / name) if (folder / name).is_file() else None

    monkeypatch.setattr(checkpoint, "cached_file", cached)
    checkpoint.check_files("some-team/some-model", None)
    cut("model-00003-*", -1)(folder)
    with pytest.raises(ModelLoadError, match=r"model-00003-of-.* of 'some-team/some-model' is cut"):
        checkpoint.check_files("some-team/some-model", None)
    remove("*.safetensors*")(folder)
    checkpoint.check_files("some-team/some-model", None)


def test_nothing_is_wrong_with_what_can_be_served(saved: dict[str, Path]) -> None:
    for folder in saved.values():
        checkpoint.check_files(folder, None)
