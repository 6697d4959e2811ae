"""Chat messages to a prompt: structure checked, media collected, template rendered, text kept text.

A user who types `<image>` or an end-of-turn token means the letters. Where no text holds such a
literal, the rendered template is tokenised as one string, as HF does; where one does, it is marked
before rendering, cut out afterwards, and tokenised as ordinary letters, so that it never becomes
the special token that it spells.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import PurePath
from typing import Any

from aioengine.errors import InvalidRequestError, UnsupportedModalityError, shown
from aioengine.processors.chat.answers import AnswerParser
from aioengine.processors.chat.calls import CallGrammar, write_grammar
from aioengine.processors.chat.formats import PLAIN, AnswerFormat, find_format
from aioengine.processors.chat.literals import START, Literals
from aioengine.processors.chat.parts import (
    PARTS,
    ChatMedia,
    fill_parts,
    invalid,
    part_text,
    read_item,
    wrong,
)
from aioengine.processors.chat.tools import check_depth, read_calls, read_id
from aioengine.processors.encdec import EncDecMultiModalProcessor
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.prompt.updates import find

__all__ = ["ChatMedia", "ChatPrompt", "ChatRenderer", "takes_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of what a model has thought; a template knows one of them."""
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
EMPTY_KEYS = ("refusal", "audio", "annotations", "function_call")
"""Keys that OpenAI's client writes too; they say nothing where they are empty."""
TEXTS = (*REASONING, "content")
"""Keys of a message's texts, as templates write them one after the other."""
_PROBE = "aioengineprobe"
MAX_TAIL = 1 << 12
"""Characters at the end of a rendered prompt in which an answer begins."""


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation as token ids, placeholders not expanded; modality -> media in prompt order.

    `literals`: token ranges of what a user typed and only looks like a placeholder. `tail`: the end
    of the rendered text, in which nobody but the template has written a special token. `tools`: in
    the prompt; `answers`: how the model writes its answer. `grammar`: what an answer has to follow
    that must call a tool.
    """

    token_ids: list[int]
    tail: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    answers: AnswerFormat = PLAIN
    grammar: CallGrammar | None = None
    media: dict[str, list[ChatMedia]] = field(default_factory=dict)
    literals: list[tuple[int, int]] = field(default_factory=list)

    def new_parser(self) -> AnswerParser:
        """Make what reads one answer to this prompt."""
        return AnswerParser(self.answers.parse, self.tail, self.tools)


class ChatRenderer:
    """Renders conversations for one processor. Not thread-safe, as the processor is not.

    `check_length`: raises for a rendered text of so many characters, before it is tokenised.
    """

    def __init__(
        self, processor: BaseMultiModalProcessor, check_length: Callable[[int], None] | None = None
    ) -> None:
        self._processor = processor
        self._check_length = check_length
        self._tokenizer = processor.info.get_tokenizer()
        self._is_multimodal = bool(processor.info.get_supported_mm_limits())
        self._template = _find_template(processor)
        self._tool_template = _find_template(processor, "tool_use")
        self._takes: dict[str, tuple[bool, bool]] = {}
        self._literals = Literals(self._list_literals())
        self._known: dict[str, list[int]] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: Mapping[str, Sequence[ChatMedia]] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: str | Mapping[str, str] = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt that the model's chat template makes of `messages`, ready for an answer.

        `given`: modality -> the items for parts without content, in their order. `tools`: schemas
        (see `read_tools`), of which `choice` has to be called; `options`: values that the template
        may ask for. Raises InvalidRequestError or UnsupportedModalityError with the exact place as
        parameter (`messages[0].content[1]`), and PlaceholderMismatchError where there are more or
        fewer items than such parts.
        """
        tools = () if choice == "none" else tools
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template; give a prompt as the model takes it instead of "
                "messages",
                parameter="messages",
            )
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise invalid("messages", "must be a list of mappings")
        if not messages:
            raise invalid("messages", "must not be empty")
        if tools and "tools" not in template:
            raise invalid("tools", "are given, but the model's chat template knows none")
        media: dict[str, list[ChatMedia]] = {}
        conversation = [
            self._read_message(message, f"messages[{index}]", media, template)
            for index, message in enumerate(messages)
        ]
        for modality in given or {}:
            self._check_modality(modality, f"{modality}s")
        fill_parts(media, given or {})
        named = self._literals.guard(self._read_options(options or {}))
        if tools:
            named["tools"] = self._literals.guard(tools)
        rendered = self._render(self._literals.separate(conversation, TEXTS), template, named)
        if self._check_length is not None:
            self._check_length(self._literals.length(rendered))
        token_ids, literals = self._tokenize(rendered)
        tail = rendered[-MAX_TAIL:]
        answers = find_format(template, getattr(self._tokenizer, "response_template", None))
        return ChatPrompt(
            token_ids=token_ids,
            tail=tail,
            tools=tools,
            answers=answers,
            grammar=self._grammar(answers, template, tail, tools, choice),
            media=media,
            literals=literals,
        )

    # Reading what the caller gave.

    def _read_message(
        self, message: object, path: str, media: dict[str, list[ChatMedia]], template: str
    ) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise wrong(path, "a mapping with role and content", message)
        role = message.get("role")
        if role not in ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}")
        empty = {key for key in EMPTY_KEYS if not message.get(key)}
        if unknown := sorted(map(str, message.keys() - {*KEYS, *empty})):
            raise invalid(path, f"has keys that are not supported: {', '.join(unknown)[:80]}")
        read: dict[str, Any] = {"role": role}
        if message.get("name") is not None:
            read["name"] = self._literals.mark(part_text(message["name"], f"{path}.name"))
        if message.get("tool_call_id") is not None:
            call_id = read_id(message["tool_call_id"], f"{path}.tool_call_id")
            read["tool_call_id"] = self._literals.guard(call_id)
        for key in REASONING:
            if message.get(key) is not None:
                name = _known_key(key, template)
                read[name] = self._literals.mark(part_text(message[key], f"{path}.{key}"))
        if message.get("tool_calls"):
            if role != "assistant":
                raise invalid(f"{path}.tool_calls", "belong to messages of the assistant alone")
            calls = read_calls(message["tool_calls"], f"{path}.tool_calls")
            read["tool_calls"] = self._literals.guard(calls)
        read["content"] = self._read_content(message, path, media, says_more=len(read) > 1)
        return read

    def _read_content(
        self,
        message: Mapping[str, Any],
        path: str,
        media: dict[str, list[ChatMedia]],
        *,
        says_more: bool,
    ) -> Any:
        """Read a message's text or parts. `says_more`: it needs none."""
        content = message.get("content")
        if content is None and says_more and message["role"] == "assistant":
            return ""
        if isinstance(content, str):
            return self._literals.mark(part_text(content, f"{path}.content"))
        if not isinstance(content, list | tuple):
            raise wrong(f"{path}.content", "text or a list of parts", content)
        return [
            self._read_part(part, f"{path}.content[{index}]", media)
            for index, part in enumerate(content)
        ]

    def _read_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Read what the template may ask for, which none of the renderer's own arguments is."""
        own = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages"}
        own |= {"self", "conversations", *self._tokenizer.special_tokens_map}
        for name in options:
            if name in own or not str(name).isidentifier():
                path = f"chat_template_kwargs[{name!r:.40}]"
                raise invalid(path, "is not for the caller to set")
        check_depth(options, "chat_template_kwargs")
        return dict(options)

    def _read_part(
        self, part: object, path: str, media: dict[str, list[ChatMedia]]
    ) -> dict[str, str]:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise wrong(path, "a mapping with a type", part)
        kind = part.get("type")
        if kind == "text":
            return {
                "type": "text",
                "text": self._literals.mark(part_text(part.get("text"), f"{path}.text")),
            }
        modality = PARTS.get(kind) if isinstance(kind, str) else None
        if modality is None:
            named = kind if isinstance(kind, str | None) else type(kind).__name__
            raise UnsupportedModalityError(
                f"{path} has the type {shown(named, 40)}; supported: text, {', '.join(PARTS)}",
                parameter=path,
            )
        self._check_modality(modality, path)
        item = read_item(part, modality, path)
        uuid = part.get("uuid")
        if uuid is not None:
            uuid = part_text(uuid, f"{path}.uuid")
        trusted = isinstance(item, PurePath)  # it cannot come out of JSON or a table, as text can
        found = ChatMedia(item=item, parameter=path, trusted=trusted, uuid=uuid)
        media.setdefault(modality, []).append(found)
        return {"type": modality}

    def _check_modality(self, modality: str, path: str) -> None:
        if modality not in self._processor.info.get_supported_mm_limits():
            raise UnsupportedModalityError(
                f"{path}: the model takes no {modality} items", parameter=path
            )

    # Rendering the template.

    def _render(
        self, conversation: list[dict[str, Any]], template: str, named: Mapping[str, Any]
    ) -> str:
        if template not in self._takes:
            text = self._survives(_PROBE, template)
            parts = self._survives([{"type": "text", "text": _PROBE}], template)
            self._takes[template] = (text or not parts, parts)
        takes = self._takes[template]
        conversation = [
            {**message, "content": self._shape(message["content"], takes)}
            for message in conversation
        ]
        try:
            return self._apply_template(conversation, template, **named)
        # A template refuses a conversation (roles in the wrong order, ...) by raising from Jinja.
        except Exception as error:
            raise InvalidRequestError(
                "the model's chat template does not take these messages: "
                f"{type(error).__name__}: {self._literals.marked.sub('', str(error))[:200]}",
                parameter="messages",
            ) from None

    def _apply_template(
        self, conversation: list[dict[str, Any]], template: str, **named: Any
    ) -> str:
        rendered = self._tokenizer.apply_chat_template(
            conversation,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **named,
        )
        return str(rendered)

    def _survives(self, content: str | list[dict[str, str]], template: str) -> bool:
        """Return whether the template reads content of this kind."""
        try:
            rendered = self._apply_template([{"role": "user", "content": content}], template)
        except Exception:  # A template for one kind may do anything with the other.
            return False
        # It may also lose the text, take it letter by letter, or print the list around it.
        return _PROBE in rendered and "'type'" not in rendered

    def _shape(
        self, content: str | list[dict[str, str]], takes: tuple[bool, bool]
    ) -> str | list[dict[str, str]]:
        """The content as the template reads it: as it was given, if that can be."""
        takes_text, takes_parts = takes
        if isinstance(content, str):
            return content if takes_text else [{"type": "text", "text": content}]
        if takes_parts:
            return content
        return "\n".join(
            part["text"] if part["type"] == "text" else self._placeholder(part["type"])
            for part in content
        )

    def _placeholder(self, modality: str) -> str:
        return self._processor.dummy_inputs.get_dummy_text({modality: 1})

    def _grammar(
        self,
        answers: AnswerFormat,
        template: str,
        tail: str,
        tools: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, str],
    ) -> CallGrammar | None:
        """Write what an answer has to follow; None where it need not call a tool."""
        if choice in ("auto", "none"):
            return None
        form = None if answers.calls is None else answers.calls(template)
        if form is None:
            message = "must be auto or none: how this model writes calls is not known well enough"
            raise invalid("tool_choice", message)
        name = choice["name"] if isinstance(choice, Mapping) else None
        names = [tool["function"]["name"] for tool in tools]
        called = {i: tool for i, tool in enumerate(tools) if name in (None, names[i])}
        added = self._tokenizer.added_tokens_decoder.items()
        # llguidance takes <these> for special tokens too, which no expression matches.
        tags = {i for i, token in added if f"{token.content[:1]}{token.content[-1:]}" == "<>"}
        opening, closing = answers.thought or ("", "")
        return write_grammar(
            form,
            called,
            is_one=name is not None,
            thought=closing if opening and tail.rstrip().endswith(opening.rstrip()) else "",
            special={t.content: i for i, t in added if t.special or i in tags},
        )

    # Tokenising what came out.

    def _list_literals(self) -> Iterator[str]:
        """List what user text must not be able to say: special tokens, and what the family
        expands."""
        for token in self._tokenizer.added_tokens_decoder.values():
            if token.special and token.content.strip():
                yield token.content
        yield from map(self._placeholder, self._processor.info.get_supported_mm_limits())

    def _tokenize(self, rendered: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and where among them the literals lie."""
        # As in HF: a tokenizer's template writes every special token itself, a processor's leaves
        # them to the tokenizer unless it begins with the first one.
        bos = getattr(self._tokenizer, "bos_token", None)
        add_special_tokens = self._is_multimodal and not (bos and rendered.startswith(bos))
        if not self._literals.has_marks(rendered):
            return self._processor.tokenize(rendered, add_special_tokens=add_special_tokens), []
        prefix, suffix = self._surrounding() if add_special_tokens else ([], [])
        if add_special_tokens:
            rendered = self._written(rendered)
        token_ids = list(prefix)
        literals = []
        end = 0
        for found in self._literals.marked.finditer(rendered):
            token_ids += self._fragment(rendered[end : found.start()], at_start=end == 0)
            if found.lastindex:
                start, at_start = len(token_ids), found.start() == 0
                token_ids += self._literal(found[found.lastindex], at_start=at_start)
                literals.append((start, len(token_ids)))
            end = found.end()
        token_ids += self._fragment(rendered[end:], at_start=False)
        return [*token_ids, *suffix], literals

    def _written(self, rendered: str) -> str:
        """The prompt with what the processor writes in it, which does not see the literals."""
        hidden = [found.group() for found in self._literals.marked.finditer(rendered)]
        pieces = self._processor.write(self._literals.marked.sub(START, rendered)).split(START)
        assert len(pieces) == len(hidden) + 1
        return "".join(chain.from_iterable(zip_longest(pieces, hidden, fillvalue="")))

    def _literal(self, text: str, *, at_start: bool) -> list[int]:
        """The token ids of one that a user typed; there are few, and they may be typed often."""
        if at_start:
            return self._fragment(text, at_start=True, as_text=True)
        if text not in self._known:
            self._known[text] = self._fragment(text, at_start=False, as_text=True)
        return self._known[text]

    def _fragment(self, text: str, *, at_start: bool, as_text: bool = False) -> list[int]:
        """The token ids of a piece of the prompt: unless `at_start`, no word begins with it."""
        if not text:
            return []
        if at_start:
            return self._encode(text, as_text=as_text)
        lead = self._encode("\n", as_text=False)
        token_ids = self._encode("\n" + text, as_text=as_text)
        if token_ids[: len(lead)] == lead:
            return token_ids[len(lead) :]
        return self._encode(text, as_text=as_text)

    def _encode(self, text: str, *, as_text: bool) -> list[int]:
        token_ids = list(
            self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=as_text)
        )
        added = self._tokenizer.added_tokens_decoder
        if as_text and len(text) > 1 and any(token_id in added for token_id in token_ids):
            # An added token that is not special is matched all the same; halves cannot spell it.
            middle = (len(text) + 1) // 2
            return [
                *self._encode(text[:middle], as_text=True),
                *self._encode(text[middle:], as_text=True),
            ]
        return token_ids

    def _surrounding(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after every text."""
        if not self._processor.adds_special_tokens:
            return [], []
        bare = list(self._tokenizer.encode("a", add_special_tokens=False))
        full = list(self._tokenizer.encode("a", add_special_tokens=True))
        start = find(full, bare)
        return ([], []) if start < 0 else (full[:start], full[start + len(bare) :])


def takes_messages(processor: BaseMultiModalProcessor) -> bool:
    """Return whether the model is spoken to in chat messages, as one with a template is."""
    is_encdec = isinstance(processor, EncDecMultiModalProcessor)
    return not is_encdec and _find_template(processor) is not None


def _find_template(processor: BaseMultiModalProcessor, name: str = "default") -> str | None:
    """The model's chat template, its HF processor's or its tokenizer's; None: it has none. `name`:
    of one of several, where there is such a one."""
    template = None
    if processor.info.get_supported_mm_limits():
        template = getattr(processor.info.get_hf_processor(), "chat_template", None)
    template = template or getattr(processor.info.get_tokenizer(), "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get(name, template.get("default"))
    return template if isinstance(template, str) else None


def _known_key(key: str, template: str) -> str:
    """The key under which the template looks for what a model has thought."""
    return next((k for k in (key, *REASONING) if re.search(rf"\b{k}\b", template)), key)
