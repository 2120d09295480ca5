"""The control seam: every change of a trajectory is an Edit, a Branch or an Adopt.

A `Controller` is a frozen value in the config; it makes one `Watch` for each sequence, which hears
every token once and answers with a decision. Nothing else steers a sequence but a `LogitsRule`.
The first decision wins, in the order of the controllers; all watches hear every event even so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from engine.request import Admission, Finish, LogitsRule, Origin, Role, SamplingParams, Sequence
from engine.scheduler.reasoning import Markers


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Truncate, then append, then switch role, then finish; each part optional.

    `truncate` is the new length of `Sequence.tokens`, never below the prompt's.
    """

    truncate: int | None = None
    append: tuple[int, ...] = ()
    role: Role | None = None
    finish: Finish | None = None

    def __post_init__(self) -> None:
        _check_ids(self.append)
        if self.truncate is not None and not isinstance(self.truncate, int):
            raise ValueError(f"Edit.truncate must be a length or None, not {self.truncate!r}")
        if self.finish is not None and not isinstance(self.finish, Finish):
            raise ValueError(f"Edit.finish must be a Finish or None, not {self.finish!r}")


def _check_ids(append: object) -> None:
    if not isinstance(append, tuple) or not all(isinstance(token, int) for token in append):
        raise ValueError(f"append must be a tuple of token ids, not {append!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A child that shares its parent's pages until it writes; the parent rests while it runs.

    `append` is read first; then the child generates until a thought ends, it finishes, or, for
    "scored", not at all: the logprobs of `append` come back in `child.score`. A child has no watch
    but its own, which hears what it generates, and the stop rules. `max_tokens` bounds that; None:
    what the parent has left. The `max_tokens` and `grammar` of own `params` aren't asked.
    """

    role: Role = "main"
    append: tuple[int, ...] = ()
    until: Literal["thought", "finish", "scored"] = "finish"
    max_tokens: int | None = None
    params: SamplingParams | None = None  # None: the parent's
    watch: Watch | None = None

    def __post_init__(self) -> None:
        _check_ids(self.append)
        if self.until not in ("thought", "finish", "scored"):
            raise ValueError(f"Branch.until must be thought, finish or scored, not {self.until!r}")
        if self.max_tokens is not None and not isinstance(self.max_tokens, int):
            raise ValueError(f"Branch.max_tokens must be a count or None, not {self.max_tokens!r}")
        for name, kind in (("params", SamplingParams), ("watch", Watch)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"Branch.{name} must be {kind.__name__} or None, not {value!r}")


@dataclass(frozen=True, slots=True)
class Adopt:
    """The parent takes the child's tokens and its slot of that role; other roles catch up."""

    child: Sequence


Decision = Edit | Adopt | list[Branch] | None
"""A list starts another round: children live until a decision that is no list."""


class TokenEvent(NamedTuple):
    """One token that entered `seq.tokens` (it is tokens[position]); `role` brought it."""

    token: int
    position: int
    role: Role
    origin: Origin
    entropy: float | None = None
    logprob: float | None = None
    watch: tuple[float, ...] = ()  # logprobs of the controller's own watch_ids


class ThoughtEvent(NamedTuple):
    """tokens[start : end] of one thought, its boundary included."""

    start: int
    end: int
    role: Role
    mean_entropy: float | None = None


class Watch:
    """One controller's state for one sequence. Every hook is optional."""

    def begin(self, seq: Sequence) -> Decision:
        """Before the first token is generated."""
        return None

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        return None

    def on_thought(self, seq: Sequence, event: ThoughtEvent) -> Decision:
        """After on_token of the thought's last token."""
        return None

    def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
        """The branches of this watch's last round have ended; here they are, in its order.

        None: they go, with those of earlier rounds, and the parent runs on.
        """
        return None

    def rewound(self, seq: Sequence, pos: int) -> None:
        """Tokens from `pos` on are gone: forget them."""

    def rules(self, seq: Sequence) -> tuple[LogitsRule, ...]:
        """Asked once, after begin."""
        return ()

    def settled(self, seq: Sequence) -> int:
        """How many of seq.tokens will never be truncated by this watch; streaming stops there."""
        return len(seq.tokens)


class Language(NamedTuple):
    """What a controller may know of the model that it steers."""

    markers: Markers
    token_bytes: Callable[[int], bytes]


class Controller(ABC):
    """Frozen hyperparameters of one method of control.

    `roles` it always uses (admitted together), `children[role]` branches it may start at once,
    `entropy` whether its watches read entropies, `watch_ids` whose logprobs they read.
    """

    roles: tuple[Role, ...] = ("main",)
    children: dict[Role, int] = {}  # noqa: RUF012 (a default that nobody mutates)
    entropy: bool = False
    watch_ids: tuple[int, ...] = ()

    def bind(self, language: Language) -> Controller:
        """This method for a model of that language; asked once, before any watch is made.

        ValueError: the method can't serve such a model.
        """
        return self

    @abstractmethod
    def watch(self) -> Watch:
        """Fresh state for one sequence."""


class Capacity(Protocol):
    """All that the scheduler knows of a cache."""

    def refuses(self, tokens: int, kv_budget: int | str | None) -> str | None:
        """Why a prompt of so many tokens and one more can never be held, at the budget that a
        request asks for; None if it can."""

    def admit(self, seq: Sequence, spare: int = 0) -> Admission | None:
        """A slot, judged by the policy's peak, with room for `spare` children besides; or None."""

    def reserve(self, seq: Sequence, slot: int, tokens: int) -> int:
        """How many of the next tokens may run now: pages, and never across the next compaction."""

    def busy(self, slot: int) -> bool:
        """Whether the slot waits for a compaction: `reserve` would do what is left of it."""

    def fork(self, slot: int, child: Sequence, spare: int = 0) -> int | None:
        """A slot for the child that shares every page; None if its peak finds no room.

        A branch (`child.parent` is set) takes one of the rooms that its parent was admitted with,
        if one is left; a later choice of n > 1 brings its own, with `spare` for its children.
        """

    def truncate(self, slot: int, pos: int) -> int:
        """Drop cells from `pos` on; the new `computed` (0 if a compaction is in the way)."""

    def release(self, slot: int) -> None:
        """Give everything back."""
