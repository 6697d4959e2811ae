"""Expenses and receipts in SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiosqlite

from .models import Expense, FiledExpense, Period, Search

SCHEMA = """
CREATE TABLE IF NOT EXISTS receipts (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL, note TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS expenses (
    id INTEGER PRIMARY KEY, receipt_id INTEGER REFERENCES receipts,
    merchant TEXT NOT NULL, cents INTEGER NOT NULL, category TEXT NOT NULL, day TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS expenses_by_day ON expenses (day);
"""


class Database:
    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[Database]:
        async with aiosqlite.connect(path) as connection:
            connection.row_factory = aiosqlite.Row
            await connection.execute("PRAGMA journal_mode = WAL")
            await connection.executescript(SCHEMA)
            yield cls(connection)

    async def add_receipt(self, file: str, note: str) -> int:
        return await self._insert("INSERT INTO receipts (file, note) VALUES (?, ?)", file, note)

    async def add_expense(self, expense: Expense, receipt_id: int | None = None) -> int:
        row = expense.model_dump(mode="json")
        return await self._insert(
            "INSERT INTO expenses (receipt_id, merchant, cents, category, day) "
            "VALUES (?, ?, ?, ?, ?)",
            *(receipt_id, row["merchant"], row["cents"], row["category"], row["day"]),
        )

    async def expenses(
        self, search: Search | None = None, *, limit: int = -1, receipt_id: int | None = None
    ) -> list[FiledExpense]:
        """The latest first; all that fit."""
        search = search or Search.model_construct(limit=limit)
        rows = await self._rows(
            "SELECT * FROM expenses WHERE instr(lower(merchant), lower(?)) "
            "AND category = coalesce(?, category) AND (? IS NULL OR receipt_id = ?) "
            "ORDER BY day DESC, id DESC LIMIT ?",
            *(search.merchant, search.category, receipt_id, receipt_id, search.limit),
        )
        return [FiledExpense.model_validate(dict(row)) for row in rows]

    async def totals(self, period: Period) -> dict[str, int]:
        """Cents by category."""
        rows = await self._rows(
            "SELECT category, sum(cents) AS cents FROM expenses WHERE day BETWEEN ? AND ? "
            "GROUP BY category ORDER BY category",
            *(period.first.isoformat(), period.last.isoformat()),
        )
        return {row["category"]: row["cents"] for row in rows}

    async def _rows(self, sql: str, *values: object) -> list[aiosqlite.Row]:
        return list(await self._connection.execute_fetchall(sql, values))

    async def _insert(self, sql: str, *values: object) -> int:
        cursor = await self._connection.execute(sql, values)
        await self._connection.commit()
        assert cursor.lastrowid is not None
        return cursor.lastrowid
