"""Compaction: a policy sees cells of some layers, says which stay, and pages come free.

It happens at positions that depend on the sequence alone (points.py), one slot at a time, so that
neither its time nor its numbers depend on the batch. A slot is compacted piece by piece
(pieces.py), in as many steps as it takes; none of its tokens runs until the last is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import noise
from engine.cache.budgets import Budgets
from engine.cache.carry_out import carry_out
from engine.cache.parts import Parts
from engine.cache.pieces import Layers, Piece, offered, planned
from engine.cache.policy import KVPolicy, KVSpec
from engine.cache.repack import pack
from engine.cache.view import Compaction, LayerView


class Compactor:
    """Applies one policy to slots whose time has come."""

    def __init__(self, policy: KVPolicy, spec: KVSpec, budgets: Budgets, parts: Parts) -> None:
        self._policy = policy
        self._allocation = spec.allocation
        self._budgets = budgets
        self._parts = parts
        self._begun: dict[int, list[tuple[int, Layers]]] = {}  # what is left to do

    def begun(self, slot: int) -> bool:
        """Whether some layers of the slot are compacted and others are not yet."""
        return slot in self._begun

    def forget(self, slot: int) -> None:
        """The slot was emptied."""
        self._begun.pop(slot, None)

    def work(self, slot: int) -> tuple[bool, int]:
        """Compact the slot's next layers: whether they were the last, and how many cells went."""
        parts, policy = self._parts, self._policy
        budgets = self._budgets.layers(parts.tables.budget[slot])
        todo = self._begun.pop(slot, None) or planned(parts, slot, policy, budgets)
        piece, gone = offered(parts, slot, policy, *todo[0]), 0
        if piece.cells.any():
            carry_out(parts, slot, piece, self._decide(slot, piece))
            gone = int((piece.held - parts.held(slot)[piece.layers]).sum())
            self._count_pages(slot)
        if todo[1:]:
            self._begun[slot] = todo[1:]
            return False, gone
        self._finish(slot)
        return True, gone

    def _decide(self, slot: int, piece: Piece) -> Compaction:
        view = self._view(slot, piece)
        utility = demand = torch.zeros_like(view.pos, dtype=torch.float32)
        if self._policy.by_utility or self._allocation.by_utility:
            utility = self._policy.utility(view, piece.total)
        if self._allocation.by_utility:
            even = torch.full_like(view.valid[..., 0], piece.total, dtype=torch.int64)  # [S, H]
            demand = utility.masked_fill(self._policy.protected(view, even), torch.inf)
        budget = self._allocation.head_budgets(demand, view.valid, piece.total)
        done = self._policy.compact(view, utility, budget.minimum(view.valid.sum(-1)))
        if done.bias is not None and self._parts.store.bias is None:
            raise ValueError(f"{self._policy} gives biases: it must say so by `bias = True`")
        return done

    def _finish(self, slot: int) -> None:
        tables, parts = self._parts.tables, self._parts
        tables.compacted_at[slot] = tables.ready[slot] = now = tables.computed[slot]
        if parts.packed is not None:
            pack(parts, parts.packed, slot)
            parts.packed.groups.renew(slot, now, now)
        held = parts.held(slot)
        tables.base[slot] = -(-held.sum(-1) // held.shape[1])

    def _count_pages(self, slot: int) -> None:
        tables, packed = self._parts.tables, self._parts.packed
        tables.held_pages[slot] = int(tables.taken[slot].sum())
        if packed is not None:
            packed.groups.held_pages[slot] = int(packed.groups.taken[slot].sum())

    def _view(self, slot: int, piece: Piece) -> LayerView:
        tables, device = self._parts.tables, self._parts.store.k.device
        cells, valid = piece.cells_offered()
        k, v, pos, bias = (
            None if x is None else x.view(*cells.shape, *x.shape[1:])
            for x in self._parts.read(cells.reshape(-1))
        )
        assert k is not None
        assert v is not None
        assert pos is not None
        ring, now = self._parts.ring, tables.computed[slot]
        queries, query_pos = (None, None) if ring is None else ring.read(piece.layers, slot)
        seed, lineage, thought_ends = tables.whose[slot]
        bounds = [end for end in (tables.prompt_len[slot], *thought_ends) if end <= now]
        key = noise.hashed(*(noise.words([part]) for part in (seed, lineage, now)))

        def upload(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return LayerView(
            upload(piece.layers),
            piece.start,
            piece.end,
            k,
            v,
            pos.long(),
            upload(valid),
            queries,
            query_pos,
            bias,
            upload(np.array(bounds, dtype=np.int64)).expand(len(cells), -1),
            upload(key.astype(np.int64)).expand(len(cells)),
        )
