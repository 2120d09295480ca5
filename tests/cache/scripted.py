"""Cells that say what they are, a policy whose choices a list can repeat, and ragged budgets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.allocation import Allocation
from engine.cache.choose import keep_best
from engine.cache.format import Cells
from engine.cache.paged import PagedCache
from engine.cache.policy import KVPolicy
from engine.cache.view import Compaction, KVShape, LayerView


def score(pos: int, layer: int, head: int) -> int:
    return (pos * 7 + layer * 3 + head * 5) % 11


@dataclass(frozen=True)
class Scripted(KVPolicy):
    """Keeps the best by `score` of all tokens but the first `skip` and the last `tail`.

    With `early`, a thought that ends so many cells before a window is full brings its compaction.
    With `bias`, a cell's is the number of compactions that it came through.
    """

    skip: int = 0
    tail: int = 0
    streams_prompt: bool = False
    keeps_prompt: bool = False
    bounded: bool = True
    bias: bool = False
    early: int = 0

    queries = 3

    def due(
        self, held: int, fresh: int, budget: int, window: int, thought_ended: bool = False
    ) -> bool:
        soon = self.early if thought_ended else 0
        return super().due(held, fresh + soon, budget, window)

    def span(self, prompt: int, last: int, now: int) -> tuple[int, int]:
        start = max(self.skip, prompt) if self.keeps_prompt else self.skip
        return start, max(start, now - self.tail)

    def utility(self, view: LayerView, budget: int) -> Tensor:
        self._check_queries(view)
        heads = torch.arange(view.pos.shape[1])[:, None]
        return ((view.pos * 7 + view.layer[:, None, None] * 3 + heads * 5) % 11).float()

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        rest = (budget - self.skip - self.tail).clamp(min=0)
        keep = keep_best(utility, view.valid, rest)
        bias = None if view.bias is None else view.bias.gather(-1, keep.clamp(min=0)) + 1
        return Compaction(keep, bias=bias)

    def _check_queries(self, view: LayerView) -> None:
        """The ring holds exactly the last positions' queries (they say their own position)."""
        assert view.queries is not None
        assert view.query_pos is not None
        pos = view.query_pos[0]
        last = int(pos[-1])
        assert pos.tolist() == [max(p, -1) for p in range(last - self.queries + 1, last + 1)]
        if not self.tail:
            assert last == int(view.pos[view.valid].max())
        there = pos >= 0
        assert (view.queries[0, there][:, :, 1] == pos[there, None]).all()
        assert (view.queries[:, there][..., 2] == view.layer[:, None, None]).all()


@dataclass(frozen=True)
class Ragged(Allocation):
    """The first half of the layers, and the first half of each one's heads, hold more."""

    by: int = 4

    def _spread(self, total: int, count: int) -> list[int]:
        assert count % 2 == 0
        return [total + self.by] * (count // 2) + [total - self.by] * (count // 2)

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        return self._spread(budget, shape.layers)

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        return torch.tensor([self._spread(total, utility.shape[1])] * utility.shape[0])


def _read(cache: PagedCache, slot: int, layer: int) -> list[Cells]:
    """Each head's cells, packed and plain, in order."""
    where, _ = cache._parts.addresses(slot, layer)
    held = cache.held(slot)[layer]
    return [cache._parts.read(own[:n]) for own, n in zip(where, held, strict=True)]


def read_biases(cache: PagedCache, slot: int) -> list[list[list[float]]]:
    """[layer][head] the bias of each cell in order."""
    found = []
    for layer in range(cache.shape.layers):
        biases = [cells.bias for cells in _read(cache, slot, layer)]
        found.append([bias.tolist() for bias in biases if bias is not None])
    return found


def label(heads: int, tokens: Tensor, pos: Tensor, layer: int, dim: int) -> Tensor:
    """Rows [T, heads, dim] that spell (token, position, layer, head)."""
    rows = torch.zeros(len(tokens), heads, dim)
    rows[:, :, 0] = tokens[:, None].float()
    rows[:, :, 1] = pos[:, None].float()
    rows[:, :, 2] = layer
    rows[:, :, 3] = torch.arange(heads)
    return rows


def run_labelled(cache: PagedCache, rows: list[tuple[list[int], int, int, int]]) -> None:
    """A step of rows (tokens, slot, start, count) whose cells are labels."""
    shape = cache.shape
    kv = cache.plan([(slot, start, count) for _, slot, start, count in rows])
    tokens = torch.tensor([t for ts, _, s, n in rows for t in ts[s : s + n]])
    pos = torch.tensor([p for _, _, s, n in rows for p in range(s, s + n)])
    for layer in range(shape.layers):
        q = label(shape.q_heads, tokens, pos, layer, shape.head_dim)
        k = label(shape.kv_heads, tokens, pos, layer, shape.head_dim)
        kv.attend(layer, q, k, -k)
    kv.finish()


def read_labels(cache: PagedCache, slot: int) -> list[list[list[tuple[int, int]]]]:
    """[layer][head] the (token, position) of each cell in order, checked against k, v and pos.

    8 bits are near enough to tell labels, even after some roundings.
    """
    packs = cache._packed is not None
    found = []
    for layer in range(cache.shape.layers):
        heads = []
        for head, cells in enumerate(_read(cache, slot, layer)):
            k = cells.k.round() if packs else cells.k
            torch.testing.assert_close(k, -cells.v, atol=4.0 if packs else 0, rtol=0)
            assert (k[:, 2] == layer).all()
            assert (k[:, 3] == head).all()
            pos = cells.pos.tolist()
            assert pos == cache.positions(slot, layer)[head].tolist()
            torch.testing.assert_close(k[:, 1], cells.pos.float(), atol=2.0 if packs else 0, rtol=0)
            heads.append([(int(t), p) for t, p in zip(k[:, 0].tolist(), pos, strict=True)])
        found.append(heads)
    return found
