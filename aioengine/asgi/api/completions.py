"""completions: prompts in, texts out, whole and in chunks."""

from __future__ import annotations

import codecs
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aioengine.asgi.api.answers import ChoicesAnswer, finite, most_probable
from aioengine.asgi.api.asks import Ask, make_ask, prompt_options, wrong
from aioengine.asgi.api.fields import COMPLETIONS, known
from aioengine.types import CompletionOutput, Delta, Prompt, TokenLogprobs

__all__ = ["TextAnswer", "read_completion", "read_prompts"]

MAX_PROMPTS = 128
MEDIA = dict.fromkeys(("images", "audios", "videos"), "prompt")
"""What a model may want beside a prompt, and this endpoint does not take."""


def read_completion(body: Mapping[str, Any]) -> Ask:
    """The body of completions. Raises InvalidRequestError."""
    given = known(body, COMPLETIONS)
    if given.pop("best_of", None) not in (None, given.get("n", 1)):
        raise wrong("best_of", "as large as n")
    options = prompt_options(given)
    listed = read_prompts(given.get("prompt"), "prompt", MAX_PROMPTS)
    prompts = tuple(
        Prompt(**{**options, "text" if isinstance(prompt, str) else "token_ids": prompt})
        for prompt in listed
    )
    ask = make_ask(given, prompts, given.get("logprobs"))
    return replace(ask, are_listed=listed is given["prompt"], aliases={**ask.aliases, **MEDIA})


def read_prompts(given: Any, name: str, most: int) -> Sequence[str | list[int]]:
    """One or many of the forms that a prompt has; many are the list that is given.

    Raises InvalidRequestError.
    """
    if isinstance(given, str) or (given and _is_prompt(given)):
        return [given]
    many = given if isinstance(given, list) else []
    if len(many) > most:
        raise wrong(name, f"a list of {most} prompts at most")
    if not many or not all(map(_is_prompt, many)):
        raise wrong(name, "text, token ids, or a list of either")
    return many


def _is_prompt(value: Any) -> bool:
    """Return whether it is text, or token ids."""
    are_ids = isinstance(value, list) and all(type(token_id) is int for token_id in value)
    return are_ids or isinstance(value, str)


class TextAnswer(ChoicesAnswer):
    """Answers of completions."""

    whole = chunk = "text_completion"
    prefix = "cmpl-"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: Counter[int] = Counter()
        new_reader = partial(codecs.getincrementaldecoder("utf-8"), "replace")
        self._readers: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(new_reader)

    def _content(self, output: CompletionOutput) -> dict[str, Any]:
        return {"text": output.text, "finish_reason": output.finish_reason}

    def _addition(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "finish_reason": delta.finish_reason}

    def _rest(self) -> dict[str, Any]:
        return {"text": ""}

    def _is_empty(self, delta: Delta) -> bool:
        return not delta.text

    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens, chosen, top, offsets = [], [], [], []
        for position in positions:
            texts = [self._texts.text(token_id) for token_id in position]
            found = list(position.values())
            tokens.append(texts[0])
            chosen.append(finite(found[0].logprob))
            named = [(text, finite(each.logprob)) for text, each in zip(texts, found, strict=True)]
            best = most_probable(zip(found, named, strict=True), self._num_logprobs)
            top.append(dict([*best, named[0]]))  # the sampled token is always among them
            offsets.append(self._offsets[index])
            token_id = next(iter(position))
            if not self._texts.is_special(token_id):
                # Characters that are whole: a token may be a part of one.
                fresh = self._readers[index].decode(bytes(self._texts.utf8(token_id)))
                self._offsets[index] += len(fresh)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }
