from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.evaluation.records import Comparison, Run
from bench.evaluation.report import SAMPLES, TEXT_CHARS, shorten, worst, write_report
from tests.bench import synthetic

VOID = {"meta", "br", "hr", "link", "img"}


class Page(HTMLParser):
    """Fails on a tag that isn't closed in its place; collects ids, tags and outside references."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href"):
                self.links.append(value or "")
            else:
                self.links += re.findall(r"url\(([^)]*)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


@pytest.fixture(scope="module", autouse=True)
def _plots() -> None:
    pytest.importorskip("matplotlib")


def written(path: Path, runs: Sequence[Run], comparisons: Sequence[Comparison] = ()) -> str:
    file = path / "report.html"
    write_report(file, runs, comparisons)
    return file.read_text(encoding="utf-8")


def test_a_comparison_of_two_tasks_has_everything_inside(tmp_path: Path) -> None:
    tasks = ("gsm8k", "aime")
    base, run = synthetic.run(tasks=tasks), synthetic.run("int4", tasks=tasks)
    compared = [replace(synthetic.comparison(base, run), mismatches=("dtype: bf16, not f32",))]
    html = written(tmp_path, [base, run], compared)
    page = Page(html)
    assert page.tags.count("svg") == 5  # three of accuracy, two of chains
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert "http" not in html.replace("http-equiv", "")
    assert "@import" not in html
    assert "None" not in html.replace("None.", "")
    assert not re.search(r"\bnan\b", html)
    for shown in (
        "55.6 % (26.7 to 81.1 %)",
        "12,345 / 11,222 / 32,111 tokens",
        "32.1 GB·s",
        "1.24x\n(1.10 to 1.40x)",
        "-1.2 points (-4.3 to +2.2)",
        "61.7 %\n→ 61.7 %",
        "dtype: bf16, not f32",
        "sampling.temperature",
        "some CPU",
        "tokens between the thinking markers",
        "a cycle of 7 tokens from 300 tokens on",
        "error: out of memory",
        "mean chain (tokens)",
    ):
        assert shown in html, shown
    assert written(tmp_path, [base, run], compared) == html


def test_intervals_of_few_problems_are_called_too_narrow(tmp_path: Path) -> None:
    run = synthetic.run()
    compared = synthetic.comparison(run, run)
    few = replace(compared, tasks=(replace(compared.tasks[0], problems=19),))
    assert "pairs in gsm8k (19): intervals of ratios are too narrow there" in written(
        tmp_path, [run], [few]
    )
    assert "too narrow" not in written(tmp_path, [run], [compared])


def test_what_others_wrote_is_text(tmp_path: Path) -> None:
    evil = "<script>alert('$x_1^')</script>\x1b\ud83d"
    fields = ("task", "problem", "expected", "answer", "error", "text", "thinking")
    changes: dict[str, Any] = dict.fromkeys(fields, evil)
    samples = [synthetic.sample(1, **changes)]
    run = synthetic.run(f"_{evil}", samples=samples, tasks=(evil,))
    run = replace(run, chain_rule=evil, settings={evil: evil}, environment={evil: [evil]})
    compared = replace(synthetic.comparison(run, run), mismatches=(evil,))
    page = Page(html := written(tmp_path, [run], [compared]))
    assert "script" not in page.tags
    assert html.count("&lt;script&gt;") > 20


def test_a_server_that_tells_little(tmp_path: Path) -> None:
    bare: dict[str, Any] = {"loop": None, "closed": None, "digest": None, "anatomy": None}
    samples = [synthetic.sample(i, **bare) for i in range(3)]
    run = synthetic.run("server", synthetic.SERVER, samples)
    html = written(tmp_path, [run, synthetic.run()])
    assert "Left out, for want of the figure: server." in html
    alone = written(tmp_path, [run])
    assert Page(alone).tags.count("svg") == 3
    assert "Nothing to draw." in alone
    assert "Comparison" not in alone


def test_nothing_was_right(tmp_path: Path) -> None:
    nothing = replace(
        synthetic.SUMMARY,
        right=0,
        accuracy=0.0,
        accuracy_ci=(0.0, 0.2),
        seconds_per_correct=None,
        cpu_seconds_per_correct=None,
        kv_byte_seconds_per_correct=None,
    )
    samples = [synthetic.sample(i, "wrong") for i in range(3)]
    html = written(tmp_path, [synthetic.run("weak", nothing, samples)])
    assert "0.0 % (0.0 to 20.0 %)" in html
    assert Page(html).tags.count("svg") == 4


@pytest.mark.parametrize("mean", [0.0, float("nan")])
def test_every_sample_crashed(tmp_path: Path, mean: float) -> None:
    names = [name for name in synthetic.SUMMARY.__slots__ if "_tokens_" in name]
    means: dict[str, Any] = dict.fromkeys(names, mean)
    crashed = replace(
        synthetic.SERVER,
        sample_count=0,
        right=0,
        errors=2,
        accuracy=mean,
        thoughts_mean=mean,
        **means,
    )
    samples = [synthetic.sample(i, "error", anatomy=None) for i in range(2)]
    html = written(tmp_path, [synthetic.run("broken", crashed, samples)])
    assert "2 samples: error: out of memory" in html
    assert "No sample finished." in html
    assert "svg" not in Page(html).tags


def test_many_long_samples_stay_small(tmp_path: Path) -> None:
    text = "a" * TEXT_CHARS + "MIDDLE" + "b" * TEXT_CHARS
    samples = [synthetic.sample(i, text=text) for i in range(SAMPLES)]
    runs = [synthetic.run(name, samples=samples) for name in ("full", "int4")]
    html = written(tmp_path, runs)
    assert "MIDDLE" not in html
    assert "[4,006 characters left out]" in html
    assert Page(html).tags.count("details") == SAMPLES


def test_short_text_is_whole() -> None:
    assert shorten("x" * TEXT_CHARS) == "x" * TEXT_CHARS


def test_the_worst_waste_most() -> None:
    cut = synthetic.sample(0, finish_reason="length", output_tokens=2000)
    late = replace(synthetic.looping(1), output_tokens=310)
    early = synthetic.looping(2)
    assert worst([synthetic.sample(3), cut, late, early]) == [early, late, cut]


def test_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs is empty"):
        write_report(tmp_path / "report.html", [], [])
