"""Sampling options of one request: frozen, keyword-only, checked on construction.

Names and defaults are vLLM's.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from aioengine.errors import (
    InvalidRequestError,
    check_text,
    ints,
    is_real,
    is_text,
    optional,
    reals,
    require,
    require_fields,
    with_known_names,
)

__all__ = ["SamplingParams", "StructuredOutputs"]

MAX_COMPLETIONS = 256
MAX_LOGPROBS = 128
MAX_PROMPT_LOGPROBS = 20
MAX_STRINGS = 64
MAX_STRING_LENGTH = 1024
MAX_STRINGS_LENGTH = 4096
MAX_TOKEN_IDS = {"stop_token_ids": 1024, "allowed_token_ids": 1 << 18, "logit_bias": 1 << 14}

# A grammar's compiler works in time that grows with the square of an expression's length, and on a
# stack that grows with the number of rules that lead to each other.
MAX_EXPRESSION_LENGTH = 2048
MAX_GRAMMAR_LENGTH = 64 * 1024
MAX_RULES = 1000
MAX_SCHEMA_DEPTH = 32
MAX_REFERENCES = 500
# A number that is to be a multiple of m makes some m states, and patterns that hold at once make as
# many states as each of them, multiplied. Where schemas are combined, any two might hold at once.
MAX_MULTIPLE = 2_000
MAX_SUM_OF_MULTIPLES = 10_000
MAX_COMBINED = 8
COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
MERGED = {
    "additionalProperties",
    "items",
    "multipleOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
}


@with_known_names("StructuredOutputs has no field {}", prefix="structured_outputs.")
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output text. Exactly one of the fields is given."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as the object that it is."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole text."""
    choice: Sequence[str] | None = None
    """The only texts that are allowed."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, as llguidance reads it; it begins at `start`. No
    `%json` or other directives that bring in a schema."""

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if self._has(name)]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            rule = "exactly one of json, json_object, regex, choice and grammar"
            message = f"structured_outputs must be {rule}, not {' and '.join(given) or 'none'}"
            raise InvalidRequestError(message, parameter="structured_outputs")
        if self.regex is not None:
            check_text(self.regex, MAX_EXPRESSION_LENGTH, "structured_outputs.regex")
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        if self.json is not None:
            self._check_schema(self.json)

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def _check_choice(self, choice: Any) -> None:
        name = "structured_outputs.choice"
        require(isinstance(choice, list | tuple), name, type(choice), "a list of texts")
        is_count = 0 < len(choice) <= MAX_RULES
        require(is_count, name, len(choice), f"1 to {MAX_RULES} texts")
        for text in choice:
            check_text(text, MAX_EXPRESSION_LENGTH, name, "a list of texts")
        length = sum(map(len, choice))
        rule = f"at most {MAX_GRAMMAR_LENGTH} characters in all"
        require(length <= MAX_GRAMMAR_LENGTH, name, length, rule)

    def _check_grammar(self, grammar: Any) -> None:
        name = "structured_outputs.grammar"
        check_text(grammar, MAX_GRAMMAR_LENGTH, name)
        lengths = [len(line) for line in grammar.splitlines()]
        require(len(lengths) <= MAX_RULES, name, len(lengths), f"at most {MAX_RULES} lines")
        longest = max(lengths, default=0)
        rule = f"in lines of at most {MAX_EXPRESSION_LENGTH} characters"
        require(longest <= MAX_EXPRESSION_LENGTH, name, longest, rule)
        # A schema in there would be compiled unseen.
        found = next((word for word in ("%json", "%regex", "%lark") if word in grammar), None)
        require(found is None, name, found, "free of %json, %regex and %lark")

    def _check_schema(self, schema: Any) -> None:
        name, size = "structured_outputs.json", f"of at most {MAX_GRAMMAR_LENGTH} characters"
        is_schema = isinstance(schema, str | Mapping)
        require(is_schema, name, type(schema), "a JSON schema, as a mapping or as text")
        require(len(schema) <= MAX_GRAMMAR_LENGTH, name, len(schema), size)
        text, fault = "", _fault_of_schema(schema)
        if not fault:
            try:
                text = self.schema_text
            except (ValueError, TypeError, RecursionError):
                fault = "JSON"
        if not fault and not is_text(text, MAX_GRAMMAR_LENGTH):
            fault = f"Unicode text, {size}"
        if fault:
            raise InvalidRequestError(f"{name} must be {fault}", parameter=name)

    @property
    def schema_text(self) -> str:
        """`json` as text."""
        return self.json if isinstance(self.json, str) else json.dumps(self.json)


def _fault_of_schema(schema: str | Mapping[str, Any]) -> str:
    """Name what a schema has to be and is not, or nothing."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
    except RecursionError:
        return f"nested at most {MAX_SCHEMA_DEPTH} levels deep"
    except ValueError:
        return "JSON"
    load = _SchemaLoad()
    level: list[tuple[str, Any]] = [("", parsed)]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [entry for entry in level if isinstance(entry[1], dict | list | tuple | Mapping)]
        if not level:
            return load.fault
        below: list[tuple[str, Any]] = []
        for name, item in level:
            load.num_values += len(item)
            if isinstance(item, list | tuple):
                below += [(name, child) for child in item]
                continue
            load.add(name, item)
            for key, child in item.items():
                is_named = key == "properties" and isinstance(child, Mapping)
                below += child.items() if is_named else [(name, child)]
        if fault := load.fault:
            return fault
        level = below
    return f"nested at most {MAX_SCHEMA_DEPTH} levels deep"


class _SchemaLoad:
    """Counts of what in a schema makes work for its compiler.

    Expressions and multiples are counted for each property's name: those of one name might have to
    hold at once, where schemas are combined; equal ones are one.
    """

    def __init__(self) -> None:
        self.num_values = self.num_references = self.longest_pattern = 0
        self.is_combined = False
        self._patterns: defaultdict[str, set[str]] = defaultdict(set)
        self._multiples: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, name: str, mapping: Mapping[str, Any]) -> None:
        """One object of the schema, somewhere in the property `name`."""
        self.num_references += "$ref" in mapping
        keyed = mapping.get("patternProperties")
        patterns = list(keyed) if isinstance(keyed, Mapping) else []
        patterns += [mapping[key] for key in ("pattern", "format") if key in mapping]
        patterns = [pattern for pattern in patterns if isinstance(pattern, str)]
        if patterns:
            self._patterns[name].update(patterns)
            self.longest_pattern = max([self.longest_pattern, *map(len, patterns)])
        if "multipleOf" in mapping:
            self._multiples[name].add(_significant(mapping["multipleOf"]))
        joins = sum(key in mapping for key in COMBINING)
        if joins:
            entries = mapping.get("allOf")
            merges = isinstance(entries, list | tuple) and len(entries) > 1
            self.is_combined |= merges or joins > 1 or not MERGED.isdisjoint(mapping)

    @property
    def fault(self) -> str:
        """The first bound that is passed, or nothing."""
        if self.num_values > MAX_GRAMMAR_LENGTH:
            return f"of at most {MAX_GRAMMAR_LENGTH} characters"
        if self.longest_pattern > MAX_EXPRESSION_LENGTH:
            return f"with patterns of at most {MAX_EXPRESSION_LENGTH} characters"
        if self.num_references > MAX_REFERENCES:
            return f"with at most {MAX_REFERENCES} references"
        if max((max(found) for found in self._multiples.values()), default=1) > MAX_MULTIPLE:
            return f"with values of multipleOf of at most {MAX_MULTIPLE}, the point taken out"
        if sum(sum(found) for found in self._multiples.values()) > MAX_SUM_OF_MULTIPLES:
            return f"with values of multipleOf of {MAX_SUM_OF_MULTIPLES} in sum"
        if not self.is_combined:
            return ""
        everywhere = self._patterns.get("", set())
        if any(len(found | everywhere) > MAX_COMBINED for found in self._patterns.values()):
            return f"with at most {MAX_COMBINED} patterns for one property, if combined"
        always = self._multiples.get("", set())
        if any(math.prod(found | always) > MAX_MULTIPLE for found in self._multiples.values()):
            return f"with values of multipleOf that multiply to at most {MAX_MULTIPLE}, if combined"
        return ""


def _significant(multiple: Any) -> int:
    """The digits of a number without its point and the zeros at its ends: 0.25 is 25."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 1
    if isinstance(multiple, float) and not math.isfinite(multiple):
        return 1
    digits = "".join(map(str, Decimal(str(multiple)).as_tuple().digits)).strip("0")
    return int(digits[:20] or 1)


YES_OR_NO = (lambda value: isinstance(value, bool)), "True or False"
STRINGS = (
    ("stop", "a string, a list of strings, or None", bytes),
    ("bad_words", "a list of words, or None", str | bytes),
)
"""Fields of strings, what each must be, and the sequences that are no lists of them."""
CHECKS = {
    "temperature": (reals(0, 100), "a number from 0 to 100"),
    "top_p": (lambda value: is_real(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (reals(0, 1), "a number from 0 to 1"),
    "top_k": (ints(-1), "an integer: positive, or 0 or -1 for all tokens"),
    "seed": (optional(ints(-(2**63), 2**64 - 1)), "an integer of 64 bits or None"),
    "presence_penalty": (reals(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (reals(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": (reals(0.01, 100), "a number from 0.01 to 100"),
    "n": (ints(1, MAX_COMPLETIONS), f"an integer from 1 to {MAX_COMPLETIONS}"),
    "max_tokens": (optional(ints(1)), "a positive integer or None"),
    "min_tokens": (ints(0), "an integer, 0 or more"),
    "thinking_budget": (optional(ints(0)), "an integer, 0 or more, or None"),
    "logprobs": (
        optional(ints(0, MAX_LOGPROBS)),
        f"an integer from 0 to {MAX_LOGPROBS}, or None",
    ),
    "prompt_logprobs": (
        optional(ints(0, MAX_PROMPT_LOGPROBS)),
        f"an integer from 0 to {MAX_PROMPT_LOGPROBS}, or None",
    ),
    "include_stop_str_in_output": YES_OR_NO,
    "ignore_eos": YES_OR_NO,
    "skip_special_tokens": YES_OR_NO,
    "detokenize": YES_OR_NO,
}


STRUCTURES = {
    "StructuredOutputs: structured_outputs=StructuredOutputs({}=...)": (
        StructuredOutputs.__dataclass_fields__
    )
}
"""Names that SamplingParams does not know, and where they go."""


@with_known_names("SamplingParams has no option {}", STRUCTURES)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping options of one request, with vLLM's names and defaults."""

    RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    """Options that a checkpoint's generation config may recommend."""

    n: int = 1
    """Completions of one prompt. They share its media, its encoder rows and its prefix."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (nucleus sampling)."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has already; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the output has the token; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens there were (prompt too), multiplies the negative."""
    seed: int | None = None
    """The same seed gives the same tokens, alone or in company; None (or -1) draws one."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; the one completed first wins. Tokens that the text leaves out have
    none (see `skip_special_tokens`)."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the stop token, in the output text."""
    bad_words: Sequence[str] | None = None
    """Words that must not appear, neither at the beginning of the output nor within it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """The most output tokens; None: all that the model's length allows."""
    min_tokens: int = 0
    """Output tokens before end-of-sequence and stop tokens may be chosen."""
    logprobs: int | None = None
    """Log probabilities of each output token and of so many of the most probable ones there."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. Such a request reads no cached prefix."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit, -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be chosen."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: token ids only, no text (and no stop strings)."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, a regular expression, choices or a grammar that the text must follow."""
    thinking_budget: int | None = None
    """The most tokens of reasoning in an answer to messages. Then the model is made to end it, as
    its format does, and goes on with the answer. 0: none."""
    logits_processors: Sequence[Callable[[Sequence[int], Any], Any]] | None = field(
        default=None, repr=False
    )
    """Functions of the output tokens so far and the logits of the next (torch.Tensor [vocab],
    float32, or float64 in such a model), which return the logits to use: the same tensor, changed,
    or another like it. They run before all other options, in order, and not on the event loop."""

    def __post_init__(self) -> None:
        require_fields(self, CHECKS)
        most = self.max_tokens
        rule = f"at most max_tokens ({most})"
        require(most is None or self.min_tokens <= most, "min_tokens", self.min_tokens, rule)
        self._check_stops()
        self._check_tokens()
        self._check_structure()
        self._check_processors()

    def _check_stops(self) -> None:
        for name, rule, no_list in STRINGS:
            value = getattr(self, name)
            is_list = isinstance(value, Sequence) and not isinstance(value, no_list)
            require(value is None or is_list, name, type(value), rule)
            _check_strings(name, _strings(value))
        if not all(word.strip() for word in self.bad_words or ()):
            message = "bad_words must be a list of words, and one of them is blank"
            raise InvalidRequestError(message, parameter="bad_words")
        is_text_wanted = self.detokenize or not self.stop_strings
        require(is_text_wanted, "stop", "given", "absent when detokenize is False")

    def _check_tokens(self) -> None:
        for name, most in MAX_TOKEN_IDS.items():
            if (value := getattr(self, name)) is None:
                continue
            kind = Mapping if name == "logit_bias" else Sequence
            what = f"a {'mapping' if kind is Mapping else 'list'} of token ids"
            require(isinstance(value, kind), name, type(value), f"{what}, or None")
            length = len(value)
            require(length <= most, name, length, f"at most {most} token ids")
            # A list may be as long as the vocabulary: no Python code for each token.
            others = set(map(type, value)) - {int}
            require(not others, name, next(iter(others), int), f"{what}, which are integers")
            least = min(value, default=0)
            require(least >= 0, name, least, f"{what}, which are 0 or more")
        allowed = self.allowed_token_ids
        is_some = allowed is None or len(allowed) > 0
        require(is_some, "allowed_token_ids", "empty", "None or token ids")
        is_bias = reals(-100, 100)
        for token_id, bias in (self.logit_bias or {}).items():
            require(is_bias(bias), f"logit_bias[{token_id}]", bias, "a number from -100 to 100")

    def _check_structure(self) -> None:
        structure = self.structured_outputs
        is_known = isinstance(structure, StructuredOutputs | None)
        require(is_known, "structured_outputs", type(structure), "a StructuredOutputs or None")
        rule = "left alone with structured_outputs, which say themselves where the text ends"
        for name in ("ignore_eos", "min_tokens"):
            value = getattr(self, name)
            require(structure is None or not value, name, value, rule)
        budget = self.thinking_budget
        rule = "None with structured_outputs, which the whole text follows"
        require(structure is None or budget is None, "thinking_budget", budget, rule)
        rule = "None when detokenize is False: reasoning is found in the text"
        require(self.detokenize or budget is None, "thinking_budget", budget, rule)

    def _check_processors(self) -> None:
        name, given = "logits_processors", self.logits_processors
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        require(given is None or is_list, name, type(given), "a list of functions, or None")
        for number, function in enumerate(given or ()):
            is_function = callable(function) and not isinstance(function, type)
            rule = "a function of the output tokens and the logits"
            require(is_function, f"{name}[{number}]", type(function), rule)

    @classmethod
    def recommended(cls, generation_config: Any) -> dict[str, Any]:
        """Options that a checkpoint's makers recommend in its config; greedy, unless they sample.

        `generation_config`: transformers', or None.
        """
        samples = bool(getattr(generation_config, "do_sample", None))
        names = cls.RECOMMENDED if samples else cls.RECOMMENDED[-1:]
        found = {name: getattr(generation_config, name, None) for name in names}
        said = {name: value for name, value in found.items() if value is not None}
        return {"temperature": 1.0 if samples else 0.0, **said}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return _strings(self.stop)


def _check_strings(name: str, strings: Sequence[Any]) -> None:
    require(len(strings) <= MAX_STRINGS, name, len(strings), f"at most {MAX_STRINGS} strings")
    what = "a string or a list of strings" if name == "stop" else "a list of words"
    for string in strings:
        check_text(string, MAX_STRING_LENGTH, name, what)
    length = sum(map(len, strings))
    rule = f"at most {MAX_STRINGS_LENGTH} characters in all"
    require(length <= MAX_STRINGS_LENGTH, name, length, rule)


def _strings(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
