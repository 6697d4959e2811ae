"""Answers to conversations as messages: what is thought, said and called, whole and in deltas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from aioengine import (
    Engine,
    Message,
    Prompt,
    SamplingParams,
    StructuredOutputs,
    ToolCall,
)
from aioengine.errors import InvalidRequestError, PromptTooLongError
from aioengine.types import Delta
from tests.processors.test_chat_tools import TEMPLATES, weather
from tests.support.engines import greedy, running_engine
from tests.support.scripts import script
from tests.support.tiny import tiny_llama, tiny_tokenizer

ASKED = [{"role": "user", "content": "Will it rain in Paris?"}]
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
ANSWERS = {
    "hermes": f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>",
    "mistral": f"[THINK]hm[/THINK]I look.[TOOL_CALLS][{CALL}]",
}
MARKS = ["[TOOL_CALLS]", "[THINK]", "[/THINK]", "<other>"]


@pytest.fixture(scope="module", params=ANSWERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A model whose marks are special tokens, or letters, and whose template knows tools."""
    return save_model(tmp_path_factory.mktemp(name), name)


def save_model(path: Path, name: str) -> Path:
    """Save a tiny model that speaks by a template."""
    tokenizer = tiny_tokenizer()
    if name == "mistral":
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(path)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(path)
    return path


def said(deltas: Sequence[Delta]) -> Message:
    """The message that deltas add up to."""
    calls: dict[int, list[str]] = {}
    for each in (call for delta in deltas for call in delta.tool_calls):
        if each.id is not None and each.name is not None:
            calls[each.index] = [each.id, each.name, ""]
        calls[each.index][2] += each.arguments
    return Message(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(ToolCall(*call) for call in calls.values()),
    )


async def test_an_answer_is_a_message(folder: Path, name: str) -> None:
    async with running_engine(folder, max_model_len=1024) as engine:
        count = script(engine, ANSWERS[name])
        params = SamplingParams(temperature=0, max_tokens=count)
        output = await engine.generate(ASKED, params, tools=[weather])
        message = output.message
        assert message is not None and message == output.outputs[0].message
        assert (message.reasoning, message.content) == ("hm", "I look.")
        (call,) = message.tool_calls
        assert call.name == "weather" and call.read() == {"city": "Paris"} and len(call.id) == 9
        if name == "hermes":
            assert output.text == ANSWERS[name]  # as it came
        async with engine.stream(ASKED, params, tools=[weather]) as stream:
            deltas = [delta async for delta in stream]
            whole = (await stream.result()).message
        assert len(deltas) > 5 and said(deltas) == whole
        assert whole is not None and whole.content == "I look."
        # The conversation goes on with what came of the call.
        result = {"role": "tool", "tool_call_id": call.id, "content": "It will."}
        again = [*ASKED, message.to_dict(), result]
        count = script(engine, "Yes.")
        params = SamplingParams(temperature=0, max_tokens=count)
        output = await engine.generate(again, params, tools=[weather])
        assert output.message == Message("Yes.")
        spoken = Prompt(messages=[*ASKED, message, result], tools=[weather])
        assert list(output.prompt_token_ids) == list(await engine.tokenize(spoken))
        assert [*await engine.tokenize([message, *ASKED])]  # from the first on
        prompt = engine.tokenizer.decode(output.prompt_token_ids)
        assert "hm" in prompt or name == "mistral"
        assert '{"city": "Paris"}' in prompt and "It will." in prompt


async def test_runs_tell_the_order_of_a_message(folder: Path, name: str) -> None:
    async with running_engine(folder, max_model_len=1024) as engine:
        count = script(engine, ANSWERS[name])
        params = SamplingParams(temperature=0, max_tokens=count)
        async with engine.stream(ASKED, params, tools=[weather]) as stream:
            deltas = [delta async for delta in stream]
            (output,) = (await stream.result()).outputs
        assert output.message is not None
        arguments = output.message.tool_calls[0].arguments
        kinds = [(run.kind, run.size, run.call) for run in output.runs]
        assert kinds == [("reasoning", 2, 0), ("content", 7, 0), ("call", len(arguments), 0)]
        num_tokens = [run.num_tokens for run in output.runs]
        assert sum(num_tokens) == count and 0 < num_tokens[1] <= 7 < num_tokens[2]
        for kind, number in zip(("reasoning", "content", "call"), num_tokens, strict=True):
            runs = [run for delta in deltas for run in delta.runs if run.kind == kind]
            assert sum(run.num_tokens for run in runs) == number
        for delta in deltas:
            sizes = [run.size for run in delta.runs if run.kind == "content"]
            assert sum(sizes) == len(delta.content)


async def test_special_tokens_that_are_no_marks_are_left_out(folder: Path, name: str) -> None:
    if name == "hermes":
        pytest.skip("its tokenizer has none")
    async with running_engine(folder) as engine:
        count = script(engine, "a<other>b[TOOL_CALLS]")
        output = await engine.generate(ASKED, SamplingParams(temperature=0, max_tokens=count))
        assert output.message == Message("ab") and output.text == "ab"


async def test_stop_strings_end_a_message(folder: Path) -> None:
    async with running_engine(folder) as engine:
        count = script(engine, "One two three.")
        params = SamplingParams(temperature=0, max_tokens=count, stop=["two"])
        output = await engine.generate(ASKED, params)
        assert output.text == "One " and output.message == Message("One ")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["]", "I look.", "[TOOL_CALLS]", "m", "[{", "THINK", '"}', "k."])
async def test_a_message_stops_where_its_text_does(
    folder: Path, name: str, stop: str, include: bool
) -> None:
    """A mark that the text does not show stops nothing, and is read all the same."""
    async with running_engine(folder, max_model_len=1024) as engine:
        answer = ANSWERS[name]
        count = script(engine, answer)
        params = SamplingParams(
            temperature=0, max_tokens=count, stop=[stop], include_stop_str_in_output=include
        )
        async with engine.stream(ASKED, params, tools=[weather]) as stream:
            deltas = [delta async for delta in stream]
            (found,) = (await stream.result()).outputs
        before, ending, _ = shown(answer).partition(stop)
        assert found.text == before + (ending if include else "")
        assert found.stop_reason == (stop if ending else None)
        assert said(deltas) == found.message
        # The message is that of an answer that ends there, with the marks that it ends with.
        ends = [answer[:end] for end in range(len(answer) + 1)]
        count = script(engine, max(each for each in ends if shown(each) == found.text))
        params = SamplingParams(temperature=0, max_tokens=count)
        wanted = (await engine.generate(ASKED, params, tools=[weather])).message
        assert without_ids(found.message) == without_ids(wanted)


def shown(answer: str) -> str:
    """An answer without its special tokens."""
    for mark in MARKS:
        answer = answer.replace(mark, "")
    return answer


def without_ids(message: Message | None) -> Message:
    assert message is not None
    return replace(message, tool_calls=tuple(replace(c, id="") for c in message.tool_calls))


async def test_other_prompts_have_no_message(folder: Path) -> None:
    async with running_engine(folder) as engine:
        output = await engine.generate("Hello", greedy(3))
        assert output.message is None
        params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
        assert (await engine.generate(ASKED, params)).message is None
        async with engine.stream("Hello", greedy(3)) as stream:
            assert [each.content async for each in stream] == [""] * 3


async def test_what_stands_beside_messages(folder: Path) -> None:
    async with running_engine(folder) as engine:
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ("Hello", {"tools": [weather]}, "tools"),
            ([1, 2], {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            (ASKED, {"tools": [{"name": "<|x|>"}]}, "tools[0].function.name"),
            (ASKED, {"tools": [weather], "tool_choice": "other"}, "tool_choice"),
            (ASKED, {"tool_choice": "required"}, "tool_choice"),
            (ASKED, {"chat_template_kwargs": 3}, "chat_template_kwargs"),
            (Prompt(messages=ASKED, tools=[weather]), {"tools": [weather]}, "tools"),
        ]
        for prompt, options, parameter in wrong:
            with pytest.raises(InvalidRequestError) as caught:
                await engine.generate(prompt, greedy(1), **options)
            assert caught.value.parameter == parameter
        script(engine, "x")
        plain = await engine.generate(ASKED, greedy(1))
        none = await engine.generate(ASKED, greedy(1), tools=[weather], tool_choice="none")
        given = await engine.generate(Prompt(messages=ASKED, tools=[weather]), greedy(1))
        assert none.prompt_token_ids == plain.prompt_token_ids != given.prompt_token_ids


async def test_a_tool_that_has_to_be_called(folder: Path, name: str) -> None:
    other = {"name": "other", "parameters": {"type": "object", "additionalProperties": False}}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=400)
    async with running_engine(folder, max_model_len=1024) as engine:
        for choice, names in (("required", {"weather", "other"}), ("other", {"other"})):
            tools = [weather, other]
            output = await engine.generate(ASKED, params, tools=tools, tool_choice=choice)
            message = output.message
            assert message is not None and message.tool_calls and not message.content
            assert {call.name for call in message.tool_calls} <= names
            if output.outputs[0].finish_reason == "stop":
                assert all(isinstance(call.read(), dict) for call in message.tool_calls)
        structured = replace(params, structured_outputs=StructuredOutputs(regex="a"))
        with pytest.raises(InvalidRequestError, match="exclude each other"):
            await engine.generate(ASKED, structured, tools=[weather], tool_choice="required")
        deep: dict[str, Any] = {"type": "object"}
        for _ in range(60):
            deep = {"type": "object", "properties": {"a": deep}}
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(ASKED, tools=[{"name": "f", "parameters": deep}], tool_choice="f")
        assert str(caught.value.parameter).startswith("tools[0]")
        unknown = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
        tools = [weather, {"name": "odd", "parameters": unknown}]
        with pytest.raises(InvalidRequestError, match="odd cannot be followed") as caught:
            await engine.generate(ASKED, tools=tools, tool_choice="required")
        assert caught.value.parameter == "tools[1].function.parameters"
        assert engine.statistics().encoder_items_run == engine.statistics().running == 0
        free, total = engine.statistics().kv_blocks_free, engine.statistics().kv_blocks_total
        assert free == total


def tool_of(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("properties", [True, -1, 1.5, "city", ["city"]])
async def test_properties_that_are_none(folder: Path, properties: Any) -> None:
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    async with running_engine(folder) as engine:
        with pytest.raises(InvalidRequestError, match="properties") as caught:
            tools = [tool_of("f", schema)]
            await engine.generate(ASKED, greedy(2), tools=tools, tool_choice="required")
        assert caught.value.parameter == "tools[0].function.parameters"


@pytest.mark.parametrize("text", ["a</s>b", "x[TOOL_CALLS]y", "</tool_call>", "<other>"])
async def test_arguments_that_spell_marks(folder: Path, name: str, text: str) -> None:
    fields = {"t": {"enum": [text]}}
    schema = {"type": "object", "properties": fields, "required": ["t"]}
    async with running_engine(folder, max_model_len=1024) as engine:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=200)
        tools = [tool_of("f", schema)]
        output = await engine.generate(ASKED, params, tools=tools, tool_choice="f")
        assert output.message is not None
        (call,) = output.message.tool_calls
        assert call.read() == {"t": text}


@pytest.mark.parametrize("cut", ["\ufffd", "caf\ufffd"])
async def test_what_waits_for_its_end_stands_before_a_mark(
    folder: Path, name: str, cut: str
) -> None:
    async with running_engine(folder, max_model_len=1024) as engine:
        answer = ANSWERS[name].replace("hm", cut).replace("I look.", cut)
        params = SamplingParams(temperature=0, max_tokens=script(engine, answer))
        output = await engine.generate(ASKED, params, tools=[weather])
        message = output.message
        assert message is not None and [call.name for call in message.tool_calls] == ["weather"]
        assert (message.reasoning, message.content) == (cut, cut)


async def test_a_schema_of_a_tool_that_need_not_be_called(folder: Path) -> None:
    large = {"type": "object", "properties": {}, "description": "x" * 70_000}
    tools = [tool_of("f", {"type": "object", "properties": {}}), tool_of("g", large)]
    async with running_engine(folder, max_model_len=1024) as engine:
        for choice in ("g", "required"):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.generate(ASKED, greedy(2), tools=tools, tool_choice=choice)
            assert caught.value.parameter == "tools[1].function.parameters"
        with pytest.raises(PromptTooLongError):  # in the prompt it is all the same
            await engine.generate(ASKED, greedy(2), tools=tools, tool_choice="f")


@pytest.mark.parametrize("tools", [False, 0, 0.0, True, {}, "f"])
async def test_tools_that_are_no_list(folder: Path, tools: Any) -> None:
    async with running_engine(folder) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(ASKED, greedy(2), tools=tools)
        assert caught.value.parameter == "tools"
        with pytest.raises(InvalidRequestError):
            await engine.generate(Prompt(messages=ASKED, tools=tools), greedy(2))
        assert await engine.generate(Prompt(messages=ASKED, tools=None), greedy(2))  # type: ignore[arg-type]


async def test_a_call_in_tags_that_has_to_be_made(tmp_path: Path) -> None:
    schema = {"properties": {"on": {"type": "boolean"}, "kind": {"enum": ["rain", "snow"]}}}
    tool = {"name": "look", "parameters": {**schema, "required": ["on", "kind"]}}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200)
    async with running_engine(save_model(tmp_path, "tags"), max_model_len=1024) as engine:
        output = await engine.generate(ASKED, params, tools=[weather, tool], tool_choice="look")
    assert output.text.startswith("<tool_call>\n<function=look>\n<parameter=on>\n")
    assert output.outputs[0].finish_reason == "stop" and output.message is not None
    (call,) = output.message.tool_calls
    assert call.name == "look" and not output.message.content
    assert call.read()["on"] in (True, False) and call.read()["kind"] in ("rain", "snow")


def test_the_blocking_engine_takes_tools(folder: Path, name: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "kv_cache_bytes": 8 << 20}
    with Engine.from_pretrained(folder, **options) as engine:
        output = engine.generate(ASKED, greedy(2), tools=[weather])
        asked = engine.tokenizer.decode(output.prompt_token_ids)
        assert "Tell the weather of a city." in asked and output.message is not None
        with engine.stream(ASKED, greedy(2), tools=[weather]) as stream:
            assert said([*stream]) is not None
    assert json.loads(json.dumps(output.message.to_dict()))["role"] == "assistant"
