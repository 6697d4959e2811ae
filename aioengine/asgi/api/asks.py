"""OpenAI's request bodies, read into prompts and sampling parameters.

A field that is neither known nor known to be harmless is refused, so that nobody waits for what a
misspelt one should have done. SamplingParams' own names are taken beside OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.errors import InvalidRequestError, refuse_names
from aioengine.sampling_params import SamplingParams, StructuredOutputs
from aioengine.types import Prompt

__all__ = ["Ask", "read_chat", "read_completion"]

MAX_PROMPTS = 128
"""Of one completions request."""
MAX_COMPLETIONS = 1024
"""Of all its prompts."""
MAX_MESSAGES = MAX_PARTS = 4096
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARACTERS = 1024

SAMPLING = frozenset(
    {
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "bad_words", "ignore_eos"),
        *("allowed_token_ids", "skip_special_tokens"),
    }
)
"""Fields that SamplingParams takes as they are."""
COMMON = SAMPLING | {
    *("model", "stream", "stream_options", "logit_bias", "logprobs", "response_format"),
    *("structured_outputs", "cache_salt", "mm_processor_kwargs"),
}
CHAT = COMMON | {"messages", "top_logprobs", "max_completion_tokens"}
COMPLETION = COMMON | {"prompt", "best_of"}
MEDIA_PARTS = {f"{each}_url": each for each in ("image", "audio", "video")} | {
    "input_audio": "audio"
}
STREAM_OPTIONS = ("include_usage", "include_obfuscation")
"""Obfuscation pads events against who guesses texts from their lengths; it is taken, not built."""
STRUCTURES = tuple(StructuredOutputs.__dataclass_fields__)
TOKEN_ID = re.compile("[0-9]{1,10}")
IGNORED = frozenset(
    {
        *("user", "safety_identifier", "metadata", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""For OpenAI's own accounts."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
}
"""Fields of what is not built, with the values that ask for nothing of it."""


ALIASES = {
    "structured_outputs": "response_format",
    "max_tokens": "max_completion_tokens",
    "prompt": "messages",
}
"""The engine's names of parameters, and OpenAI's, of which a client may have used either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Fields of one request. A chat has one prompt. `model`: None takes the one there is.

    `aliases`: the engine's names of parameters -> those that the client has used.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    model: str | None
    is_streamed: bool
    wants_usage: bool
    aliases: Mapping[str, str]

    def in_its_words(self, error: Exception) -> Exception:
        """An error that names the client's own parameter."""
        return _in_words(error, self.aliases)


def read_chat(body: Mapping[str, Any]) -> Ask:
    """The body of chat/completions. Raises InvalidRequestError."""
    given = _known(body, CHAT)
    messages = given.get("messages")
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise _wrong("messages", f"a list of {MAX_MESSAGES} messages at most")
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    wants = _flag(given, "logprobs")
    num_top = given.get("top_logprobs", 0)
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise _wrong("top_logprobs", f"an integer, 0 to {MAX_TOP_LOGPROBS}")
    if num_top and not wants:
        raise _wrong("logprobs", "true where top_logprobs is given")
    conversation = [_read_message(message, i) for i, message in enumerate(messages)]
    prompt = Prompt(messages=conversation, **_prompt_options(given))
    given.setdefault("max_tokens", None)
    return _ask(given, (prompt,), num_top if wants else None)


def read_completion(body: Mapping[str, Any]) -> Ask:
    """The body of completions. Raises InvalidRequestError."""
    given = _known(body, COMPLETION)
    if given.pop("best_of", None) not in (None, given.get("n", 1)):
        raise _wrong("best_of", "as large as n")
    options = _prompt_options(given)
    prompts = tuple(
        Prompt(**{**options, "text" if isinstance(prompt, str) else "token_ids": prompt})
        for prompt in _prompts(given.get("prompt"))
    )
    return _ask(given, prompts, given.get("logprobs"))


def _ask(given: Mapping[str, Any], prompts: tuple[Prompt, ...], logprobs: int | None) -> Ask:
    sampling = {name: given[name] for name in SAMPLING & given.keys()}
    if "logit_bias" in given:
        sampling["logit_bias"] = _read_bias(given["logit_bias"])
    structure = _read_structure(given)
    is_streamed = _flag(given, "stream")
    model = given.get("model")
    if not isinstance(model, str | None):
        raise _wrong("model", "text")
    aliases = {name: alias for name, alias in ALIASES.items() if alias in given}
    try:
        params = SamplingParams(**sampling, logprobs=logprobs, structured_outputs=structure)
    except InvalidRequestError as error:
        raise _in_words(error, aliases) from error
    if len(prompts) * params.n > MAX_COMPLETIONS:
        raise _wrong("n", f"so small that all prompts together have {MAX_COMPLETIONS} completions")
    return Ask(
        prompts=prompts,
        params=params,
        model=model,
        aliases=aliases,
        is_streamed=is_streamed,
        wants_usage=_wants_usage(given, is_streamed),
    )


def _wants_usage(given: Mapping[str, Any], is_streamed: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not is_streamed:
        raise _wrong("stream_options", "absent where stream is not true")
    if not isinstance(options, dict) or options.keys() - {*STREAM_OPTIONS}:
        raise _wrong("stream_options", f"an object with {' and '.join(STREAM_OPTIONS)} at most")
    flags = {name: _flag(options, name, "stream_options.") for name in STREAM_OPTIONS}
    return flags["include_usage"]


def _known(body: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The fields that are given: null is as good as nothing. Refuses all that is not known."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise InvalidRequestError(f"{name} is not supported", parameter=name)
    wanted = [name for name in given if name not in NEUTRAL and name not in IGNORED]
    refuse_names("{} is not a field of this request", wanted, names)
    return {name: value for name, value in given.items() if name in names}


def _read_message(message: Any, index: int) -> Any:
    """A message without its empty fields, which clients send back as they got them.

    What is no message is left to the chat template's reader, which knows how to refuse it.
    """
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list) and len(content) > MAX_PARTS:
        raise _wrong(f"messages[{index}].content", f"of {MAX_PARTS} parts at most")
    parts = content if isinstance(content, list) else []
    for number, part in enumerate(parts):
        # A name of the caller's own would be taken at its word, whoever else uses it.
        if isinstance(part, dict) and "uuid" in part:
            path = f"messages[{index}].content[{number}].uuid"
            raise InvalidRequestError(f"{path} is taken in the process only", parameter=path)
        parts[number] = _with_bytes(part)
    return {
        name: value
        for name, value in message.items()
        if name in ("role", "content") or value not in (None, [])
    }


def _with_bytes(part: Any) -> Any:
    """A part whose base64 was decoded as the body was read, as one that holds the bytes."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in MEDIA_PARTS:
        return part
    item = part.get(kind)
    if isinstance(item, dict) and (kind != "input_audio" or isinstance(item.get("format"), str)):
        item = item.get("data" if kind == "input_audio" else "url")
    modality = MEDIA_PARTS[kind]
    return {"type": modality, modality: item} if isinstance(item, bytes) else part


def _prompts(given: Any) -> Sequence[str | list[int]]:
    """One or many of the forms that a prompt has."""
    if isinstance(given, str) or (given and _is_prompt(given)):
        return [given]
    many = given if isinstance(given, list) else []
    if len(many) > MAX_PROMPTS:
        raise _wrong("prompt", f"a list of {MAX_PROMPTS} prompts at most")
    if not many or not all(map(_is_prompt, many)):
        raise _wrong("prompt", "text, token ids, or a list of either")
    return many


def _is_prompt(value: Any) -> bool:
    """Return whether it is text, or token ids."""
    are_ids = isinstance(value, list) and all(type(token_id) is int for token_id in value)
    return are_ids or isinstance(value, str)


def _prompt_options(given: Mapping[str, Any]) -> dict[str, Any]:
    salt = given.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARACTERS:
        raise _wrong("cache_salt", f"text of {MAX_SALT_CHARACTERS} characters at most")
    return {name: given[name] for name in ("cache_salt", "mm_processor_kwargs") if name in given}


def _read_bias(given: Any) -> dict[int, Any]:
    """JSON's keys are text."""
    if not isinstance(given, dict) or not all(TOKEN_ID.fullmatch(key) for key in given):
        raise _wrong("logit_bias", "an object whose keys are token ids")
    return {int(key): value for key, value in given.items()}


def _read_structure(given: Mapping[str, Any]) -> StructuredOutputs | None:
    """`response_format`, or the engine's own `structured_outputs`."""
    own, wanted = given.get("structured_outputs"), given.get("response_format")
    if own is not None and wanted is not None:
        raise _wrong("structured_outputs", "absent where response_format is given")
    if own is not None:
        if not isinstance(own, dict):
            raise _wrong("structured_outputs", f"an object with one of {', '.join(STRUCTURES)}")
        return StructuredOutputs(**own)
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    described = wanted.get("json_schema") if kind == "json_schema" else None
    if isinstance(described, dict) and isinstance(described.get("schema"), dict):
        try:
            return StructuredOutputs(json=described["schema"])
        except InvalidRequestError as error:
            raise _in_words(error, ALIASES) from error
    raise _wrong("response_format", "of type text, json_object, or json_schema with a schema")


def _in_words(error: Exception, aliases: Mapping[str, str]) -> Exception:
    name = getattr(error, "parameter", None) or ""
    alias = aliases.get(name.partition(".")[0])
    return error.for_parameter(alias) if alias and isinstance(error, InvalidRequestError) else error


def _flag(given: Mapping[str, Any], name: str, path: str = "") -> bool:
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise _wrong(path + name, "true or false")
    return bool(value)


def _wrong(name: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {rule}", parameter=name)
