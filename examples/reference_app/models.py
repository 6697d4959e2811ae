"""Data that enters and leaves the application, and its settings."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Category = Literal["travel", "meals", "office", "other"]


class Settings(BaseModel):
    """Environment variables `DESK_*`; mappings are written as JSON."""

    backend: Literal["in_process", "http"] = "in_process"
    model: str
    """A folder or hub id, or what the HTTP server calls the model."""
    url: str = "http://127.0.0.1:8080/v1"
    sees_images: bool = True
    """Whether the model takes images; without, the reader is given the receipt's note alone."""
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 256}
    engine: dict[str, Any] = {}
    data: Path = Path("desk-data")
    report_every_s: float = Field(default=60, gt=0)

    @classmethod
    def from_environment(cls) -> Settings:
        names = {name: f"DESK_{name.upper()}" for name in cls.model_fields}
        given: dict[str, Any] = {
            name: os.environ[variable] for name, variable in names.items() if variable in os.environ
        }
        for name in {"sampling", "engine"} & given.keys():
            given[name] = json.loads(given[name])
        return cls.model_validate(given)


class Arguments(BaseModel):
    """Arguments of a tool: no others may be written."""

    model_config = ConfigDict(extra="forbid")


class Expense(Arguments):
    """Arguments of `file_expense`."""

    merchant: str = Field(min_length=1, max_length=100)
    cents: int = Field(gt=0, le=10_000_000, description="Total in cents")
    category: Category
    day: date


class FiledExpense(Expense):
    id: int
    receipt_id: int | None


class Search(Arguments):
    """Arguments of `search_expenses`."""

    merchant: str = Field(default="", description="Part of the merchant's name")
    category: Category | None = None
    limit: int = Field(default=5, ge=1, le=20)


class Period(Arguments):
    """Arguments of `total_by_category`."""

    first: date
    last: date


class Receipt(BaseModel):
    id: int
    width: int
    height: int
    expense: FiledExpense | None


class Question(BaseModel):
    text: str = Field(min_length=1, max_length=2000)


class Report(BaseModel):
    """Figures over all expenses, in cents."""

    num_expenses: int = 0
    by_month: dict[str, int] = {}
    medians: dict[str, float] = {}
    similar: list[tuple[int, int]] = []
    """Pairs of expenses that may be one, filed twice."""
