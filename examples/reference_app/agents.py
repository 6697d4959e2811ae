"""Two agents: the reader files an expense from a receipt, the clerk answers questions."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from .backends import Backend, Reply
from .database import Database
from .models import Expense, Period, Search

MAX_TURNS = 4
Event = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, with arguments that pydantic checks."""

    name: str
    description: str
    arguments: type[BaseModel]
    run: Callable[[Any], Awaitable[Any]]
    is_last: bool = False
    """Whether the agent's work is done once this has succeeded."""

    @property
    def schema(self) -> dict[str, Any]:
        parameters = self.arguments.model_json_schema()
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Agent:
    backend: Backend
    instructions: str
    tools: Sequence[Tool]
    must_call: str | None = None

    async def run(self, content: str | list[dict[str, Any]]) -> AsyncGenerator[Event, None]:
        """Go on until the model calls nothing more, or for `MAX_TURNS` turns.

        Events are `{"text": piece}`, and `{"call": name, "arguments": ..., "result": ...}`.
        """
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.instructions},
            {"role": "user", "content": content},
        ]
        schemas = [tool.schema for tool in self.tools]
        for _ in range(MAX_TURNS):
            turn = self.backend.stream(messages, schemas, self.must_call)
            async with aclosing(turn) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Reply):
                        messages.append(piece.message)
                    else:
                        yield {"text": piece}
            is_done = True
            for call in messages[-1].get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                result, is_last = await self._call(name, arguments)
                yield {"call": name, "arguments": arguments, "result": result}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                is_done = is_done and is_last
            if is_done:
                return

    async def _call(self, name: str, arguments: str) -> tuple[str, bool]:
        """The result for the model, or what is wrong with its call; and whether that was all."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            return f"Error: there is no tool {name}", False
        try:
            read = tool.arguments.model_validate_json(arguments)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)
            return f"Error: {json.dumps(wrong)}", False
        return json.dumps(await tool.run(read)), tool.is_last


def reader(backend: Backend, database: Database, receipt_id: int) -> Agent:
    async def file_expense(expense: Expense) -> dict[str, int]:
        return {"expense_id": await database.add_expense(expense, receipt_id)}

    tool = Tool("file_expense", "File an expense.", Expense, file_expense, is_last=True)
    instructions = "You read receipts. File what the receipt says as one expense."
    return Agent(backend, instructions, [tool], must_call=tool.name)


def clerk(backend: Backend, database: Database) -> Agent:
    async def search_expenses(search: Search) -> list[dict[str, Any]]:
        return [expense.model_dump(mode="json") for expense in await database.expenses(search)]

    tools = [
        Tool("search_expenses", "Find expenses, latest first.", Search, search_expenses),
        Tool("total_by_category", "Sum up a period, in cents.", Period, database.totals),
    ]
    instructions = "You answer questions about a company's expenses. Look them up, do not guess."
    return Agent(backend, instructions, tools)


def receipt_content(note: str, image: bytes | None) -> str | list[dict[str, Any]]:
    """The reader's message; an image stands before the note."""
    text = f"File this receipt. Its note: {note or 'none'}"
    if image is None:
        return text
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
