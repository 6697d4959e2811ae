"""The processor cache against a plain model of an LRU bounded by bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.processors.cache.memory import HeldItems, ProcessorCache
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargsItem

CONFIG = {"x": MultiModalFieldConfig.batched("image")}


def item(num_bytes: int) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_config(
        {"x": torch.zeros(num_bytes, dtype=torch.uint8)}, CONFIG
    )


@given(
    capacity=st.integers(0, 12),
    steps=st.lists(
        st.tuples(st.sampled_from("gtpc"), st.integers(0, 5), st.integers(0, 14)), max_size=60
    ),
)
def test_is_an_lru_by_bytes(capacity: int, steps: list[tuple[str, int, int]]) -> None:
    cache = ProcessorCache(capacity)
    model: OrderedDict[str, int] = OrderedDict()
    hits = misses = 0
    for action, number, size in steps:
        name = str(number)
        if action == "g":
            found = cache.get(name)
            assert (found is not None) == (name in model)
            hits, misses = hits + (name in model), misses + (name not in model)
        elif action == "t":
            assert cache.touch(name) == (name in model)
        elif action == "c" and size == 0:
            cache.clear()
            model.clear()
        elif action == "p":
            size = max(size, 1)
            assert cache.put(name, item(size)) == (size <= capacity)
            if size <= capacity:
                model.pop(name, None)
                while sum(model.values()) + size > capacity:
                    model.popitem(last=False)
                model[name] = size
        if action in "gt" and name in model:
            model.move_to_end(name)
        statistics = cache.statistics()
        assert statistics.used_bytes == sum(model.values()) <= capacity
        assert (statistics.entries, statistics.hits, statistics.misses) == (
            len(model), hits, misses,
        )  # fmt: skip
        assert all(name in cache for name in model)
    assert cache.statistics().capacity_bytes == capacity


def test_from_many_threads() -> None:
    cache = ProcessorCache(50)

    def work(seed: int) -> None:
        for step in range(300):
            name = str((seed * 7 + step) % 20)
            if cache.get(name) is None:
                cache.put(name, item(step % 9 + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    statistics = cache.statistics()
    assert statistics.hits + statistics.misses == 8 * 300
    assert statistics.used_bytes <= 50


@given(
    capacity=st.integers(0, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60),
)
def test_what_is_held_is_counted_once_and_bounded(
    capacity: int, steps: list[tuple[bool, int]]
) -> None:
    held, holders = HeldItems(capacity), Counter[str]()
    items = [item(1 + 2 * number) for number in range(6)]
    for holds, number in steps:
        name = str(number)
        if not holds:
            if holders[name]:
                held.release(name)
                holders[name] -= 1
        else:
            before = held.num_bytes
            fits = not before or holders[name] or before + items[number].num_bytes <= capacity
            assert held.hold(name, items[number]) is bool(fits)
            holders[name] += bool(fits)
        live = [int(name) for name, count in holders.items() if count]
        assert held.num_bytes == sum(items[number].num_bytes for number in live)
        assert all((held.get(str(n)) is items[n]) == (n in live) for n in range(6))
        assert held.num_bytes <= capacity or len(live) == 1
