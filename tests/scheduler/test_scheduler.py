"""Batches, admission, preemption, choices, abort, logprobs: the loop itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.request import Finish, Role
from engine.scheduler.controller import Edit, TokenEvent
from engine.scheduler.track import lineage_of
from tests.scheduler.fakes import EOS, FakeCapacity, Rig, ids, letters, logprob_of, noise
from tests.scheduler.scripted import Listener


def endless(role: Role, tokens: Seq[int], lineage: int) -> int:
    return 97 + noise(tuple(tokens[-3:]), lineage) % 3


def counts(rig: Rig) -> list[dict[str, int]]:
    return [{row.seq.id: row.count for row in batch.rows} for batch in rig.batches]


def test_prefill_in_chunks_then_decode() -> None:
    rig = Rig(endless, max_batched_tokens=4)
    (seq,) = rig.add("0123456789", max_tokens=3)
    rig.finish()
    assert counts(rig) == [{"r": 4}, {"r": 4}, {"r": 2}, {"r": 1}, {"r": 1}]
    assert seq.finish == Finish("length")
    assert seq.output_len == 3
    assert rig.scheduler.stats().ran_tokens == {"main": 12}


def test_decodes_go_first_and_prompts_share_the_rest() -> None:
    rig = Rig(endless, max_batched_tokens=9)
    rig.add("a", id="d", max_tokens=10)
    rig.step()
    rig.add("a" * 40, id="p", max_tokens=1)
    rig.add("a" * 40, id="q", max_tokens=1)
    rig.step()
    assert counts(rig)[-1] == {"d": 1, "p": 4, "q": 4}


def test_a_short_prompt_leaves_its_share_to_the_others() -> None:
    rig = Rig(endless, max_batched_tokens=10)
    rig.add("aa", id="s", max_tokens=1)
    rig.add("a" * 40, id="p", max_tokens=1)
    rig.step()
    assert counts(rig)[-1] == {"s": 2, "p": 8}


def test_priority_takes_the_budget_first() -> None:
    rig = Rig(endless, max_batched_tokens=8)
    rig.add("a" * 20, id="low", priority=1, max_tokens=1)
    rig.add("a" * 20, id="high", priority=0, max_tokens=1)
    rig.step()
    assert counts(rig)[-1] == {"high": 8}


def test_max_num_seqs_and_admission_order() -> None:
    rig = Rig(endless, max_num_seqs=2)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        rig.add("p", id=name, priority=priority, max_tokens=2)
    rig.step()
    assert set(counts(rig)[-1]) == {"c", "a"}
    assert rig.scheduler.stats()[:2] == (2, 1)
    rig.finish()


def test_rows_never_cross_a_compaction_point() -> None:
    rig = Rig(endless, cut=6)
    rig.add("a" * 20, max_tokens=3)
    rig.finish()
    assert [c["r"] for c in counts(rig)] == [6, 6, 6, 2, 1, 1]


def test_the_youngest_gives_way_and_resumes_in_its_old_place() -> None:
    rig = Rig(endless, pages=8)
    first, *_ = rig.add("a" * 8, id="old", max_tokens=20)
    second, *_ = rig.add("a" * 8, id="young", max_tokens=20)
    third, *_ = rig.add("a" * 4, id="late", max_tokens=2)
    rig.finish()
    ends = [s.seq.id for s in rig.settled if s.finish]
    assert ends.index("old") < ends.index("young")
    assert rig.scheduler.stats().preemptions > 0
    for seq in (first, second, third):
        assert seq.finish == Finish("length")
        assert seq.output_len == seq.params.max_tokens
    alone = Rig(endless)
    (again,) = alone.add("a" * 8, max_tokens=20)
    alone.finish()
    assert again.tokens == second.tokens == first.tokens


def test_an_urgent_request_takes_pages_from_one_that_came_before() -> None:
    rig = Rig(endless, pages=8)
    rig.add("a" * 8, id="low", priority=5, max_tokens=20)
    rig.step()
    rig.add("a" * 8, id="high", priority=0, max_tokens=20)
    rig.finish()
    assert [s.seq.id for s in rig.settled if s.finish] == ["high", "low"]


def test_alone_to_the_last_page_ends_with_length_and_the_engine_goes_on() -> None:
    rig = Rig(endless, pages=4)
    (seq,) = rig.add("a" * 8, max_tokens=None)
    (other,) = rig.add("a" * 8, id="next", max_tokens=3)
    rig.finish()
    assert seq.finish == Finish("length")
    assert len(seq.tokens) == 17  # 16 cells, and the token that was sampled from the last
    assert rig.text["r", 0] == seq.tokens[8:]
    assert other.output_len == 3


def test_outgrown_by_forced_text_ends_with_length() -> None:
    def shout(seq: object, event: TokenEvent) -> Edit | None:
        return Edit(append=(98,) * 20) if event.origin == "sampled" else None

    rig = Rig(endless, pages=5, controllers=(Listener(answer=shout),))
    (seq,) = rig.add("a" * 4, max_tokens=None)
    rig.add("a" * 4, id="other", max_tokens=2)
    rig.finish()
    assert seq.finish == Finish("length")


def test_refused_is_what_can_never_fit() -> None:
    rig = Rig(pages=4)
    assert rig.scheduler.refuses(15) is None
    assert rig.scheduler.refuses(16) == "main: 5 pages, the pool has 4"


def test_roles_without_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"roles \['helper'\]"):
        Rig(controllers=(Listener(roles=("main", "helper")),))


def test_choices_fork_the_first_ones_prompt() -> None:
    rig = Rig(endless, max_batched_tokens=8)
    choices = rig.add("a" * 12, n=3, max_tokens=4)
    assert [c.lineage for c in choices] == [0, lineage_of(0, 1), lineage_of(0, 2)]
    rig.finish()
    # 11 tokens once, then the last prompt token and 3 more of each
    assert rig.scheduler.stats().ran_tokens == {"main": 11 + 3 * 4}
    assert len({tuple(c.tokens) for c in choices}) == 3
    assert [s.seq.index for s in rig.settled if s.finish] == [0, 1, 2]


def test_choices_share_the_prompt_in_every_role() -> None:
    rig = Rig(endless, roles=("main", "helper"), controllers=(Listener(roles=("main", "helper")),))
    rig.add("a" * 12, n=2, max_tokens=1)
    rig.finish()
    assert rig.scheduler.stats().ran_tokens == {"main": 11 + 2, "helper": 11}


@pytest.mark.parametrize(("pages", "seqs"), [(1000, 2), (6, 8), (4, 8)])
def test_choices_that_find_no_room_come_later(pages: int, seqs: int) -> None:
    rig = Rig(endless, pages=pages, max_num_seqs=seqs)
    choices = rig.add("a" * 10, n=4, max_tokens=5)
    rig.finish()
    roomy = Rig(endless)
    expected = roomy.add("a" * 10, n=4, max_tokens=5)
    roomy.finish()
    assert [c.tokens for c in choices] == [c.tokens for c in expected]


def test_choices_of_a_one_token_prompt() -> None:
    rig = Rig(endless)
    choices = rig.add("a", n=2, max_tokens=2)
    rig.finish()
    assert all(c.output_len == 2 for c in choices)


def test_a_first_choice_that_ends_at_once_leaves_the_others() -> None:
    def begin(seq: object) -> Edit | None:
        return Edit(finish=Finish("stop")) if seq is choices_seen[0] else None

    choices_seen: list[object] = []

    def remember(seq: object) -> Edit | None:
        choices_seen.append(seq)
        return begin(seq)

    rig = Rig(endless, controllers=(Listener(on_begin=remember),))
    choices = rig.add("aaaa", n=3, max_tokens=2)
    rig.finish()
    assert [c.output_len for c in choices] == [0, 2, 2]


def test_a_later_choice_that_ends_at_once_is_not_waited_for() -> None:
    seen: list[object] = []

    def begin(seq: object) -> Edit | None:
        seen.append(seq)
        return Edit(finish=Finish("stop")) if len(seen) == 2 else None

    rig = Rig(endless, controllers=(Listener(on_begin=begin),))
    choices = rig.add("aaaa", n=3, max_tokens=2)
    rig.finish()
    assert [c.output_len for c in choices] == [2, 0, 2]


def test_abort_at_any_moment_reports_once() -> None:
    rig = Rig(endless, max_batched_tokens=4, max_num_seqs=1)
    (seq,) = rig.add("a" * 8, id="x", max_tokens=9)
    rig.add("a" * 8, id="waits", n=2, max_tokens=9)
    rig.step()
    rig.scheduler.abort("waits")
    batches = rig.scheduler.schedule()
    outs = [rig.run(batch) for batch in batches]
    rig.scheduler.abort("x")
    rig.scheduler.abort("x")
    rig.scheduler.abort("nobody")
    for batch, out in zip(batches, outs, strict=True):
        rig.scheduler.commit(batch, out)
    assert len(seq.tokens) == 8
    rig.finish()
    assert [(s.seq.id, s.seq.index, s.finish) for s in rig.settled] == [
        ("x", 0, Finish("abort")),
        ("waits", 0, Finish("abort")),
        ("waits", 1, Finish("abort")),
    ]
    assert not rig.scheduler.has_work()
    rig.text.clear()
    rig.add("aa", id="x", max_tokens=2)
    rig.finish()


def test_a_stop_string_is_held_back_and_dropped() -> None:
    script = iter(ids("xabyabc"))
    rig = Rig(lambda *_: next(script))
    (seq,) = rig.add("p", stop="abc", max_tokens=None)
    seen = []
    while rig.scheduler.has_work():
        rig.step()
        seen.append(bytes(rig.text.get(("r", 0), [])).decode())
    assert seen == ["x", "x", "x", "xaby", "xaby", "xaby", "xabyabc"]
    assert seq.finish == Finish("stop", "abc", 3)


def test_logprobs_are_one_a_token_and_prompt_logprobs_come_once() -> None:
    rig = Rig(letters, pages=8, max_batched_tokens=5, prefix=4)
    choices = [
        *rig.add("abcabcab", id="1", n=2, logprobs=0, prompt_logprobs=0, max_tokens=9),
        *rig.add("abcaacab", id="2", logprobs=0, prompt_logprobs=0, max_tokens=9),
    ]
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    for seq in choices:
        expected = [logprob_of("main", seq.tokens[:i], t) for i, t in enumerate(seq.tokens)]
        assert seq.prompt_logprobs == expected[1:8]
        assert seq.logprobs == expected[8:]


def test_thought_ends_are_recorded() -> None:
    script = iter([*ids("a\n\nb\n\nc"), EOS])
    rig = Rig(lambda *_: next(script))
    (seq,) = rig.add("pp", max_tokens=None)
    rig.finish()
    assert seq.thought_ends == [5, 8, 10]


def test_an_empty_scheduler_has_nothing_to_do() -> None:
    rig = Rig()
    assert rig.scheduler.schedule() == []
    assert rig.scheduler.drain() == []


def test_a_capacity_that_takes_nobody_ends_requests_with_length() -> None:
    rig = Rig(pages=2)
    (seq,) = rig.add("a" * 20, max_tokens=2)
    rig.finish()
    assert seq.finish == Finish("length")


def test_the_fake_pool_counts() -> None:
    pool = FakeCapacity(2)
    assert pool.refuses(7) is None
    assert pool.refuses(8) is not None


def test_a_sequence_that_is_being_compacted_waits_while_others_run() -> None:
    rig = Rig(endless)
    first, *_ = rig.add("aa", id="a", max_tokens=6)
    second, *_ = rig.add("aa", id="b", max_tokens=6)
    rig.step()
    waiting = rig.capacity["main"].waiting
    waiting.add(first.slots["main"])
    rig.step()
    assert set(counts(rig)[-1]) == {"b"}
    waiting.add(second.slots["main"])  # both: then the first goes on, which nobody waits for
    rig.step()
    assert set(counts(rig)[-1]) == {"a"}
    waiting.clear()
    rig.step()
    assert set(counts(rig)[-1]) == {"a", "b"}
    rig.finish()
