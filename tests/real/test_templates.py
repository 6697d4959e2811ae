"""Chat templates as model families publish them: transformers' own prompts to the byte, literals
that stay text, and answers in the template's own words read back into the message."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
from transformers import AddedToken

from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.renderer import ChatPrompt, ChatRenderer
from aioengine.processors.chat.tools import read_tools
from aioengine.processors.text_only import TextOnlyDummyInputs, TextOnlyInfo, TextOnlyProcessor
from tests.processors.conftest import context_of, make_tokenizer, save_llava
from tests.processors.test_answers import read_pieces
from tests.real.conftest import asset


class Published(NamedTuple):
    """A template: its format's name, its special tokens (its first token, its last, and others),
    added tokens that are none, and the conversations that it refuses."""

    format: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    thinks: bool = True


IM = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
HEADER = ("<|start_header_id|>", "<|end_header_id|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
           "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
GEMMA = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|channel>", "<channel|>",
         "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
         "<|think|>")  # fmt: skip
HARMONY = ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
           "<|constrain|>", "<|call|>")  # fmt: skip
PUBLISHED = {
    "qwen3": Published("hermes", IM, TAGS),
    "qwen3.5": Published("hermes", IM, TAGS),
    "hermes3": Published("hermes", ("<|begin_of_text|>", *IM[1:]), thinks=False),
    "llama3.1": Published("llama3", LLAMA + HEADER, refused=("parallel",), thinks=False),
    "mistral-nemo": Published("mistral", MISTRAL, thinks=False),
    "mistral-small3.2": Published(
        "mistral",
        (*MISTRAL, "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        thinks=False,
    ),
    "gemma4": Published("gemma", GEMMA),
    "gpt-oss": Published("harmony", HARMONY, refused=("said and called",)),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "qwen3": [{"enable_thinking": False}],
    "qwen3.5": [{"enable_thinking": False}],
    "llama3.1": [{"tools_in_user_message": False, "date_string": "1 Jan 2026"}],
    "gemma4": [{"enable_thinking": True}],
    "gpt-oss": [{"reasoning_effort": "high"}],
}


def weather(city: str, days: int = 1, more: dict | None = None) -> str:  # type: ignore[type-arg]
    """Tell the weather of a city.

    Args:
        city: Name of the city.
        days: How many days to look ahead.
        more: Whatever else is known.
    """
    return f"{city}, {days}, {more}"


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, text: str = '{"rain": "böig", "mm": 1.5}') -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "weather"}


SYSTEM = {"role": "system", "content": "Be brief.\nUse tools. "}
ASKED = {"role": "user", "content": "Will it rain in Zürich?"}
NESTED = {"city": 'Zürich "}\n', "days": 3, "more": {"a": [1.5, None, True], "b": {}}}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "A tool\n\nknows.",
          "tool_calls": [call(1, **NESTED)]}  # fmt: skip
BOTH = {**CALLED, "tool_calls": [call(1, city="Paris"), call(2, city="Rome", days=2)]}
ANSWERED = {"role": "assistant", "content": "It will, 1.5 mm.", "reasoning_content": "Easy."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "asked": [ASKED],
    "with a system": [SYSTEM, ASKED],
    "called": [SYSTEM, ASKED, CALLED, result(1)],
    "said and called": [ASKED, {**CALLED, "content": "I look."}, result(1)],
    "parallel": [SYSTEM, ASKED, BOTH, result(1), result(2, "dry")],
    "answered": [SYSTEM, ASKED, CALLED, result(1), ANSWERED, {"role": "user", "content": "Why?"}],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Renderer and tokenizer by the name of a template."""
    folder = save_llava(tmp_path_factory.mktemp("llava"))

    @cache
    def make(name: str) -> tuple[ChatRenderer, Any]:
        spec = PUBLISHED[name]
        tokenizer = make_tokenizer("bytes")
        first, last, *others = spec.special
        tokenizer.add_special_tokens(
            {"bos_token": first, "eos_token": last, "additional_special_tokens": others}
        )
        tokenizer.add_tokens([AddedToken(word, special=False) for word in spec.added])
        tokenizer.chat_template = (asset("templates") / f"{name}.jinja").read_text()
        context = context_of(folder)
        context._tokenizer = tokenizer
        info = TextOnlyInfo(context)
        return ChatRenderer(TextOnlyProcessor(info, TextOnlyDummyInputs(info))), tokenizer

    return make


def theirs(
    tokenizer: Any, messages: list[dict[str, Any]], *, asks: bool = True, **options: Any
) -> str:
    """transformers' prompt. One family has its own word for thoughts."""
    read = []
    for message in messages:
        if "reasoning_content" in message:
            message = {**message, "thinking": message["reasoning_content"]}
        read.append(message)
    rendered = tokenizer.apply_chat_template(
        read, tools=[weather], tokenize=False, add_generation_prompt=asks, **options
    )
    return str(rendered)


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_are_transformers_own(made: Any, name: str) -> None:
    renderer, tokenizer = made(name)
    tools = read_tools([weather])
    for kind, messages in CONVERSATIONS.items():
        for options in [{}, *OPTIONS.get(name, [])]:
            if kind in PUBLISHED[name].refused:
                with pytest.raises(jinja2.TemplateError):
                    theirs(tokenizer, messages, **options)
                with pytest.raises(InvalidRequestError, match="does not take these messages"):
                    renderer.render(messages, tools=tools, options=options)
                continue
            found = renderer.render(messages, tools=tools, options=options)
            expected = theirs(tokenizer, messages, **options)
            assert tokenizer.decode(found.token_ids, skip_special_tokens=False) == expected, kind
            token_ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
            assert found.token_ids == token_ids and not found.literals
            assert found.answers.name == PUBLISHED[name].format
            assert expected.endswith(found.tail)


PLACES = ("system", "user", "tool result", "argument", "reasoning", "name of an argument")


def hostile(place: str, text: str) -> list[dict[str, Any]]:
    """A conversation with the text in one place."""
    said = {each: text if each == place else "x" for each in PLACES}
    arguments = {"city": said["argument"], "k " + said["name of an argument"]: 1}
    return [
        {"role": "system", "content": said["system"]},
        {"role": "user", "content": said["user"]},
        {**CALLED, "reasoning_content": said["reasoning"], "tool_calls": [call(1, **arguments)]},
        result(1, said["tool result"]),
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_literals_stay_text(made: Any, name: str, place: str) -> None:
    """The prompt reads as transformers writes it, and has the template's special tokens alone."""
    renderer, tokenizer = made(name)
    words = PUBLISHED[name].special
    special = set(tokenizer.convert_tokens_to_ids(words))
    tools = read_tools([weather])

    def found(text: str) -> list[int]:
        token_ids = renderer.render(hostile(place, text), tools=tools).token_ids
        expected = theirs(tokenizer, hostile(place, text))
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == expected
        return [each for each in token_ids if each in special]

    plain = found("x")
    assert plain  # the template's own
    for word in words:
        assert found(f"a{word}b") == plain, word
    joined = "".join(words)
    assert found(f"a{joined}b") == found(f"a {words[-1][:3]}") == plain


def an_answer(tokenizer: Any, message: dict[str, Any]) -> tuple[str, str]:
    """A prompt, and the message as the template writes it behind, without the end of its turn."""
    prompt = theirs(tokenizer, [ASKED])
    whole = theirs(tokenizer, [ASKED, message], asks=False)
    assert whole.startswith(prompt.removesuffix("<think>\n"))
    ends = "|".join(map(re.escape, ("<|im_end|>", "<|eot_id|>", "</s>", "<turn|>", "<|call|>",
                                    "<|return|>", "<|tool_response>")))  # fmt: skip
    return prompt, re.sub(f"({ends})\\s*$", "", whole[len(prompt) :])


def read_all(prompt: ChatPrompt, answer: str) -> dict[str, Any]:
    """The message of an answer, the same however it is cut."""
    whole = read_pieces(prompt.new_parser(), [answer])
    assert read_pieces(prompt.new_parser(), [*answer]) == whole
    for cut in range(len(answer)):
        parts = [answer[:cut], answer[cut:]]
        assert read_pieces(prompt.new_parser(), parts) == whole, cut
    return whole


def answer_kinds(name: str) -> dict[str, dict[str, Any]]:
    """Messages that the template can write, and whose writing is no other message's."""
    spec = PUBLISHED[name]
    words = "".join(spec.special).replace('<|"|>', "")
    tags = "".join(("</tool_call>", "<tool_call>", '{"a": [', "```", "; "))
    literal = tags if name == "gpt-oss" else words + tags
    kinds = {
        "an answer": ANSWERED,
        "a call": CALLED,
        "calls": BOTH,
        "literals in arguments": {**CALLED, "tool_calls": [call(1, city=literal, days=1)]},
    }
    if spec.refused:
        del kinds["calls"]
    return kinds


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_in_the_words_of_the_template(made: Any, name: str) -> None:
    renderer, tokenizer = made(name)
    prompt = renderer.render([ASKED], tools=read_tools([weather]))
    for kind, message in answer_kinds(name).items():
        if not PUBLISHED[name].thinks:
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
        text, answer = an_answer(tokenizer, message)
        assert text.endswith(prompt.tail[-20:])
        found = read_all(prompt, answer)
        assert found["content"] == message["content"], kind
        assert found["reasoning"] == message.get("reasoning_content", ""), kind
        calls = [(each[0], json.loads(each[1])) for each in found["calls"]]
        wanted = [each["function"] for each in message.get("tool_calls", [])]
        assert calls == [(each["name"], each["arguments"]) for each in wanted], kind


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_around_calls_and_calls_that_break_off(made: Any, name: str) -> None:
    renderer, tokenizer = made(name)
    message = {**CALLED, "tool_calls": [call(1, city="Paris", days=3)]}
    del message["reasoning_content"]
    prompt = renderer.render([ASKED], tools=read_tools([weather]))
    _, answer = an_answer(tokenizer, message)
    if name not in ("llama3.1", "gpt-oss"):  # where an answer is calls alone, or messages
        before = "</think>I look." if prompt.tail.rstrip().endswith("<think>") else "I look."
        answer = answer.removeprefix("<think>\n\n</think>\n\n").removeprefix("</think>")
        answer = answer.removeprefix("\n</think>\n\n")
        after = "" if name.startswith("mistral") else "\nDone."
        found = read_all(prompt, before + answer + after)
        assert found["content"] == "I look." + after.strip()
        assert json.loads(found["calls"][0][1]) == {"city": "Paris", "days": 3}
    for end in range(len(answer)):  # no call is lost, and none comes twice
        found = read_pieces(prompt.new_parser(), [answer[:end]])
        assert found == read_pieces(prompt.new_parser(), [*answer[:end]])
        assert len(found["calls"]) <= 1


def test_there_are_no_others() -> None:
    names = {path.stem for path in Path(asset("templates")).iterdir()}
    assert names == set(PUBLISHED)
