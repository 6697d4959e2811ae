"""Output that has to follow a schema, a regular expression, choices or a grammar.

llguidance compiles each into a matcher, which says before every token which ones may come. The
grammars are hostile. Their size is bounded before they are compiled (params.py), because the
compiler's work grows faster than that and its recursion with it; the rest by llguidance's own
budgets. They are compiled on a thread of their own, with a large stack and with the interpreter's
lock released. The vocabulary is prepared while the engine loads: that holds the lock for long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from aioengine.errors import InvalidRequestError
from aioengine.params import StructuredOutputs

__all__ = ["Constraint", "Grammars"]

PARAMETER = "structured_outputs"
MAX_COMPILED = 16
"""Compiled grammars that are kept."""
STACK_BYTES = 64 << 20
"""Of the thread that compiles; reserved, not taken."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # some 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a model cannot fill its output with blanks."""


class Grammars:
    """Compiles grammars for one model's vocabulary. `compile` runs on the thread of `pool`."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Blocks for a second where the vocabulary is large; `tokenizer` is used here only."""
        self._vocab_size = vocab_size
        self._refusal = ""
        self._vocabulary: Any = None
        self._compiled: LRUCache[str, Any] = LRUCache(MAX_COMPILED)
        self._pool: ThreadPoolExecutor | None = None
        ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not ends:
            self._refusal = "needs a model with an end-of-sequence token"
            return
        try:
            from llguidance import hf

            size = max(vocab_size, len(tokenizer))
            self._vocabulary = hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
        except ImportError:
            self._refusal = "needs llguidance: pip install 'aioengine[structured]'"
        except Exception as error:  # whatever a tokenizer may be that llguidance does not know
            self._refusal = f"does not work with this model's tokenizer ({type(error).__name__})"

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The thread that compiles."""
        if self._pool is None:
            usual = threading.stack_size(STACK_BYTES)
            try:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="aioengine-grammar")
                self._pool.submit(int)  # starts the thread
            finally:
                threading.stack_size(usual)
        return self._pool

    def close(self) -> None:
        """Give up what is not compiled yet; does not wait."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, structure: StructuredOutputs, count: int) -> list[Constraint]:
        """`count` constraints that do not share state. Raises InvalidRequestError."""
        if self._vocabulary is None:
            raise InvalidRequestError(f"{PARAMETER} {self._refusal}", parameter=PARAMETER)
        with _refusing_panics():
            grammar = _grammar(structure)
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compile(grammar)
                self._compiled[grammar] = matcher
            return [Constraint(matcher.deep_copy(), self._vocab_size) for _ in range(count)]

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest: here, and not between two steps
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher


@contextmanager
def _refusing_panics() -> Iterator[None]:
    """A panic of the Rust code is not an Exception; here it is the grammar's fault."""
    try:
        yield
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise _refused(str(error)) from error
    except BaseException as error:
        raise _refused(type(error).__name__) from error


class Constraint:
    """One completion's place in its grammar. Used by the launch thread only."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._num_taken = 0

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor:
        """Which tokens may be number `output_index`: int32 [ceil(vocab / 32)], one bit each.

        `token_ids` end with the output so far. Raises InvalidRequestError where the grammar turns
        out to be too complex.
        """
        count = output_index - self._num_taken
        with _refusing_panics():
            for token_id in token_ids[len(token_ids) - count :] if count else ():
                self._matcher.consume_token(token_id)
            self._num_taken = output_index
            bits = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise _refused(self._matcher.get_error())
        return torch.frombuffer(bytearray(bits), dtype=torch.int32)[: self._num_words]


def _grammar(structure: StructuredOutputs) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    found: str
    if structure.json is not None or structure.json_object:
        schema = '{"type": "object"}' if structure.json_object else structure.schema_text
        # Overrides come last, so that a schema cannot ask for another style.
        found = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
    elif structure.regex is not None:
        found = LLMatcher.grammar_from_regex(structure.regex)
    elif structure.choice is not None:
        texts = (json.dumps(choice, ensure_ascii=False) for choice in structure.choice)
        found = LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    else:
        found = LLMatcher.grammar_from_lark(structure.grammar or "")
    return found


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAMETER} cannot be followed: {reason.strip()!s:.200}", parameter=PARAMETER
    )
