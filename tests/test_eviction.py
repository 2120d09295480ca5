"""A compacted cache against the oracle with the mask that the cache's own positions spell."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine import Engine, Output
from engine.cache.allocation import Allocation
from engine.cache.allocations.adakv import AdaKV
from engine.cache.allocations.pyramid import Pyramid
from engine.cache.allocations.reasonalloc import ReasonAlloc
from engine.cache.policies.am import AM
from engine.cache.policies.h2o import H2O
from engine.cache.policies.kara import Kara
from engine.cache.policies.keydiff import KeyDiff
from engine.cache.policies.knorm import Knorm
from engine.cache.policies.rkv import RKV
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.tam import TAM
from engine.cache.policies.tova import TOVA
from engine.cache.policies.vase import VaSE
from engine.cache.policy import KVPolicy, KVSpec
from engine.cache.view import KVShape
from engine.request import Sequence
from engine.scheduler.controller import Controller, Edit, TokenEvent, Watch
from tests.conftest import MakeEngine
from tests.engines import CacheTape, Model, assert_idle, greedy, prompts, run_all
from tests.kernels.invariance import assert_same_rows

BUDGET, WINDOW = 24, 12
LAYERS, HEADS = 2, 2


@dataclass(frozen=True)
class Ragged(Allocation):
    """Other budgets for every layer and head: layers +-`layers`, their heads +-`heads`."""

    layers: int = 5
    heads: int = 7

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        assert shape.layers == LAYERS
        return [budget - self.layers, budget + self.layers]

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        assert utility.shape[1] == HEADS
        return torch.tensor([[total + self.heads, total - self.heads]] * len(utility))


def spec(policy: KVPolicy, allocation: Allocation | None = None) -> KVSpec:
    ragged = {} if allocation is None else {"allocation": allocation}
    return KVSpec(policy=policy, budget_tokens=BUDGET, window=WINDOW, **ragged)  # type: ignore[arg-type]


SPECS = {
    "sinks-recent": spec(SinksRecent()),
    "sinks-recent-ragged": spec(SinksRecent(sinks=2), Ragged()),
    "snapkv": spec(SnapKV(queries=4, kernel=3)),
    "snapkv-ragged": spec(SnapKV(queries=6, group="mean"), Ragged()),
    "am-ragged": spec(AM(queries=6, score="rms"), Ragged()),
    "tam": spec(TAM(queries=8, tail=5, pivotal=1.1, shortest=8)),
}
each_spec = pytest.mark.parametrize("kv", SPECS.values(), ids=SPECS)

WAVE = ReasonAlloc(demand=(1.0, 2.0))
METHODS = {
    "rkv": spec(RKV(queries=4)),
    "rkv-vases-reasonalloc": spec(
        RKV(queries=8, mix=0.5, kernel=5, pool="mean", group="softmax", threshold=None), WAVE
    ),
    "h2o": spec(H2O(queries=6)),
    "tova-adakv": spec(TOVA(), AdaKV()),
    "knorm-pyramid": spec(Knorm(recent=4), Pyramid(beta=2, recent=4)),
    "keydiff": spec(KeyDiff()),
    "vase": spec(VaSE()),
    "vase-reasonalloc": spec(VaSE(kernel=3), WAVE),
    "vase-dkv-adakv": spec(VaSE(variant="dkv", rank=8), AdaKV()),
    "kara": KVSpec(policy=Kara(recent=5), budget_tokens=6, window=WINDOW),
    "kara-adakv": KVSpec(
        policy=Kara(recent=3, chunk=3), budget_tokens=6, window=WINDOW, allocation=AdaKV()
    ),
}
EVERY = SPECS | METHODS
every_spec = pytest.mark.parametrize("kv", EVERY.values(), ids=EVERY)
DRAWS = {name: kv for name, kv in METHODS.items() if isinstance(kv.policy, VaSE)}
CHOOSES = {name: kv for name, kv in EVERY.items() if name not in DRAWS}


def peak_of(kv: KVSpec, prompt: int, total: int) -> int:
    """Cells that one head can have at most: all that its layer's heads may hold together."""
    assert kv.policy is not None
    layers = kv.allocation.layer_budgets(KVShape(LAYERS, 4, HEADS, 16), kv.budget)
    return HEADS * kv.policy.peak(prompt, total, max(layers), kv.window)


PROMPT = prompts(8, seed=8)[6]  # 64 tokens: more than budget + window
SHORT = PROMPT[:9]


def assert_oracles(model: Model, tape: CacheTape, output: Output) -> None:
    """Every logit that sampled a token is the oracle's under the mask that the cache shows."""
    tokens = [*output.prompt_token_ids, *output.token_ids]
    first = len(output.prompt_token_ids)
    keep = tape.keeps[output.id][:, :, : len(tokens), : len(tokens)]
    truth = model.logits(tokens, keep, tape.refits[output.id])[first - 1 : -1]
    got = tape.stacked(output.id)
    assert got.shape == truth.shape
    assert (got - truth).abs().max() <= 1e-4


@every_spec
def test_logits_are_the_oracles_under_the_caches_mask(
    kv: KVSpec, tiny_model: Model, make_engine: MakeEngine
) -> None:
    """Short and long prompts past several compactions, in company and in chunks."""
    engine = make_engine(kv=kv, max_batched_tokens=40, max_num_seqs=8)
    tape = CacheTape(engine)
    for i, prompt in enumerate([PROMPT, SHORT, *prompts(6, seed=9)]):
        engine.add(prompt, greedy(70), id=str(i))
    outputs = run_all(engine)
    for output in outputs.values():
        assert len(tape.compacted[output.id]) >= 3
        assert_oracles(tiny_model, tape, output)
    kept = tape.keeps["0"][:, :, len(PROMPT) + 68, : len(PROMPT) + 69].sum(-1)
    assert kept.max() <= peak_of(kv, len(PROMPT), len(PROMPT) + 69)
    full = tiny_model.logits([*PROMPT, *outputs["0"].token_ids])[len(PROMPT) - 1 : -1]
    assert (tape.stacked("0") - full).abs().max() > 1e-2, "the mask must matter"


@each_spec
def test_budgets_are_kept_and_memory_is_freed(kv: KVSpec, make_engine: MakeEngine) -> None:
    engine = make_engine(kv=kv)
    tape = CacheTape(engine)
    engine.add(PROMPT, greedy(60), id="x")
    most = 0
    while engine.has_work():
        engine.step()
        compacted, stats = tape.compacted.get("x", []), engine.stats().kv["main"]
        if compacted and compacted[-1] == sum(tape.ran["x"][-1]):  # just now
            expected = torch.tensor([[BUDGET] * HEADS] * LAYERS)
            if isinstance(kv.allocation, Ragged):
                expected = torch.tensor([[BUDGET + 2, BUDGET - 12], [BUDGET + 12, BUDGET - 2]])
            # the first is due once the smallest layer is full; others may hold less then
            assert torch.equal(tape.held["x"].long(), expected.clamp(max=compacted[-1]))
        if compacted:
            most = max(most, stats.used_pages)
    stats = engine.stats().kv["main"]
    # a page a head more than budget + window needs, for the heads' raggedness
    assert most <= LAYERS * HEADS * (-(-(BUDGET + WINDOW) // 16) + 1)
    ran = len(PROMPT) + 58  # when it last held anything: before the step that ended it
    assert stats.evicted_cells == LAYERS * HEADS * ran - int(tape.held["x"].sum())
    streams = kv.policy is not None and kv.policy.streams_prompt
    assert tape.most["x"] == (BUDGET + WINDOW if streams else len(PROMPT))


def test_smaller_budgets_let_more_in(make_engine: MakeEngine) -> None:
    """That is what freed pages are for: the same pool, the same requests."""
    running = {}
    for name, kv in (("full", KVSpec()), ("bounded", SPECS["sinks-recent"])):
        engine = make_engine(kv=kv, kv_tokens=512, max_num_seqs=16)
        for _ in range(16):
            engine.add([*PROMPT[:-1], 3], greedy(40))
        for _ in range(30):
            engine.step()
        running[name] = engine.stats().scheduler.running
        run_all(engine)
        assert name == "full" or engine.stats().scheduler.preemptions == 0
    assert running["bounded"] == 512 // 64 > running["full"]


@every_spec
def test_compactions_dont_depend_on_company_or_chunks(kv: KVSpec, make_engine: MakeEngine) -> None:
    tapes = []
    for chunk, others in ((512, 0), (16, 0), (24, 7), (512, 7)):
        engine = make_engine(kv=kv, max_batched_tokens=chunk, max_num_seqs=8)
        tapes.append(CacheTape(engine))
        for i, prompt in enumerate(prompts(others, seed=10)):
            engine.add(prompt, greedy(20 + 5 * i))
        engine.step()
        engine.add(PROMPT, greedy(70, seed=0), id="x")
        outputs = run_all(engine)
        assert len(outputs["x"].token_ids) == 70
    first, *rest = tapes
    assert len(first.compacted["x"]) >= 4
    for tape in rest:
        assert tape.compacted["x"] == first.compacted["x"]
        assert torch.equal(tape.keeps["x"], first.keeps["x"])
        assert_same_rows(tape.stacked("x"), first.stacked("x"))


# going back


@dataclass(frozen=True)
class Back(Controller):
    """Once, when the output has `at` tokens: truncate to `to` of them."""

    at: int
    to: int

    def watch(self) -> Watch:
        return _BackWatch(self)


class _BackWatch(Watch):
    def __init__(self, controller: Back) -> None:
        self._back = controller
        self._done = False

    def on_token(self, seq: Sequence, event: TokenEvent) -> Edit | None:
        if self._done or seq.output_len < self._back.at:
            return None
        self._done = True
        return Edit(truncate=seq.prompt_len + self._back.to)

    def settled(self, seq: Sequence) -> int:
        return len(seq.tokens) if self._done else seq.prompt_len


@dataclass(frozen=True)
class Given(Controller):
    """The output begins with these tokens: a fresh catch-up of them before anything is sampled."""

    tokens: tuple[int, ...]

    def watch(self) -> Watch:
        return _GivenWatch(self.tokens)


class _GivenWatch(Watch):
    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    def begin(self, seq: Sequence) -> Edit:
        return Edit(append=self._tokens)


def _answer(engine: Engine, prompt: Seq[int]) -> tuple[CacheTape, Output]:
    tape = CacheTape(engine)
    engine.add(prompt, greedy(60, seed=0), id="x")
    return tape, run_all(engine)["x"]


@pytest.mark.parametrize("kv", CHOOSES.values(), ids=CHOOSES)
@pytest.mark.parametrize("prompt", [PROMPT, SHORT], ids=["long", "short"])
def test_truncate_to_before_a_compaction(
    kv: KVSpec, prompt: list[int], tiny_model: Model, make_engine: MakeEngine
) -> None:
    """The logits are those of a fresh catch-up of the prefix, bit for bit, and the oracle's."""
    plain, whole = _answer(make_engine(kv=kv), prompt)
    to = 41
    back, again = _answer(make_engine(kv=kv, controllers=(Back(59, to),)), prompt)
    fresh, given = _answer(make_engine(kv=kv, controllers=(Given(whole.token_ids[:to]),)), prompt)
    assert again.token_ids[:to] == given.token_ids[:to] == whole.token_ids[:to]
    assert len(prompt) + to < plain.compacted["x"][-1], "a compaction lies in between"
    assert sum(start == 0 for start, _ in back.ran["x"]) == 2, "all of it ran again"
    assert_oracles(tiny_model, back, again)
    for position in range(len(prompt) + to, len(prompt) + 60):
        assert_same_rows(back.logits["x"][position], fresh.logits["x"][position])
    assert torch.equal(back.keeps["x"], fresh.keeps["x"])
    assert again.token_ids == given.token_ids


@pytest.mark.parametrize("kv", DRAWS.values(), ids=DRAWS)
def test_what_is_drawn_again_is_drawn_anew(
    kv: KVSpec, tiny_model: Model, make_engine: MakeEngine
) -> None:
    """A truncation changes the lineage: the same prefix keeps other cells, and is as exact."""
    to = len(PROMPT) + 41
    plain, _ = _answer(make_engine(kv=kv), PROMPT)
    back, output = _answer(make_engine(kv=kv, controllers=(Back(59, 41),)), PROMPT)
    again, same = _answer(make_engine(kv=kv, controllers=(Back(59, 41),)), PROMPT)
    assert same.token_ids == output.token_ids
    assert torch.equal(back.keeps["x"], again.keeps["x"])
    assert not torch.equal(plain.keeps["x"][:, :, to - 1], back.keeps["x"][:, :, to - 1])
    tokens = [*PROMPT, *output.token_ids]
    keep = back.keeps["x"][:, :, : len(tokens), : len(tokens)]
    truth = tiny_model.logits(tokens, keep)[to - 1 : -1]
    got = torch.stack([back.logits["x"][position] for position in range(to, len(tokens))])
    assert (got - truth).abs().max() <= 1e-4


@each_spec
def test_truncate_after_a_compaction_drops_cells_only(
    kv: KVSpec, tiny_model: Model, make_engine: MakeEngine
) -> None:
    plain, whole = _answer(make_engine(kv=kv), PROMPT)
    last = [at for at in plain.compacted["x"] if at <= len(PROMPT) + 50][-1]
    at, to = last + 9 - len(PROMPT), last + 3 - len(PROMPT)
    back, again = _answer(make_engine(kv=kv, controllers=(Back(at, to),)), PROMPT)
    assert again.token_ids == whole.token_ids
    assert sum(n for _, n in back.ran["x"]) == sum(n for _, n in plain.ran["x"]) + (at - to)
    assert back.compacted == plain.compacted
    assert_oracles(tiny_model, back, again)
    for position, before in back.again["x"].items():
        assert_same_rows(back.logits["x"][position], before)
    assert torch.equal(back.keeps["x"], plain.keeps["x"])


@pytest.mark.parametrize("name", ["kara", "kara-adakv"])
def test_preemption_of_a_growing_cache_gives_the_same(name: str, make_engine: MakeEngine) -> None:
    """Windows are compacted at the same positions when all is computed again."""
    found = []
    for tokens in (4096, 320):
        engine = make_engine(kv=METHODS[name], kv_tokens=tokens, max_num_seqs=8)
        for i, prompt in enumerate(prompts(8, seed=11, longest=50)):
            engine.add(prompt, greedy(70), id=str(i))
        outputs = run_all(engine)
        found.append({id: output.token_ids for id, output in outputs.items()})
        assert (engine.stats().scheduler.preemptions > 0) == (tokens == 320)
        assert_idle(engine)
    assert found[0] == found[1]


@each_spec
def test_preemption_of_a_bounded_cache_never_happens(kv: KVSpec, make_engine: MakeEngine) -> None:
    engine = make_engine(kv=kv, kv_tokens=320, max_num_seqs=8)
    for prompt in prompts(10, seed=11, longest=50):
        engine.add(prompt, greedy(60))
    outputs = run_all(engine)
    assert {len(o.token_ids) for o in outputs.values()} == {60}
    assert engine.stats().scheduler.preemptions == 0
    assert_idle(engine)


@every_spec
def test_a_prefix_hit_gives_what_a_miss_gives(kv: KVSpec, make_engine: MakeEngine) -> None:
    engine = make_engine(kv=kv)
    miss, hit = (engine.generate([PROMPT], greedy(40, seed=0))[0] for _ in range(2))
    assert miss.cached_tokens == 0 < hit.cached_tokens
    assert hit.token_ids == miss.token_ids
