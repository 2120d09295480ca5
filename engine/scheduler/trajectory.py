"""How tokens enter a sequence, and how decisions change it.

Every token is heard once by every watch, in order, the stop rules first; the first decision wins.
What a decision brings (forced or adopted tokens) enters in the same way, so another decision may
come in its middle. One that only changes the role leaves the rest in place; any other one drops
what hadn't entered yet, the interrupted edit's role and finish with it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from engine.request import Finish, LogitsRule, Origin, Role, RowOutput, Sequence, TokenLogprob
from engine.scheduler.branches import spawn
from engine.scheduler.controller import (
    Adopt,
    Branch,
    Controller,
    Decision,
    Edit,
    ThoughtEvent,
    TokenEvent,
    Watch,
)
from engine.scheduler.slots import Slots
from engine.scheduler.track import REWOUND, Ear, Track, lineage_of

log = logging.getLogger(__name__)

MAX_DECISIONS = 1000
"""In a row, without a model running: more is a controller that goes in circles."""


class Fault(Exception):
    """A controller failed; its sequence ends with an error."""


class Arrival(NamedTuple):
    """A token about to enter, and what is known of it."""

    token: int
    origin: Origin
    role: Role
    logprob: TokenLogprob | None = None
    entropy: float | None = None
    watch: tuple[float, ...] = ()


class Verdict(NamedTuple):
    """A decision and whose it is."""

    ear: Ear
    decision: Edit | Adopt | list[Branch]


@dataclass
class Plan:
    """What is still to come of the decision under way."""

    arriving: deque[Arrival] = field(default_factory=deque)
    role: Role | None = None
    finish: Finish | None = None


Part = TypeVar("Part", Ear, LogitsRule)
T = TypeVar("T")


def ask(part: Part, call: Callable[[Part], T]) -> T:
    """What a hook of a watch or a rule answers; its exceptions become a Fault that names it."""
    try:
        return call(part)
    except Fault:
        raise
    except Exception as error:
        name = part.name if isinstance(part, Ear) else type(part).__name__
        raise Fault(f"{name}: {error}") from error


class _Unmade(Watch):
    """Stands for a watch that its controller couldn't make: its sequence ends at once."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def begin(self, seq: Sequence) -> Decision:
        raise self._error


def watch_of(controller: Controller) -> Watch:
    """Fresh state for one sequence; if there is none, the sequence's own first failure."""
    try:
        return controller.watch()
    except Exception as error:
        return _Unmade(error)


class Trajectory:
    """Applies tokens and decisions to tracks, with their cells."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.edits: Counter[str] = Counter()  # by the controller's name

    # what the scheduler calls

    def begin(self, track: Track) -> None:
        """The watches' first words, and their rules."""

        def go() -> None:
            verdict = self._first(track, lambda ear: ear.watch.begin(track.seq))
            stop, *others = track.ears
            rules = stop.watch.rules(track.seq)
            for each in others:
                track.inherited += ask(each, lambda ear: tuple(ear.watch.rules(track.seq)))
            track.seq.rules = rules + track.inherited
            self._run(track, Plan(), verdict)

        self._guard(track, go)

    def sampled(self, track: Track, out: RowOutput) -> None:
        """A model has run to the sequence's end and sampled a token."""
        assert out.token is not None
        track.decisions = 0
        arrival = Arrival(out.token, "sampled", track.seq.role, out.logprob, out.entropy, out.watch)
        self._guard(track, lambda: self._run(track, Plan(deque((arrival,))), None))

    def join(self, track: Track) -> None:
        """All children of the round have ended: the asking watch decides."""
        ear, children = track.asker, track.round
        assert ear is not None
        track.asker, track.round = None, []
        track.earlier = track.earlier + children

        def go() -> None:
            seqs = [child.seq for child in children]
            decision = ask(ear, lambda ear: ear.watch.on_join(track.seq, seqs))
            if not decision:
                self._dismiss(track)
            self._run(track, Plan(), Verdict(ear, decision) if decision else None)

        self._guard(track, go)

    def fail(self, track: Track, why: Fault | str) -> None:
        traceback = why if isinstance(why, Fault) else None
        log.error("request %s: %s", track.seq.id, why, exc_info=traceback)
        self.end(track, Finish("error", str(why)))

    def end(self, track: Track, finish: Finish) -> None:
        """The sequence is over, and its family's slots with it (a child's own stays adoptable)."""
        track.seq.finish, track.ended = finish, True
        track.asker = None
        self._dismiss(track)

    # the loop

    def _guard(self, track: Track, go: Callable[[], None]) -> None:
        try:
            go()
        except Fault as fault:
            self.fail(track, fault)
        self._slots.settle(track.seq, track.stale)
        track.stale = None

    def _run(self, track: Track, plan: Plan, verdict: Verdict | None) -> None:
        while not track.ended and track.asker is None:
            if verdict is not None:
                plan, verdict = self._obey(track, verdict, plan), None
            elif plan.arriving:
                verdict = self._enter(track, plan.arriving.popleft())
            else:
                self._conclude(track, plan)
                return

    def _conclude(self, track: Track, plan: Plan) -> None:
        if plan.role is not None:
            track.seq.role = plan.role
        if plan.finish is not None:
            self._finish(track, plan.finish)

    def _finish(self, track: Track, finish: Finish) -> None:
        """An ordinary end closes the thought that is open; the watches hear of it."""
        self.end(track, finish)
        if finish.reason in ("stop", "length") and track.thoughts.close():
            self._thought(track, track.seq.role)

    def _first(self, track: Track, call: Callable[[Ear], Decision]) -> Verdict | None:
        """All watches hear; the first that decides wins."""
        verdict = None
        for ear in track.ears:
            decision = ask(ear, call)
            if decision and verdict is None:
                verdict = Verdict(ear, decision)
        return verdict

    def _enter(self, track: Track, arrival: Arrival) -> Verdict | None:
        seq = track.seq
        position = len(seq.tokens)
        seq.tokens.append(arrival.token)
        track.entropies.append(arrival.entropy)
        if seq.params.logprobs is not None:
            # a forced token was certain; what the model thought of it isn't computed
            seq.logprobs.append(arrival.logprob or TokenLogprob(arrival.token, 0.0))
        logprob = arrival.logprob.logprob if arrival.logprob else None
        event = TokenEvent(
            arrival.token, position, arrival.role, arrival.origin, arrival.entropy, logprob
        )

        def tell(ear: Ear) -> Decision:
            if not (ear.ids and arrival.watch):
                return ear.watch.on_token(seq, event)
            own = tuple(arrival.watch[i] for i in ear.ids)
            return ear.watch.on_token(seq, event._replace(watch=own))

        verdict = self._first(track, tell)
        if track.thoughts.feed(arrival.token):
            on_thought = self._thought(track, arrival.role)
            verdict = on_thought if verdict is None else verdict
            if verdict is None and track.branch is not None and track.branch.until == "thought":
                track.ended = True
        return verdict

    def _thought(self, track: Track, role: Role) -> Verdict | None:
        seq = track.seq
        start, end = max(seq.prompt_len, *seq.thought_ends[-1:], 0), len(seq.tokens)
        seq.thought_ends.append(end)
        known = [e for e in track.entropies[max(0, start - track.base) :] if e is not None]
        mean = sum(known) / len(known) if known else None
        event = ThoughtEvent(start, end, role, mean)
        return self._first(track, lambda ear: ear.watch.on_thought(seq, event))

    # decisions

    def _obey(self, track: Track, verdict: Verdict, plan: Plan) -> Plan:
        """What fails on the way (a rule's fork, a token that isn't one) is the controller's."""
        return ask(verdict.ear, lambda ear: self._carry_out(track, ear, verdict.decision, plan))

    def _carry_out(
        self, track: Track, ear: Ear, decision: Edit | Adopt | list[Branch], plan: Plan
    ) -> Plan:
        track.decisions += 1
        if track.decisions > MAX_DECISIONS:
            raise Fault(f"{ear.name}: {MAX_DECISIONS} decisions without a model step")
        if isinstance(decision, list):
            return self._branch(track, ear, decision)
        if isinstance(decision, Adopt):
            return self._adopt(track, ear, decision.child)
        if not isinstance(decision, Edit):
            raise Fault(f"{ear.name}: decides {decision!r}: no Edit, Adopt or list of Branch")
        self.edits[ear.name] += 1
        self._dismiss(track)
        if decision.role is not None:
            self._known(ear, decision.role)
        if decision == Edit(role=decision.role):
            track.seq.role = decision.role or track.seq.role
            return plan
        return self._edit(track, ear, decision)

    def _branch(self, track: Track, ear: Ear, branches: list[Branch]) -> Plan:
        for branch in branches:
            if not isinstance(branch, Branch):
                raise Fault(f"{ear.name}: a round of children holds {branch!r}: no Branch")
            self._known(ear, branch.role)
        self._mark_stale(track)
        track.asker, track.crowded = ear, False
        # asked, since the rules' own fork() runs there
        track.round = ask(ear, lambda ear: [spawn(track, ear, branch) for branch in branches])
        for child in track.round:
            self._start_child(child)
        return Plan()

    def _start_child(self, child: Track) -> None:
        if not child.scored:
            self.begin(child)
        elif len(child.seq.tokens) == child.base:
            child.ended = True  # nothing to read

    def _known(self, ear: Ear, role: Role) -> None:
        if role not in self._slots.capacity:
            roles = ", ".join(sorted(self._slots.capacity))
            raise Fault(f"{ear.name}: no model has the role {role!r} (there are: {roles})")

    def _edit(self, track: Track, ear: Ear, edit: Edit) -> Plan:
        track.thoughts.check(edit.append)
        if edit.append or edit.truncate is not None:
            track.seq.edits[ear.name] = track.seq.edits.get(ear.name, 0) + 1
        if edit.truncate is not None and edit.truncate < len(track.seq.tokens):
            self._truncate(track, ear, edit.truncate)
        self._mark_stale(track)
        forced = deque(Arrival(token, "forced", track.seq.role) for token in edit.append)
        return Plan(forced, edit.role, edit.finish)

    def _truncate(self, track: Track, ear: Ear, pos: int) -> None:
        seq = track.seq
        if pos < track.floor:
            raise Fault(f"{ear.name}: truncate={pos} would cut into the prompt ({track.floor})")
        if pos < track.reported:
            raise Fault(
                f"{ear.name}: truncate={pos} would take back text that its settled() had let go"
                f" (the first {track.reported} tokens)"
            )
        del seq.tokens[pos:]
        del seq.logprobs[pos - track.base :], track.entropies[pos - track.base :]
        while seq.thought_ends and seq.thought_ends[-1] > pos:
            seq.thought_ends.pop()
        track.thoughts.rewind(pos - track.floor)
        for rule in seq.rules:
            ask(rule, lambda rule: rule.rewind(pos))
        for each in track.ears:
            ask(each, lambda ear: ear.watch.rewound(seq, pos))
        seq.lineage = lineage_of(seq.lineage, REWOUND)

    def _mark_stale(self, track: Track) -> None:
        length = len(track.seq.tokens)
        track.stale = length if track.stale is None else min(track.stale, length)

    def _adopt(self, track: Track, ear: Ear, seq: object) -> Plan:
        child = next((c for c in track.children if c.seq is seq), None)
        if child is None:
            raise Fault(f"{ear.name}: adopts a sequence that isn't its living child")
        self._slots.adopt(track.seq, child.seq)
        self._dismiss(track)
        begin = len(track.seq.tokens)
        assert begin == child.base
        tokens = child.seq.tokens[begin:]
        known: Seq[TokenLogprob | None] = child.seq.logprobs or [None] * len(tokens)
        return Plan(
            deque(
                Arrival(token, "adopted", child.seq.role, logprob, entropy)
                for token, logprob, entropy in zip(tokens, known, child.entropies, strict=True)
            )
        )

    def _dismiss(self, track: Track) -> None:
        """Children go, and their slots; one that was adopted has none left."""
        for child in track.children:
            for each in child.family():
                self._slots.release(each.seq)
                each.ended = True
        track.earlier, track.round = [], []
