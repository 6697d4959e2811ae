"""Chat messages to a prompt: structure checked, media collected, template rendered, text kept text.

A user who types `<image>` or an end-of-turn token means the letters. Where no text holds such a
literal, the rendered template is tokenised as one string, as HF does; where one does, it is marked
before rendering, cut out afterwards, and tokenised as ordinary letters, so that it never becomes
the special token that it spells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import PurePath
from typing import Any

from aioengine.errors import (
    InvalidRequestError,
    UnsupportedModalityError,
    shown,
)
from aioengine.processors.encdec import EncDecMultiModalProcessor
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.prompt.chat_parts import (
    PARTS,
    ChatMedia,
    fill_parts,
    invalid,
    part_text,
    read_item,
    wrong,
)
from aioengine.processors.prompt.updates import find

__all__ = ["ChatMedia", "ChatPrompt", "ChatRenderer", "takes_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Private-use characters: no tokenizer gives them a meaning, and they are taken out of user text.
_START, _END = "\ue0f0", "\ue0f1"
_MARKS = re.compile(f"[{_START}{_END}]")
_PROBE = "aioengineprobe"


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation as token ids, placeholders not expanded; modality -> media in prompt order.

    `literals`: token ranges of what a user typed and only looks like a placeholder.
    """

    token_ids: list[int]
    media: dict[str, list[ChatMedia]] = field(default_factory=dict)
    literals: list[tuple[int, int]] = field(default_factory=list)


class ChatRenderer:
    """Renders conversations for one processor. Not thread-safe, as the processor is not."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._tokenizer = processor.info.get_tokenizer()
        self._is_multimodal = bool(processor.info.get_supported_mm_limits())
        self._template = _find_template(processor)
        self._takes: tuple[bool, bool] | None = None
        self._literals, self._marked = self._find_literals()
        self._known: dict[str, list[int]] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: Mapping[str, Sequence[ChatMedia]] | None = None,
    ) -> ChatPrompt:
        """The prompt that the model's chat template makes of `messages`, ready for an answer.

        `given`: modality -> the items for parts without content, in their order. Raises
        InvalidRequestError or UnsupportedModalityError with the exact place as parameter
        (`messages[0].content[1]`), and PlaceholderMismatchError where there are more or fewer items
        than such parts.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template; give a prompt as the model takes it instead of "
                "messages",
                parameter="messages",
            )
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise invalid("messages", "must be a list of mappings")
        if not messages:
            raise invalid("messages", "must not be empty")
        media: dict[str, list[ChatMedia]] = {}
        conversation = [
            self._read_message(message, f"messages[{index}]", media)
            for index, message in enumerate(messages)
        ]
        for modality in given or {}:
            self._check_modality(modality, f"{modality}s")
        fill_parts(media, given or {})
        rendered = self._render(self._separated(conversation))
        token_ids, literals = self._tokenize(rendered)
        return ChatPrompt(token_ids=token_ids, media=media, literals=literals)

    # Reading what the caller gave.

    def _read_message(
        self, message: object, path: str, media: dict[str, list[ChatMedia]]
    ) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise wrong(path, "a mapping with role and content", message)
        role = message.get("role")
        if role not in ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}")
        unknown = sorted(str(key) for key in message if key not in ("role", "content", "name"))
        if unknown:
            raise invalid(path, f"has keys that are not supported: {', '.join(unknown)[:80]}")
        read: dict[str, Any] = {"role": role}
        if "name" in message:
            read["name"] = self._mark(part_text(message["name"], f"{path}.name"))
        content = message.get("content")
        if isinstance(content, str):
            read["content"] = self._mark(part_text(content, f"{path}.content"))
            return read
        if not isinstance(content, list | tuple):
            raise wrong(f"{path}.content", "text or a list of parts", content)
        read["content"] = [
            self._read_part(part, f"{path}.content[{index}]", media)
            for index, part in enumerate(content)
        ]
        return read

    def _read_part(
        self, part: object, path: str, media: dict[str, list[ChatMedia]]
    ) -> dict[str, str]:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise wrong(path, "a mapping with a type", part)
        kind = part.get("type")
        if kind == "text":
            return {"type": "text", "text": self._mark(part_text(part.get("text"), f"{path}.text"))}
        modality = PARTS.get(kind) if isinstance(kind, str) else None
        if modality is None:
            named = kind if isinstance(kind, str) else type(kind).__name__
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

    def _mark(self, text: str) -> str:
        text = _MARKS.sub("", text)
        if self._literals is None:
            return text
        return self._literals.sub(lambda found: f"{_START}{found[0]}{_END}", text)

    def _separated(self, conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with its texts kept apart, if joined they would spell a literal."""
        if self._literals is None:
            return conversation
        texts = [_MARKS.sub("", text) for text in _texts(conversation)]
        apart = sum(len(self._literals.findall(text)) for text in texts)
        if len(self._literals.findall("".join(texts))) == apart:
            return conversation

        def fence(content: Any) -> Any:
            if isinstance(content, str):
                return f"{_END}{content}{_END}"
            return [
                {**part, "text": fence(part["text"])} if "text" in part else part
                for part in content
            ]

        return [{**message, "content": fence(message["content"])} for message in conversation]

    # Rendering the template.

    def _render(self, conversation: list[dict[str, Any]]) -> str:
        if self._takes is None:
            text = self._survives(_PROBE)
            parts = self._survives([{"type": "text", "text": _PROBE}])
            self._takes = (text or not parts, parts)
        conversation = [
            {**message, "content": self._shape(message["content"])} for message in conversation
        ]
        try:
            return self._apply_template(conversation)
        # A template refuses a conversation (roles in the wrong order, ...) by raising from Jinja.
        except Exception as error:
            raise InvalidRequestError(
                "the model's chat template does not take these messages: "
                f"{type(error).__name__}: {self._marked.sub('', str(error))[:200]}",
                parameter="messages",
            ) from None

    def _apply_template(self, conversation: list[dict[str, Any]]) -> str:
        rendered = self._tokenizer.apply_chat_template(
            conversation, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    def _survives(self, content: str | list[dict[str, str]]) -> bool:
        """Return whether the template reads content of this kind."""
        try:
            rendered = self._apply_template([{"role": "user", "content": content}])
        except Exception:  # A template for one kind may do anything with the other.
            return False
        # It may also lose the text, take it letter by letter, or print the list around it.
        return _PROBE in rendered and "'type'" not in rendered

    def _shape(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        """The content as the template reads it: as it was given, if that can be."""
        assert self._takes is not None
        takes_text, takes_parts = self._takes
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

    # Tokenising what came out.

    def _find_literals(self) -> tuple[re.Pattern[str] | None, re.Pattern[str]]:
        """List what user text must not be able to say: special tokens, and what the family expands.

        A pattern for these, and one for them between marks, which finds marks alone too.
        """
        added = self._tokenizer.added_tokens_decoder.values()
        literals = {token.content for token in added if token.special and token.content.strip()}
        for modality in self._processor.info.get_supported_mm_limits():
            literals.add(self._placeholder(modality))
        literals.discard("")
        if not literals:
            return None, _MARKS
        pattern = _any_of(literals)
        return re.compile(pattern), re.compile(f"{_START}({pattern}){_END}|{_MARKS.pattern}")

    def _tokenize(self, rendered: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and where among them the literals lie."""
        # As in HF: a tokenizer's template writes every special token itself, a processor's leaves
        # them to the tokenizer unless it begins with the first one.
        bos = getattr(self._tokenizer, "bos_token", None)
        add_special_tokens = self._is_multimodal and not (bos and rendered.startswith(bos))
        if _START not in rendered and _END not in rendered:
            return self._processor.tokenize(rendered, add_special_tokens=add_special_tokens), []
        prefix, suffix = self._surrounding() if add_special_tokens else ([], [])
        if add_special_tokens:
            rendered = self._written(rendered)
        token_ids = list(prefix)
        literals = []
        end = 0
        for found in self._marked.finditer(rendered):
            token_ids += self._fragment(rendered[end : found.start()], at_start=end == 0)
            if found.lastindex:
                start, at_start = len(token_ids), found.start() == 0
                token_ids += self._literal(found[1], at_start=at_start)
                literals.append((start, len(token_ids)))
            end = found.end()
        token_ids += self._fragment(rendered[end:], at_start=False)
        return [*token_ids, *suffix], literals

    def _written(self, rendered: str) -> str:
        """The prompt with what the processor writes in it, which does not see the literals."""
        hidden = [found.group() for found in self._marked.finditer(rendered)]
        pieces = self._processor.write(self._marked.sub(_START, rendered)).split(_START)
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


def _find_template(processor: BaseMultiModalProcessor) -> str | None:
    """The model's chat template, its HF processor's or its tokenizer's; None: it has none."""
    template = None
    if processor.info.get_supported_mm_limits():
        template = getattr(processor.info.get_hf_processor(), "chat_template", None)
    template = template or getattr(processor.info.get_tokenizer(), "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of the words that matches, tried letter by letter.

    As a tree: with words beside each other, a text of beginnings takes as many tries as there are
    words at each letter, and `re` keeps the GIL.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + write(node[letter]) for letter in sorted(node) if letter]
        if not branches:
            return ""
        pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        return f"(?:{pattern})?" if "" in node else pattern

    return write(root)


def _texts(conversation: list[dict[str, Any]]) -> Iterator[str]:
    for message in conversation:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if "text" in part)
