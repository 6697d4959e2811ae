"""Work of the application itself: uploaded images, and the report. Blocking; run in threads."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from PIL import Image, ImageOps

from .models import FiledExpense, Report

MAX_PIXELS = 40_000_000
MAX_SIDE = 1024


def shrink(data: bytes) -> tuple[bytes, int, int]:
    """A JPEG of at most `MAX_SIDE` pixels in width and height, and the image's own size.

    Raises ValueError for what is no image, or too large.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
        if image.width * image.height > MAX_PIXELS:
            raise ValueError("the image is too large")
        width, height = image.size
        image.draft("RGB", (MAX_SIDE, MAX_SIDE))
        image = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError("the file is no PNG, JPEG or WebP image") from error
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=85)
    return jpeg.getvalue(), width, height


def make_report(expenses: Sequence[FiledExpense]) -> Report:
    """Compares all pairs: plain Python that takes its time."""
    by_month: defaultdict[str, int] = defaultdict(int)
    by_category: defaultdict[str, list[int]] = defaultdict(list)
    for expense in expenses:
        by_month[f"{expense.day:%Y-%m}"] += expense.cents
        by_category[expense.category].append(expense.cents)
    rows = [(each.id, each.cents, each.day.toordinal()) for each in expenses]
    similar = [
        (id, other)
        for place, (id, cents, day) in enumerate(rows)
        for other, other_cents, other_day in rows[:place]
        if cents == other_cents and abs(day - other_day) <= 3
    ]
    return Report(
        num_expenses=len(expenses),
        by_month=dict(sorted(by_month.items())),
        medians={category: median(cents) for category, cents in by_category.items()},
        similar=similar,
    )
