"""What the scheduler keeps of one sequence, beside the sequence itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import LogitsRule, Role, Sequence
from engine.scheduler.controller import Branch, Controller, Watch
from engine.scheduler.thoughts import ThoughtTracker

REWOUND = -1
"""The index that rehashes the lineage of a sequence that was truncated."""


def lineage_of(parent: int, index: int) -> int:
    """A 63-bit lineage for the `index`-th descendant of `parent`; the same in every process."""
    packed = parent.to_bytes(8, "little") + index.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class Ear(NamedTuple):
    """A watch, whose it is, and where its watch_ids lie among the batch's."""

    controller: Controller
    watch: Watch
    ids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return type(self.controller).__name__


@dataclass(eq=False, slots=True)
class Track:
    """A sequence's place in the scheduler.

    A request's choice waits (no slot) or runs (a slot of every role that is always used). A child
    belongs to its parent: it is pending (no slot), live (a slot) or ended. A parent rests while
    `asker` is set: a round of children is under way.
    """

    seq: Sequence
    ears: tuple[Ear, ...]
    thoughts: ThoughtTracker
    base: int  # where the lists of generated tokens begin
    floor: int  # no edit truncates below
    running: bool = False
    ended: bool = False
    reported: int = 0  # tokens that drain has given out
    decisions: int = 0  # since a model last ran for it
    stale: int | None = None  # cells from this position on are no longer of its tokens
    entropies: list[float | None] = field(default_factory=list)
    inherited: tuple[LogitsRule, ...] = ()  # rules that a child gets copies of
    # n > 1
    leader: Track | None = None  # the choice whose prompt it waits to fork
    followers: list[Track] = field(default_factory=list)
    # branches
    parent: Track | None = None
    branch: Branch | None = None  # what a child was asked for
    asker: Ear | None = None
    round: list[Track] = field(default_factory=list)
    earlier: list[Track] = field(default_factory=list)  # children of rounds before
    born: int = 0  # children ever made
    crowded: bool = False  # a child found no pages: the others run one at a time

    @property
    def order(self) -> tuple[int, int, int]:
        """Lower is more urgent."""
        return self.seq.priority, self.seq.arrival, self.seq.index

    @property
    def scored(self) -> bool:
        return self.branch is not None and self.branch.until == "scored"

    @property
    def children(self) -> list[Track]:
        return self.earlier + self.round

    @property
    def pending(self) -> list[Track]:
        """Children of the round that wait for a slot."""
        return [c for c in self.round if not c.ended and not c.seq.slots]

    @property
    def root(self) -> Track:
        return self if self.parent is None else self.parent.root

    def family(self) -> Iterator[Track]:
        """Itself, then its descendants, elder ones first."""
        yield self
        for child in self.children:
            yield from child.family()

    def targets(self) -> list[tuple[Role, int]]:
        """What it has to do now: catch up in these roles to these lengths."""
        length = len(self.seq.tokens)
        if self.ended:
            return []
        if self.followers:
            return [(role, self.seq.prompt_len - 1) for role in self.seq.slots]
        if self.asker is not None:
            return [(role, length - 1) for role in dict.fromkeys(c.seq.role for c in self.pending)]
        return [(self.seq.role, length - 1 if self.scored else length)]
