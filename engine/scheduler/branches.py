"""Children of a sequence: how they are made, get their slots, and give them up.

A parent rests while a round of children is under way. It catches up in their roles to its last
token but one (a fork must have something left to run), and each pending child shares its pages from
there on. A child that lost its slot forks again and catches up its own tokens, so what children
answer doesn't depend on how many fit at once.
"""

from __future__ import annotations

from engine.request import Role, Sequence, TokenLogprob
from engine.scheduler.controller import Branch
from engine.scheduler.slots import Slots
from engine.scheduler.stop import StopRules, StopWatch
from engine.scheduler.track import Ear, Track, lineage_of


def spawn(parent: Track, asker: Ear, branch: Branch) -> Track:
    """A pending child: the parent's tokens, then `branch.append`, given text like a prompt.

    It has the stop rules, its own watch (under the asking controller's name and watch_ids) and
    copies of the parent's rules.
    """
    stop = parent.ears[0]
    assert isinstance(stop.controller, StopRules)
    assert isinstance(stop.watch, StopWatch)
    seq = Sequence(
        id=parent.seq.id,
        prompt_len=parent.seq.prompt_len,
        tokens=[*parent.seq.tokens, *branch.append],
        params=branch.params or parent.seq.params,
        messages=parent.seq.messages,
        role=branch.role,
        seed=parent.seq.seed,
        lineage=lineage_of(parent.seq.lineage, parent.born),
        priority=parent.seq.priority,
        arrival=parent.seq.arrival,
        index=parent.seq.index,
        thought_ends=parent.seq.thought_ends.copy(),
        parent=parent.seq,
    )
    parent.born += 1
    watch = stop.controller.branch(stop.watch, branch.append, branch.max_tokens)
    ears = [Ear(stop.controller, watch)]
    if branch.watch is not None:
        ears.append(asker._replace(watch=branch.watch))
    base = len(parent.seq.tokens)
    child = Track(
        seq,
        tuple(ears),
        parent.thoughts.fork(),
        base,
        len(seq.tokens),
        parent=parent,
        branch=branch,
    )
    child.inherited = tuple(rule.fork() for rule in parent.inherited)
    _read_given(child, branch)
    return child


def _read_given(child: Track, branch: Branch) -> None:
    seq = child.seq
    for at, token in enumerate(branch.append, child.base + 1):
        if child.thoughts.feed(token):
            seq.thought_ends.append(at)
    child.thoughts = child.thoughts.fork()  # counts from where it generates
    child.entropies = [None] * len(branch.append)
    if seq.params.logprobs is not None:
        seq.logprobs = [TokenLogprob(token, 0.0) for token in branch.append]
    if branch.until == "scored":
        seq.score = []


def fork_pending(parent: Track, slots: Slots) -> None:
    """Slots for the pending children whose role the parent has caught up in, as pages allow."""
    for child in parent.pending:
        role = child.seq.role
        ready = parent.seq.computed.get(role) == len(parent.seq.tokens) - 1
        if not ready or (parent.crowded and _busy(parent)):
            continue
        if not slots.fork(parent.seq, child.seq, (role,)) and not _retry(parent, child, slots):
            continue
        if child.scored:
            child.seq.score = []


def _busy(parent: Track) -> bool:
    return any(c.seq.slots and not c.ended for c in parent.round)


def _retry(parent: Track, child: Track, slots: Slots) -> bool:
    """If no sibling runs, the family's ended ones make room: they can be adopted without a slot."""
    parent.crowded = True
    if _busy(parent):
        return False
    for each in parent.root.family():
        if each.ended:
            slots.release(each.seq)
    return slots.fork(parent.seq, child.seq, (child.seq.role,))


def give_way(starved: Track, role: Role, slots: Slots) -> bool:
    """Free pages of `role` inside the starved one's own family; whether anyone gave any.

    Its own children that have ended go first, then siblings that have, then the youngest live
    sibling, which may be itself; an only child looks among its parent's siblings.
    """
    for child in starved.children:
        if child.ended and role in child.seq.slots:
            slots.release(child.seq)
            return True
    parent = starved.parent
    if parent is None:
        return False
    holders = [c for c in parent.children if any(role in each.seq.slots for each in c.family())]
    ended = [c for c in holders if c.ended]
    live = [c for c in holders if not c.ended]
    if not ended and live == [starved]:
        return give_way(parent, role, slots)
    parent.crowded = True
    for each in (ended or live)[-1].family():
        slots.release(each.seq)
    return True
