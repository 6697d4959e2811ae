"""Bounds on reasoning: in each format, whatever its marks are made of, alone and beside grammars.

A logits processor says what the model would like to write: it thinks for ever, until its thought is
ended, and answers then. It cannot make a token come that the bound does not allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count as counted
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from transformers import AddedToken

from aioengine import AsyncEngine, Message, Prompt, RequestOutput, SamplingParams, StructuredOutputs
from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.formats import FORMATS
from tests.engine.test_messages import said
from tests.processors.test_chat_tools import TEMPLATES, weather
from tests.support.engines import running_engine
from tests.support.grids import rest_is_slow
from tests.support.tiny import EOS, tiny_llama, tiny_tokenizer

ASKED = [{"role": "user", "content": "Will it rain in Paris?"}]
TALK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Form(NamedTuple):
    """How a model of a format thinks: the end of its prompt, what begins and ends its thoughts, and
    what stands before its answer."""

    template: str
    begin: str
    end: str
    before: str = ""


FORMS = {
    "thinking": Form(TALK + "<think>\n", "", "</think>"),
    "hermes": Form(TEMPLATES["hermes"], "<think>", "</think>"),
    "deepseek": Form(TALK + "{# <｜tool▁calls▁begin｜> #}<think>", "", "</think>"),
    "mistral": Form(TEMPLATES["mistral"], "[THINK]", "[/THINK]"),
    "gemma": Form(TEMPLATES["gemma"], "<|channel>thought", "<channel|>"),
    "harmony": Form(
        TEMPLATES["harmony"],
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    "described": Form(TALK + "A:<think>", "", "</think>"),
}
MARKS = ("special", "added", "letters")
DESCRIBED = {
    "start_anchor": "A:",
    "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {}},
}
THOUGHT = "it may rain, or the sun may shine; who knows? "
ANSWER = "Yes."


def save(folder: Path, name: str, marks: str) -> None:
    """A model of a format, whose marks are special tokens, other tokens, or letters."""
    form, tokenizer = FORMS[name], tiny_tokenizer()
    if marks != "letters":
        words = {form.end, *(FORMATS[name].marks if name in FORMATS else ("<think>",))}
        added = [AddedToken(word, special=marks == "special") for word in sorted(words)]
        tokenizer.add_tokens(added)
    tokenizer.chat_template = form.template
    if name == "described":
        tokenizer.response_template = DESCRIBED
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)


class Wish:
    """A logits processor of what the model would like to write.

    `lengths`: of its thoughts, which it begins anew as often; behind the last it answers.
    """

    def __init__(self, tokenizer: Any, form: Form, lengths: Sequence[int] = (10**6,)) -> None:
        def encode(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        self.tokenizer, self.form, self.lengths = tokenizer, form, lengths
        self.end, self.thought = encode(form.end), encode(THOUGHT)
        self.begin = encode(form.begin)
        again = f"{'<|start|>assistant' if form.before else ''}{form.begin or '<think>'}"
        self.again, self.answer = encode(again), [*encode(form.before + ANSWER), EOS]

    def tokens(self, budget: int) -> list[int]:
        """What comes of it."""
        found, left = [], budget
        for number, length in enumerate(self.lengths):
            found += self.again if number else self.begin
            used = min(length, left)
            found += [*islice(cycle(self.thought), used), *self.end]
            left -= used
        return found + self.answer

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        logits.zero_()[self.next(list(token_ids))] = 100.0
        return logits

    def next(self, token_ids: list[int]) -> int:
        """The token that it would like to come."""
        for number, length in enumerate(self.lengths):
            begin = self.again if number else self.begin
            at = next(n for n in counted() if self.ends(token_ids[:n]) or n >= len(token_ids))
            if not self.ends(token_ids[:at]):
                wanted = [*begin, *islice(cycle(self.thought), min(length, 400)), *self.end]
                return wanted[len(token_ids)]
            token_ids = token_ids[at:]
        return self.answer[len(token_ids)]

    def ends(self, token_ids: list[int]) -> bool:
        """Whether the tokens end a thought."""
        return self.form.end in self.tokenizer.decode(token_ids, skip_special_tokens=False)


def asking(wish: Wish, budget: int | None, **options: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": 300, **options}
    return SamplingParams(thinking_budget=budget, logits_processors=[wish], **settings)


def check(engine: AsyncEngine, wish: Wish, budget: int, output: RequestOutput) -> None:
    assert [*output.token_ids] == wish.tokens(budget), output.text
    thought = engine.tokenizer.decode([*islice(cycle(wish.thought), budget)])
    assert output.message == Message(ANSWER, thought.strip())
    assert output.usage.completion_tokens == len(output.token_ids)
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "marks"), rest_is_slow(product(FORMS, MARKS), [*zip(FORMS, cycle(MARKS))])
)
async def test_each_format(tmp_path: Path, name: str, marks: str) -> None:
    save(tmp_path, name, marks)
    async with running_engine(tmp_path) as engine:
        wish = Wish(engine.tokenizer, FORMS[name])
        for budget in (0, 1, 5):
            params = asking(wish, budget)
            check(engine, wish, budget, await engine.generate(ASKED, params))
            async with engine.stream(ASKED, params) as stream:
                deltas = [delta async for delta in stream]
                output = await stream.result()
            check(engine, wish, budget, output)
            assert said(deltas) == output.message
        # A thought that ends before is not touched, nor is one without a bound. Of the mark that
        # ends it, some letters may come before the bound.
        short = Wish(engine.tokenizer, FORMS[name], [5])
        for bound in (None, *range(5, 7 + len(short.end)), 100):
            check(engine, short, 5, await engine.generate(ASKED, asking(short, bound)))
        cut = await engine.generate(ASKED, asking(wish, 5, max_tokens=len(wish.begin) + 2))
        assert cut.message is not None and not cut.message.content
        assert cut.outputs[0].finish_reason == "length"


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hermes")
    save(folder, "hermes", "letters")
    return folder


@pytest.mark.parametrize("name", ["hermes", "harmony"])
async def test_thoughts_that_come_again_share_the_bound(tmp_path: Path, name: str) -> None:
    save(tmp_path, name, "special")
    async with running_engine(tmp_path) as engine:
        wish = Wish(engine.tokenizer, FORMS[name], [3, 10, 10])
        output = await engine.generate(ASKED, asking(wish, 5))
        assert [*output.token_ids] == wish.tokens(5)
        assert output.message is not None and output.message.content == ANSWER


async def test_the_end_comes_once_where_a_stop_string_holds_it_back(hermes: Path) -> None:
    async with running_engine(hermes) as engine:
        wish = Wish(engine.tokenizer, FORMS["hermes"])
        output = await engine.generate(ASKED, asking(wish, 5, stop=[">>"]))
        # So is the last letter of what begins the thought, which is seen a token late.
        assert [*output.token_ids] == wish.tokens(6)
        assert output.message is not None and output.message.content == ANSWER


@pytest.mark.parametrize("marks", MARKS)
async def test_the_models_own_end_held_back_by_a_stop_string(tmp_path: Path, marks: str) -> None:
    save(tmp_path, "hermes", marks)
    async with running_engine(tmp_path) as engine:
        wish = Wish(engine.tokenizer, FORMS["hermes"], [5])
        for bound in range(5, 9):
            asked = asking(wish, bound, stop=["</think>Z"])
            check(engine, wish, 5, await engine.generate(ASKED, asked))


async def test_company_and_preemption_change_nothing(hermes: Path) -> None:
    scarce: dict[str, Any] = {"block_size": 8, "max_model_len": 128, "enable_prefix_caching": False}
    scarce["kv_cache_bytes"] = 20 * 8 * 2 * 2 * 24 * 8
    async with running_engine(hermes, **scarce) as engine:
        wish = Wish(engine.tokenizer, FORMS["hermes"])
        budgets = [3, 0, 7, 1, 5, 9, 30, 12]
        asked = [engine.generate(ASKED, asking(wish, each, max_tokens=100)) for each in budgets]
        for budget, output in zip(budgets, await asyncio.gather(*asked), strict=True):
            assert [*output.token_ids] == wish.tokens(budget)
        output = await engine.generate(ASKED, asking(wish, 4, n=2, max_tokens=60))
        assert [[*each.token_ids] for each in output.outputs] == [wish.tokens(4)] * 2
        assert engine.statistics().preemptions > 0


@pytest.mark.parametrize("marks", ["special", "added", "letters"])
async def test_beside_a_tool_that_has_to_be_called(tmp_path: Path, marks: str) -> None:
    save(tmp_path, "hermes", marks)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["hermes"] + "<think>\n")
    async with running_engine(tmp_path, max_model_len=1024) as engine:
        for seed, budget in enumerate((0, 5)):
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=200, thinking_budget=budget
            )
            output = await engine.generate(ASKED, params, tools=[weather], tool_choice="required")
            message = output.message
            assert message is not None and message.tool_calls and not message.content
            decode = engine.tokenizer.decode
            texts = [decode([*output.token_ids[:n]]) for n in range(len(output.token_ids))]
            end = len(engine.tokenizer.encode("</think>", add_special_tokens=False))
            at = next(n for n, text in enumerate(texts) if "</think>" in text)
            assert at <= budget + end + 3  # bytes of a character
            if output.outputs[0].finish_reason == "stop":
                assert isinstance(message.tool_calls[0].read(), dict)


async def test_where_it_can_have_no_meaning(hermes: Path, tmp_path: Path) -> None:
    params = SamplingParams(thinking_budget=3)
    async with running_engine(hermes) as engine:
        for prompt in ("Hello", [1, 2, 3], Prompt(token_ids=[1, 2])):
            with pytest.raises(InvalidRequestError, match="no messages") as caught:
                await engine.generate(prompt, params)
            assert caught.value.parameter == "thinking_budget"
    for template in (TEMPLATES["llama3"], TALK):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
        async with running_engine(tmp_path) as engine:
            with pytest.raises(InvalidRequestError, match="no reasoning") as caught:
                await engine.generate(ASKED, params)
            assert caught.value.parameter == "thinking_budget"


async def test_where_another_parameter_forbids_its_end(hermes: Path) -> None:
    async with running_engine(hermes) as engine:
        end = engine.tokenizer.encode("</think>", add_special_tokens=False)
        for name, value, fits in (
            ("bad_words", ["rain", "</think>"], ["rain"]),
            ("allowed_token_ids", end[:-1], [5, 6, *end]),
        ):
            params = {"thinking_budget": 0, "max_tokens": 2, name: fits}
            await engine.generate(ASKED, SamplingParams(**params))
            with pytest.raises(InvalidRequestError, match=f"{name} forbids </think>") as caught:
                await engine.generate(ASKED, SamplingParams(**{**params, name: value}))
            assert caught.value.parameter == "thinking_budget"


def test_params() -> None:
    wrong: list[dict[str, Any]] = [
        {"thinking_budget": -1},
        {"thinking_budget": 1.5},
        {"thinking_budget": True},
        {"thinking_budget": 0, "detokenize": False},
        {"thinking_budget": 5, "structured_outputs": StructuredOutputs(regex="a")},
    ]
    for options in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**options)
        assert caught.value.parameter == "thinking_budget"
    assert SamplingParams(thinking_budget=0).thinking_budget == 0
