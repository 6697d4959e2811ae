"""Constraints on the answers to a prompt: grammars, and bounds on reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aioengine.engine.detokenizer import MessageReader
from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.renderer import ChatPrompt
from aioengine.sampling.sampler import Constraint
from aioengine.sampling.sampling_metadata import SamplingContext
from aioengine.sampling.structured_output import Grammars
from aioengine.sampling.thinking_budget import ThinkingBudget, end_tokens
from aioengine.sampling_params import SamplingParams

__all__ = ["bound_thinking", "check_thinking", "compile_grammar"]

GRAMMAR_LOOK_S = 1.0
"""How often one who waits for a grammar looks whether the one being compiled takes too long."""


async def compile_grammar(
    grammars: Grammars, params: SamplingParams, chat: ChatPrompt | None
) -> Sequence[Constraint]:
    """Compile what each of the `n` completions has to follow; none where they need not.

    Raises InvalidRequestError.
    """
    structure, grammar = params.structured_outputs, None if chat is None else chat.grammar
    if structure is not None and grammar is not None:
        message = "structured_outputs and a tool that has to be called exclude each other"
        raise InvalidRequestError(message, parameter="structured_outputs")
    wanted = structure or grammar
    if wanted is None:
        return ()
    compiled = asyncio.wrap_future(grammars.submit(wanted, params.n))
    try:
        while not compiled.done():
            await asyncio.wait([compiled], timeout=GRAMMAR_LOOK_S)
            grammars.relieve()
        return compiled.result()
    finally:
        compiled.cancel()


def check_thinking(params: SamplingParams, chat: ChatPrompt | None) -> None:
    """Raise InvalidRequestError for a bound on reasoning where none can be told from the answer."""
    fault = ""
    if chat is None:
        fault = "a prompt that is no messages has no reasoning to be told from its answer"
    elif chat.answers.thought is None:
        fault = f"no reasoning is known in answers of the model's format ({chat.answers.name})"
    if fault and params.thinking_budget is not None:
        message = f"thinking_budget must be None: {fault}"
        raise InvalidRequestError(message, parameter="thinking_budget")


def bound_thinking(
    params: SamplingParams,
    chat: ChatPrompt,
    readers: Sequence[MessageReader | None],
    grammars: Sequence[Constraint],
    context: SamplingContext,
) -> Sequence[Constraint]:
    """Add the bound on reasoning, if there is one, to the grammars of the completions, or none.

    `readers`: of each completion's message; `context`: for the thread of the caller. Raises
    InvalidRequestError where the end of reasoning cannot be written.
    """
    if params.thinking_budget is None:
        return grammars
    assert chat.answers.thought is not None
    mark = chat.answers.thought[1]
    end = end_tokens(context.tokenizer, mark, context.vocab_size)
    if (other := context.forbidding(params, end)) is not None:
        message = f"thinking_budget must be None where {other} forbids {mark}, which ends reasoning"
        raise InvalidRequestError(message, parameter="thinking_budget")
    found = []
    for index, reader in enumerate(readers):
        assert reader is not None
        grammar = grammars[index] if grammars else None
        budget = params.thinking_budget, end, reader, context.vocab_size, grammar
        found.append(ThinkingBudget(*budget))
    return found
