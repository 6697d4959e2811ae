"""Order in which media are decoded and encoded; positions that still wait for rows.

Needs are ranked: first what running requests need soonest, then waiting requests by seniority, and
before these whoever runs but lacks KV blocks: its rows are of no use until others have got theirs.
Media are asked for in that order while their rows fit `max_media_rows`, and encoded in that order
while there is room; making room never evicts what is needed sooner than the item it is made for.
Items behind one without pixels, in the same prompt, come last. Equal media are one item, whoever
asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter

from aioengine.core.encoder_cache import EncoderCache
from aioengine.core.plan import EncodePlan, Limits, MediaPlan
from aioengine.core.request import Item, Request

__all__ = ["BATCHES_AHEAD", "MediaScheduler"]

Need = tuple[Request, Item]

LONGEST_PATIENCE = 4
"""Steps that may go before an encoder's run, at most."""
BATCHES_AHEAD = 4
"""Of `max_num_seqs` waiting requests each: one looks no further for media to ask for."""


class MediaScheduler:
    """The life of media keys: asked for, decoded, encoded (then the encoder cache's business)."""

    def __init__(self, limits: Limits) -> None:
        self.cache = EncoderCache(limits.encoder_cache_bytes)
        self.counters: Counter[str] = Counter()
        self._limits = limits
        self._without_room = ""
        self._users: dict[str, dict[str, None]] = {}  # key -> live requests, the oldest first
        self._decoded: dict[str, bool] = {}  # media asked for: whether the pixels are there

    def add(self, request: Request) -> None:
        """A request has come."""
        for item in request.all_items:
            self._users.setdefault(item.key, {})[request.request_id] = None

    def remove(self, request: Request) -> None:
        """A request has ended; media that nobody else has are forgotten."""
        for key in {item.key for item in request.all_items}:
            del self._users[key][request.request_id]
            if not self._users[key]:
                del self._users[key]
                self._decoded.pop(key, None)

    def is_needed(self, key: str) -> bool:
        """Return whether a live request has this item."""
        return key in self._users

    def users(self, key: str) -> Collection[str]:
        """The live requests that have this item, the oldest first."""
        return self._users.get(key, {}).keys()

    @property
    def is_waiting_for_others(self) -> bool:
        """Return whether somebody's pixels or an encoder run are still to come."""
        return self.cache.is_encoding or not all(self._decoded.values())

    # ---- what a request waits for

    def first_missing(self, request: Request, start: int, end: int) -> tuple[int, Item] | None:
        """The first position in [start, end) whose encoder row is not there, and its item."""
        for item in request.open_items(start):
            if item.span.first_row_position >= end:
                return None
            if not self.cache.is_ready(item.key):
                runs = item.span.row_runs(start, end)
                if runs:
                    return runs[0][0], item
        return None

    def awaited(self, request: Request) -> Item | None:
        """The next item whose rows are not there, of those that it needs or will need."""
        if request.encoder is not None and not (request.is_running or request.finds_cross):
            return None if self.is_encoded(request.encoder) else request.encoder
        start = request.num_scheduled if request.is_running else request.hit_estimate
        missing = self.first_missing(request, start, request.num_tokens)
        return None if missing is None else missing[1]

    def blocker(self, request: Request) -> Item | None:
        """The item whose missing rows park a running request: not one token can follow."""
        start = request.num_scheduled
        end = min(start + self._limits.max_num_batched_tokens, request.num_tokens)
        missing = self.first_missing(request, start, end)
        if missing is None:
            return None
        least = self._limits.block_size
        return None if request.cut_before_missing(start, missing[0], least) > start else missing[1]

    def unseen_blocker(self, request: Request) -> str | None:
        """The key of the item that parks a running request, if it is not even decoded."""
        blocker = self.blocker(request)
        return None if blocker is None or self.has_pixels(blocker) else blocker.key

    def is_encoded(self, item: Item | None) -> bool:
        """Return whether the item's rows are there to be used."""
        return item is not None and self.cache.is_ready(item.key)

    def has_pixels(self, item: Item) -> bool:
        """Return whether the item is decoded, being encoded, or encoded."""
        return item.key in self.cache or self._decoded.get(item.key, False)

    # ---- work for others, and their results

    def schedule(self, running: Sequence[Request], waiting: Sequence[Request]) -> MediaPlan:
        """Choose what to decode now, and what to encode if the encoder is free."""
        if not self._users:
            return MediaPlan((), None)
        needs = self._needs(running, waiting)
        asked = self._ask(needs)
        if self.cache.is_encoding:
            return MediaPlan(asked, None)
        return MediaPlan(asked, self._encode(needs, self._patience(running, needs)))

    def media_ready(self, key: str) -> None:
        """The item is decoded and processed. Ignored if nobody needs it any more."""
        if key in self._decoded:
            self._decoded[key] = True

    def encoded(self, key: str) -> None:
        """The encoder has written the item's rows."""
        self.cache.fill(key)
        self._decoded.pop(key, None)

    def encoding_failed(self, key: str) -> None:
        """The encoder could not; those who need the item have to be ended."""
        self.cache.cancel(key)
        self._decoded.pop(key, None)

    def _needs(self, running: Iterable[Request], waiting: Iterable[Request]) -> dict[str, Need]:
        """The items that live requests have yet to compute, by rank; each once, at its soonest.

        An item behind one that has no pixels yet comes last: its rows could not be used before.
        Many of these, and a long queue, are looked at only as far as they could be asked for, and
        no further than a few batches ahead.
        """
        soon: list[tuple[int, Request, Item]] = []
        later: list[tuple[int, Request, Item]] = []
        behind: list[tuple[int, Request, Item]] = []
        num_rows = 0
        for request in running:
            for item, is_next in self._open(request, request.num_scheduled):
                if not is_next:
                    if num_rows > self._limits.max_media_rows:
                        break
                    num_rows += item.span.num_rows
                distance = max(0, request.needed_at(item) - request.num_scheduled)
                rank = later if request.lacks_blocks else soon
                (rank if is_next else behind).append((distance, request, item))
        soon.sort(key=itemgetter(0))  # stable: by seniority where equally far
        num_rows = 0
        for request in islice(waiting, BATCHES_AHEAD * self._limits.max_num_seqs):
            if num_rows > self._limits.max_media_rows:
                behind.clear()  # even these come after those that are not looked at any more
                break
            for item, is_next in self._open(request, request.hit_estimate):
                (later if is_next else behind).append((0, request, item))
                num_rows += item.span.num_rows
        needs: dict[str, Need] = {}
        for _, request, item in (*soon, *later, *behind):
            needs.setdefault(item.key, (request, item))
        return needs

    def _open(self, request: Request, position: int) -> Iterator[tuple[Item, bool]]:
        """The items from `position` on, and whether all those before each have their pixels.

        What cross-attention reads comes before them, until there are keys and values of it.
        """
        is_next = True
        if request.encoder is not None and not (request.is_running or request.finds_cross):
            yield request.encoder, is_next
            is_next = self.has_pixels(request.encoder)
        for item in request.open_items(position):
            yield item, is_next
            is_next = is_next and self.has_pixels(item)

    def _ask(self, needs: dict[str, Need]) -> tuple[str, ...]:
        """Ask for media while their rows fit; for the one needed first in any case."""
        missing = {key: item for key, (_, item) in needs.items() if key not in self.cache}
        num_rows = sum(item.span.num_rows for key, item in missing.items() if key in self._decoded)
        asked = []
        for rank, (key, item) in enumerate(missing.items()):
            if key in self._decoded:
                continue
            if rank and num_rows + item.span.num_rows > self._limits.max_media_rows:
                break
            num_rows += item.span.num_rows
            self._decoded[key] = False
            asked.append(key)
        return tuple(asked)

    def _patience(self, running: Sequence[Request], needs: dict[str, Need]) -> int:
        """Count the steps that may go before the encoder's run: as many as are fair to both sides.

        A step is of use to the requests that run, the encoder's run to those that wait for it. Few
        that run would keep many waiting, with steps that read all weights for a few tokens.
        """
        num_running = sum(request.has_slot for request in running)
        waiting = {owner.request_id for key, (owner, _) in needs.items() if key not in self.cache}
        if not num_running:
            return 1
        return max(1, round(LONGEST_PATIENCE * num_running / (num_running + len(waiting))))

    def _encode(self, needs: dict[str, Need], patience: int) -> EncodePlan | None:
        keys: list[str] = []
        rows: list[int] = []
        evicted: list[str] = []
        modality = ""
        for rank, (key, (request, item)) in enumerate(needs.items()):
            if key in self.cache or not self._decoded.get(key, False):
                continue
            if keys and (
                item.modality != modality
                or len(keys) == self._limits.max_encode_items
                or sum(rows) + item.span.num_rows > self._limits.max_num_encoder_input_tokens
            ):
                break
            needed_sooner = frozenset(islice(needs, rank))
            made = self.cache.reserve(key, item.num_bytes, keep=needed_sooner)
            if made is None:
                if key != self._without_room:
                    self._without_room = key
                    self.counters["encoder_waits"] += 1
                break
            modality = item.modality
            keys.append(key)
            rows.append(item.span.num_rows)
            evicted += made
            request.encoded_keys.add(key)
        if not keys:
            return None
        self.counters["encoder_misses"] += len(keys)
        return EncodePlan(modality, tuple(keys), tuple(rows), tuple(evicted), patience)
