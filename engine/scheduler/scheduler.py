"""Continuous batching: every step, let each running sequence's current role catch up.

Prefill, decode, chunked prefill, resume after preemption, forced text and hand-over to another role
are this one act. The invariant: `computed[role] <= len(tokens)`, and between steps at least the
last token of an unfinished sequence is left to run, so that something can be sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.request import MAIN, Batch, Finish, Needs, Role, Row, RowOutput, Sequence, StepOutput
from engine.scheduler.branches import fork_pending, give_way
from engine.scheduler.check import check
from engine.scheduler.controller import Capacity, Controller
from engine.scheduler.line import Line
from engine.scheduler.rows import Wanted, collect, given, groups
from engine.scheduler.slots import Slots
from engine.scheduler.stop import StopRules
from engine.scheduler.thoughts import Thoughts
from engine.scheduler.track import Ear, Track, lineage_of
from engine.scheduler.trajectory import Fault, Trajectory, ask, watch_of


class Settled(NamedTuple):
    """tokens[start:end] of `seq` are final and new; `finish` comes once, with the last of them."""

    seq: Sequence
    start: int
    end: int
    finish: Finish | None


class Stats(NamedTuple):
    """Numbers for metrics; `ran_tokens` counts each role's tokens, recomputed ones too, and `edits`
    what each controller decided, by its class's name."""

    running: int
    waiting: int
    preemptions: int
    ran_tokens: dict[Role, int]
    edits: dict[str, int]


class Scheduler:
    """Turns requests into batches, and what the models answer into tokens and decisions."""

    def __init__(
        self,
        capacity: Mapping[Role, Capacity],
        *,
        stop: StopRules,
        controllers: tuple[Controller, ...] = (),
        thoughts: Thoughts,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        watch_ids = tuple(sorted({i for c in controllers for i in c.watch_ids}))
        self._needs = Needs(any(c.entropy for c in controllers), watch_ids)
        self._controllers = [
            (each, tuple(watch_ids.index(i) for i in each.watch_ids))
            for each in (stop, *controllers)
        ]
        children = [role for c in controllers for role in c.children]
        always = dict.fromkeys((MAIN, *(r for c in controllers for r in c.roles), *children))
        if missing := [role for role in always if role not in capacity]:
            raise ValueError(f"the controllers need models for the roles {missing}; give them")
        self._thoughts = thoughts
        self._slots = Slots(capacity, tuple(always), frozenset(children))
        self._trajectory = Trajectory(self._slots)
        self._line = Line(self._slots, max_num_seqs)
        self._max_batched_tokens = max_batched_tokens
        self._requests: dict[str, list[Track]] = {}
        self._flying: dict[Sequence, Track] = {}  # of this step's rows
        self._fresh: dict[Track, None] = {}  # choices that drain has to look at
        self._ran = dict.fromkeys(capacity, 0)
        self._arrivals = 0
        self._ends = 0

    # requests come and go

    def refuses(self, prompt_len: int, kv_budget: int | str | None = None) -> str | None:
        """Why a prompt can never be served, by the caches that every request needs."""
        for role in self._slots.always:
            if reason := self._slots.capacity[role].refuses(prompt_len, kv_budget):
                return f"{role}: {reason}"
        return None

    def add(self, choices: Seq[Sequence]) -> None:
        """The n choices of one request, in order. Sets their arrival, index and lineage."""
        tracks = [self._track(seq, index) for index, seq in enumerate(choices)]
        leader, *followers = tracks
        self._arrivals += 1
        self._requests[leader.seq.id] = list(tracks)
        for track in tracks:
            self._line.add(track)
        leader.followers = followers
        for track in followers:
            track.leader = leader
        for track in tracks:
            self._trajectory.begin(track)
            self._after(track)

    def _track(self, seq: Sequence, index: int) -> Track:
        seq.arrival, seq.index = self._arrivals, index
        seq.lineage = lineage_of(0, index) if index else 0
        ears = tuple(Ear(each, watch_of(each), ids) for each, ids in self._controllers)
        track = Track(seq, ears, self._thoughts.tracker(), seq.prompt_len, seq.prompt_len)
        track.reported = seq.prompt_len
        return track

    def abort(self, request_id: str) -> None:
        """End all choices of a request; nothing that is in flight for them is heard."""
        for track in list(self._requests.get(request_id, ())):
            self._end(track, Finish("abort"))

    def has_work(self) -> bool:
        return bool(self._line.running or self._line.waiting or self._fresh)

    # a step: rows out

    def schedule(self) -> list[Batch]:
        """One batch for each role with work; empty only if nothing can run at all."""
        line, preempted = self._line, self._line.preemptions
        while True:
            before = (line.preemptions, self._ends)
            self._place()
            if line.preemptions == preempted and self._admit():
                self._place()
            batches = self._batches()
            if batches or not line.running:
                return batches
            if before == (line.preemptions, self._ends):
                self._unstick()

    def _admit(self) -> bool:
        """New requests, but none in a step in which another had to give way."""
        if self._line.admit():
            return True
        if not self._line.running and self._line.waiting:
            # not even alone: it has outgrown the pool
            self._end(self._line.waiting[0], Finish("length"))
        return False

    def _place(self) -> None:
        """Slots for all that run: forks of prompts, children, roles switched to."""
        self._line.fork_choices()
        for track in self._members():
            for role, _ in track.targets():
                self._slots.hold(track.seq, role)
            keep = {track.seq.role, *(child.seq.role for child in track.round)}
            self._slots.drop_extras(track.seq, frozenset(keep))
            if track.asker is not None and track.seq.slots:
                fork_pending(track, self._slots)

    def _members(self) -> Iterator[Track]:
        """All tracks that may hold slots, the urgent first."""
        for root in self._line.running:
            for track in root.family():
                if track.parent is None or track.seq.slots:
                    yield track

    def _unstick(self) -> None:
        """Nothing can run: all wait for pages that others hold. The youngest gives way."""
        youngest = self._line.running[-1]
        if len(self._line.running) > 1:
            self._line.preempt(youngest)
            return
        members = list(youngest.family())
        pending = [child for track in members for child in track.pending]
        homeless = [t for t in members if any(r not in t.seq.slots for r, _ in t.targets())]
        self._end((pending + homeless)[0], Finish("length"))

    def _batches(self) -> list[Batch]:
        wanted: dict[Role, Wanted] = {}
        busy: dict[Role, Wanted] = {}
        for track in self._members():
            for role, target in track.targets():
                missing = target - track.seq.computed.get(role, target)
                if missing > 0:
                    where = busy if self._slots.busy(track.seq, role) else wanted
                    where.setdefault(role, []).append((track, missing))
        rows = {role: self._fill(role, tracks) for role, tracks in wanted.items()}
        for role, tracks in busy.items():
            if not rows.get(role):  # then nobody is held up by the first of them
                rows[role] = self._fill(role, tracks[:1])
        # some may have given way to others after their rows were made
        batches = []
        for role, made in rows.items():
            live = tuple(row for row in made if self._current(role, row))
            if live:
                batches.append(Batch(role, live, self._needs))
        return batches

    def _fill(self, role: Role, wanted: Wanted) -> list[Row]:
        """Rows for one role, as far as its tokens of a step go; a group shares what is left."""
        rest, rows = self._max_batched_tokens, []
        for group in groups(wanted):
            for at, (track, missing) in enumerate(group):
                share = -(-rest // (len(group) - at))
                row = self._row(track, role, min(missing, share)) if share else None
                if row is not None:
                    rows.append(row)
                    rest -= row.count
        return rows

    def _row(self, track: Track, role: Role, tokens: int) -> Row | None:
        seq = track.seq
        while role in seq.slots and not track.ended:
            count = self._slots.capacity[role].reserve(seq, seq.slots[role], tokens)
            if count:
                start = seq.computed[role]
                self._flying[seq] = track
                return Row(seq, start, count, given(track, role, start))
            self._make_room(track, role)
        return None

    def _make_room(self, track: Track, role: Role) -> None:
        """Someone gives way to `track`: siblings, a younger request, or it gives way itself."""
        if give_way(track, role, self._slots):
            return
        root = track.root
        others = self._line.others(root, role)
        if not others:
            self._end(track, Finish("length"))  # the pool's last page
        elif others[-1].order > root.order:
            self._line.preempt(others[-1])
        else:
            self._line.preempt(root)

    def live(self, batch: Batch) -> Batch:
        """Less the rows of sequences that have ended since `schedule`, by another role's batch."""
        return batch._replace(rows=tuple(r for r in batch.rows if self._current(batch.role, r)))

    # a step: tokens in

    def commit(self, batch: Batch, out: StepOutput) -> None:
        """What the model answered to `batch`; rows of sequences that ended meanwhile are void."""
        for row, got in zip(batch.rows, out.rows, strict=True):
            if self._current(batch.role, row):
                self._commit_row(batch.role, row, got)

    def fail(self, batch: Batch, message: str) -> None:
        """The model couldn't run `batch`: its requests end with an error, others go on."""
        for row in batch.rows:
            track = self._flying.get(row.seq)
            if track is not None and not track.root.ended:
                self._end(track.root, Finish("error", message))

    def _current(self, role: Role, row: Row) -> bool:
        track = self._flying.get(row.seq)
        live = track is not None and not track.ended
        return live and row.seq.computed.get(role) == row.start

    def _commit_row(self, role: Role, row: Row, got: RowOutput) -> None:
        track, seq = self._flying[row.seq], row.seq
        samples = row.samples
        seq.computed[role] += row.count
        self._ran[role] += row.count
        if row.given is not None:
            collect(track, row, got)
        elder = track.parent
        while elder is not None:
            elder.decisions, elder = 0, elder.parent
        if got.error is not None:
            self._trajectory.fail(track, got.error)
        elif samples:
            self._trajectory.sampled(track, got)
        elif track.scored and seq.computed[role] == len(seq.tokens) - 1:
            track.ended = True
        self._after(track)

    def _end(self, track: Track, finish: Finish) -> None:
        self._ends += 1
        self._trajectory.end(track, finish)
        self._after(track)

    def _after(self, track: Track) -> None:
        """Follow up on what a track has come to: rounds that are complete, ends."""
        self._join(track)
        if track.parent is None:
            self._fresh[track] = None
            if track.ended:
                self._retire(track)
        elif track.ended:
            self._after(track.parent)

    def _join(self, track: Track) -> None:
        while track.asker is not None:
            for child in track.round:
                self._join(child)
            if not all(child.ended for child in track.round):
                return
            self._trajectory.join(track)

    def _retire(self, track: Track) -> None:
        self._line.retire(track)
        tracks = self._requests[track.seq.id]
        tracks.remove(track)
        if not tracks:
            del self._requests[track.seq.id]

    # text out

    def drain(self) -> list[Settled]:
        """Newly settled tokens since the last call, in arrival order. It ends a step: whoever has
        ended is forgotten."""
        self._flying.clear()
        found = []
        for track in sorted(self._fresh, key=lambda t: (t.seq.arrival, t.seq.index)):
            end = self._settled(track)
            if end > track.reported or track.ended:
                found.append(Settled(track.seq, track.reported, end, track.seq.finish))
            track.reported = end
        self._fresh.clear()
        return found

    def _settled(self, track: Track) -> int:
        seq = track.seq
        if not track.ended:
            try:
                settled = min(ask(ear, lambda e: int(e.watch.settled(seq))) for ear in track.ears)
                return min(max(settled, track.reported), len(seq.tokens))
            except Fault as fault:
                self._trajectory.fail(track, fault)
                self._retire(track)
        return len(seq.tokens)

    def check(self) -> None:
        """Assert the invariants; for tests, after any step."""
        check(self._line, self._slots)
        live = [track for tracks in self._requests.values() for track in tracks]
        assert set(live) == {*self._line.running, *self._line.waiting}

    def stats(self) -> Stats:
        line = self._line
        return Stats(
            len(line.running),
            len(line.waiting),
            line.preemptions,
            dict(self._ran),
            dict(self._trajectory.edits),
        )
