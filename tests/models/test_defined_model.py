"""Models that are defined here: built, loaded from safetensors files, and run over pages."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaModel

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.models import SupportsMultiModal
from aioengine.models.runtime.attention import Attention
from aioengine.models.runtime.defined_model import DefinedModel
from aioengine.models.runtime.hf_loading import load_config
from aioengine.models.runtime.registry import register_model
from aioengine.models.runtime.weights import build_empty, copy_weights, load_defined
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.processors.text_only import TextOnlyDummyInputs, TextOnlyInfo, TextOnlyProcessor
from tests.models.driver import Driver, Request
from tests.support.tiny import draw_weights, tiny_tokenizer

WIDTH, HEADS, VOCAB = 48, 4, 320


class OwnConfig(PreTrainedConfig):
    """A model type that transformers does not know."""

    model_type = "aioengine_test_own"
    vocab_size: int = VOCAB
    hidden_size: int = WIDTH
    num_hidden_layers: int = 2
    max_position_embeddings: int = 256
    eos_token_id: int | None = 2


class OwnLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 2 * width)
        self.attention = Attention(HEADS, width // HEADS, (width // HEADS) ** -0.5, HEADS // 2)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        attended: Tensor = self.out(self.attention(query, key, value))
        return hidden + attended


class Own(nn.Module):
    """Learned positions, a table that is not a parameter, and a head shared with the embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(
            OwnLayer(config.hidden_size) for _ in range(config.num_hidden_layers)
        )
        rate = torch.arange(1, config.hidden_size + 1) / config.hidden_size
        self.register_buffer("rate", rate, persistent=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        rate: Any = self.rate
        hidden = hidden + torch.sin(positions[:, None] * rate).to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return copy_weights(self, weights)


class OwnInfo(TextOnlyInfo):
    """Tokenizer and processor by ways of its own."""

    @classmethod
    def load_tokenizer(cls, source: str, hf_config: Any, options: Any) -> Any:
        return tiny_tokenizer()

    @classmethod
    def load_hf_processor(cls, source: str, hf_config: Any, options: Any, **kwargs: Any) -> Any:
        return cls.load_tokenizer(source, hf_config, options)


@register_model("AioengineTestOwnModel")
@MULTIMODAL_REGISTRY.register_processor(
    TextOnlyProcessor, info=OwnInfo, dummy_inputs=TextOnlyDummyInputs
)
class OwnModel(DefinedModel):
    definition: ClassVar[type[nn.Module]] = Own
    config_class = OwnConfig


def own_config() -> OwnConfig:
    return OwnConfig(architectures=["AioengineTestOwnModel"], dtype="float64")


def drawn(config: Any) -> Own:
    model = Own(config).double()
    draw_weights(model)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own")
    config = own_config()
    config.save_pretrained(path)
    save_file(weights_of(drawn(config)), path / "model.safetensors")
    return path


def load(path: Path, dtype: torch.dtype = torch.float64) -> OwnModel:
    return OwnModel.load(path, hf_config=load_config(path), dtype=dtype, device="cpu")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_config_is_of_the_family_s_class(folder: Path) -> None:
    assert type(load_config(folder)) is OwnConfig
    with pytest.raises(OSError, match="nowhere"):
        load_config(folder / "nowhere")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_and_buffers(folder: Path, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    model = load(folder, dtype)
    expected = drawn(own_config())
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name).to(dtype)), name
        assert not parameter.requires_grad
    assert torch.equal(model.model.rate, expected.rate.float())
    assert model.model.head.weight is model.model.embed.weight
    assert torch.get_default_dtype() == before
    assert not model.model.training
    assert model.dtype == dtype
    assert (model.hidden_size, model.vocab_size) == (WIDTH, VOCAB)
    (group,) = model.kv_groups
    assert (group.num_kv_heads, group.key_dim, group.num_layers) == (2, 12, 2)


def test_a_default_dtype_of_the_application_s(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = load(folder)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.model.rate.dtype == torch.float32


def test_other_threads_modules_are_left_alone() -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            inside.set()
            assert done.wait(10)
            self.layer = nn.Linear(2, 2)

    made: list[nn.Module] = []
    builder = threading.Thread(
        target=lambda: made.append(build_empty(Slow, None, torch.float64, "cpu"))
    )
    builder.start()
    assert inside.wait(10)
    beside = nn.Linear(2, 2)
    done.set()
    builder.join()
    assert beside.weight.requires_grad
    assert beside.weight.device.type == "cpu"
    assert made[0].get_parameter("layer.weight").dtype == torch.float64


def test_over_pages_as_without(folder: Path) -> None:
    """Chunked and mixed, the logits of a plain causal run."""
    model = load(folder)
    plain = load(folder)
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [Request(each) for each in ids]
    driver = Driver(model)
    driver.step([(requests[0], 5), (requests[1], 3)])
    driver.step([(requests[0], 5), (requests[1], 7)])
    driver.step([(requests[0], 1), (requests[1], 1)])
    for request, tokens in zip(requests, ids, strict=True):
        alone = Request(tokens)
        Driver(plain).step([(alone, len(tokens))])
        torch.testing.assert_close(request.all_logits, alone.all_logits, rtol=0, atol=1e-10)


async def test_in_an_engine(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"device": "cpu", "kv_cache_bytes": 1 << 20, "max_model_len": 64, "block_size": 4}
    found = []
    for budget in (64, 3):
        async with AsyncEngine.from_pretrained(
            folder, max_num_batched_tokens=budget, **options
        ) as engine:
            outputs = [await engine.generate(text, params) for text in ("What is it?", "The lazy")]
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.1.qkv.bias"), "layers.1.qkv.bias"),
        (lambda w: w.update(stray=torch.zeros(1)), "no place for: stray"),
        (lambda w: w.update({"layers.0.out.weight": torch.zeros(1, WIDTH)}), "layers.0.out.weight"),
    ],
)
def test_weights_that_do_not_fit(copied: Path, change: Change, message: str) -> None:
    weights = load_file(copied / "model.safetensors")
    change(weights)
    save_file(weights, copied / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(copied)


@pytest.mark.parametrize("length", [0, 5, 400, -100])
def test_a_file_that_was_cut(copied: Path, length: int) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load(copied)


def test_no_safetensors_files(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(copied)


def into_shards(path: Path) -> dict[str, str]:
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, path / file)
    return places


def write_index(path: Path, places: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards(copied: Path) -> None:
    write_index(copied, into_shards(copied))
    expected = drawn(own_config()).state_dict()
    found = load(copied).model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_index_that_does_not_fit(copied: Path) -> None:
    places = into_shards(copied)
    for index in ({**places, "stray": "part-0.safetensors"}, None, [], {"a": 3}):
        write_index(copied, index)
        with pytest.raises(ModelLoadError):
            load(copied)
    write_index(copied, {**places, "stray": "../part-0.safetensors"})
    with pytest.raises(ModelLoadError, match="not beside it"):
        load(copied)
    write_index(copied, {**places, "stray": "part-2.safetensors"})
    with pytest.raises(ModelLoadError, match="part-2"):
        load(copied)
    write_index(copied, places)
    shard = copied / "part-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load(copied)


def test_what_a_definition_cannot_be(folder: Path) -> None:
    class Hollow(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("sum", self.layer.weight.sum())

    with pytest.raises(ModelLoadError, match=r"\.sum of Hollow"):
        build_empty(Hollow, None, torch.float32, "cpu")
    config = own_config()
    config.quantization_config = {"bits": 4}
    with pytest.raises(ModelLoadError, match="quantized"):
        load_defined(Own, folder, hf_config=config, dtype=torch.float32, device="cpu")


class Seeing(Own):
    """Encodes and embeds media itself, by the guide's newer names."""

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor] | None:
        pixels = kwargs.get("pixel_values")
        if pixels is None:
            return None
        return [2 * each.flatten(0, -2) for each in pixels]

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, is_multimodal: Any = None
    ) -> Tensor:
        if multimodal_embeddings is None:
            embeds: Tensor = self.embed(input_ids)
            return embeds
        embeds = self.embed(input_ids.masked_fill(is_multimodal, 0))
        return embeds.masked_scatter(is_multimodal[:, None], torch.cat(multimodal_embeddings) + 1)


class SeeingModel(DefinedModel):
    definition: ClassVar[type[nn.Module]] = Seeing
    config_class = OwnConfig


def test_a_definition_that_encodes_and_embeds_media_itself(folder: Path) -> None:
    model = SeeingModel.load(folder, hf_config=own_config(), dtype=torch.float64, device="cpu")
    assert isinstance(model.model, SupportsMultiModal)
    pixels = [torch.rand(3, 1, WIDTH), torch.rand(3, 1, WIDTH)]
    rows = model.encode("image", [{"pixel_values": each} for each in pixels])
    for row, each in zip(rows, pixels, strict=True):
        assert torch.equal(row, 2 * each.double().flatten(0, -2))
    given_rows = torch.rand(2, WIDTH)
    (passed,) = model.encode("image", [{"image_embeds": given_rows}])
    assert torch.equal(passed, given_rows.double())
    assert model.embed_multimodal() == []
    ids = torch.tensor([1, 10**6, 10**6, 2])
    mask = torch.tensor([False, True, True, False])
    table = model.model.embed.weight
    embeds = model.embed_input_ids(ids, [given_rows.double()], mask)
    assert torch.equal(embeds, torch.stack([table[1], *(given_rows.double() + 1), table[2]]))
    assert torch.equal(model.embed_input_ids(ids[[0, 3]]), table[[1, 2]])


def test_a_definition_that_promises_more_than_it_does(folder: Path) -> None:
    class Promising(Own, SupportsMultiModal):
        pass

    class PromisingModel(DefinedModel):
        definition: ClassVar[type[nn.Module]] = Promising

    with pytest.raises(ModelLoadError, match=r"abstract.*embed_multimodal"):
        PromisingModel.probe(own_config())


class OverLlama(nn.Module):
    """transformers' own decoder as a part, and a tower beside it that is no business of ours."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.language = LlamaModel(config)
        self.tower = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_decoder(self) -> nn.Module:
        return self.language

    def get_input_embeddings(self) -> nn.Module:
        return self.language.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        assert inputs_embeds is not None
        output = self.language(
            inputs_embeds=inputs_embeds[None], position_ids=positions[None], use_cache=False
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return copy_weights(self, weights)


class OverLlamaModel(DefinedModel):
    definition: ClassVar[type[nn.Module]] = OverLlama


def test_modules_of_transformers_inside(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        reference = OverLlama(config).double().eval()
    draw_weights(reference)
    save_file(weights_of(reference), tmp_path / "model.safetensors")
    model = OverLlamaModel.load(tmp_path, hf_config=config, dtype=torch.float64, device="cpu")
    tokens = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request(tokens)
    driver = Driver(model)
    for count in (4, 4, 1):
        driver.step([(request, count)])
    with torch.no_grad():
        embeds = reference.language.embed_tokens(torch.tensor(tokens))
        expected = reference.compute_logits(reference(None, torch.arange(9), embeds))
    torch.testing.assert_close(request.all_logits, expected, rtol=0, atol=1e-10)
