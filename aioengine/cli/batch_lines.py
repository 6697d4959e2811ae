"""Lines of `aioengine batch`: requests in two forms, and their answers in the same."""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, Prompt, RequestOutput, SamplingParams, StructuredOutputs
from aioengine.cli.checks import in_flags
from aioengine.cli.options import media_item
from aioengine.cli.prompts import (
    MODALITIES,
    MediaItems,
    in_own_words,
    prompt_of,
    sampling_params,
)
from aioengine.engine.bulk import answer
from aioengine.engine.prompts import PromptLike
from aioengine.errors import (
    AioEngineError,
    EngineError,
    InvalidRequestError,
    MediaError,
    refuse_names,
)

__all__ = ["MAX_LINE_BYTES", "LineForm", "OpenAILines", "PlainLines", "digest_of", "form_of"]

DIGEST_CHARACTERS = 12
MAX_LINE_BYTES = 4 << 20
"""Of a line; of a longer one so much is read. Images go into files beside it."""
NOT_TAKEN = {"n", "logprobs", "prompt_logprobs", "detokenize", "logits_processors"}
"""Fields of SamplingParams that an answer of one text has no use for, or a line cannot say."""
SAMPLING = {each.name for each in fields(SamplingParams)} - NOT_TAKEN
OWN = {"custom_id", "prompt", "messages", *(f"{modality}s" for modality in MODALITIES)}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

Fields = Mapping[str, Any]


def digest_of(line: bytes) -> str:
    """A line's mark in its answer, by which a later run knows it again."""
    return sha256(line.strip()).hexdigest()[:DIGEST_CHARACTERS]


class LineForm(ABC):
    """A form of lines, for one engine that runs."""

    def __init__(self, engine: AsyncEngine, options: argparse.Namespace) -> None:
        self.engine = engine
        self.options = options
        self.num_failed = 0

    async def answer(self, number: int, line: bytes) -> bytes:
        """The answer to line `number`, as a line; what is wrong with a request is one too.

        Raises EngineError.
        """
        found: dict[str, Any] = {"id": f"line-{number}-{digest_of(line)}"}
        given: Fields = {}
        try:
            given = read_fields(line)
            name = given.get("custom_id")
            if not isinstance(name, str | int | None):
                message = f"custom_id must be text or an integer, not {type(name).__name__}"
                raise InvalidRequestError(message, parameter="custom_id")
            found |= {} if name is None else {"custom_id": name}
            found |= await self.reply(given)
        except EngineError:
            raise
        except AioEngineError as error:
            self.num_failed += 1
            found |= self.failure(error)
        try:
            return json.dumps(found, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half a character, as an escape alone can say it
            return json.dumps(found).encode() + b"\n"

    @abstractmethod
    async def reply(self, given: Fields) -> dict[str, Any]:
        """Fields of the answer. Raises AioEngineError."""

    @abstractmethod
    def failure(self, error: AioEngineError) -> dict[str, Any]:
        """Fields of an answer to what could not be answered."""


class PlainLines(LineForm):
    """`{"prompt": ..., "images": [...], "max_tokens": ...}`, or `messages` in place of a prompt.

    A line that is a JSON string is a prompt too. Sampling parameters have SamplingParams' names.
    """

    def __init__(self, engine: AsyncEngine, options: argparse.Namespace) -> None:
        super().__init__(engine, options)
        self._params = sampling_params(engine, options)

    async def reply(self, given: Fields) -> dict[str, Any]:
        """See `LineForm`."""
        refuse_names("a line has no field {}", given, SAMPLING | OWN)
        sampling = {name: value for name, value in given.items() if name in SAMPLING}
        bias = sampling.get("logit_bias")
        if isinstance(bias, dict):  # JSON's keys are text
            sampling["logit_bias"] = {
                int(key) if key.isdecimal() else key: value for key, value in bias.items()
            }
        structure = sampling.get("structured_outputs")
        if isinstance(structure, dict):
            sampling["structured_outputs"] = StructuredOutputs(**structure)
        params = replace(self._params, **sampling)
        media = self._media(given)
        prompt = self._prompt(given, [(kind, item) for _, kind, item in media])
        try:
            output = await answer(self.engine.generate, prompt, params)
        except InvalidRequestError as error:
            places = [(kind, place) for place, kind, _ in media]
            message = len(prompt) - 1 if isinstance(prompt, list) else 0
            raise in_own_words(error, places, message) from error
        usage = {k: v for k, v in asdict(output.usage).items() if k.endswith("_tokens")}
        reason = output.outputs[0].finish_reason
        return {"text": output.text, "finish_reason": reason, "usage": usage}

    def failure(self, error: AioEngineError) -> dict[str, Any]:
        """See `LineForm`."""
        parameter = getattr(error, "parameter", None)
        kind = type(error).__name__
        text = in_flags(error) if isinstance(error, MediaError) else str(error)
        return {"error": {"type": kind, "parameter": parameter, "message": text}}

    def _media(self, given: Fields) -> list[tuple[str, str, str | Path]]:
        """The items of a line: where each stands, its modality and what it is."""
        places = [
            (f"{modality}s[{index}]", modality, item)
            for modality in MODALITIES
            for index, item in enumerate(_listed(given, f"{modality}s"))
        ]
        return [(place, modality, self._item(item, place)) for place, modality, item in places]

    def _prompt(self, given: Fields, media: MediaItems) -> PromptLike:
        prompt, messages = given.get("prompt"), given.get("messages")
        if (prompt is None) == (messages is None):
            message = "a line has one of prompt and messages"
            raise InvalidRequestError(message, parameter="prompt")
        if isinstance(prompt, str):
            return prompt_of(self.engine, self.options, prompt, media)
        by_modality: dict[str, list[Any]] = {}
        for modality, item in media:
            by_modality.setdefault(modality, []).append(item)
        if messages is not None and not isinstance(messages, list):
            message = f"messages must be a list of messages, not {type(messages).__name__}"
            raise InvalidRequestError(message, parameter="messages")
        return Prompt(token_ids=prompt, messages=messages, media=by_modality)

    def _item(self, item: object, parameter: str) -> str | Path:
        """A URL, or a file that lies where files may be read."""
        try:
            if not isinstance(item, str):
                message = f"{parameter} must be a file's path or a URL, not {type(item).__name__}"
                raise InvalidRequestError(message, parameter=parameter)
            *roots, folder = self.options.local_roots
            found = media_item(item, Path(folder))
        except argparse.ArgumentTypeError as error:
            raise InvalidRequestError(f"{parameter}: {error}", parameter=parameter) from error
        if isinstance(found, Path):
            found = found.resolve()
            if not any(found.is_relative_to(Path(root).resolve()) for root in [*roots, folder]):
                message = (
                    f"{parameter} lies outside of the folder of the lines; name its own with "
                    "--local-roots"
                )
                raise InvalidRequestError(message, parameter=parameter)
        return found


class OpenAILines(LineForm):
    """OpenAI's batch files: `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`.

    The model that a body names is not looked at: it is the one that was loaded.
    """

    def __init__(self, engine: AsyncEngine, options: argparse.Namespace) -> None:
        super().__init__(engine, options)
        from aioengine.asgi import error_responses
        from aioengine.asgi.api import chat, completions
        from aioengine.engine.detokenizer import TokenTexts

        self._api_error = error_responses.api_error
        self._endpoints = dict(
            zip(
                ENDPOINTS,
                (
                    (chat.read_chat, chat.ChatAnswer),
                    (completions.read_completion, completions.TextAnswer),
                ),
                strict=True,
            )
        )
        self._texts = TokenTexts(engine.tokenizer)

    async def reply(self, given: Fields) -> dict[str, Any]:
        """See `LineForm`."""
        url, body = given.get("url"), given.get("body")
        if given.get("method", "POST") != "POST" or url not in ENDPOINTS:
            message = f"a line is a POST to {' or '.join(ENDPOINTS)}"
            raise InvalidRequestError(message, parameter="url")
        if not isinstance(body, dict):
            raise InvalidRequestError("body must be an object", parameter="body")
        read, kind = self._endpoints[url]
        ask = read(body)
        if len(ask.prompts) != 1 or ask.is_streamed:
            message = "a line has one prompt, and is answered as a whole"
            raise InvalidRequestError(message, parameter="body")
        whole = kind(self.engine.model_name, self._texts, ask)
        try:
            output: RequestOutput = await answer(self.engine.generate, ask.prompts[0], ask.params)
        except InvalidRequestError as error:
            raise ask.in_its_words(error) from error
        return _response(200, whole.id, await whole.complete([output]))

    def failure(self, error: AioEngineError) -> dict[str, Any]:
        """See `LineForm`."""
        found = self._api_error(error)
        return _response(found.status, None, found.body)


def form_of(line: bytes) -> type[LineForm]:
    """The form of a file whose first line is this."""
    try:
        given = read_fields(line)
    except InvalidRequestError:
        return PlainLines
    return OpenAILines if "body" in given else PlainLines


def read_fields(line: bytes) -> Fields:
    """The object of a line, or the one that a string stands for. Raises InvalidRequestError."""
    if len(line) > MAX_LINE_BYTES:
        message = f"the line has more than {MAX_LINE_BYTES >> 20} MiB; put media into files"
        raise InvalidRequestError(message, parameter="line")
    try:
        found = json.loads(line.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:
        message = f"the line is not JSON: {error!s:.100}"
        raise InvalidRequestError(message, parameter="line") from None
    if isinstance(found, str):
        return {"prompt": found}
    if not isinstance(found, dict):
        message = f"a line is a JSON object or string, not {type(found).__name__}"
        raise InvalidRequestError(message, parameter="line")
    return found


def _listed(given: Fields, name: str) -> list[Any]:
    """The items of a field, of which one may stand without a list."""
    found = given.get(name, [])
    return found if isinstance(found, list) else [found]


def _response(status: int, request_id: str | None, body: object) -> dict[str, Any]:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"response": response, "error": None}
