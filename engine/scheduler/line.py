"""Who waits, who runs, who gives way.

Requests are admitted in the order (priority, arrival, choice) while slots and pages last, and the
youngest of that order gives way when pages run out. The most urgent running request can take
everything from the others, so it always gets on and ends: nobody is preempted for ever.
`max_num_seqs` bounds running choices; children aren't counted, pages alone bound them.
"""

from __future__ import annotations

from bisect import insort
from time import perf_counter

from engine.request import Role
from engine.scheduler.slots import Slots
from engine.scheduler.track import Track


def _order(track: Track) -> tuple[int, int, int]:
    return track.order


class Line:
    """The queue and the running set, both sorted by urgency."""

    def __init__(self, slots: Slots, max_num_seqs: int) -> None:
        self._slots = slots
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Track] = []
        self.running: list[Track] = []
        self.preemptions = 0

    def add(self, track: Track) -> None:
        insort(self.waiting, track, key=_order)

    def admit(self) -> bool:
        """The head of the queue, as far as it goes; whether anyone came in."""
        before = len(self.running)
        for track in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                break
            if track.leader is None and not self._admit(track):
                break
        return len(self.running) > before

    def _admit(self, track: Track) -> bool:
        # alone, it may have the pages that are meant for its children
        if self._slots.admit(track.seq) or (
            not self.running and self._slots.admit(track.seq, spare=False)
        ):
            self._start(track)
            return True
        return False

    def _start(self, track: Track) -> None:
        self.waiting.remove(track)
        insort(self.running, track, key=_order)
        track.running = True
        if track.seq.started is None:
            track.seq.started = perf_counter()

    def preempt(self, track: Track) -> None:
        """It and its family give up every slot; tokens stay, and it waits in its old place."""
        for each in track.family():
            self._slots.release(each.seq)
        self.running.remove(track)
        track.running = False
        self.add(track)
        self.preemptions += 1

    def retire(self, track: Track) -> None:
        """It has ended."""
        self._slots.release(track.seq)
        (self.running if track.running else self.waiting).remove(track)
        track.running = False
        for follower in track.followers:
            follower.leader = None
        track.followers = []
        if track.leader is not None:
            track.leader.followers.remove(track)
            track.leader = None

    def fork_choices(self) -> None:
        """Later choices take the first one's prompt, when that is computed but for its last token.

        Those that find no room wait for admission like anyone else.
        """
        for leader in [track for track in self.running if track.followers]:
            seq, at = leader.seq, leader.seq.prompt_len - 1
            for role in seq.slots:
                self._slots.trim(seq, role, at)
            if any(computed < at for computed in seq.computed.values()):
                continue
            for follower in leader.followers:
                follower.leader = None
                if len(self.running) < self.max_num_seqs and self._slots.fork(
                    seq, follower.seq, tuple(seq.slots)
                ):
                    follower.seq.prompt_logprobs = seq.prompt_logprobs.copy()
                    self._start(follower)
            leader.followers = []

    def others(self, root: Track, role: Role) -> list[Track]:
        """Running requests that hold pages of `role`, `root` apart."""
        return [
            track
            for track in self.running
            if track is not root and any(role in each.seq.slots for each in track.family())
        ]
