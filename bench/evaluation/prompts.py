"""How a problem is asked: its question, then how to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
"""Nearly every grader reads a box, so one instruction serves their tasks."""


def messages(
    question: str, *, instruction: str | None = None, system: str | None = None
) -> list[dict[str, str]]:
    r"""Chat messages: `system` if given, and the user's turn.

    The instruction ends the user's turn, after a blank line: some chat templates have no system
    role, others put a default of their own there, and makers of reasoning models advise against
    system prompts. None is `INSTRUCTION`, "" leaves the question alone.
    """
    turns = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": _asked(question, instruction)}]


def plain(messages: Sequence[Mapping[str, str]]) -> str:
    """The same for a model without a chat template: text for it to continue."""
    *before, question = (message["content"] for message in messages)
    return "\n\n".join((*before, f"Question: {question}", "Answer:"))


def _asked(question: str, instruction: str | None) -> str:
    return "\n\n".join(
        filter(None, (question, INSTRUCTION if instruction is None else instruction))
    )
