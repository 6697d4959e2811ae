"""Trains the demo model from scratch on rendered scenes.

    python examples/demo_model/train.py

Made for two CPU cores, so every image is used for several texts: it is encoded once, and its
description and questions follow in one sequence under a mask in which each text sees only the
image and itself.  A second loss reads shape, colour and size from every image patch; its head
is dropped at export.  For the first part of the run only that loss is used, which is cheap and
makes the tower useful before the decoder starts.

Progress through the schedule is time spent over ``--minutes``, so a busy machine still ends with
a fully decayed learning rate.  A stopped run goes on from its last checkpoint.
"""

import argparse
import io
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any

import model as demo
import numpy as np
import scenes
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "aioengine" / "assets" / "demo_llava"

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You describe pictures.",
    "Answer briefly.",
    "You are a helpful vision assistant.",
    "A chat between a curious user and an artificial intelligence assistant.",
)
SMALL_TALK = ("Hello!", "Hi", "Hello", "Who are you?", "What can you do?", "How are you?", "Help")
NO_IMAGE = "Please show me a picture."

KINDS = ("describe", *scenes.QUESTION_KINDS, "no picture")
QUESTION_WEIGHTS = {
    "colour": 1.2, "count": 1.6, "place": 6.0, "digit": 1.0, "what": 0.8, "size": 0.6, "exists": 0.9
}  # fmt: skip
QUESTIONS_PER_SCENE = 6
DESCRIBED_SHARE = 0.4

SHAPE_CLASSES = (*scenes.SHAPES, *(f"digit {d}" for d in range(10)))
PATCH_CLASSES = (len(SHAPE_CLASSES) + 1, len(scenes.COLOURS) + 1, len(scenes.SIZES) + 1)
"""Classes per patch for shape, colour and size; 0 is the background in each."""

PLACE_WORDS = (("top", "centre", "bottom"), ("left", "centre", "right"))
"""Words for the rows and for the columns of the grid."""

IGNORED = -100


@dataclass
class Options:
    """Command line settings."""

    out: Path
    save_to: Path
    minutes: float
    batch: int
    crowd: int
    pool: int
    warm_start: Path | None
    rate: float
    tower_share: float
    seed: int
    threads: int
    log_every: int
    check_every: int


# ---------------------------------------------------------------------------------------------
# Images: a pool on disk, filled by a second process while training runs


def layout_of(index: int, crowd: int) -> scenes.Layout:
    """What image ``index`` of the pool shows; the first ``crowd`` are full of things."""
    seed = scenes.TRAINING_SEEDS[index]
    return scenes.make_crowd(seed) if index < crowd else scenes.make_layout(seed)


def render_training_image(layout: scenes.Layout, seed: int) -> np.ndarray[Any, Any]:
    """One image as the model will get it, uint8 (IMAGE_PX, IMAGE_PX, 3).

    Most are drawn larger and shrunk by the image processor's filter; some are not square or have
    been through JPEG, since users' files will be.
    """
    rng = Random(seed + 2)
    side = demo.IMAGE_PX * rng.choice((0.75, 1, 1.5, 2, 2, 3, 4))
    aspect = rng.uniform(0.75, 1.33) if rng.random() < 0.2 else 1.0
    size = (round(side * max(1.0, aspect)), round(side * max(1.0, 1 / aspect)))
    image = scenes.draw(layout, size)
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(50, 95))
        image = Image.open(buffer).convert("RGB")
    square = (demo.IMAGE_PX, demo.IMAGE_PX)
    return np.asarray(image.resize(square, Image.Resampling.BICUBIC))


class Pool:
    """Training images on disk, uint8 (count, IMAGE_PX, IMAGE_PX, 3): crowds first."""

    def __init__(self, folder: Path, crowd: int, rest: int) -> None:
        self.crowd, self.count = crowd, crowd + rest
        path = folder / f"pool_{crowd}_{rest}.u8"
        self.marker = path.with_suffix(".ready")
        shape = (self.count, demo.IMAGE_PX, demo.IMAGE_PX, 3)
        self.pictures = np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=shape)
        done = int(self.marker.read_text()) if self.marker.exists() else 0
        self.ready: Synchronized[int] = multiprocessing.Value("i", done)

    def start(self) -> None:
        """Starts the filling; returns once there is enough to begin."""
        multiprocessing.Process(target=self._fill, daemon=True).start()
        while self.ready.value < min(self.crowd, 1024):
            time.sleep(0.2)

    def _fill(self) -> None:
        os.nice(5)  # training itself comes first
        for index in range(self.ready.value, self.count):
            layout = layout_of(index, self.crowd)
            self.pictures[index] = render_training_image(layout, index)
            if (index + 1) % 256 == 0 or index + 1 == self.count:
                self.ready.value = index + 1
                self.marker.write_text(str(index + 1))

    @property
    def has_scenes(self) -> bool:
        """Whether there are enough images that are not crowds."""
        return self.ready.value >= min(self.count, self.crowd + 1024)

    def draw(self, number: int, rng: Random, crowded: bool) -> tuple[Any, list[scenes.Layout]]:
        """Random images, uint8 (number, IMAGE_PX, IMAGE_PX, 3), and what they show."""
        ready = self.ready.value
        low, high = (0, min(ready, self.crowd)) if crowded else (self.crowd, ready)
        chosen = [rng.randrange(low, high) for _ in range(number)]
        return self.pictures[chosen], [layout_of(index, self.crowd) for index in chosen]


def to_pixels(pictures: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """uint8 (B, S, S, 3) to float (B, 3, S, S) in [-1, 1], as the image processor does it."""
    return torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def augment(pixels: Tensor, rng: Random) -> Tensor:
    """Small shift, brightness, contrast and noise changes, (B, 3, S, S) in and out."""
    reach = 2
    padded = nn.functional.pad(pixels, (reach,) * 4, mode="replicate")
    side = pixels.shape[-1]
    top, left = rng.randint(0, 2 * reach), rng.randint(0, 2 * reach)
    pixels = padded[:, :, top : top + side, left : left + side]
    rows = (pixels.shape[0], 1, 1, 1)
    contrast = torch.empty(rows, device=pixels.device).uniform_(0.92, 1.08)
    brightness = torch.empty(rows, device=pixels.device).uniform_(-0.06, 0.06)
    pixels = pixels * contrast + brightness
    if rng.random() < 0.3:  # not always: drawing the noise costs as much as a layer
        pixels = pixels + 0.04 * rng.random() * torch.randn_like(pixels)
    return pixels


def patch_labels(layouts: list[scenes.Layout]) -> Tensor:
    """Classes of the thing over each patch, 0 for none: int64 (B, GRID * GRID, 5).

    The last axis is shape, colour, size, row of the grid, column of the grid.
    """
    edges = np.arange(demo.GRID + 1) / demo.GRID
    labels = np.zeros((len(layouts), demo.GRID, demo.GRID, 5), np.int64)
    for row, layout in enumerate(layouts):
        best = np.full((demo.GRID, demo.GRID), 0.2)
        for thing in layout.things:
            half = 0.42 * thing.extent
            cover_x = np.minimum(edges[1:], thing.x + half) - np.maximum(edges[:-1], thing.x - half)
            cover_y = np.minimum(edges[1:], thing.y + half) - np.maximum(edges[:-1], thing.y - half)
            cover = np.outer(cover_y.clip(0), cover_x.clip(0)) * demo.GRID**2
            mine = cover > best
            best[mine] = cover[mine]
            labels[row][mine] = (
                1 + SHAPE_CLASSES.index(thing.noun),
                1 + list(scenes.COLOURS).index(thing.colour),
                1 + scenes.SIZES.index(thing.size),
                1 + thing.cell // 3,
                1 + thing.cell % 3,
            )
    return torch.from_numpy(labels.reshape(len(layouts), -1, 5))


# ---------------------------------------------------------------------------------------------
# Texts


@dataclass
class Texts:
    """Token arrays of a batch, each (B, L) int64."""

    ids: Tensor
    positions: Tensor
    groups: Tensor
    """0: the shared start with the image; 1...: texts that see it; -1...: texts that do not."""
    targets: Tensor
    """The next token where an answer is to be learnt, IGNORED elsewhere."""
    kinds: Tensor
    """Index into KINDS at the positions with a target."""

    def to(self, device: torch.device) -> "Texts":
        moved = (self.ids, self.positions, self.groups, self.targets, self.kinds)
        return Texts(*(tensor.to(device) for tensor in moved))


class Writer:
    """Turns layouts into packed token rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: Random) -> None:
        core = tokenizer.backend_tokenizer
        self.rng = rng

        @lru_cache(maxsize=200_000)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(core.encode(text, add_special_tokens=False).ids)

        self.encode = encode

    def batch(self, layouts: list[scenes.Layout], plain: bool = False) -> Texts:
        """Packs each layout's texts into one row; ``plain`` leaves out the odd variants."""
        rows = [self._row(layout, plain) for layout in layouts]
        length = -(-max(len(row) for row in rows) // 8) * 8
        # Padding is a group of its own; it sees itself, so that no softmax is empty.
        filler = (demo.PAD_ID, 0, -99, IGNORED, 0)
        filled = [row + [filler] * (length - len(row)) for row in rows]
        return Texts(*torch.tensor(filled, dtype=torch.int64).unbind(-1))

    def _row(self, layout: scenes.Layout, plain: bool) -> list[tuple[int, int, int, int, int]]:
        rng = self.rng
        odd = 0.0 if plain else 1.0
        start = "" if rng.random() < 0.1 * odd else demo.BOS
        if rng.random() < 0.12 * odd:
            start += rng.choice(SYSTEM_PROMPTS) + "\n"
        prefix = (*self.encode(start + "USER: "), *(demo.IMAGE_ID,) * demo.IMAGE_TOKENS)
        row = [(token, at, 0, IGNORED, 0) for at, token in enumerate(prefix)]
        turns = self._turns(layout, plain)
        group = 0
        while turns:
            group += 1
            # Now and then a conversation of two turns.
            take = 2 if len(turns) > 1 and rng.random() < 0.2 * odd else 1
            row += self._conversation(turns[:take], "\n", len(prefix), group, plain)
            turns = turns[take:]
        if rng.random() < 0.06 * odd:
            text = rng.choice((*SMALL_TALK, *scenes.DESCRIPTION_PROMPTS))
            turn = ("no picture", text, NO_IMAGE)
            row += self._conversation([turn], start + "USER: ", 0, -1, plain)
        return row

    def _turns(self, layout: scenes.Layout, plain: bool) -> list[tuple[str, str, str]]:
        """(kind, question, answer): questions, with the description among them for a share."""
        rng, things = self.rng, layout.things
        kinds = list(QUESTION_WEIGHTS)
        if not plain:
            weights = list(QUESTION_WEIGHTS.values())
            kinds = rng.choices(kinds, weights, k=QUESTIONS_PER_SCENE)
        asked = [scenes.ask_one(kind, things, rng) for kind in kinds]
        turns = [(q.kind, q.text, q.answer) for q in asked if q is not None]
        if plain or rng.random() < DESCRIBED_SHARE:
            prompt = rng.choice(scenes.DESCRIPTION_PROMPTS)
            turns.insert(rng.randint(0, len(turns)), ("describe", prompt, scenes.describe(things)))
        return turns

    def _conversation(
        self,
        turns: list[tuple[str, str, str]],
        opening: str,
        position: int,
        group: int,
        plain: bool,
    ) -> list[tuple[int, int, int, int, int]]:
        row: list[tuple[int, int, int, int, int]] = []
        for index, (kind, question, answer) in enumerate(turns):
            lead = opening if index == 0 else "USER: "
            question, gap = (question, " ") if plain else self._loosen(question)
            asked = self.encode(f"{lead}{question}{gap}ASSISTANT:")
            answered = (*self.encode(answer), demo.EOS_ID)
            # The prompt's last token predicts the answer's first, and so on up to EOS.
            learnt = (*(IGNORED,) * (len(asked) - 1), *answered, IGNORED)
            row += [
                (token, position + at, group, target, KINDS.index(kind))
                for at, (token, target) in enumerate(zip(asked + answered, learnt, strict=True))
            ]
            position += len(learnt)
        return row

    def _loosen(self, question: str) -> tuple[str, str]:
        """Typing habits: small first letter, no closing mark, a line break before the answer."""
        rng = self.rng
        if rng.random() < 0.1:
            question = question[0].lower() + question[1:]
        if rng.random() < 0.1:
            question = question[:-1]
        return question, "\n" if rng.random() < 0.1 else " "


def tokenizer_texts() -> Iterator[str]:
    """What the BPE is trained on: everything the demo can ask or say, many times over."""
    rng = Random(0)
    yield from (*SYSTEM_PROMPTS, *SMALL_TALK, NO_IMAGE, "USER: \n ASSISTANT:")
    for seed in range(4000):
        things = scenes.make_layout(seed).things
        yield scenes.describe(things)
        yield rng.choice(scenes.DESCRIPTION_PROMPTS)
        for question in scenes.ask(things, rng):
            yield f"{question.text} ASSISTANT:"
            if question.kind == "place":
                yield f"{scenes.at_place(question.answer[:-1].lower()).capitalize()}."
            else:
                yield question.answer


# ---------------------------------------------------------------------------------------------
# Network and losses


@torch.no_grad()
def mark_places(position_embedding: nn.Embedding) -> None:
    """Gives every third of the rows and of the columns a code that patches cannot drown.

    From small random position embeddings, the crowds teach the tower to forget where things are,
    and the decoder never learns to answer "where".
    """
    width = position_embedding.embedding_dim
    row_codes, column_codes = 0.8 * torch.randn(2, 3, width)
    for patch in range(position_embedding.num_embeddings):
        row, column = divmod(patch, demo.GRID)
        code = row_codes[3 * row // demo.GRID] + column_codes[3 * column // demo.GRID]
        position_embedding.weight[patch] += code


class Trainee(nn.Module):
    """The model with its training-only patch head."""

    def __init__(
        self, llava: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        super().__init__()
        self.llava = llava
        # All ten digits share the word "digit", the last of the shape words.
        names = ((*scenes.SHAPES, "digit"), tuple(scenes.COLOURS), scenes.SIZES, *PLACE_WORDS)
        self.words = [
            torch.tensor(
                [tokenizer.encode(f" {word}", add_special_tokens=False) for word in group]
            ).squeeze(1)
            for group in names
        ]
        width = llava.config.vision_config.hidden_size
        self.patch_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(PATCH_CLASSES)))

    def tower(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) to patch features before the projector, (B, GRID * GRID, width)."""
        output = self.llava.model.vision_tower(pixels, output_hidden_states=True)
        features: Tensor = output.hidden_states[self.llava.config.vision_feature_layer]
        return features

    def patch_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the three patch labels; background counts less, digits more."""
        shape = labels[..., 0]
        weight = torch.where(shape > len(scenes.SHAPES), 2.0, torch.where(shape > 0, 1.0, 0.15))
        total = torch.zeros((), device=features.device)
        for index, logits in enumerate(self.patch_head(features).split(PATCH_CLASSES, dim=-1)):
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[..., index].flatten(), reduction="none"
            )
            total = total + (loss * weight.flatten()).sum() / weight.sum()
        return total

    def word_loss(self, picture: Tensor, labels: Tensor) -> Tensor:
        """Pulls image rows, (B, GRID * GRID, width), towards the words for what they show.

        With a thing's row close to the embedding of " red" and of " star", a question that names
        the thing finds it by plain likeness; left to itself that match is learnt very late.
        """
        shown = labels[..., 0] > 0
        rows = nn.functional.normalize(picture[shown], dim=-1)
        embedding = self.llava.model.language_model.get_input_embeddings()
        total = torch.zeros((), device=picture.device)
        for index, words in enumerate(self.words):
            known = nn.functional.normalize(embedding(words.to(rows.device)), dim=-1)
            truth = (labels[..., index][shown] - 1).clamp(max=len(words) - 1)
            total = total + nn.functional.cross_entropy(12 * rows @ known.T, truth)
        return total

    def answer_logits(self, picture: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
        """Logits (N, vocabulary) at the N target positions, and their mask (B, L).

        ``image`` holds the projected rows, (B, GRID * GRID, decoder width).
        """
        language = self.llava.model.language_model
        embeds = language.get_input_embeddings()(texts.ids)
        here = (texts.ids == demo.IMAGE_ID).unsqueeze(-1)
        embeds = embeds.masked_scatter(here, picture)
        output = language(
            inputs_embeds=embeds,
            attention_mask=visibility(texts.groups),
            position_ids=texts.positions,
            use_cache=False,
        )
        learnt = texts.targets != IGNORED
        return self.llava.lm_head(output.last_hidden_state[learnt]), learnt


def visibility(groups: Tensor) -> Tensor:
    """Which key a query may see, bool (B, 1, L, L): itself, its own past, the shared start."""
    query, key = groups.unsqueeze(2), groups.unsqueeze(1)
    size = groups.shape[1]
    past = torch.ones(size, size, dtype=torch.bool, device=groups.device).tril()
    return (((key == query) | ((key == 0) & (query > 0))) & past).unsqueeze(1)


def answer_loss(logits: Tensor, learnt: Tensor, texts: Texts) -> Tensor:
    """Cross-entropy over answer tokens; short answers count double to balance descriptions."""
    loss = nn.functional.cross_entropy(logits, texts.targets[learnt], reduction="none")
    weight = torch.where(texts.kinds[learnt] == 0, 1.0, 2.0)
    return (loss * weight).sum() / weight.sum()


# ---------------------------------------------------------------------------------------------
# The run


class Run:
    """State of a training run: network, optimiser, clock, and what is on disk."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = demo.build_tokenizer(tokenizer_texts())
        network = demo.build_model(len(self.tokenizer))
        mark_places(network.model.vision_tower.embeddings.position_embedding)
        self.trainee = Trainee(network, self.tokenizer).to(self.device)
        self.optimiser = self._optimiser()
        self.step, self.seconds, self.best, self.joint_from = 0, 0.0, -1.0, -1
        self.checkpoint = options.out / "last.pt"
        if self.checkpoint.exists():
            self._resume()
        elif options.warm_start is not None:
            state = torch.load(options.warm_start, map_location=self.device, weights_only=True)
            self.trainee.load_state_dict(state["trainee"])
        self.rng = Random(options.seed * 1_000_003 + self.step)
        self.writer = Writer(self.tokenizer, self.rng)

    def _optimiser(self) -> torch.optim.AdamW:
        """One group for what learns from the start, one for what joins later; no decay on 1-D."""
        groups = []
        for late in (False, True):
            for decay in (0.05, 0.0):
                chosen = [
                    parameter
                    for name, parameter in self.trainee.named_parameters()
                    if late == _joins_late(name) and (decay > 0) == (parameter.ndim > 1)
                ]
                groups.append({"params": chosen, "weight_decay": decay, "late": late})
        return torch.optim.AdamW(groups, lr=self.options.rate, betas=(0.9, 0.98))

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.trainee.load_state_dict(state["trainee"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.best, self.joint_from = state["best"], state["joint_from"]
        print(f"going on from step {self.step}, {self.seconds / 60:.1f} min", flush=True)

    def keep(self) -> None:
        """Writes the checkpoint; a break while writing leaves the old one intact."""
        state = {
            "trainee": self.trainee.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "joint_from": self.joint_from,
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)

    @property
    def progress(self) -> float:
        return min(1.0, self.seconds / (60 * self.options.minutes))

    def set_rates(self) -> None:
        """Linear warm-up (again for the late parts), then a cosine down to 1 %."""
        cosine = 0.505 + 0.495 * math.cos(math.pi * self.progress)
        for group in self.optimiser.param_groups:
            since = self.step - max(0, self.joint_from) if group["late"] else self.step
            group["lr"] = self.options.rate * cosine * min(1.0, (since + 1) / 300)

    def train_step(self, pool: Pool) -> dict[str, float]:
        """One update; returns its losses."""
        if self.joint_from < 0 and self.progress >= self.options.tower_share and pool.has_scenes:
            self.joint_from = self.step
        self.set_rates()
        losses: dict[str, Tensor] = {}
        total = torch.zeros((), device=self.device)
        if self.joint_from < 0 or self.step % 8 == 0:
            labels, features = self._look(pool, crowded=True)[1:]
            losses["crowd"] = self.trainee.patch_loss(features, labels)
            total = total + losses["crowd"] * (1.0 if self.joint_from < 0 else self._patch_share())
        if self.joint_from >= 0:
            layouts, labels, features = self._look(pool, crowded=False)
            texts = self.writer.batch(layouts).to(self.device)
            losses["patch"] = self.trainee.patch_loss(features, labels)
            picture = self.trainee.llava.model.multi_modal_projector(features)
            losses["word"] = self.trainee.word_loss(picture, labels)
            losses["answer"] = answer_loss(*self.trainee.answer_logits(picture, texts), texts)
            total = total + losses["answer"] + 0.3 * losses["word"]
            total = total + losses["patch"] * self._patch_share()
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self.trainee.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        return {name: loss.item() for name, loss in losses.items()}

    def _patch_share(self) -> float:
        return 0.05 + 0.45 * (1 - self.progress)

    def _look(self, pool: Pool, crowded: bool) -> tuple[list[scenes.Layout], Tensor, Tensor]:
        """A batch's layouts, patch labels and tower features."""
        pictures, layouts = pool.draw(self.options.batch, self.rng, crowded)
        features = self.trainee.tower(augment(to_pixels(pictures, self.device), self.rng))
        return layouts, patch_labels(layouts).to(self.device), features


def _joins_late(name: str) -> bool:
    return not (name.startswith("patch_head") or "vision_tower" in name)


@torch.no_grad()
def exact_shares(run: Run, count: int, chunk: int = 50) -> dict[str, float]:
    """Share of exactly right answers per kind on ``count`` dev scenes.

    An answer whose every token is the likeliest one given the right tokens before it is just
    what greedy decoding would have produced, so one forward pass tells.
    """
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    writer = Writer(run.tokenizer, Random(12345))
    run.trainee.eval()
    for first in range(0, count, chunk):
        seeds = scenes.DEV_SEEDS[first : first + chunk]
        layouts = [scenes.make_layout(seed) for seed in seeds]
        shown = zip(layouts, seeds, strict=True)
        pictures = np.stack([render_training_image(*pair) for pair in shown])
        texts = writer.batch(layouts, plain=True)
        texts = texts.to(run.device)
        features = run.trainee.tower(to_pixels(pictures, run.device))
        picture = run.trainee.llava.model.multi_modal_projector(features)
        logits, learnt = run.trainee.answer_logits(picture, texts)
        wrong = torch.zeros_like(learnt)
        wrong[learnt] = logits.argmax(-1) != texts.targets[learnt]
        rows, columns = learnt.nonzero().T.tolist()
        faults: dict[tuple[int, int, int], bool] = {}
        for row, column in zip(rows, columns, strict=True):
            key = (row, int(texts.groups[row, column]), int(texts.kinds[row, column]))
            faults[key] = faults.get(key, False) or bool(wrong[row, column])
        for (_, _, kind), fault in faults.items():
            right[KINDS[kind]].append(not fault)
    run.trainee.train()
    return {kind: sum(flags) / len(flags) for kind, flags in right.items() if flags}


def check(run: Run, count: int) -> None:
    """Measures, logs, and saves the model where it is the best so far."""
    if run.joint_from < 0:
        run.keep()
        return
    shares = exact_shares(run, count)
    score = shares["describe"] + min(shares.values())
    print("dev  " + "  ".join(f"{kind} {share:.3f}" for kind, share in shares.items()), flush=True)
    if score > run.best:
        run.best = score
        demo.save(run.trainee.llava, run.tokenizer, run.options.save_to)
        notes = {"steps": run.step, "minutes": round(run.seconds / 60, 1), "dev": shares}
        (run.options.out / "best.json").write_text(json.dumps(notes, indent=2) + "\n")
    run.keep()


class Crew:
    """Picks the number of threads by trial.

    Where other programs use the cores, more threads can be slower than one, since a step lasts
    as long as its slowest thread.  So every PERIOD steps each number is timed for TRIAL steps.
    """

    PERIOD, TRIAL = 80, 3

    def __init__(self, most: int) -> None:
        self.most = most
        self.times: dict[int, float] = {}

    def _tried(self, step: int) -> int:
        """The number on trial at ``step``, or 0 between trials."""
        number = 1 + step % self.PERIOD // self.TRIAL
        return number if number <= self.most else 0

    def choose(self, step: int) -> None:
        """Sets the threads for the step that follows."""
        number = self._tried(step)
        if number == 0:
            number = min(self.times, key=lambda n: self.times[n]) if self.times else self.most
        if number != torch.get_num_threads():
            torch.set_num_threads(number)

    def note(self, step: int, seconds: float) -> None:
        """Keeps the time of the step that ended with ``step`` done, if it was on trial."""
        step -= 1
        number = self._tried(step)
        if number > 0:
            first = step % self.PERIOD % self.TRIAL == 0
            self.times[number] = seconds if first else min(self.times[number], seconds)


def train(options: Options) -> None:
    """Runs to the end of the schedule, from the checkpoint where there is one."""
    options.out.mkdir(parents=True, exist_ok=True)
    pool = Pool(options.out, options.crowd, options.pool)
    pool.start()
    run = Run(options)
    size = sum(parameter.numel() for parameter in run.trainee.llava.parameters())
    print(f"{size / 1e6:.2f} M parameters, {len(run.tokenizer)} tokens, {run.device}", flush=True)
    while run.joint_from >= 0 and not pool.has_scenes:
        time.sleep(0.2)
    run.trainee.train()
    sums: dict[str, list[float]] = {}
    mark = run.seconds
    crew = Crew(options.threads)
    while run.progress < 1.0:
        began = time.monotonic()
        crew.choose(run.step)
        for name, loss in run.train_step(pool).items():
            sums.setdefault(name, []).append(loss)
        run.seconds += time.monotonic() - began
        crew.note(run.step, time.monotonic() - began)
        if run.step % options.log_every == 0:
            rate = options.log_every * options.batch / (run.seconds - mark)
            losses = "  ".join(f"{name} {sum(v) / len(v):.4f}" for name, v in sums.items())
            print(
                f"step {run.step}  {run.seconds / 60:.1f} min  {losses}  "
                f"{rate:.0f} scenes/s  {torch.get_num_threads()} threads  pool {pool.ready.value}",
                flush=True,
            )
            sums, mark = {}, run.seconds
        if run.step % options.check_every == 0:
            check(run, 200)
    check(run, 500)


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="Trains the demo model from scratch.")
    parser.add_argument("--out", type=Path, default=HERE / "runs", help="checkpoints and pool")
    parser.add_argument("--save-to", type=Path, default=DEFAULT_FOLDER, help="model folder")
    parser.add_argument("--minutes", type=float, default=90.0, help="length of the schedule")
    parser.add_argument("--batch", type=int, default=16, help="scenes per step")
    parser.add_argument("--crowd", type=int, default=30_000, help="crowded pictures in the pool")
    parser.add_argument("--pool", type=int, default=80_000, help="other pictures in the pool")
    parser.add_argument("--warm-start", type=Path, help="checkpoint to take only weights from")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--tower-share", type=float, default=0.12, help="part with patch loss only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="most threads to use")
    parser.add_argument("--log-every", type=int, default=200, help="steps between console lines")
    parser.add_argument("--check-every", type=int, default=1000, help="steps between dev checks")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_options())
