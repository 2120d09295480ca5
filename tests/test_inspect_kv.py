"""`taut inspect-kv`: the history is the cache's own, and the page shows it with nothing outside."""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import SamplingParams, cli
from engine.cache.allocation import Allocation
from engine.cache.allocations.adakv import AdaKV
from engine.cache.allocations.pyramid import Pyramid
from engine.cache.allocations.uniform import Uniform
from engine.cache.policies.kara import Kara
from engine.cache.policies.knorm import Knorm
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.tam import TAM
from engine.cache.policy import KVPolicy, KVSpec
from engine.inspect_kv import trace as tracing
from engine.inspect_kv.page import size, write, write_page
from engine.inspect_kv.trace import Trace, record
from engine.request import MAIN
from engine.scheduler.controller import Controller, Edit, TokenEvent, Watch
from tests.conftest import MakeEngine
from tests.engines import CacheTape, greedy

BUDGET, WINDOW = 24, 12
PROMPT = list(range(40, 90))


def spec(policy: KVPolicy, allocation: Allocation | None = None) -> KVSpec:
    allocation = allocation or Uniform()
    return KVSpec(policy=policy, budget_tokens=BUDGET, window=WINDOW, allocation=allocation)


SPECS = {
    "full": KVSpec(),
    "snapkv": spec(SnapKV(queries=4, kernel=3)),
    "snapkv-adakv": spec(SnapKV(queries=4), AdaKV()),
    "knorm-pyramid": spec(Knorm(), Pyramid(beta=2)),  # may drop the very last token
    "tam": spec(TAM(queries=8, tail=5, pivotal=1.1, shortest=8)),
    "kara": KVSpec(policy=Kara(recent=4, chunk=2), budget_tokens=6, window=12),
}
each_spec = pytest.mark.parametrize("kv", SPECS.values(), ids=SPECS)


def history(trace: Trace, query: int) -> torch.Tensor:
    """Cells that a query saw: of tokens up to it, those that no compaction before it removed."""
    past = sum(at <= query for at in trace.compactions)
    seen = torch.from_numpy(trace.removed >= past)  # [L, H, T]
    return seen & (torch.arange(seen.shape[-1]) <= query)


@each_spec
def test_the_history_is_what_every_query_saw(make_engine: MakeEngine, kv: KVSpec) -> None:
    engine = make_engine(kv=kv)
    tape = CacheTape(engine)
    trace = record(engine, PROMPT, greedy(100))
    keeps, tokens = tape.keeps[trace.output.id], len(PROMPT) + 99
    assert trace.removed.shape == (2, 2, tokens)
    assert trace.compactions == tape.compacted.get(trace.output.id, [])
    assert bool(trace.compactions) is (kv.policy is not None)
    for query in range(tokens):
        assert torch.equal(history(trace, query), keeps[:, :, query, :tokens]), query


@each_spec
def test_cells_and_bytes_are_the_caches(make_engine: MakeEngine, kv: KVSpec) -> None:
    engine = make_engine(kv=kv)
    cache, step = engine.caches[MAIN], engine.step
    held: dict[int, np.ndarray] = {}
    used: dict[int, int] = {}
    side: list[int] = []

    def watched() -> Any:
        deltas = step()
        side.append(cache.stats().used_side_bytes)
        if cache._ledger.live:
            (slot,) = cache._ledger.live
            held[cache.computed(slot)] = cache.held(slot)
            used[cache.computed(slot)] = cache.stats().used_bytes
        return deltas

    engine.step = watched  # type: ignore[method-assign]
    trace = record(engine, PROMPT, greedy(100))
    for index, at in enumerate(trace.compactions):
        assert np.array_equal(trace.held(index), held[at])
    assert {at: trace.cell_bytes[at] for at in used} == used
    last, tokens = max(held), trace.removed.shape[-1]
    assert np.array_equal(trace.held(len(trace.compactions)), held[last] + (tokens - last))
    assert trace.side_bytes == max(side) > 0
    assert trace.peak_bytes == cache.stats().peak_bytes
    assert len(trace.cell_bytes) == tokens + 1
    assert trace.full_bytes == 4 * -(-tokens // 16) * trace.page_bytes
    if kv.policy is None:
        assert trace.layer_budgets is None
        assert trace.full_bytes == trace.cell_bytes[-1]
    else:
        assert sum(trace.layer_budgets or ()) == 2 * kv.budget
    for index in range(len(trace.compactions)):
        cells, nbytes = trace.before(index)
        assert cells > trace.held(index).sum()
        assert nbytes >= trace.cell_bytes[trace.compactions[index]]


class Rewrites(Controller):
    """Once, at a position, goes back to another."""

    def watch(self) -> Watch:
        return _Rewrites()


class _Rewrites(Watch):
    done = False

    def on_token(self, seq: Any, event: TokenEvent) -> Edit | None:
        if self.done or len(seq.tokens) < 100:
            return None
        self.done = True
        return Edit(truncate=60)

    def settled(self, seq: Any) -> int:
        return len(seq.tokens) if self.done else 60


def test_a_cache_that_was_emptied_is_traced_anew(make_engine: MakeEngine) -> None:
    engine = make_engine(kv=SPECS["snapkv"], controllers=(Rewrites(),))
    tape = CacheTape(engine)
    trace = record(engine, PROMPT, greedy(100))
    assert dict(trace.output.choices[0].edits) == {"Rewrites": 1}
    assert trace.output.finish_reason == "length"
    ran = tape.compacted[trace.output.id]
    assert len(ran) > len(set(ran))
    assert trace.compactions == sorted(set(ran))
    keeps, tokens = tape.keeps[trace.output.id], trace.removed.shape[-1]
    for query in range(tokens):
        assert torch.equal(history(trace, query), keeps[:, :, query, :tokens]), query


def test_thoughts_and_texts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    trace = record(engine, "One and one make two.\n\né", greedy(60))
    assert [start for start, _ in trace.thoughts[:1]] == [trace.prompt_len]
    assert trace.thoughts[-1][1] == len(trace.token_ids) == len(trace.texts)
    ends = [end for _, end in trace.thoughts]
    assert [start for start, _ in trace.thoughts[1:]] == ends[:-1]
    assert "".join(trace.texts[: trace.prompt_len]).endswith("\\xc3\\xa9")  # a token a byte


def test_refusals_come_before_work(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="n must be 1 to be traced, not 2"):
        record(engine, PROMPT, SamplingParams(n=2))
    monkeypatch.setattr(tracing, "MOST_CELLS", 4 * 100)
    with pytest.raises(ValueError, match="at most 100 tokens of 4 kv heads; the prompt has 50"):
        record(engine, PROMPT, greedy(51))
    assert len(record(engine, PROMPT, greedy(50)).token_ids) == 100


# The page


class Page(HTMLParser):
    """Fails on a tag that isn't closed in its place; collects what the tests ask for."""

    VOID = ("meta", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.labelled: list[str] = []
        self.tokens: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.outside += [name for name in values if name in ("src", "href", "style", "onclick")]
        self.labelled += (values.get("aria-labelledby") or values.get("for") or "").split()
        if values.get("class") == "t":
            self.tokens.append("")
        if tag not in self.VOID:
            self.stack.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, values = self.stack[-1] if self.stack else ("", {})
        if values.get("class") == "t":
            self.tokens[-1] += data
        if tag == "script":
            self.scripts.append(data)


def written(path: Path, trace: Trace) -> str:
    file = path / "kv.html"
    write_page(file, trace)
    return file.read_text(encoding="utf-8")


@pytest.fixture
def snapped(make_engine: MakeEngine) -> Trace:
    return record(make_engine(kv=SPECS["snapkv-adakv"]), PROMPT, greedy(100))


def unpacked(html: str) -> tuple[dict[str, Any], np.ndarray]:
    data = json.loads(Page(html).scripts[0])
    packed = base64.b64decode(data["removed_by"])
    shape = data["layers"], data["kv_heads"], data["cached_tokens"]
    return data, np.frombuffer(packed, "<u2" if data["wide"] else "u1").reshape(shape)


def test_the_page_has_everything_inside(tmp_path: Path, snapped: Trace) -> None:
    html = written(tmp_path, snapped)
    page = Page(html)
    assert page.outside == []
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML", html)
    assert "default-src 'none'" in html
    assert len(page.ids) == len(set(page.ids))
    assert set(page.labelled) <= set(page.ids)
    assert set(re.findall(r'byId\("(\w+)"\)', html)) <= set(page.ids)
    assert [t.replace("\r", "\n") for t in page.tokens] == [
        t.replace("\r", "\n") for t in snapped.texts
    ]
    assert page.tags.count("canvas") == 2
    assert written(tmp_path, snapped) == html


def test_the_page_and_the_json_have_the_trace(tmp_path: Path, snapped: Trace) -> None:
    write(snapped, None, tmp_path / "kv.json")
    told = json.loads((tmp_path / "kv.json").read_text())
    data, removed = unpacked(written(tmp_path, snapped))
    assert np.array_equal(removed, snapped.removed)
    assert np.array_equal(np.array(told["removed_by"]), snapped.removed)
    assert told["compactions"][1]["held"] == snapped.held(1).tolist()
    for name in set(data) - {"removed_by", "wide"}:
        assert data[name] == told[name], name


def test_more_compactions_than_a_byte_counts(tmp_path: Path, snapped: Trace) -> None:
    count = 300
    removed = np.arange(4 * 400).reshape(2, 2, 400) % (count + 1)
    many = replace(
        snapped,
        removed=removed.astype(np.int32),
        compactions=list(range(100, 100 + count)),
        token_ids=[5] * 401,
        texts=["x"] * 401,
    )
    data, read = unpacked(written(tmp_path, many))
    assert data["wide"]
    assert np.array_equal(read, removed)


def test_what_models_and_people_wrote_is_text(tmp_path: Path, snapped: Trace) -> None:
    evil = "</script><script>alert('1')</script>&amp;"
    texts = [evil] * len(snapped.texts)
    html = written(tmp_path, replace(snapped, texts=texts, model=evil))
    page = Page(html)
    assert page.tags.count("script") == 2  # the data and the page's own
    assert page.tokens == texts
    assert "<script>alert" not in html
    assert unpacked(html)[0]["texts"] == texts


def test_the_size_is_bounded(tmp_path: Path, snapped: Trace) -> None:
    layers, heads, tokens = 32, 8, 2000
    removed = np.zeros((layers, heads, tokens), np.int32)
    large = replace(
        snapped,
        removed=removed,
        compactions=[1000],
        token_ids=[1] * (tokens + 1),
        texts=[" word"] * (tokens + 1),
    )
    html = written(tmp_path, large)
    assert len(html) < layers * heads * tokens * 4 / 3 + 60 * tokens + 40_000


def test_nothing_compacted_is_said(tmp_path: Path, make_engine: MakeEngine) -> None:
    idle = record(make_engine(kv=SPECS["snapkv"]), [5, 6], greedy(4))
    assert "No compaction happened" in written(tmp_path, idle)
    full = record(make_engine(), [5, 6], greedy(4))
    html = written(tmp_path, full)
    assert "Full cache" in html
    assert "No compaction happened" not in html


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (2**21, "2.0 MiB"),
        (2**30, "1.0 GiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# The command


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("engine.engine.usable_cpus", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["taut", "inspect-kv", *args])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_the_command(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    html, told = tmp_path / "kv.html", tmp_path / "kv.json"
    bound = ("--kv-policy", "knorm", "--kv-budget", "24", "--kv-window", "12")
    options = ("--model", str(tiny_folder), "--seed", "1", "--max-tokens", "40", *bound)
    asked = "Say <script>alert(1)</script>, and say why, at some length."
    assert run(monkeypatch, asked, *options, "--out", str(html), "--json", str(told)) == 0
    data = json.loads(told.read_text())
    assert data["policy"].startswith("Knorm(")
    assert data["window"] == 12
    assert data["compactions"]
    said = f"{len(data['texts'])} tokens, {len(data['compactions'])} compactions, "
    assert capsys.readouterr().out.startswith(f"{html} and {told}: {said}")
    page = Page(html.read_text(encoding="utf-8"))
    assert asked in "".join(page.tokens)
    assert page.tags.count("script") == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "give --out FILE.html, --json FILE, or both"),
        (("--out", "{here}"), "is a folder; name a file"),
        (("--json", "{here}/none/kv.json"), "there is no folder"),
        (("--out", "{here}/kv.html", "--kv-policy", "knorm"), "--kv-policy needs --kv-budget"),
    ],
)
def test_the_command_refuses_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    words: str,
) -> None:
    assert run(monkeypatch, "Hi", *(arg.format(here=tmp_path) for arg in args)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
