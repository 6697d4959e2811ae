"""Fields of the API's requests, and what becomes of each: done, ignored, or refused for a reason.

A field that is in no table is refused too, so that nobody waits for what a misspelt one should have
done. docs/list_fields.py writes the tables into docs/serving.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from aioengine.errors import InvalidRequestError, refuse_names

__all__ = [
    "ANTHROPIC",
    "BATCHES",
    "BATCH_LIST",
    "BLOCKS",
    "CACHED",
    "CHAT",
    "COMPLETIONS",
    "DETOKENIZE",
    "EMBEDDINGS",
    "FILES",
    "FILE_LIST",
    "KEPT_RESPONSE",
    "MESSAGES",
    "RERANK",
    "RESPONSES",
    "SAMPLING",
    "SCORE",
    "TOKENIZE",
    "TRANSCRIPTIONS",
    "Field",
    "Fields",
    "Handling",
    "done",
    "ignored",
    "known",
    "refused",
]


class Handling(enum.StrEnum):
    """Treatment of a field."""

    DONE = "done"
    IGNORED = "ignored"
    REFUSED = "refused"


class Field(NamedTuple):
    """Handling of a field. `neutral`: values of a refused one that ask for nothing of it."""

    handling: Handling
    note: str = ""
    neutral: tuple[Any, ...] = ()


Fields = Mapping[str, Field]


def done(note: str = "") -> Field:
    """Make a field that does what it says."""
    return Field(Handling.DONE, note)


def ignored(note: str) -> Field:
    """Make a field that may be left out without harm."""
    return Field(Handling.IGNORED, note)


def refused(note: str, *neutral: Any) -> Field:
    """Make a field of what is not built."""
    return Field(Handling.REFUSED, note, neutral)


ACCOUNT = ignored("for OpenAI's own accounts")
CACHED = ignored("prefixes are found by their tokens")
SAMPLING: Fields = dict.fromkeys(
    (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "bad_words", "ignore_eos"),
        *("allowed_token_ids", "skip_special_tokens", "thinking_budget"),
    ),
    done(),
)
"""Fields that SamplingParams takes as they are."""
GENERATION: Fields = {
    **SAMPLING,
    "model": done("a name under which the model is served; without it the one there is"),
    "stream": done("server-sent events"),
    "stream_options": done(
        "`include_usage`; `include_obfuscation` is taken, and nothing is padded"
    ),
    "logit_bias": done(),
    "structured_outputs": done("`regex`, `grammar`, `choice`, `json`: see `StructuredOutputs`"),
    "response_format": done("`text`, `json_object`, `json_schema`"),
    "cache_salt": done("narrows what caches share"),
    "mm_processor_kwargs": done("options of the model's processor"),
    "user": ACCOUNT,
    "metadata": ACCOUNT,
    "store": ACCOUNT,
    "service_tier": ACCOUNT,
    "safety_identifier": ACCOUNT,
    "prompt_cache_key": CACHED,
    "prompt_cache_options": CACHED,
    "prompt_cache_retention": ignored("prefixes stay as long as there is room"),
}
CHAT: Fields = {
    **GENERATION,
    "messages": done("at most 4,096, of at most 4,096 parts each"),
    "max_completion_tokens": done("as `max_tokens`; without either as many as the model may"),
    "logprobs": done("true, with `top_logprobs` of 0 to 20"),
    "top_logprobs": done(),
    "tools": done("functions; `strict` holds where a tool has to be called"),
    "tool_choice": done("`auto`, `none`, `required`, a function, `allowed_tools`"),
    "parallel_tool_calls": done("false: calls behind the first are left out of the answer"),
    "reasoning_effort": done(
        "given to the chat template as `reasoning_effort`, and as `enable_thinking` and `thinking`"
        " (false for `none`)"
    ),
    "chat_template_kwargs": done("values that the chat template asks for"),
    "verbosity": ignored("a hint that open models do not know"),
    "prediction": ignored("a hint that could only make it faster"),
    "functions": refused("give tools", []),
    "function_call": refused("give tool_choice", "none", "auto"),
    "modalities": refused("answers are text", ["text"]),
    "audio": refused("answers are text"),
    "moderation": refused("there is no model that moderates"),
    "web_search_options": refused("nothing is searched; give a tool of your own"),
}
COMPLETIONS: Fields = {
    **GENERATION,
    "prompt": done("text or token ids, one or up to 128"),
    "best_of": done("as large as `n`"),
    "logprobs": done("0 to 128"),
    "echo": refused("answers do not repeat the prompt; put it in front yourself", False),
    "suffix": refused("models go on behind a prompt, not before a suffix", ""),
}
TRANSCRIPTIONS: Fields = {
    "file": done("an audio file, of any length"),
    "model": GENERATION["model"],
    "language": done("in the model's letters, as `en`"),
    "prompt": done("what was said before"),
    "response_format": done("`json`, `text`"),
    "temperature": done(),
    "seed": done(),
    "stream": done("`transcript.text.delta` events"),
    "chunking_strategy": ignored("long audio is always cut where it is quiet"),
    "include": refused("tokens have no log probabilities here"),
    "timestamp_granularities": refused("time stamps are not built"),
    "keywords": refused("put them into prompt"),
    "languages": refused("give one language"),
    "known_speaker_names": refused("speakers are not told apart"),
    "known_speaker_references": refused("speakers are not told apart"),
}
FILES: Fields = {
    "file": done("of requests, a line each, kept in memory"),
    "purpose": done("`batch`"),
    "expires_after": ignored("files stay until they are deleted, or the process ends"),
}
BATCHES: Fields = {
    "input_file_id": done(),
    "endpoint": done(
        "`/v1/chat/completions`, `/v1/completions`, `/v1/responses` or `/v1/embeddings`"
    ),
    "completion_window": done("`24h`; it takes as long as it takes"),
    "metadata": done("given back"),
    "output_expires_after": ignored("files stay until they are deleted, or the process ends"),
}
MESSAGES: Fields = {
    "role": done("`system`, `developer`, `user`, `assistant`, `tool`"),
    "content": done("text, or parts `text`, `image_url`, `input_audio`, `video_url`"),
    "name": done("where the chat template writes it"),
    "tool_calls": done("arguments as JSON, or as an object"),
    "tool_call_id": done(),
    "reasoning_content": done("also `reasoning` and `thinking`, as answers have it"),
    "refusal": refused("no answer of a model here has one", ""),
    "audio": refused("answers are text", {}),
    "annotations": refused("no answer of a model here has any", []),
    "function_call": refused("give tool_calls", {}),
}
"""Of one message, which the chat's renderer reads."""
ANTHROPIC: Fields = {
    "messages": done("at most 4,096, of at most 4,096 blocks each; the last is no assistant's"),
    "max_tokens": done("has to be given, except where tokens are counted"),
    "system": done("text, or blocks of it"),
    **{name: GENERATION[name] for name in ("model", "stream", "temperature", "top_p", "top_k")},
    "stop_sequences": done(),
    "tools": done("custom ones; `eager_input_streaming` gives their arguments as they come"),
    "tool_choice": done("`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"),
    "thinking": done(
        "given to the chat template as `enable_thinking` and `thinking`; without it the template"
        " decides; `display: omitted` leaves thoughts out of the answer"
    ),
    "output_config": done("`effort`, as `reasoning_effort` to the template; `format`: a schema"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "cache_salt": GENERATION["cache_salt"],
    "mm_processor_kwargs": GENERATION["mm_processor_kwargs"],
    "metadata": ignored("for Anthropic's own accounts"),
    "service_tier": ignored("for Anthropic's own accounts"),
    "user_profile_id": ignored("for Anthropic's own accounts"),
    "workspace_id": ignored("for Anthropic's own accounts"),
    "inference_geo": ignored("the engine is where it is"),
    "speed": ignored("the engine has one"),
    "cache_control": CACHED,
    "diagnostics": CACHED,
    "context_management": ignored("the conversation is taken as it is sent"),
    "container": refused("no code is run here"),
    "mcp_servers": refused("no servers are asked; give a tool of your own", []),
}
BLOCKS: Fields = {
    "text": done(),
    "image": done("a source of type `base64` or `url`"),
    "tool_use": done(),
    "tool_result": done("text or blocks of text and images; `is_error` puts `Error: ` before it"),
    "thinking": done("as `reasoning_content` to the chat template"),
    "redacted_thinking": ignored("nobody here can read it"),
    "document": refused("give its text, or its pages as images"),
    "search_result": refused("give its text"),
    "container_upload": refused("no code is run here"),
    "server_tool_use": refused("its tool is not here"),
    **{
        f"{tool}_tool_result": refused("its tool is not here")
        for tool in (
            *("web_search", "web_fetch", "code_execution", "bash_code_execution"),
            *("text_editor_code_execution", "tool_search"),
        )
    },
}
"""Types of the blocks that Anthropic's messages have."""
TOKENIZE: Fields = {
    "model": GENERATION["model"],
    "prompt": done("text; either this or `messages`"),
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "mm_processor_kwargs": GENERATION["mm_processor_kwargs"],
    "cache_salt": GENERATION["cache_salt"],
    "return_token_strs": done("true: the tokens' texts too"),
    "add_special_tokens": done("true for a prompt; for messages the chat template decides"),
    "add_generation_prompt": refused("the tokens are those that an answer follows", True),
    "continue_final_message": refused("an answer begins anew", False),
    "chat_template": refused("the model's own is used"),
}
DETOKENIZE: Fields = {"model": GENERATION["model"], "tokens": done("token ids")}
RESPONSES: Fields = {
    **{name: field for name, field in SAMPLING.items() if name not in ("n", "max_tokens")},
    **{
        name: GENERATION[name]
        for name in (
            *("model", "stream", "logit_bias", "structured_outputs", "cache_salt"),
            *("mm_processor_kwargs", "user", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        )
    },
    "input": done(
        "text, or at most 4,096 items: messages (`input_text`, `input_image`, `input_audio`, "
        "`output_text`, `refusal`), `function_call`, `function_call_output`, `reasoning`"
    ),
    "instructions": done("a system message before all others"),
    "max_output_tokens": done("without it as many as the model may"),
    "text": done("`format`: `text`, `json_object`, `json_schema`; `verbosity` is ignored"),
    "tools": done("functions; `strict` holds where a tool has to be called"),
    "tool_choice": done("`auto`, `none`, `required`, a function, `allowed_tools`"),
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "reasoning": done(
        "`effort`, given to the chat template as chats' `reasoning_effort`; answers have what is"
        " thought itself, and `summary` adds nothing"
    ),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "include": done(
        "`message.output_text.logprobs`: of the tokens of messages; there is nothing of the others"
    ),
    "top_logprobs": done("0 to 20, with `include`"),
    "metadata": done("given back"),
    "store": done("false: not kept, also where there is a `response_store`"),
    "previous_response_id": done("with a `response_store` alone"),
    "stream_options": done("`include_obfuscation` is taken, and nothing is padded"),
    "access_programs": ACCOUNT,
    "truncation": refused("what is too long is refused; leave out items yourself", "disabled"),
    "background": refused("a response lives as long as its client stays", False),
    "background_options": refused("a response lives as long as its client stays"),
    "conversation": refused("give the items, or previous_response_id"),
    "context_management": refused("nothing is compacted; leave out items yourself", []),
    "prompt": refused("no templates are kept here; give input and instructions"),
    "max_tokens": refused("give max_output_tokens"),
    "max_completion_tokens": refused("give max_output_tokens"),
    "max_tool_calls": refused("it bounds tools that a server calls; here the client calls them"),
    "moderation": CHAT["moderation"],
    "image": refused("images are not compressed", {"context_compression": "auto"}),
}
PROMPTS: Fields = {
    "model": GENERATION["model"],
    "cache_salt": GENERATION["cache_salt"],
    "mm_processor_kwargs": GENERATION["mm_processor_kwargs"],
    "user": ACCOUNT,
}
EMBEDDINGS: Fields = {
    **PROMPTS,
    "input": done("text or token ids, one or up to 2,048"),
    "messages": done("in place of `input`: a conversation, with images where the model sees"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "encoding_format": done("`float`, `base64`"),
    "dimensions": done("so many numbers from the first on, for models trained for it"),
    "pooling": done("`last`, `mean`, `cls`; without it as the checkpoint says"),
    "normalize": done("without it as the checkpoint says"),
}
SCORE: Fields = {
    **PROMPTS,
    "text_1": done("the query"),
    "text_2": done("a text, or up to 2,048"),
}
RERANK: Fields = {
    **PROMPTS,
    "query": done(),
    "documents": done("texts, or objects with a `text`, up to 2,048"),
    "top_n": done("of the answer; 0 for all"),
    "return_documents": done("true unless it is given"),
}
FILE_LIST: Fields = {
    "limit": done("1 to 10,000, which it is without"),
    "after": done("id of the file behind which the list goes on"),
    "order": done("`desc`, the latest first, or `asc`"),
    "purpose": done("of the files that are wanted"),
}
BATCH_LIST: Fields = {
    "limit": done("1 to 100; 20 without it"),
    "after": done("id of the batch behind which the list goes on"),
}
KEPT_RESPONSE: Fields = {
    "include": refused("a response is given as it was kept; say so where it is created"),
    "stream": refused("a response is kept whole, without its events", "false"),
    "starting_after": refused("a response is kept whole, without its events"),
    "include_obfuscation": refused("a response is kept whole, without its events", "false"),
}
"""Of queries, as the two before, in which all values are text."""


def known(body: Mapping[str, Any], fields: Fields, path: str = "") -> dict[str, Any]:
    """The fields that are given and done: null is as good as nothing. Refuses all that is not
    known, and what is not built.

    `path`: of the object in the body, with a dot at its end.
    """
    taken = {}
    for name, value in body.items():
        field = fields.get(name)
        if value is None:
            continue
        if field is None:
            names = [each for each, found in fields.items() if found.handling is Handling.DONE]
            owner = path[:-1] or "this request"
            refuse_names(f"{{}} is not a field of {owner}", [name], names, prefix=path)
        elif field.handling is Handling.DONE:
            taken[name] = value
        elif field.handling is Handling.REFUSED and value not in field.neutral:
            text = f"{path}{name} is not supported: {field.note}"
            raise InvalidRequestError(text, parameter=path + name)
    return taken
