"""Output that has to follow a schema, a regular expression, choices or a grammar.

llguidance compiles each into a matcher, which says before every token which ones may come. The
grammars are hostile. Their size is bounded before they are compiled (params.py), because the
compiler's work grows faster than that and its recursion with it; then by llguidance's own budgets,
by time, and by their number. Each completion has a matcher of its own: copies would share the
states of one lexer, and with them what is left of its budget. The vocabulary is prepared while the
engine loads: that holds the interpreter's lock for long.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError, OverloadedError
from aioengine.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from aioengine.processors.chat.calls import CallGrammar

__all__ = ["Constraint", "Grammars"]

PARAMETER = "structured_outputs"
STOPPED = {
    "NoExtension": "no finite text satisfies it",
    "NoExtensionBias": "no finite text satisfies it",
    "ParserTooComplex": "its grammar is too complex",
    "LexerTooComplex": "its expressions are too complex",
    "InternalError": "its grammar could not be built",
}
"""llguidance's names of what has stopped it, in words."""
AROUND = re.compile(
    r"^((at )?\d+\(\d+\): )?(failed to compile JSON schema: )?(invalid regex .* \(in regex\): )?"
    r"|; \w+ in regex /.*$| \(at .*\)$|\. Enable .*$"
)
"""Its places and excerpts of an expression, around what is wrong there."""
MAX_LIVE = 1024
"""Constraints of live completions."""
MAX_COMPILE_S = 5.0
"""For all constraints of a request. A compilation cannot be stopped: it is left to itself then."""
MAX_ABANDONED = 2
"""Compilations that were left to themselves and still run."""
MASK_TOKEN_S = 0.002
"""Processor time for the mask of one token, on the average of a completion."""
MASK_EXTRA_S = 0.25
"""And beyond that, for a completion as a whole."""
STACK_BYTES = 64 << 20
"""Of the thread that compiles; reserved, not taken."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 2_000,  # what an ambiguous grammar makes of each grows with their square
    "max_lexer_states": 20_000,  # some 10 MB
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a model cannot fill its output with blanks."""


class Grammars:
    """Compiles grammars for one model's vocabulary, on a thread of their own."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Blocks for a second where the vocabulary is large; `tokenizer` is used here only."""
        self._vocab_size = vocab_size
        self._refusal = ""
        self._vocabulary: Any = None
        self._live: weakref.WeakSet[Constraint] = weakref.WeakSet()
        self._thread = _CompileThread()
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

    def submit(
        self, structure: StructuredOutputs | CallGrammar, count: int
    ) -> Future[list[Constraint]]:
        """`count` constraints that share nothing. The future ends with them or the error, which
        names the tool whose schema cannot be followed. The size of schemas has been checked.

        Raises InvalidRequestError where the model cannot, OverloadedError where there are too many.
        Whoever waits calls `relieve` from time to time.
        """
        if self._vocabulary is None:
            raise InvalidRequestError(f"{PARAMETER} {self._refusal}", parameter=PARAMETER)
        if len(self._live) + count > MAX_LIVE or self._thread.num_abandoned >= MAX_ABANDONED:
            raise OverloadedError(f"{PARAMETER}: {len(self._live)} are live already; try later")
        return self._thread.submit(lambda: self._compile(structure, count))

    def relieve(self) -> None:
        """Refuse the compilation under way, and go on without it, if it has taken too long."""
        self._thread.relieve()

    def close(self) -> None:
        """Give up what is not compiled yet; does not wait."""
        self._thread.close()

    def _compile(self, structure: StructuredOutputs | CallGrammar, count: int) -> list[Constraint]:
        if isinstance(structure, StructuredOutputs):
            return self._compile_text(lambda: _grammar(structure), count)
        try:
            return self._compile_text(lambda: _from_lark(structure.text), count)
        except InvalidRequestError as error:
            for place in structure.tools:
                try:
                    self._compile_text(partial(_from_lark, structure.alone(place)), 1)
                except InvalidRequestError as found:
                    reason = str(found).removeprefix(f"{PARAMETER} ")
                    raise structure.refusal(place, reason) from found
            raise error.for_parameter("tools") from error  # too much together

    def _compile_text(self, write: Callable[[], str], count: int) -> list[Constraint]:
        with _refusing_panics():
            grammar = _in_any_tokens(write())
            found = []
            end = time.perf_counter() + MAX_COMPILE_S
            for _ in range(count):
                found.append(Constraint(self._matcher(grammar), self._vocab_size))
                if time.perf_counter() > end:
                    raise _refused("it takes too long to compile")
            self._live.update(found)
            return found

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest: here, and not between two steps
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher


class _CompileThread:
    """Does one job after the other, with the interpreter's lock released most of the time.

    A daemon: a compilation that does not end must not keep the process from its end.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: tuple[float, Future[Any]] | None = None
        self._thread: threading.Thread | None = None
        self._abandoned: list[threading.Thread] = []

    @property
    def num_abandoned(self) -> int:
        """Threads whose job was given up and has not ended."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        return len(self._abandoned)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a job."""
        future: Future[Any] = Future()
        self._jobs.put((function, future))
        if self._thread is None:
            self._start()
        return future

    def relieve(self) -> None:
        """Give up the running job if it has taken too long."""
        with self._lock:
            if self._running is None or time.perf_counter() < self._running[0] + MAX_COMPILE_S:
                return
            (_, future), self._running = self._running, None
            assert self._thread is not None
            self._abandoned.append(self._thread)
            self._start()
        future.set_exception(_refused("it takes too long to compile"))

    def close(self) -> None:
        """Cancel what has not begun."""
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job[1].cancel()
        self._jobs.put(None)

    def _start(self) -> None:
        usual = threading.stack_size(STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="aioengine-grammar", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            mine = time.perf_counter(), future
            with self._lock:
                self._running = mine
            result, error = None, None
            try:
                result = function()
            except BaseException as caught:
                error = caught
            with self._lock:
                if self._running is not mine:
                    return  # given up, and another thread goes on
                self._running = None
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del job, function, future, mine, result, error


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
    """One completion's place in its grammar. Used by the thread that launches steps only."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._num_taken = 0
        self._spent_s = 0.0

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor:
        """Compute which tokens may be number `output_index`: int32 [ceil(vocab / 32)], one bit
        each.

        `token_ids` end with the output so far. Raises InvalidRequestError where the grammar turns
        out to be too complex: every other sequence of the step waits for the mask.
        """
        begin = time.thread_time()
        count = output_index - self._num_taken
        with _refusing_panics():
            for token_id in token_ids[len(token_ids) - count :] if count else ():
                self._matcher.consume_token(token_id)
            self._num_taken = output_index
            bits = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise _refused(self._matcher.get_error())
        self._spent_s += time.thread_time() - begin
        if self._spent_s > MASK_EXTRA_S + MASK_TOKEN_S * (output_index + 1):
            raise _refused("what may come next takes too long to find")
        return torch.frombuffer(bytearray(bits), dtype=torch.int32)[: self._num_words]


def _from_lark(text: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(text))


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
        texts = (_quote(choice) for choice in structure.choice)
        found = LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    else:
        found = LLMatcher.grammar_from_lark(structure.grammar or "")
    return found


def _in_any_tokens(grammar: str) -> str:
    """The grammar, which may be followed in any tokens that spell it.

    Else what has to come is tokenised as a whole, and as a special token where it spells one: the
    end of the answer, or what no grammar takes.
    """
    if grammar.startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
        grammar = part["lark_grammar"] or f"start: %json {json.dumps(part['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{grammar}'


def _quote(text: str) -> str:
    # JSON leaves this one control character as it is, and Lark does not take it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAMETER} cannot be followed: {_sentence(reason):.200}", parameter=PARAMETER
    )


def _sentence(reason: str) -> str:
    """Return what llguidance says, without positions, excerpts and names that only it knows."""
    lines = reason.strip().splitlines() or [""]
    if lines[0] in STOPPED:
        return STOPPED[lines[0]]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return AROUND.sub("", (errors or lines)[0][:1000])
