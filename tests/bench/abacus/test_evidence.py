"""The measurements of the pair, on random weights and by hand: what they count."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from bench.abacus import accuracy, chain_needed, peer
from bench.abacus.asking import ask, difference, engine_of, limit_for, markdown, points
from bench.abacus.export import write_folder
from bench.abacus.network import Network, Shape
from bench.abacus.overlap import both_wrong
from bench.abacus.task import Abacus
from bench.abacus.train import VOCABULARY
from tests.quality.measure import band, rewritten

TASK = Abacus(min_tokens=50, max_tokens=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    network = Network(Shape(VOCABULARY, 1, 32, 64, 2, 1, 32))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path: Path = tmp_path_factory.mktemp("random")
    write_folder(path, network)
    return str(path)


def test_answers_are_graded_and_repeatable(folder: str) -> None:
    problems = TASK.make("abacus", 3, seed=0)
    with engine_of(folder, threads=1) as engine:
        first = ask(engine, problems, max_tokens=12, temperature=1.0)
        again = ask(engine, problems[1:], max_tokens=12, temperature=1.0)
    assert [a.choice.token_ids for a in first[1:]] == [a.choice.token_ids for a in again]
    assert [a.problem for a in first] == problems
    assert not any(a.right for a in first)


def test_a_cell_has_both_temperatures(folder: str) -> None:
    with engine_of(folder, threads=1) as engine:
        result = accuracy.measure_cell(engine, TASK, 2, seed=0)
    assert accuracy.row(result)[:3] == ["default mix", "50 to 60", 10]
    assert accuracy.row(result)[3:5] == ["0.0 % (0.0 to 27.8)"] * 2


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_the_peer_agrees(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(peer, "limit_for", lambda _: 40)
    monkeypatch.setattr(peer, "TASK", TASK)
    found = peer.measure_model(folder, limit=2, seed=0, threads=1)
    assert found["same_answers"] == found["answers"] == 2
    assert found["greedy_tokens_not_likeliest"] == 0
    assert found["forced_tokens"] > 40
    assert found["largest_logprob_distance"] < 1e-4


def test_changes_of_a_chain() -> None:
    chain = ["2", ": ", "a=", "1", "\n\n", "1", ": ", "a=", "3", "\n\n", "a=", "3"]
    made = {name: change(chain, Random(0)) for name, change in chain_needed.CHANGES.items()}
    assert made["whole"] == chain
    assert made["none"] == []
    assert made["without its last thought"] == chain[:9]
    assert made["first half"] == chain[:6]
    assert sorted(made["tokens shuffled"]) == sorted(chain)
    assert made["tokens shuffled"] != chain
    assert sorted("".join(made["thoughts shuffled"]).split("\n\n")) == ["1: a=3", "2: a=1", "a=3"]


@pytest.mark.abacus
def test_its_own_chain_gives_its_own_answer() -> None:
    problems = TASK.make("abacus", 10, seed=0)
    with engine_of("abacus", threads=1) as engine:
        answers = ask(engine, problems, max_tokens=limit_for(TASK.max_tokens))
        again = chain_needed.answers_behind(engine, answers, chain_needed.CHANGES["whole"])
    assert again == [answer.right for answer in answers]


def test_overlap_of_mistakes() -> None:
    a = [True, True, False, False]
    same, apart = both_wrong(a, a), both_wrong(a, [True, False, True, False])
    assert (same["both_wrong"], same["correlation"]) == (0.5, 1.0)
    assert (apart["both_wrong"], apart["both_wrong_if_independent"]) == (0.25, 0.25)
    assert apart["correlation"] == 0.0
    assert both_wrong([True] * 4, a)["correlation"] == 0.0


def test_words() -> None:
    change, interval = difference([True] * 50, [True] * 45 + [False] * 5)
    assert change == pytest.approx(-0.1)
    assert points(change, interval).startswith("-10.0 (-")
    assert markdown(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_a_band_is_written_into_its_line() -> None:
    source = 'row("full", 0.0, 1.0)\n    row("rtn4", -1.0, 1.0, weights="rtn4"),\n'
    written = rewritten(source, "rtn4", *band((-0.0312, 0.004)))
    assert written == 'row("full", 0.0, 1.0)\n    row("rtn4", -0.04, 0.01, weights="rtn4"),\n'
    with pytest.raises(ValueError, match="no row 'rtn5'"):
        rewritten(source, "rtn5", 0.0, 0.0)
