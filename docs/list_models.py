"""Writes docs/models.md: python docs/list_models.py [--check].

From the registry, and from docs/parity.json, which tests/parity/measure.py writes.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from aioengine.models.encdec.base import EncoderDecoderModel
from aioengine.models.runtime.registry import known_architectures, resolve
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.processors.text_only import TextOnlyProcessor

PAGE = Path(__file__).parent / "models.md"
PARITY = Path(__file__).parent / "parity.json"
HEAD = """# Models

Made by `docs/list_models.py` from the registry and from [`parity.json`](parity.json).

Most families run transformers' own modules and weights over paged attention. Qwen-VL, DeepSeek-VL2
and Molmo (v1) have no class there and are defined here; original InternVL checkpoints
(`InternVLChatModel`) are converted to transformers' InternVL as they are loaded. None of them needs
code that comes with a checkpoint.

**Three tiers.**

1. *Held*: what most people load. Tokens and the error of logits, as below; the rate beside
   transformers is measured by scripts. They are Llama, Qwen2, LLaVA, Qwen2-VL, Qwen2.5-VL,
   Qwen3-VL, Gemma 3, SmolVLM, InternVL and Whisper (`benchmarks/families.py`, `throughput.py`,
   `models.py`), Qwen3-MoE, Mixtral, DeepSeek-V3, GPT-OSS, Qwen3.5, LFM2 and Falcon-H1
   (`benchmarks/decoders.py`). Real weights: SmolLM2-135M, a Llama, and Whisper tiny.en
   (`tests/real/`); package registries have no others as small. Memory is bounded by settings, for
   any family.
2. *Right*: the other rows below, and all that the sweep at the end calls equal. Tokens are
   compared; how fast they are is not measured.
3. *Refused*, each with its reason, before weights are read or by the trial at load.

**Tokens.** With tiny models, greedy tokens equal those of transformers' `generate` in float64, with
prompts cut anywhere that is allowed, mixed with others, with caches cold and warm
(`tests/parity/`). For `own` and `f32`, see below; the latter up to the first close call.

**Parity error.** The largest difference between a logit of the engine, in float32, and the same
logit of transformers, in float64: over every generated position, with every kind of media that the
model takes, two prompts at a time, in chunks of 13 tokens where the model allows it, over pages of
4. The engine is made to choose the reference's tokens, so that no position is left out. The bound
is 1e-4, or 1e-4 times the largest logit where that is more than 1 (`scale` in `parity.json`).
What there is, rounding makes, and how much depends on the weights, which are random here: *HF
float32* is how far transformers in float32 is from itself in float64. So the column says that the
engine computes the same function, not how exact a real checkpoint is; bfloat16 rounds far more.

- `own`: transformers has no such class. The reference is our definition itself, a whole sequence at
  once and without pages; its parts are compared with transformers' where that has their like, and
  all of it with the original, see below.
- `f32`: the model, or one of its parts or kinds, runs in nothing wider than float32 in
  transformers. There that is the reference.

**Originals.** Molmo, DeepSeek-VL2 and Qwen-VL are checked against independent references
(`tests/originals/`), in NumPy and float64, written from the papers and the published code and not
from ours. Compared are

- which tiles or crops an image becomes, from one pixel to long strips: their number, order, borders
  and masks, and where the view of the whole image stands;
- what makes rows of patches: Molmo's pooling and padding embeddings, the order of DeepSeek-VL2's
  blocks of two by two, Qwen-VL's resampler with its positions, and each tower;
- newline, separator and marker tokens, and which tokens take rows;
- rotary positions and whole decoders, with the scalings and routings of DeepSeek-VL2;
- answers of the engine, from the files of a tiny checkpoint to its tokens.

Where the published code gives other results for other lengths (Qwen-VL beyond `seq_length`), or
fails (images of which scaling leaves nothing), the engine refuses.

**Processing**: `generic`, what the HF processor itself says about its placeholders, or makes of a
whole prompt; `own`, written for this family; `tokenizer`, there is nothing else to do.
"""
TAIL = """
## Architectures that are not listed

Any other that transformers has is chosen by its kind: text, media whose HF processor says what they
become in the text, or expands a text without them as it does with them (Idefics2), positions of
three axes, rows for the decoder's first layers, text to text (encoder-decoders of
`AutoModelForSeq2SeqLM`), one image to text (Donut, Pix2Struct), images that a decoder reads by
cross-attention (Mllama, Idefics: [`encoder_decoder.md`](encoder_decoder.md)).
transformers' module runs as it is, and the trial at load
([`model-check.md`](decisions/model-check.md)) compares it with itself, so that an architecture
which needs something else is refused, in words (unless `check_model=False`). What was tried is in
[`any-architecture.md`](decisions/any-architecture.md).
`EngineConfig.model_impl` says what may be chosen: `"native"` the tables above alone,
`"transformers"` never them; the log, `engine.statistics().model_impl` and the status page say which
it is.

Layers that keep a state beside keys and values (short convolutions, gated delta nets, Mamba's) run
where a model has attention layers too: Qwen3.5 and its MoE, with images and videos, Qwen3-Next,
LFM2, Falcon-H1, Granite's and OLMo's hybrids, Nemotron-H, Bamba, Jamba, Zaya
([`states.md`](decisions/states.md)).

Latent attention keeps latents, not the keys and values of all heads: DeepSeek-V2 and V3,
DeepSeek-VL2, AXK1, GLM-4 MoE Lite, MiniCPM3, Mistral 4, Youtu
([`latent-attention.md`](decisions/latent-attention.md)).

Decoders with attention of their own (BLOOM, Falcon, GPT-J, MPT, BERT and its like with
`is_decoder`, BART's and Pegasus' decoders, DeepSeek-V3.2 and GLM with sparse attention) are run by
transformers' cache interface over our pages: right, and slower than a flat batch, as the log says
([`by-cache.md`](decisions/by-cache.md)).

Refused are, by name and reason: models without attention layers (Mamba), states of other kinds,
decoders that neither ask transformers' `AttentionInterface` nor keep all in a cache,
encoder-decoders that read neither text, audio nor an image alone, or give anything but text,
experts that drop tokens by what else is in a batch, processors that do not report what media
become, nor show it in a text's tokens, and those that say more of each token than its id and its
kind.

{sweep}

## Not built

{lacking}

## A family of your own

[`examples/own_model`](../examples/own_model) adds an architecture with `register_model`. The class
inherits `TransformersModel`, where transformers has the module, or `DefinedModel`, whose
`definition` is an `nn.Module` of yours; `register_model` refuses any other, and says so.

The names are those of vLLM's model guide; what is other here:

- `SupportsMultiModal` has the newer names, `embed_multimodal` and `embed_input_ids`. A `definition`
  with both encodes and embeds its media itself. The guide's older `get_multimodal_embeddings` and
  `get_input_embeddings(input_ids, multimodal_embeddings)` belong on the registered class.
- `SupportsEncoderDecoder` is what the engine reserves cross-attention blocks for:
  `max_encoder_len`, `encode_prompt`, `memory`. The start tokens of a decoder are its processor's
  business (`EncDecMultiModalProcessor`).
- There is no `MultiModalFeatureSpec`. An item's place is known from its header, its key from its
  bytes, its features when a worker is done; each travels as soon as it is there
  (`PlaceholderRange`, a digest, `MultiModalKwargsItem`), and nothing ever holds all of them.
- Encoder rows stand where the placeholder range says, never where a token's id does. Of a range in
  which only some tokens take rows, as between the line ends of Fuyu's patches, say which:
  `PromptUpdateDetails.select_token_id(full, token_id, features=...)`.
- `_get_dummy_images`, `_get_dummy_audios` and `_get_dummy_videos` keep to `limit_mm_per_prompt`
  ([`media.md`](media.md)).
- A model is tried at its first load against its own module
  ([`model-check.md`](decisions/model-check.md)): `TransformersModel.reference_logits` says how that
  is run over one whole prompt. Override it where transformers' forward wants more than what the
  encoder takes.
- Layers of a `definition` are packed and fused by the names that transformers gives them (`q_proj`,
  `gate_proj` ...). A class with other names says which in an attribute,
  `layer_names = LayerNames(merged=[("w1", "w3")])` (`aioengine.models.fusion.layer_names`).
- What goes wrong in a processor's own code is in the log, by its place and without what it says,
  which may hold a user's data: a `MediaError` tells its kind alone. On the engine's own dummies it
  is a `ModelLoadError`, with the error itself as `__cause__`.

Quantized checkpoints: [`quantization.md`](quantization.md).
"""
SWEEP = Path(__file__).parent / "sweep.jsonl"
SWEPT = """**Tried** on {made} with transformers {transformers} and torch {torch}, without
torchvision, timm and torchaudio: every architecture of five of transformers' auto mappings, with a
tiny random model (`tests/parity/sweep.py`). *Equal*: its greedy tokens are those of `generate`, in
chunks of 64, 13 and 5, with caches cold and warm, in float64 (float32 where experts run in nothing
wider), or a test of its own in `tests/parity/` says so (Gemma 3n: of text alone). *Unbuilt*: it
needs what is not there, or no rule of the script makes it small. An architecture may be in several
mappings.

{counts}
Equal without a row above: {equal}.

Refused:

{refused}"""
WITH = Path(__file__).parent / "sweep_torchvision.jsonl"
MEDIA = ("image-text-to-text", "multimodal", "speech")
"""Mappings of what takes images or audio."""
SWEPT_WITH = """

**With torchvision** {torchvision}, timm and torchaudio beside a CPU build of torch
(`tests/parity/extras.py`; processors then are transformers' faster ones), on {made}, those that
take images or audio:

{counts}
Equal with them and not without: {more}.

Refused: {refused}.

Unbuilt: {unbuilt}."""
BY_CACHE = (
    "Of {total} architectures that are equal, {cached} run by their cache (`models/by_cache/`), "
    "which is slower than a flat batch."
)
VERDICTS = ("equal", "refused", "unbuilt", "differs")
REASONS = (
    ("encoder-decoders without a class", "each encoder-decoder"),
    ("state between calls", "keeps (a )?state"),
    ("masks or biases of a layer's own", "gives its attention"),
    ("tokens that see each other both ways", "tokens see later ones"),
    ("attention past the interface", "AttentionInterface|does not route"),
    ("no text as an answer", "neither generates text nor|does not generate text|and no text"),
    ("no encoder under transformers' usual name", "but no get_image_features"),
    ("processors that do not report what media become", "does not report"),
    ("processors that do more to a prompt", "does more to a prompt"),
    ("a layer that runs twice", "more than once"),
    ("more of each token than its id", "for each token of a prompt"),
    ("arguments that a flattened batch has not", "cannot be run on a flattened batch"),
    ("by the trial", "a short trial|does not compute|trial"),
)
"""Why an architecture is refused, in few words, and by what its error is known."""
TITLES = ("Images", "Images and videos", "Audio", "Encoder-decoder", "Text")
NOTES = {
    "Encoder-decoder": "More about prompts of two halves: "
    "[`encoder_decoder.md`](encoder_decoder.md).\n\n",
}
COLUMNS = (
    "architecture", "takes", "parity error", "HF float32", "processing", "what is special",
)  # fmt: skip
WORDS = {"image": ("image", "images"), "video": ("video", "videos")}
WORDS["audio"] = "audio item", "audio"

# What is lacking, and the architecture, with the modality, that would end it.
LACKING: Sequence[tuple[str, str, str | None]] = (
    ("images and audio of Gemma 3n", "Gemma3nForConditionalGeneration", "image"),
    ("videos of Gemma 4", "Gemma4ForConditionalGeneration", "video"),
    ("videos of Molmo 2", "Molmo2ForConditionalGeneration", "video"),
    ("videos of original InternVL checkpoints", "InternVLChatModel", "video"),
)
NEVER_LISTED = (
    "MolmoE, which has experts",
    "InternVL before 1.5",
    "sound woven into a video's frames (`use_audio_in_video`) and speech as an answer in Qwen-Omni",
)


@cache
def parity() -> Mapping[str, Any]:
    """What was measured, by architecture."""
    found: Mapping[str, Any] = json.loads(PARITY.read_text())
    return found


def first_line(text: str | None) -> str:
    """Of a docstring, without its full stop."""
    return (text or "").strip().splitlines()[0].rstrip(".")


def takes_of(name: str) -> Mapping[str, int | None]:
    """Modality -> items in a prompt (None: any number), as the engine said when it was measured."""
    measured = parity().get(name, {})
    found: Mapping[str, int | None] = parity()[measured.get("same_as", name)]["takes"]
    return found


def processing_of(model: Any) -> str:
    """Whose the class is that prepares prompts."""
    entries = MULTIMODAL_REGISTRY._entries
    processor = next((entries[base][0] for base in model.__mro__ if base in entries), None)
    if processor is None or issubclass(processor, TextOnlyProcessor):
        return "tokenizer"
    if processor.__module__ == "aioengine.models.generic":
        return "generic"
    return "own" if processor.__module__.startswith("aioengine.models.") else "tokenizer"


def short(error: float | None) -> str:
    """One digit of it."""
    return "" if error is None else f"{error:.0e}".replace("e-0", "e-")


def row(name: str, model: Any) -> tuple[str, ...]:
    """An architecture's cells."""
    measured, special = parity().get(name), first_line(model.__doc__)
    if measured is None:
        return f"`{name}`", "", "not measured", "", processing_of(model), special
    other = measured.get("same_as")
    if other is not None:
        measured = parity()[other]
        special = f"As `{other}`" if resolve([other]) is model else special
    words = (
        f"one {names[0]}" if measured["takes"][kind] == 1 else names[1]
        for kind, names in WORDS.items()
        if kind in measured["takes"]
    )
    source, dtype = measured["against"].split(", ")
    marks = ["own"] * (source != "transformers") + ["f32"] * (dtype != "float64")
    return (
        f"`{name}`",
        ", ".join(words) or "text",
        " ".join([short(measured["error"]), *marks]),
        short(measured["float32"]),
        processing_of(model),
        special,
    )


def title_of(name: str, model: Any) -> str:
    """The table that the architecture is in."""
    if issubclass(model, EncoderDecoderModel):
        return "Encoder-decoder"
    kinds = takes_of(name) if name in parity() else {}
    if "audio" in kinds:
        return "Audio"
    if "video" in kinds:
        return "Images and videos"
    takes_media = "image" in kinds or processing_of(model) != "tokenizer"
    return "Images" if takes_media else "Text"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell, but for the last, so that a terminal shows them."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)][:-1]
    lines = [COLUMNS, ("-" * 3,) * len(COLUMNS), *rows]
    found = []
    for cells in lines:
        fill = "-" if cells[0] == "---" else " "
        padded = [cell.ljust(width, fill) for cell, width in zip(cells, widths, strict=False)]
        found.append(f"| {' | '.join([*padded, cells[-1]])} |\n")
    return "".join(found)


def lacking() -> str:
    """A list of what is not built."""
    found = []
    for what, architecture, modality in LACKING:
        is_known = architecture in known_architectures() and architecture in parity()
        if not is_known or (modality is not None and modality not in takes_of(architecture)):
            found.append(what)
    return "\n".join(f"- {what}" for what in (*found, *NEVER_LISTED))


def sweep() -> str:
    """What `tests/parity/sweep.py` found; nothing where it has not run."""
    if not SWEEP.exists():
        return ""
    made, *rows = _rows(SWEEP)
    lines = _counts(rows)
    known = known_architectures()
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["verdict"] == "refused":
            found = (words for words, form in REASONS if re.search(form, row["reason"]))
            by_reason[next(found, "other reasons")].append(row["architecture"])
    equal = [name for name in _with_verdict(rows, "equal") if name not in known]
    ways = Counter(row.get("way") for row in rows if row["verdict"] == "equal")
    if ways["by cache"]:
        lines += ["", BY_CACHE.format(total=ways.total(), cached=ways["by cache"])]
    counts = "\n".join([*lines, ""])
    refused = "\n".join(f"- {why}: {_names(names)}" for why, names in sorted(by_reason.items()))
    text = SWEPT.format(**made, counts=counts, equal=_names(equal), refused=refused)
    return "\n".join(_wrapped(line) for line in (text + _sweep_with(rows)).splitlines())


def _sweep_with(without: Sequence[Mapping[str, Any]]) -> str:
    """What it found where torchvision is; nothing where that has not run."""
    if not WITH.exists():
        return ""
    made, *rows = _rows(WITH)
    more = set(_with_verdict(rows, "equal")) - set(_with_verdict(without, "equal"))
    found = {verdict: _names(_with_verdict(rows, verdict)) for verdict in VERDICTS[1:3]}
    heard = [{**row, "mappings": [*filter(MEDIA.count, row["mappings"])]} for row in rows]
    counts = "\n".join([*_counts(heard), ""])
    return SWEPT_WITH.format(**made, counts=counts, more=_names(sorted(more)), **found)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    counted = Counter((each, row["verdict"]) for row in rows for each in row["mappings"])
    lines = [f"| mapping | {' | '.join(VERDICTS)} |", "|---" * (len(VERDICTS) + 1) + "|"]
    for mapping in dict.fromkeys(each for row in rows for each in row["mappings"]):
        cells = (str(counted[mapping, verdict]) for verdict in VERDICTS)
        lines.append(f"| {mapping} | {' | '.join(cells)} |")
    return lines


def _with_verdict(rows: Sequence[Mapping[str, Any]], verdict: str) -> list[str]:
    return [row["architecture"] for row in rows if row["verdict"] == verdict]


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrapped(line: str) -> str:
    """A list's line of at most 100 letters."""
    indent = "  " if line.startswith("- ") else ""
    return line if line.startswith("|") else textwrap.fill(line, 100, subsequent_indent=indent)


def page() -> str:
    """The whole of docs/models.md."""
    tables: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name in known_architectures():
        model = resolve([name])
        if model.__module__.startswith("aioengine."):
            tables[title_of(name, model)].append(row(name, model))
    parts = [HEAD]
    for title in TITLES:
        rows = sorted(tables[title], key=lambda cells: cells[0].lower())
        parts.append(f"\n## {title}\n\n{NOTES.get(title, '')}{table(rows)}")
    return "".join(parts) + TAIL.format(lacking=lacking(), sweep=sweep())


def main() -> None:
    """Write the page; with --check, fail if it would change."""
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/models.md is not what docs/list_models.py writes; run it")


if __name__ == "__main__":
    main()
