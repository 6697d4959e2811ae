"""Messages that a model answers with, and the calls of tools in them. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Message", "Run", "ToolCall", "ToolCallDelta"]


class Run(NamedTuple):
    """A stretch of a message in the order it was written: so many characters of one kind.

    Of a call, whose number is `call`, they are its arguments'. `num_tokens`: those that wrote it,
    marks of the format among them; the runs of a message that says anything have all its tokens.
    """

    kind: Literal["content", "reasoning", "call"]
    size: int
    num_tokens: int
    call: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for. `arguments`: as it wrote them, JSON mostly."""

    id: str
    name: str
    arguments: str

    def read(self) -> dict[str, Any]:
        """The arguments as an object. Raises ValueError where they are none."""
        found = json.loads(self.arguments)
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {self.name} are no object")
        return found


@dataclass(frozen=True, slots=True)
class Message:
    """A model's answer in a conversation: what it says, what it has thought, and what it calls."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The message as one of a conversation that goes on."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return found


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call `index`: its id and name come first, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
