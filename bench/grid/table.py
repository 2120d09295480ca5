"""A grid's runs as Markdown: by part and budget, ranked at equal memory, and claim by claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from bench.evaluation import units
from bench.evaluation.compare import compare
from bench.evaluation.intervals import mcnemar
from bench.evaluation.records import KVHeld, Run
from bench.grid.folder import Result
from bench.grid.points import CLAIMS, FULL, PARTS
from bench.grid.ranking import rankings

HEADER = (
    "method",
    "right",
    "less than full, points",
    "changed",
    "p",
    "looped",
    "chain",
    "peak cells",
    "KV at peak",
    "KV, mean",
    "side",
    "promise",
)

NOTES = """\
Right with 95 % intervals; differences are paired, of the same problems, and so are their intervals
(bootstrap) and p (McNemar, exact). Changed: problems that only this run, and only the other, got
right. Chain: mean tokens. Memory is a sequence's, the mean over problems: cells of all heads of all
layers and bytes of their pages, at their peak and on average over the steps, and the side state
(remembered queries, tables, biases). Promise: the most cells by which a layer exceeded its heads'
`policy.peak`."""


def tables(found: Sequence[Result]) -> str:
    """ValueError: the run with the full cache isn't there, which all others are set beside."""
    base = next((each.run for each in found if each.method == FULL), None)
    if base is None:
        raise ValueError("there is no run with the full cache yet: all others are set beside it")
    blocks = [_about(base), NOTES]
    for part in (FULL, *PARTS):
        own = [each for each in found if each.part == part]
        for budget in sorted({each.cells for each in own}, key=lambda cells: cells or 0):
            blocks.append(_table(part, base, [each for each in own if each.cells == budget]))
    blocks += rankings(found)
    blocks.append(_claims(found))
    return "\n\n".join(filter(None, blocks))


def _about(base: Run) -> str:
    s, place = base.settings, base.environment
    tasks = ", ".join(f"{count} problems of {name}" for name, (count, _) in s["tasks"].items())
    return (
        f"## {s['model']} ({s['model_digest']}), {tasks}, seed {s['seed']}\n\n"
        f"At most {s['max_tokens']} tokens, temperature {s['temperature']:g}; commit"
        f" {place.get('commit')}, {place.get('date')}, {place.get('cpu')}."
    )


def _table(part: str, base: Run, own: Iterable[Result]) -> str:
    ordered = sorted(own, key=lambda each: -each.run.summary.accuracy)
    first = ordered[0]
    title = "the full cache" if part == FULL else part
    if first.budget is not None:
        title += f", {first.budget}"
        title += "" if first.budget == str(first.cells) else f" ({first.cells} cells a head)"
    return f"### {title}\n\n{markdown(HEADER, (_row(base, each) for each in ordered))}"


def _row(base: Run, each: Result) -> list[str]:
    run, s = each.run, each.run.summary
    held = [sample.kv for sample in run.samples if sample.kv is not None]
    return [
        each.method,
        units.percent_range(s.accuracy, s.accuracy_ci),
        *(("", "", "") if run is base else _beside(base, run)),
        units.percent(s.looped_share),
        f"{s.thinking_tokens_mean:.0f}",
        f"{_mean(held, lambda kv: kv.peak_cells):,.0f}",
        kilobytes(_mean(held, lambda kv: kv.peak_bytes)),
        kilobytes(_mean(held, lambda kv: kv.mean_bytes)),
        kilobytes(_mean(held, lambda kv: kv.side_bytes)),
        _promise(max(kv.excess_cells for kv in held)),
    ]


def _promise(excess: int) -> str:
    return "kept" if excess <= 0 else f"BROKEN by {excess} cells"


def _beside(base: Run, run: Run) -> tuple[str, str, str]:
    """The paired difference of accuracy, which verdicts changed, and how likely that is."""
    found = compare(base, run)
    gained, lost = _changed(base, run)
    difference = points(found.accuracy_difference, found.accuracy_difference_ci)
    return difference, f"+{gained} -{lost}", p_value(mcnemar(gained, lost))


def _changed(base: Run, run: Run) -> tuple[int, int]:
    """Samples that only the run, and only its base, got right."""
    others = {sample.key: sample for sample in run.samples}
    count = Counter(
        (sample.right, others[sample.key].right)
        for sample in base.samples
        if sample.key in others and sample.pairs_with(others[sample.key])
    )
    return count[False, True], count[True, False]


def _claims(found: Sequence[Result]) -> str:
    """What the papers say, at each budget where both are there."""
    runs = {(each.method, each.budget): each for each in found}
    budgets = sorted({(each.cells, each.budget) for each in found if each.cells is not None})
    rows = []
    for better, worse in CLAIMS:
        for _, budget in budgets:
            above, below = runs.get((better, budget)), runs.get((worse, budget))
            if above is not None and below is not None:
                rows.append([f"{better} over {worse}", budget, *_claim(below.run, above.run)])
    header = ("claim", "budget", "difference, points", "changed", "p", "")
    return f"### Claims\n\n{markdown(header, rows)}" if rows else ""


def _claim(worse: Run, better: Run) -> tuple[str, str, str, str]:
    low, high = compare(worse, better).accuracy_difference_ci
    verdict = "as claimed" if low > 0 else "the other way" if high < 0 else "undecided"
    return (*_beside(worse, better), verdict)


def _mean(held: Sequence[KVHeld], of: Callable[[KVHeld], float]) -> float:
    return fmean(map(of, held))


def kilobytes(value: float) -> str:
    return units.amount(value / 1e3, "kB")


def points(difference: float, interval: tuple[float, float]) -> str:
    low, high = (100 * end for end in interval)
    return f"{100 * difference:+.1f} ({low:+.1f} to {high:+.1f})"


def p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
