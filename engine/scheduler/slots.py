"""Slots and `computed`: the only place where the scheduler touches a `Capacity`."""

from __future__ import annotations

from collections.abc import Mapping

from engine.request import MAIN, Role, Sequence
from engine.scheduler.controller import Capacity


class Slots:
    """Every role's cache. Sequences get the roles that are always used together, or none."""

    def __init__(
        self, capacity: Mapping[Role, Capacity], always: tuple[Role, ...], spare: frozenset[Role]
    ) -> None:
        self.capacity = capacity
        self.always = always
        self._spare = spare

    def admit(self, seq: Sequence, *, spare: bool = True) -> bool:
        """All roles that are always used, with room for a child where children may run."""
        for role in self.always:
            if not self._admit(seq, role, self._room(role) if spare else 0):
                self.release(seq)
                return False
        return True

    def _room(self, role: Role) -> int:
        return int(role in self._spare)

    def _admit(self, seq: Sequence, role: Role, spare: int) -> bool:
        granted = self.capacity[role].admit(seq, spare)
        if granted is None:
            return False
        seq.slots[role], seq.computed[role] = granted
        limit = len(seq.tokens) - 1
        if seq.params.prompt_logprobs is not None:  # what a prefix hit covers has no logprobs
            limit = min(limit, len(seq.prompt_logprobs))
        self.trim(seq, role, limit)
        if role == MAIN and not seq.output_len:
            seq.cached_tokens = seq.computed[role]
        return True

    def busy(self, seq: Sequence, role: Role) -> bool:
        """Whether its cache is being compacted, while others go on."""
        return role in seq.slots and self.capacity[role].busy(seq.slots[role])

    def hold(self, seq: Sequence, role: Role) -> None:
        """A slot of one role that it has come to use, if there is one."""
        if role not in seq.slots:
            self._admit(seq, role, 0)

    def fork(self, parent: Sequence, child: Sequence, roles: tuple[Role, ...]) -> bool:
        """Share the parent's pages in all these roles, or in none; for a branch or a choice."""
        for role in roles:
            spare = self._room(role) if child.parent is None else 0
            slot = self.capacity[role].fork(parent.slots[role], child, spare)
            if slot is None:
                self.release(child)
                return False
            child.slots[role], child.computed[role] = slot, parent.computed[role]
        return True

    def adopt(self, seq: Sequence, child: Sequence) -> None:
        """The child's slots replace those of the same roles."""
        for role in list(child.slots):
            self.drop(seq, role)
            seq.slots[role] = child.slots.pop(role)
            seq.computed[role] = child.computed.pop(role)

    def trim(self, seq: Sequence, role: Role, limit: int) -> None:
        """Keep cells of the first `limit` tokens at most."""
        if seq.computed[role] > limit:
            seq.computed[role] = self.capacity[role].truncate(seq.slots[role], limit)

    def settle(self, seq: Sequence, stale: int | None) -> None:
        """After edits: no cell from `stale` on, and the last token always left to run."""
        limit = len(seq.tokens) - 1
        for role in seq.slots:
            self.trim(seq, role, limit if stale is None else min(limit, stale))

    def drop_extras(self, seq: Sequence, keep: frozenset[Role]) -> None:
        """Roles that were admitted for a while and are no longer in use."""
        if len(seq.slots) > len(self.always):
            for role in [r for r in seq.slots if r not in self.always and r not in keep]:
                self.drop(seq, role)

    def drop(self, seq: Sequence, role: Role) -> None:
        if role in seq.slots:
            self.capacity[role].release(seq.slots.pop(role))
            del seq.computed[role]

    def release(self, seq: Sequence) -> None:
        for role in list(seq.slots):
            self.drop(seq, role)
