from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from bench.evaluation import figures
from bench.evaluation.table import comparison_table, summary_table
from tests.bench import synthetic

TASKS = ("gsm8k", "reasoning-gym/countdown")


def rendered(table: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_every_figure_of_a_run_is_whole(width: int) -> None:
    text = rendered(summary_table(synthetic.run("[b]full", tasks=TASKS)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "[b]full" in text
    assert "tokens between the thinking markers" in text
    for group in figures.GROUPS.values():
        for figure in group:
            assert text.count(figure.show(synthetic.SUMMARY)) >= 3, figure.name
    for shown in (
        "55.6 % (26.7 to 81.1 %)",
        "12,345 / 11,222 / 32,111 tokens",
        "1,234 tok/s",
        "32.1 GB·s",
        "123 GB",
        "11.1 %",
    ):
        assert text.count(shown) == 3, shown  # two tasks, and both pooled


def test_one_task_has_no_pooled_row() -> None:
    assert "all pooled" not in rendered(summary_table(synthetic.run()), 100)


def test_figures_that_nobody_knows_are_said_to_be_missing() -> None:
    text = rendered(summary_table(synthetic.run(summary=synthetic.SERVER)), 100)
    assert "n/a" in text
    assert "None" not in text
    assert "nan" not in text


@pytest.mark.parametrize("width", [80, 100])
def test_every_figure_of_a_comparison_is_whole(width: int) -> None:
    base, run = synthetic.run(tasks=TASKS), synthetic.run("[b]int4", tasks=TASKS)
    compared = replace(synthetic.comparison(base, run), mismatches=("dtype: bf16, not f32",))
    text = rendered(comparison_table([compared]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "[b]int4 beside full (base)" in text
    assert "dtype: bf16, not f32" in text
    for group in figures.COMPARED_GROUPS.values():
        for figure in group:
            for line in figure.show(compared.tasks[0]).splitlines():
                assert text.count(line) >= 2, figure.name
            for line in figure.overall(compared).splitlines():
                assert line in text, figure.name
    for shown in (
        "-1.1 points (-4.2 to +2.1)",
        "(1.10 to 1.40x)",
        "150 pairs",
        "1.22x",
        "→ 25.3 %",
    ):
        assert shown in text, shown


def test_intervals_of_few_problems_are_called_too_narrow() -> None:
    base, run = synthetic.run(tasks=TASKS), synthetic.run("int4", tasks=TASKS)
    compared = synthetic.comparison(base, run)

    def text_of(*problems: int) -> str:
        tasks = zip(compared.tasks, problems, strict=True)
        counted = tuple(replace(task, problems=count) for task, count in tasks)
        return rendered(comparison_table([replace(compared, tasks=counted)]), 200)

    assert "pairs in gsm8k (19): intervals of ratios are too narrow there" in text_of(19, 20)
    assert "pairs in gsm8k (3), reasoning-gym/countdown (19): " in text_of(3, 19)
    assert "narrow" not in text_of(20, 20)
