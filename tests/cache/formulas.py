"""Attention written out query by query and cell by cell."""

import math

from engine.cache.view import LayerView
from tests.cache.views import GROUP


def held(view: LayerView, slot: int, head: int) -> int:
    return int(view.valid[slot, head].sum())


def softmax(logits: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(x) for x in logits.values())
    return {i: math.exp(x) / total for i, x in logits.items()}


def one_query(
    view: LayerView, slot: int, head: int, row: int, skip: int, group: str
) -> list[float]:
    """What one query gives each cell of a head, its last `skip` cells not in question."""
    assert view.queries is not None
    assert view.query_pos is not None
    cells, at = held(view, slot, head), int(view.query_pos[slot, row])
    seen = [i for i in range(cells - skip) if int(view.pos[slot, head, i]) <= at]
    heads = view.queries[slot, row, head * GROUP : (head + 1) * GROUP]
    logits = [{i: float(q @ view.k[slot, head, i]) / math.sqrt(8) for i in seen} for q in heads]
    if group == "softmax":
        each = [softmax(x) for x in logits]
        weights = {i: sum(x[i] for x in each) / GROUP for i in seen}
    elif group == "max":
        weights = softmax({i: max(x[i] for x in logits) for i in seen})
    else:
        weights = softmax({i: sum(x[i] for x in logits) / GROUP for i in seen})
    return [weights.get(i, 0.0) for i in range(cells)]


def attended(view: LayerView, slot: int, head: int, skip: int, group: str) -> list[float]:
    """The mean over the queries that exist."""
    assert view.query_pos is not None
    rows = [r for r, p in enumerate(view.query_pos[slot].tolist()) if p >= 0]
    each = [one_query(view, slot, head, r, skip, group) for r in rows]
    return [sum(column) / len(rows) for column in zip(*each, strict=True)]


def pooled(scores: list[float], kernel: int, how: str) -> list[float]:
    reach, out = kernel // 2, []
    for i in range(len(scores)):
        near = scores[max(0, i - reach) : i + reach + 1]
        out.append(max(near) if how == "max" else sum(near) / kernel)
    return out
