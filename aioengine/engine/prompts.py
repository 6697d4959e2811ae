"""The forms in which a caller may give a prompt and its media, read into one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import Any

from aioengine.core.request import Item
from aioengine.errors import InvalidRequestError, UnsupportedModalityError, is_real, refuse_names
from aioengine.media_pipeline.items import MediaInput
from aioengine.processors.chat.parts import ChatMedia
from aioengine.processors.chat.tools import list_tools, read_choice, read_tools
from aioengine.processors.mm_kwargs import copy_options
from aioengine.sampling_params import SamplingParams, StructuredOutputs
from aioengine.types import Message, Prompt

__all__ = [
    "CHAT",
    "PromptLike",
    "as_mapping",
    "check_arguments",
    "check_token_ids",
    "count_least",
    "encode_pairs",
    "fillings",
    "list_media",
    "read_prompt",
]

MAX_MODALITY_CHARACTERS = 40

FORMS = ("text", "token_ids", "messages", "embeds")
"""What a prompt has exactly one of."""
HALVES = ("encoder_text", "encoder_token_ids", "decoder_text", "decoder_token_ids")
"""What of a prompt is for encoder-decoder models."""
CHAT = ("tools", "tool_choice", "chat_template_kwargs")
"""What of a prompt stands beside messages."""
TOKEN_IDS = ("token_ids", "encoder_token_ids", "decoder_token_ids")
FIELDS: tuple[tuple[Sequence[str], Any, str], ...] = (
    (("text", "encoder_text", "decoder_text", "cache_salt"), str | None, "text"),
    (TOKEN_IDS, Sequence | None, "a sequence of token ids"),
    (("messages",), Sequence | None, "a list of messages"),
    (("media", "uuids"), Mapping, "a mapping from modality to a list"),
    (("mm_processor_kwargs", "chat_template_kwargs"), Mapping, "a mapping"),
)
"""Fields of a prompt, their type, and the same in words."""

HALF_PROMPTS = ("encoder_prompt", "decoder_prompt")
KEYS = {
    "prompt": "text",
    "prompt_token_ids": "token_ids",
    "prompt_embeds": "embeds",
    "multi_modal_data": "media",
    "multi_modal_uuids": "uuids",
    "mm_processor_kwargs": "mm_processor_kwargs",
    "cache_salt": "cache_salt",
}
"""Keys of a prompt in vLLM's form, and the fields of `Prompt` that they fill."""

Messages = Sequence[Mapping[str, Any] | Message]
PromptLike = str | Sequence[int] | Messages | Mapping[str, Any] | Prompt


BATCH_DIMENSIONS = {"image": 4, "video": 5}
"""Of an array that holds several items, along its first axis."""
MAX_ITEMS = 1 << 16
"""Taken from what may go on for ever."""


@dataclass(frozen=True, slots=True)
class FromPrompt:
    """An item of a prompt in the form of a mapping, whose text is as little trusted as messages."""

    item: Any


def read_prompt(
    prompt: PromptLike, media: Mapping[str, Any], chat: Mapping[str, Any] | None = None
) -> Prompt:
    """Any accepted form of a prompt as a `Prompt`, with `media` added to its own, each a list.

    `chat`: its fields beside messages, as a call's arguments. Raises InvalidRequestError.
    """
    read = _read_chat(_as_prompt(prompt), chat or {})
    _check_fields(read)
    merged = _merge(read.media, media)
    uuids = {name: [each] if isinstance(each, str) else each for name, each in read.uuids.items()}
    given = [name for name in FORMS if getattr(read, name) is not None]
    halves = [name for name in HALVES if getattr(read, name) is not None]
    if len(given) > 1 or not (given or halves or merged):
        message = f"a prompt has exactly one of {', '.join(FORMS)}, not {len(given)}"
        raise InvalidRequestError(message, parameter="prompt", value=len(given))
    if read.embeds is not None and merged:
        message = "a prompt of embeddings has its media among them; give none beside it"
        raise InvalidRequestError(message, parameter=f"{next(iter(merged))}s")
    for half in ("encoder", "decoder"):
        if f"{half}_text" in halves and f"{half}_token_ids" in halves:
            message = f"give {half}_text or {half}_token_ids, not both"
            raise InvalidRequestError(message, parameter=f"{half}_text")
    return replace(
        read, media=merged, uuids=uuids, mm_processor_kwargs=copy_options(read.mm_processor_kwargs)
    )


def _read_chat(prompt: Prompt, given: Mapping[str, Any]) -> Prompt:
    """The prompt with what is given beside its messages."""
    named = {name: value for name, value in given.items() if value is not None and value != ()}
    for name in named:
        if getattr(prompt, name):
            message = f"{name} are given twice, in the prompt and beside it; give them once"
            raise InvalidRequestError(message, parameter=name)
    prompt = replace(prompt, **named) if named else prompt
    if prompt.tools != ():
        tools = () if prompt.tools is None else list_tools(prompt.tools)
        prompt = replace(prompt, tools=tools)
    if not (prompt.tools or prompt.tool_choice or prompt.chat_template_kwargs):
        return prompt
    if prompt.messages is None:
        name = next(name for name in CHAT if getattr(prompt, name))
        message = f"{name} are for chat messages; give messages, not text or token ids"
        raise InvalidRequestError(message, parameter=name)
    return prompt


def as_mapping(message: Any) -> Any:
    """The message, as a mapping if it is an answer of a model's."""
    return message.to_dict() if isinstance(message, Message) else message


def with_schemas(prompt: Prompt) -> Prompt:
    """The prompt with its tools as schemas, and its choice among them. Raises InvalidRequestError.

    Not for the event loop: a thousand schemas take 100 ms.
    """
    if not (prompt.tools or prompt.tool_choice):
        return prompt
    tools = read_tools(prompt.tools)
    choice = read_choice(prompt.tool_choice, tools)
    if choice not in ("auto", "none"):
        _check_schemas(tools, choice)
    return replace(prompt, tools=tools, tool_choice=choice)


def _check_schemas(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, str]) -> None:
    """Refuse schemas of what has to be called that no grammar is made of: it would take too
    long."""
    for index, tool in enumerate(tools):
        if isinstance(choice, Mapping) and tool["function"]["name"] != choice["name"]:
            continue
        try:
            StructuredOutputs(json=tool["function"].get("parameters") or {"type": "object"})
        except InvalidRequestError as error:
            raise error.for_parameter(f"tools[{index}].function.parameters") from error


def count_least(prompt: Prompt) -> tuple[int, int]:
    """Characters of the longest text, or of all contents of messages, and what counts as a token.

    That is each token id, media item, message and part of a message: an empty part may become none,
    but costs as much to read. Of messages, what has their form is counted: of their other texts,
    which a template may leave out, the longest.
    """
    texts = prompt.text, prompt.encoder_text, prompt.decoder_text
    characters = max(len(text or "") for text in texts)
    token_ids = prompt.token_ids, prompt.encoder_token_ids, prompt.decoder_token_ids
    others = max(len(ids or ()) for ids in token_ids)
    if prompt.messages is None:  # whose parts are counted
        others += sum(map(len, prompt.media.values()))
    characters += sum(len(json.dumps(tool)) for tool in prompt.tools)
    longest = 0
    for message in map(as_mapping, prompt.messages or ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else ()
        others += 1 + len(parts)
        for part in parts or [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            characters += len(text) if isinstance(text, str) else 0
        longest = max(longest, *map(len, _texts_beside(message)), 0)
    return max(characters, longest), others


def _texts_beside(message: Any) -> Iterator[str]:
    """Texts beside the content: what the model thought, and the arguments of its calls."""
    if isinstance(message, Mapping):
        calls = message.get("tool_calls")
        functions = [
            call["function"]
            for call in (calls if isinstance(calls, list | tuple) else ())
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        ]
        for given in (message, *functions):
            yield from (text for text in given.values() if isinstance(text, str))


def check_arguments(params: object, request_id: object, priority: object) -> None:
    """Raise InvalidRequestError for arguments of the wrong kind."""
    if not isinstance(params, SamplingParams | None):
        raise _wrong("params", "SamplingParams", params)
    if not isinstance(request_id, str | None):
        raise _wrong("request_id", "text", request_id)
    if not isinstance(priority, int):
        raise _wrong("priority", "an integer", priority)


def _as_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, Prompt):
        given = {name: getattr(prompt, name) for name in TOKEN_IDS}
        # Arrays or tensors of ids.
        return replace(prompt, **{k: ids.tolist() for k, ids in given.items() if _is_array(ids)})
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if _is_array(prompt):
        return Prompt(token_ids=prompt.tolist())
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    if isinstance(prompt, list | tuple):
        first = prompt[0] if prompt else None
        is_message = isinstance(first, Message)
        if isinstance(first, Mapping):
            is_message = not first.keys() & {*KEYS, *HALF_PROMPTS}
        if is_message:
            return Prompt(messages=prompt)
        if isinstance(first, str | list | tuple | Mapping | Prompt):
            message = (
                "prompt is a list of prompts, but a call takes one: use engine.map(prompts), or "
                "asyncio.gather(*(engine.generate(each) for each in prompts))"
            )
            raise InvalidRequestError(message, parameter="prompt", value=type(first).__name__)
        return Prompt(token_ids=prompt)
    raise _wrong("prompt", "text, token ids, chat messages or a Prompt", prompt)


def _from_mapping(given: Mapping[str, Any]) -> Prompt:
    """A prompt in vLLM's form: TextPrompt, TokensPrompt, or the two of an encoder and a decoder.

    Token ids win over a text beside them. Text in its media is no path: it may be users' JSON.
    """
    if "role" in given:
        message = "prompt is one chat message; give a list of messages"
        raise InvalidRequestError(message, parameter="prompt")
    known = (*KEYS, *HALF_PROMPTS)
    text = f"prompt has the key {{}}, which is none of {', '.join(known)}"
    refuse_names(text, map(str, given), known)
    fields = {KEYS[key]: value for key, value in given.items() if key in KEYS and value is not None}
    for form in ("embeds", "token_ids"):
        if form in fields:
            fields.pop("text", None)
    if isinstance(media := fields.get("media"), Mapping):
        fields["media"] = {
            modality: [FromPrompt(item) for item in as_items(modality, items)]
            for modality, items in media.items()
        }
    for key in HALF_PROMPTS:
        half = given.get(key)
        if half is None:
            continue
        read = _as_prompt(half)
        if read.messages is not None or read.embeds is not None:
            message = f"{key} must be text or token ids; it has neither messages nor embeddings"
            raise InvalidRequestError(message, parameter=key)
        name = key.removesuffix("_prompt")
        # Beside the media of an encoder that reads nothing else stands an empty text.
        fields[f"{name}_text"] = None if read.media and not read.text else read.text
        fields[f"{name}_token_ids"] = read.token_ids
        for field in ("media", "uuids", "mm_processor_kwargs", "cache_salt"):
            value = getattr(read, field)
            if value and fields.setdefault(field, value) is not value:
                message = f"prompt has {field} twice; give it in {key}, or beside it"
                raise InvalidRequestError(message, parameter="prompt")
    return _as_prompt(Prompt(**fields))


def _is_array(value: object) -> bool:
    return hasattr(value, "tolist")


def _check_fields(prompt: Prompt) -> None:
    """Refuse fields of the wrong kind, which would surface later and further from the caller."""
    for names, kind, wanted in FIELDS:
        for name in names:
            value, is_form = getattr(prompt, name), name in FORMS
            parameter = "prompt" if is_form else name
            if not isinstance(value, kind):
                raise _wrong(parameter, f"made of {wanted}" if is_form else wanted, value)
            if kind == Sequence | None and isinstance(value, str | bytes):
                raise _wrong(parameter, f"made of a sequence as {name}", value)
    for modality, uuids in prompt.uuids.items():
        if isinstance(uuids, str):
            continue
        if not isinstance(uuids, list | tuple) or not all(isinstance(u, str | None) for u in uuids):
            raise _wrong("uuids", f"a list of text or None for {modality!r:.40}", uuids)


def _merge(*sources: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Modality -> items of all sources; modalities without items are left out."""
    merged: dict[str, list[Any]] = {}
    for source in sources:
        for modality, items in source.items():
            if not isinstance(modality, str) or len(modality) > MAX_MODALITY_CHARACTERS:
                message = f"media has a key that is no modality: {modality!r:.40}"
                raise UnsupportedModalityError(message, parameter="media")
            merged.setdefault(modality, []).extend(as_items(modality, items))
    return {modality: items for modality, items in merged.items() if items}


def _wrong(parameter: str, wanted: str, value: object) -> InvalidRequestError:
    kind = type(value).__name__
    return InvalidRequestError(
        f"{parameter} must be {wanted}, not {kind}", parameter=parameter, value=kind
    )


def as_items(modality: str, given: Any) -> list[Any]:
    """The items in what a caller gave for a modality: one, None, or any iterable of them.

    An iterator is run through at once. Arrays of numbers are one item, unless they have one
    dimension more than one has. Raises InvalidRequestError.
    """
    name = f"{modality}s"
    if given is None:
        return []
    try:
        is_one = _is_one(modality, given)
    # The object's own attributes raise; its reader will meet them, and tell of it.
    except Exception:
        is_one = True
    if is_one:
        return [given]
    if isinstance(given, list):
        return given
    if isinstance(given, Set) or hasattr(given, "__aiter__"):
        kind = type(given).__name__
        message = f"{name} must be an item or a list of them, in order, not {kind}"
        raise InvalidRequestError(message, parameter=name, value=kind)
    items = list(islice(given, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        message = f"{name} has more than {MAX_ITEMS} items"
        raise InvalidRequestError(message, parameter=name, value=MAX_ITEMS)
    return items


def _is_one(modality: str, given: Any) -> bool:
    """Return whether it is an item itself. Looks at what it can do, and imports no library."""
    if isinstance(given, str | bytes | bytearray | memoryview | Mapping):
        return True
    if isinstance(given, list | tuple):
        # Samples and their rate. A list of two may be anything.
        is_pair = modality == "audio" and isinstance(given, tuple) and len(given) == 2
        return (is_pair and is_real(given[1])) or (is_pair and getattr(given[1], "ndim", None) == 0)
    if (num_dimensions := getattr(given, "ndim", None)) is not None and hasattr(given, "dtype"):
        if getattr(given.dtype, "kind", "") in "OSU" and num_dimensions == 1:
            return False  # an array or a Series of objects
        return bool(num_dimensions != BATCH_DIMENSIONS.get(modality))
    if hasattr(given, "__aiter__") or isinstance(given, Set):
        return False
    is_file = any(callable(getattr(given, name, None)) for name in ("read", "as_py"))
    is_upload = callable(getattr(getattr(given, "file", None), "read", None))
    return is_file or is_upload or not isinstance(given, Iterable) or _shares_bytes(given)


def _shares_bytes(given: Any) -> bool:
    """Return whether it is a buffer, as an `mmap` or Arrow's."""
    try:
        return memoryview(given).itemsize == 1
    except TypeError:
        return False


def list_media(prompt: Prompt) -> list[MediaInput]:
    """Return the items of a prompt whose media are lists. Raises InvalidRequestError."""
    media = []
    for modality, items in prompt.media.items():
        uuids: Sequence[str | None] = prompt.uuids.get(modality) or [None] * len(items)
        if len(uuids) != len(items):
            message = f"uuids[{modality!r}] has {len(uuids)} entries for {len(items)} items"
            raise InvalidRequestError(message, parameter="uuids", value=len(uuids))
        for index, (item, uuid) in enumerate(zip(items, uuids, strict=True)):
            name = f"{modality}s[{index}]"
            trusted = True
            if isinstance(item, FromPrompt):
                item = item.item
                trusted = isinstance(item, PurePath)
            media.append(MediaInput(modality, index, item, name, trusted, uuid))
    return media


def fillings(prompt: Prompt) -> dict[str, list[ChatMedia]]:
    """Modality -> the items for a conversation's parts without content."""
    given: dict[str, list[ChatMedia]] = {}
    for each in list_media(prompt):
        found = ChatMedia(
            item=each.item, parameter=each.parameter, trusted=each.trusted, uuid=each.uuid
        )
        given.setdefault(each.modality, []).append(found)
    return given


def check_token_ids(
    token_ids: Sequence[int], items: Sequence[Item], num_embeddings: int, parameter: str
) -> None:
    """Raise InvalidRequestError for ids beyond the embedding table, where no encoder rows come."""
    if max(token_ids, default=0) < num_embeddings:
        return
    covered = {
        position + i
        for item in items
        for position, _, count in item.span.row_runs(0, len(token_ids))
        for i in range(count)
    }
    for position, token_id in enumerate(token_ids):
        if token_id >= num_embeddings and position not in covered:
            raise InvalidRequestError(
                f"the prompt has the token id {token_id}, but the model embeds only "
                f"{num_embeddings}",
                parameter=parameter,
                value=token_id,
            )


def encode_pairs(
    tokenizer: Any, pairs: Sequence[tuple[str, str]]
) -> list[tuple[tuple[int, ...], int]]:
    """The token ids of each pair of texts, as one prompt, and where the second one's type begins; 0
    where the tokenizer knows no types.

    Raises InvalidRequestError for texts that are no Unicode.
    """
    found = []
    for index, (first, second) in enumerate(pairs):
        for name, text in (("query", first), (f"documents[{index}]", second)):
            try:
                text.encode()
            except UnicodeEncodeError:
                message = f"{name} is not valid Unicode (it has lone surrogates)"
                raise InvalidRequestError(message, parameter=name) from None
        encoding = tokenizer(first, second, return_token_type_ids=True, verbose=False)
        types = list(encoding.get("token_type_ids") or ())
        found.append((tuple(encoding["input_ids"]), types.index(1) if 1 in types else 0))
    return found
