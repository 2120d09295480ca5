"""The scheduler's invariants, asserted by its tests after every step."""

from __future__ import annotations

from engine.request import Role
from engine.scheduler.line import Line
from engine.scheduler.slots import Slots
from engine.scheduler.track import Track


def check(line: Line, slots: Slots) -> None:
    """Assert that queues, slots, lengths and families fit together."""
    for queue in (line.running, line.waiting):
        assert [t.order for t in queue] == sorted(t.order for t in queue)
    assert len(line.running) <= line.max_num_seqs
    held: set[tuple[Role, int]] = set()
    for root in line.running:
        assert root.running
        assert set(slots.always) <= set(root.seq.slots)
        for track in root.family():
            _check_track(track)
            own = set(track.seq.slots.items())
            assert not own & held, "two sequences have one slot"
            held |= own
    for root in line.waiting:
        assert not root.running
        for track in root.family():
            _check_track(track)
            assert not track.seq.slots, "a sequence that waits holds a slot"


def _check_track(track: Track) -> None:
    seq = track.seq
    length = len(seq.tokens)
    assert set(seq.computed) == set(seq.slots)
    assert all(0 <= n < length for n in seq.computed.values()), "nothing left to sample from"
    assert seq.thought_ends == sorted(set(seq.thought_ends))
    assert seq.thought_ends[-1:] <= [length]
    assert track.base <= track.floor <= length
    assert track.reported <= length
    assert len(track.entropies) == length - track.base
    if seq.params.logprobs is not None:
        assert len(seq.logprobs) == length - track.base
    if track.parent is None:
        assert not track.ended, "an ended request is still in line"
    else:
        assert seq.tokens[: track.base] == track.parent.seq.tokens
    assert (track.asker is not None) == bool(track.round)
    assert all(child.parent is track for child in track.children)
    assert all(f.leader is track for f in track.followers)
