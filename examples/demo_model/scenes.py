"""Random images of simple things, with their description and questions about them.

A scene holds one to three things on a 3x3 grid.  A thing is a shape or a digit with a colour and
a size, drawn with Pillow on a muted background.  Everything follows from one integer seed, so the
same seed gives the same scene at any pixel size, on any machine with the same Pillow.

    scene = render_scene(HELD_OUT_SEEDS.start, size=480)
    scene.image.save("scene.png")
    print(scene.description)
    for question in scene.questions:
        print(question.kind, question.text, question.answer)

Lengths are fractions of the shorter side of the image unless a name ends in ``_px``.
"""

import colorsys
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]

TRAINING_SEEDS = range(0, 100_000_000)
"""Seeds that training may use."""

DEV_SEEDS = range(200_000_000, 200_100_000)
"""Seeds that training watches its progress on; never trained on."""

HELD_OUT_SEEDS = range(300_000_000, 300_100_000)
"""Seeds for evaluation and tests; disjoint from the other two ranges."""

COLOURS: dict[str, RGB] = {
    "red": (208, 30, 38),
    "green": (34, 148, 58),
    "blue": (36, 76, 214),
    "yellow": (248, 220, 44),
    "orange": (244, 132, 20),
    "purple": (146, 44, 172),
    "black": (18, 18, 20),
    "white": (246, 246, 244),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
SIZES = ("small", "large")
PLACES = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
"""Names of the grid's cells in reading order."""

BACKGROUNDS = ("plain", "gradient", "noise", "stripes", "checks")
QUESTION_KINDS = ("colour", "count", "place", "digit", "what", "size", "exists")
NUMBERS = ("none", "one", "two", "three")

_EXTENT = {"small": (0.235, 0.255), "large": (0.325, 0.35)}
_MAX_ANGLE = 8.0
_LIGHT_MASK_PX, _SHARP_MASK_PX = 128, 384


@dataclass(frozen=True)
class Thing:
    """One shape or digit and where it is drawn."""

    shape: str
    """One of SHAPES, or ``digit``."""
    digit: int | None
    colour: str
    size: str
    cell: int
    """Index into PLACES."""
    rgb: RGB
    x: float
    """Centre, as a fraction of the image's width."""
    y: float
    """Centre, as a fraction of the image's height."""
    extent: float
    """Side of the square that the glyph is drawn in, as a fraction of the shorter side."""
    angle: float
    """Degrees anticlockwise."""
    weight: int
    """Boldness of a digit, 0 to 2; no meaning for a shape."""

    @property
    def noun(self) -> str:
        """The thing's name without its attributes: ``star``, ``digit 7``."""
        return self.shape if self.digit is None else f"digit {self.digit}"

    @property
    def place(self) -> str:
        return PLACES[self.cell]


@dataclass(frozen=True)
class Background:
    """A muted backdrop: its pattern, two close tones and what makes it unique."""

    pattern: str
    first: RGB
    second: RGB
    seed: int


@dataclass(frozen=True)
class Layout:
    """All of a scene but its pixels; the things are in reading order."""

    things: tuple[Thing, ...]
    background: Background


@dataclass(frozen=True)
class Question:
    """A question about a scene and its one right answer."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """A rendered scene."""

    seed: int
    image: Image.Image
    description: str
    questions: list[Question]
    things: tuple[Thing, ...]


def render_scene(seed: int, size: int | tuple[int, int] = 480) -> Scene:
    """Returns the scene of ``seed`` at ``size`` pixels (a side, or width and height)."""
    layout = make_layout(seed)
    return Scene(
        seed=seed,
        image=draw(layout, size),
        description=describe(layout.things),
        questions=ask(layout.things, Random(seed + 1)),
        things=layout.things,
    )


# ---------------------------------------------------------------------------------------------
# What is in the scene


def make_layout(seed: int) -> Layout:
    """Chooses things and background; draws nothing, so it costs microseconds."""
    rng = Random(seed)
    cells = sorted(rng.sample(range(len(PLACES)), rng.randint(1, 3)))
    with_digit = rng.choice(cells) if rng.random() < 0.5 else None
    things: list[Thing] = []
    for cell in cells:
        thing = _make_thing(rng, cell, cell == with_digit)
        # Questions name a thing by colour and shape, so that pair must be its own.
        while any((t.colour, t.shape) == (thing.colour, thing.shape) for t in things):
            thing = _make_thing(rng, cell, cell == with_digit)
        things.append(thing)
    return Layout(tuple(things), _make_background(rng))


def make_crowd(seed: int) -> Layout:
    """Six to nine things, digits at will: much to learn for the eye, but nothing to be asked."""
    rng = Random(seed)
    cells = sorted(rng.sample(range(len(PLACES)), rng.randint(6, 9)))
    things = tuple(_make_thing(rng, cell, rng.random() < 0.55) for cell in cells)
    return Layout(things, _make_background(rng))


def _make_thing(rng: Random, cell: int, is_digit: bool) -> Thing:
    size = rng.choice(SIZES)
    extent = rng.uniform(*_EXTENT[size])
    # The glyph fills less than 0.88 of its square: 0.02 over the cell's edge never overlaps.
    slack = (1 / 3 - extent) / 2 + 0.02
    colour = rng.choice(tuple(COLOURS))
    red, green, blue = (max(0, min(255, c + rng.randint(-10, 10))) for c in COLOURS[colour])
    return Thing(
        shape="digit" if is_digit else rng.choice(SHAPES),
        digit=rng.randint(0, 9) if is_digit else None,
        colour=colour,
        size=size,
        cell=cell,
        rgb=(red, green, blue),
        x=(cell % 3 + 0.5) / 3 + rng.uniform(-slack, slack),
        y=(cell // 3 + 0.5) / 3 + rng.uniform(-slack, slack),
        extent=extent,
        angle=rng.uniform(-_MAX_ANGLE, _MAX_ANGLE),
        weight=rng.randint(0, 2),
    )


def _make_background(rng: Random) -> Background:
    hue, saturation, value = rng.random(), rng.uniform(0.0, 0.2), rng.uniform(0.46, 0.66)
    first = _tone(hue, saturation, value)
    shift = rng.choice((-1, 1)) * rng.uniform(0.05, 0.12)
    second = _tone(hue + rng.uniform(-0.1, 0.1), saturation, value + shift)
    return Background(rng.choice(BACKGROUNDS), first, second, rng.getrandbits(32))


def _tone(hue: float, saturation: float, value: float) -> RGB:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1.0, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


# ---------------------------------------------------------------------------------------------
# Pixels


def draw(layout: Layout, size: int | tuple[int, int]) -> Image.Image:
    """Draws ``layout`` as an RGB image of ``size`` pixels (a side, or width and height)."""
    width_px, height_px = (size, size) if isinstance(size, int) else size
    image = _draw_background(layout.background, width_px, height_px)
    for thing in layout.things:
        side_px = max(2, round(thing.extent * min(width_px, height_px)))
        mask = _thing_mask(thing, side_px)
        left_px = round(thing.x * width_px - side_px / 2)
        top_px = round(thing.y * height_px - side_px / 2)
        image.paste(thing.rgb, (left_px, top_px), mask)
    return image


def _thing_mask(thing: Thing, side_px: int) -> Image.Image:
    master_px = _LIGHT_MASK_PX if side_px <= _LIGHT_MASK_PX else _SHARP_MASK_PX
    if thing.digit is None:
        master = _shape_master(thing.shape, master_px)
    else:
        master = _digit_master(thing.digit, thing.weight, master_px)
    turned = master.rotate(thing.angle, Image.Resampling.BICUBIC)
    return turned.resize((side_px, side_px), Image.Resampling.BILINEAR)


@lru_cache(maxsize=64)
def _shape_master(shape: str, side_px: int) -> Image.Image:
    """The upright mask of a shape, (side, side), drawn at twice the size for smooth edges."""
    mask = Image.new("L", (2 * side_px, 2 * side_px))
    pen = ImageDraw.Draw(mask)
    points = [(2 * side_px * x, 2 * side_px * y) for x, y in _outline(shape)]
    pen.polygon(points, fill=255)
    return mask.resize((side_px, side_px), Image.Resampling.BOX)


def _outline(shape: str) -> list[tuple[float, float]]:
    """Corner points of a shape inside the unit square, clear of the edge at any allowed angle."""
    if shape == "square":
        return [(0.14, 0.14), (0.86, 0.14), (0.86, 0.86), (0.14, 0.86)]
    if shape == "triangle":
        return [(0.5, 0.08), (0.92, 0.84), (0.08, 0.84)]
    if shape == "cross":
        near, far, low, high = 0.36, 0.64, 0.07, 0.93
        return [
            (near, low), (far, low), (far, near), (high, near), (high, far), (far, far),
            (far, high), (near, high), (near, far), (low, far), (low, near), (near, near),
        ]  # fmt: skip
    if shape == "star":
        return [_polar(0.47 if i % 2 == 0 else 0.2, math.pi * i / 5) for i in range(10)]
    return [_polar(0.42, 2 * math.pi * i / 96) for i in range(96)]


def _polar(radius: float, angle: float) -> tuple[float, float]:
    return 0.5 + radius * math.sin(angle), 0.5 - radius * math.cos(angle)


@lru_cache(maxsize=128)
def _digit_master(digit: int, weight: int, side_px: int) -> Image.Image:
    """The upright mask of a digit, (side, side), in the typeface that ships with Pillow."""
    font = ImageFont.load_default(size=side_px)
    stroke_px = round(side_px * (0.02 + 0.015 * weight))
    left, top, right, bottom = font.getbbox(str(digit), stroke_width=stroke_px)
    glyph = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)))
    pen = ImageDraw.Draw(glyph)
    pen.text((-left, -top), str(digit), fill=255, font=font, stroke_width=stroke_px)
    # Same height for every digit: 0.88 of the square.
    scale = 0.88 * side_px / glyph.height
    glyph = glyph.resize((round(glyph.width * scale), round(glyph.height * scale)))
    mask = Image.new("L", (side_px, side_px))
    mask.paste(glyph, ((side_px - glyph.width) // 2, (side_px - glyph.height) // 2))
    return mask


def _draw_background(background: Background, width_px: int, height_px: int) -> Image.Image:
    """Paints the pattern; its grain is tied to the image's size, not to the pixel."""
    rng = Random(background.seed)
    size = (width_px, height_px)
    blend: Image.Image
    if background.pattern == "plain":
        return Image.new("RGB", size, background.first)
    if background.pattern == "gradient":
        ramp = Image.linear_gradient("L").rotate(90 * rng.randint(0, 3))
        blend = ramp.resize(size, Image.Resampling.BILINEAR)
    elif background.pattern == "noise":
        grain = rng.choice((24, 48, 96))
        speckle = Image.frombytes("L", (grain, grain), rng.randbytes(grain * grain))
        blend = speckle.resize(size, Image.Resampling.BILINEAR)
    elif background.pattern == "stripes":
        blend = _stripes(rng, size)
    else:
        blend = _checks(rng, size)
    first = Image.new("RGB", size, background.first)
    return Image.composite(Image.new("RGB", size, background.second), first, blend)


def _stripes(rng: Random, size: tuple[int, int]) -> Image.Image:
    """Parallel bands in one of four directions, as a mask of ``size``."""
    width_px, height_px = size
    mask = Image.new("L", size)
    pen = ImageDraw.Draw(mask)
    step = min(size) / rng.randint(4, 10)
    slant = rng.choice((0.0, 1.0, -1.0))
    across = slant == 0.0 and rng.random() < 0.5
    reach = abs(slant) * height_px
    start = -reach - step * rng.random()
    end = (height_px if across else width_px) + reach
    while start < end:
        stop = start + step / 2
        if across:
            corners = [(0.0, start), (width_px, start), (width_px, stop), (0.0, stop)]
        else:
            lean = slant * height_px
            corners = [
                (start, 0.0),
                (stop, 0.0),
                (stop + lean, height_px),
                (start + lean, height_px),
            ]
        pen.polygon(corners, fill=255)
        start += step
    return mask


def _checks(rng: Random, size: tuple[int, int]) -> Image.Image:
    """A chess board of 5 to 12 fields a side, as a mask of ``size``."""
    fields = rng.randint(5, 12)
    board = Image.new("L", (fields, fields))
    board.putdata([255 * ((i % fields + i // fields) % 2) for i in range(fields * fields)])
    return board.resize(size, Image.Resampling.NEAREST)


# ---------------------------------------------------------------------------------------------
# Words

DESCRIPTION_PROMPTS = (
    "Describe the picture.",
    "Describe the image.",
    "Describe this picture.",
    "Describe this image.",
    "Please describe the picture.",
    "Please describe this image.",
    "Describe what you see.",
    "Describe the picture in detail.",
    "Describe the scene.",
    "What do you see?",
    "What can you see?",
    "What can you see in this picture?",
    "What do you see in the image?",
    "What is in the picture?",
    "What is in this image?",
    "What's in the picture?",
    "What's in this image?",
    "What is shown here?",
    "What does the picture show?",
    "What does this image show?",
    "Tell me what you see.",
    "Tell me about the picture.",
    "Caption this image.",
    "Write a caption for the picture.",
)
"""Ways to ask for the full description; the first is the canonical one."""

_COLOUR_WORDINGS = (
    "What colour is {x}?",
    "What color is {x}?",
    "Which colour is {x}?",
    "Which colour does {x} have?",
    "What is the colour of {x}?",
    "What's the color of {x}?",
    "Tell me the colour of {x}.",
)
_PLACE_WORDINGS = (
    "Where is {x}?",
    "Where's {x}?",
    "Where can I find {x}?",
    "Where do you see {x}?",
    "In which part of the picture is {x}?",
    "What is the position of {x}?",
    "Tell me where {x} is.",
)
_SIZE_WORDINGS = (
    "How big is {x}?",
    "How large is {x}?",
    "What size is {x}?",
    "What is the size of {x}?",
    "Is {x} small or large?",
    "Is {x} large or small?",
)
_WHAT_WORDINGS = (
    "What is {at}?",
    "What's {at}?",
    "What do you see {at}?",
    "What can you see {at}?",
    "Which object is {at}?",
    "What object is {at}?",
)
_DIGIT_WORDINGS = (
    "Which digit is shown?",
    "What digit is shown?",
    "Which digit do you see?",
    "What digit do you see?",
    "What is the digit?",
    "Which digit is it?",
    "Which number is shown?",
    "What number do you see?",
    "Which digit is in the picture?",
    "What number is in the picture?",
    "Read the digit.",
    "Read the number.",
)
_COUNT_WORDINGS = (
    "How many {xs} are there?",
    "How many {xs} do you see?",
    "How many {xs} can you see?",
    "How many {xs} are in the picture?",
    "How many {xs} are there in the image?",
    "Count the {xs}.",
    "What is the number of {xs}?",
)
_EXISTS_WORDINGS = (
    "Is there {a}?",
    "Is there {a} in the picture?",
    "Do you see {a}?",
    "Can you see {a}?",
    "Does the picture show {a}?",
)


def describe(things: Sequence[Thing]) -> str:
    """The full description: every thing in reading order with size, colour, name and place."""
    phrases = [f"a {t.size} {t.colour} {t.noun} {at_place(t.place)}" for t in things]
    text = phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"
    return sentence(text)


def at_place(place: str) -> str:
    """``at the top left``, ``in the centre``."""
    return f"{'in' if place == 'centre' else 'at'} the {place}"


def sentence(text: str) -> str:
    """First letter large, full stop at the end."""
    return text[0].upper() + text[1:] + "."


def ask(things: Sequence[Thing], rng: Random) -> list[Question]:
    """One question of every kind that the scene allows, each in a random wording.

    A question of kind ``digit`` is left out where there is no digit.
    """
    return [q for kind in QUESTION_KINDS if (q := ask_one(kind, things, rng)) is not None]


def ask_one(kind: str, things: Sequence[Thing], rng: Random) -> Question | None:
    """A question of ``kind`` (one of QUESTION_KINDS), or None where the scene allows none."""
    made = _ASKERS[kind](things, rng)
    return None if made is None else Question(kind, *made)


def _naming(things: Sequence[Thing], thing: Thing, rng: Random, hide: str) -> str:
    """A phrase that fits only ``thing`` and does not tell its ``hide`` attribute."""
    forms: list[tuple[str, Callable[[Thing], object]]] = [
        (f"the {thing.shape}", lambda t: t.shape),
        (f"the {thing.colour} {thing.shape}", lambda t: (t.colour, t.shape)),
        (f"the {thing.size} {thing.shape}", lambda t: (t.size, t.shape)),
        (f"the {thing.colour} object", lambda t: t.colour),
        (f"the object {at_place(thing.place)}", lambda t: t.cell),
        (f"the {thing.shape} {at_place(thing.place)}", lambda t: t.cell),
    ]
    told = {"colour": (1, 3), "size": (2,), "place": (4, 5)}[hide]
    fitting = [
        phrase
        for index, (phrase, key) in enumerate(forms)
        if index not in told and sum(key(t) == key(thing) for t in things) == 1
    ]
    return rng.choice(fitting)


def _ask_colour(things: Sequence[Thing], rng: Random) -> tuple[str, str]:
    thing = rng.choice(things)
    name = _naming(things, thing, rng, "colour")
    return rng.choice(_COLOUR_WORDINGS).format(x=name), sentence(thing.colour)


def _ask_place(things: Sequence[Thing], rng: Random) -> tuple[str, str]:
    thing = rng.choice(things)
    name = _naming(things, thing, rng, "place")
    return rng.choice(_PLACE_WORDINGS).format(x=name), sentence(thing.place)


def _ask_size(things: Sequence[Thing], rng: Random) -> tuple[str, str]:
    thing = rng.choice(things)
    name = _naming(things, thing, rng, "size")
    return rng.choice(_SIZE_WORDINGS).format(x=name), sentence(thing.size)


def _ask_what(things: Sequence[Thing], rng: Random) -> tuple[str, str]:
    found = {thing.cell: f"a {thing.size} {thing.colour} {thing.noun}" for thing in things}
    cell = rng.choice(tuple(found)) if rng.random() < 0.8 else rng.randrange(len(PLACES))
    text = rng.choice(_WHAT_WORDINGS).format(at=at_place(PLACES[cell]))
    return text, sentence(found.get(cell, "nothing"))


def _ask_digit(things: Sequence[Thing], rng: Random) -> tuple[str, str] | None:
    for thing in things:
        if thing.digit is not None:
            return rng.choice(_DIGIT_WORDINGS), sentence(str(thing.digit))
    return None


def _ask_count(things: Sequence[Thing], rng: Random) -> tuple[str, str]:
    which = rng.random()
    if which < 0.4:
        noun, number = rng.choice(("objects", "things")), len(things)
    elif which < 0.75:
        shape = rng.choice([t.shape for t in things] + list(SHAPES[: len(things)]))
        noun, number = plural(shape), sum(t.shape == shape for t in things)
    else:
        colour = rng.choice([*(t.colour for t in things), rng.choice(tuple(COLOURS))])
        noun, number = f"{colour} objects", sum(t.colour == colour for t in things)
    return rng.choice(_COUNT_WORDINGS).format(xs=noun), sentence(NUMBERS[number])


def plural(noun: str) -> str:
    """``stars``, ``crosses``."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _ask_exists(things: Sequence[Thing], rng: Random) -> tuple[str, str]:
    thing = rng.choice(things)
    colour, shape = thing.colour, thing.shape
    if rng.random() < 0.5:
        # Change one attribute: the hard negatives are those that are nearly right.
        if rng.random() < 0.5:
            colour = rng.choice(tuple(COLOURS))
        else:
            shape = rng.choice((*SHAPES, "digit"))
    article = "an" if colour == "orange" else "a"
    there = any((t.colour, t.shape) == (colour, shape) for t in things)
    text = rng.choice(_EXISTS_WORDINGS).format(a=f"{article} {colour} {shape}")
    return text, "Yes." if there else "No."


_ASKERS: dict[str, Callable[[Sequence[Thing], Random], tuple[str, str] | None]] = {
    "colour": _ask_colour,
    "count": _ask_count,
    "place": _ask_place,
    "digit": _ask_digit,
    "what": _ask_what,
    "size": _ask_size,
    "exists": _ask_exists,
}
