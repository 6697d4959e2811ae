"""Which replica a request goes to: caches first, evenly enough, and agreed on without a word."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.ray_serve.affinity import (
    HOME_WEIGHT,
    MAX_GAIN,
    MAX_KEYS,
    MEDIA_WEIGHT,
    REQUEST_COST,
    Affinity,
    Placements,
    affinity_of_form,
    affinity_of_object,
    ranked,
)

REPLICAS = ("amber", "birch", "cedar", "dogwood", "elder")
IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 40
LONG_TEXT = "".join(f"Rule {number}: be brief, and then be clear. " for number in range(200))


def chat(*texts: str, image: str | None = None, **fields: object) -> dict[str, object]:
    """Turns of a chat, the user's first; the image is in front of the first."""
    messages: list[dict[str, object]] = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]
    if image is not None:
        parts = [
            {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
            {"type": "text", "text": texts[0]},
        ]
        messages[0] = {"role": "user", "content": parts}
    return {"model": "m", "messages": messages, **fields}


def shared(first: Affinity, second: Affinity) -> int:
    """What a replica that has had the first request has of the second, in characters."""
    placements = Placements(1000)
    placements.record(first, "amber", frozenset(REPLICAS))
    return placements.gains(second)["amber"]


def test_turns_of_a_conversation_share_its_home_and_all_that_was_said() -> None:
    first = affinity_of_object(chat("What is a heron?"))
    second = affinity_of_object(chat("What is a heron?", "A wading bird.", "And an egret?"))
    other = affinity_of_object(chat("What is an egret?"))
    assert first.home == second.home != other.home
    assert shared(first, second) == len("What is a heron?")
    assert shared(second, first) == len("What is a heron?")
    assert shared(first, other) == 0


def test_content_is_the_same_as_text_and_as_parts() -> None:
    as_text = affinity_of_object(chat("What is a heron?"))
    part = {"type": "text", "text": "What is a heron?"}
    as_parts = {"messages": [{"role": "user", "content": [part]}]}
    assert affinity_of_object(as_parts) == as_text


def test_roles_and_borders_of_messages_count() -> None:
    said = affinity_of_object({"messages": [{"role": "user", "content": "ab"}]})
    told = affinity_of_object({"messages": [{"role": "system", "content": "ab"}]})
    apart = affinity_of_object(
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    )
    assert len({said.home, told.home, apart.home}) == 3
    assert shared(said, told) == shared(said, apart) == 0


def test_a_long_system_prompt_is_shared_by_conversations_with_homes_of_their_own() -> None:
    system = {"role": "system", "content": LONG_TEXT}
    requests = [
        affinity_of_object({"messages": [system, {"role": "user", "content": question}]})
        for question in ("Who?", "Where?")
    ]
    assert requests[0].home != requests[1].home
    assert shared(*requests) == len(LONG_TEXT) > HOME_WEIGHT


def test_texts_share_their_beginning_at_growing_lengths() -> None:
    document = affinity_of_object({"prompt": LONG_TEXT})
    assert document.home == affinity_of_object({"prompt": LONG_TEXT[:300]}).home
    for length in (200, 256, 512, 1500, 5000):
        other = affinity_of_object({"prompt": LONG_TEXT[:length] + "#" * 9000})
        found = shared(document, other)
        assert found <= length
        assert found > length / 2 or length < 256
    assert shared(document, affinity_of_object({"prompt": LONG_TEXT[1:]})) == 0


def test_a_image_is_known_in_any_company() -> None:
    asked = affinity_of_object(chat("What is this?", image=IMAGE))
    again = affinity_of_object(chat("How many birds?", image=IMAGE))
    other = affinity_of_object(chat("What is this?", image=IMAGE[:-1]))
    assert asked.home == again.home != other.home
    assert shared(asked, again) == MEDIA_WEIGHT
    assert shared(asked, other) == 0


def test_prefixes_of_different_images_differ() -> None:
    first = affinity_of_object(chat(LONG_TEXT, image=IMAGE))
    second = affinity_of_object(chat(LONG_TEXT, image=IMAGE[:-1]))
    assert shared(first, second) == 0
    assert shared(first, affinity_of_object(chat(LONG_TEXT, image=IMAGE))) > MEDIA_WEIGHT


def test_tenants_share_nothing() -> None:
    requests = [affinity_of_object(chat(LONG_TEXT, image=IMAGE, cache_salt=salt)) for salt in "ab"]
    assert shared(*requests) == 0
    assert requests[0].home != requests[1].home


def form(boundary: str, clip: bytes, *fields: bytes) -> Affinity:
    """Of a transcription, its fields before its file."""
    parts = [b'\r\nContent-Disposition: form-data; name="f"\r\n\r\n' + each for each in fields]
    head = b'\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = b"--" + boundary.encode()
    body = body + (b"\r\n" + body).join([*parts, head + clip]) + b"\r\n" + body + b"--\r\n"
    return affinity_of_form(f'multipart/form-data; boundary="{boundary}"', body)


def test_a_clip_is_known_whatever_the_form_around_it() -> None:
    clip = bytes(range(256)) * 64
    first = form("one", clip, b"whisper")
    assert first.home
    assert first == form("two", clip)
    assert shared(first, form("one", clip[1:], b"whisper")) == 0


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data", "multipart/form-data; boundary=x", "multipart/form-data; boundary="],
)
def test_forms_without_files_share_nothing(content_type: str) -> None:
    assert affinity_of_form(content_type, b"no form at all") == Affinity()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "image_url", "url"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(messages=anything, prompt=anything, salt=anything)
def test_any_json_has_an_affinity(messages: object, prompt: object, salt: object) -> None:
    """What is refused is refused by a replica; keys are the same whenever they are computed."""
    body = {"messages": messages, "prompt": prompt, "cache_salt": salt}
    found = affinity_of_object(body)
    assert found == affinity_of_object(json.loads(json.dumps(body)))
    assert len(found.keys) <= MAX_KEYS


def test_values_as_deep_as_json_may_be_do_no_harm() -> None:
    deep: object = "x"
    for _ in range(5000):
        deep = {"text": [deep]}
    for field in ("messages", "prompt", "cache_salt"):
        affinity_of_object({field: deep})
        affinity_of_object({field: [deep, 1]})
    affinity_of_object({"messages": [{"role": deep, "content": [deep, {"url": deep}]}]})


def test_token_ids_share_their_beginning() -> None:
    ids = list(range(2000))
    whole = affinity_of_object({"prompt": ids})
    assert shared(whole, affinity_of_object({"prompt": [ids[:1000] + [7] * 1000]})) > 1000
    assert shared(whole, affinity_of_object({"prompt": ids[1:]})) == 0


def test_a_request_has_few_keys_however_long_it_is() -> None:
    texts = [f"turn {number}" for number in range(500)]
    whole = affinity_of_object(chat(*texts))
    assert len(whole.keys) == MAX_KEYS
    assert shared(affinity_of_object(chat(*texts[:101])), whole) > 0


def test_homes_are_spread_evenly() -> None:
    queues = dict.fromkeys(REPLICAS, 0)
    homes = Counter(ranked(Affinity(home=b"%d" % n), queues, {})[0] for n in range(2000))
    assert min(homes.values()) > 2000 / len(REPLICAS) * 0.8


@given(st.binary(min_size=1), st.sampled_from(REPLICAS))
def test_a_replica_that_goes_moves_its_own_share_only(home: bytes, gone: str) -> None:
    before = ranked(Affinity(home), dict.fromkeys(REPLICAS, 0), {})
    left = [name for name in REPLICAS if name != gone]
    after = ranked(Affinity(home), dict.fromkeys(left, 0), {})
    assert after == [name for name in before if name != gone]


def test_order_of_replicas_does_not_matter() -> None:
    one = ranked(Affinity(b"x"), dict.fromkeys(REPLICAS, 0), {})
    assert one == ranked(Affinity(b"x"), dict.fromkeys(reversed(REPLICAS), 0), {})


def test_what_was_seen_weighs_more_than_home_and_less_than_a_long_queue() -> None:
    request = affinity_of_object(chat("What is this?", image=IMAGE))
    queues = dict.fromkeys(REPLICAS, 0)
    home, other, *_ = ranked(request, queues, {})
    gains = {other: MEDIA_WEIGHT}
    assert ranked(request, queues, gains)[0] == other
    bearable = (MEDIA_WEIGHT - HOME_WEIGHT) // REQUEST_COST
    assert ranked(request, {**queues, other: bearable - 1}, gains)[0] == other
    assert ranked(request, {**queues, other: bearable + 1}, gains)[0] == home
    assert ranked(request, {**queues, home: 3}, {})[0] != home


@given(st.lists(st.sampled_from(["hot", "cold"]) | st.text(), min_size=40, max_size=120))
def test_no_cache_makes_queues_uneven_beyond_the_bound(texts: list[str]) -> None:
    """Even where all requests want the same replica, and none of them ends."""
    placements, queues = Placements(1000), dict.fromkeys(REPLICAS, 0)
    for text in texts:
        request = affinity_of_object(chat(text * 4000, image=IMAGE))
        chosen = ranked(request, queues, placements.gains(request))[0]
        placements.record(request, chosen, frozenset(REPLICAS))
        queues[chosen] += 1
        assert max(queues.values()) - min(queues.values()) <= (
            (MAX_GAIN + HOME_WEIGHT) // REQUEST_COST + 1
        )


def test_placements_forget_what_is_old_and_who_is_gone() -> None:
    placements = Placements(2)
    first, second = (Affinity(b"x", {key: 10}) for key in (b"1", b"2"))
    placements.record(first, "amber", frozenset(REPLICAS))
    placements.record(first, "birch", frozenset(REPLICAS))
    assert placements.gains(first) == {"amber": 10, "birch": 10}
    placements.record(first, "cedar", frozenset({"birch", "cedar"}))
    assert placements.gains(first) == {"birch": 10, "cedar": 10}
    placements.record(second, "amber", frozenset(REPLICAS))
    placements.record(Affinity(b"x", {b"3": 10}), "amber", frozenset(REPLICAS))
    assert placements.gains(first) == {}
    assert placements.gains(second) == {"amber": 10}
