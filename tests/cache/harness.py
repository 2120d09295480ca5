"""A cache driven without a model: cells and queries are functions of the token and its position."""

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.cache.paged import PagedCache
from engine.cache.policy import KVSpec
from engine.cache.view import KVShape
from engine.kernels.packed import PackedCells, unpack_keys, unpack_values
from engine.request import SamplingParams, Sequence

SHAPE = KVShape(layers=2, q_heads=4, kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


def naive_attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pos_pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    bias_pool: Tensor | None = None,
    packed: PackedCells | None = None,
) -> Tensor:
    """The attention op's definition, one row and head at a time."""
    out = torch.empty_like(q)
    group = q.shape[2] // table.shape[1]
    for b in range(table.shape[0]):
        for h in range(table.shape[1]):
            n = int(lengths[b, h])
            pages = table[b, h].long()
            k, v = (pool[pages].flatten(0, 1)[:n].to(q.dtype) for pool in (k_pool, v_pool))
            pos = pos_pool[pages].flatten()[:n]
            bias = torch.zeros(n) if bias_pool is None else bias_pool[pages].flatten()[:n]
            if packed is not None:
                there = torch.arange(64) < packed.fill[b, h, :, None]
                pages = packed.table[b, h].long()
                pk = unpack_keys(packed.k[pages], packed.k_grid[pages], packed.bits)[there]
                pv = unpack_values(packed.v[pages], packed.v_grid[pages], packed.bits)[there]
                k, v = torch.cat((pk.to(q.dtype), k)), torch.cat((pv.to(q.dtype), v))
                pos = torch.cat((packed.pos[pages][there], pos))
                own = torch.zeros(len(pk)) if packed.bias is None else packed.bias[pages][there]
                bias = torch.cat((own, bias))
            sees = pos <= q_pos[b][:, None]  # [M, n]
            heads = q[b, :, h * group : (h + 1) * group].transpose(0, 1)  # [G, M, D]
            logits = heads @ k.mT * q.shape[-1] ** -0.5 + bias
            weights = logits.masked_fill(~sees, -torch.inf).softmax(-1)
            out[b, :, h * group : (h + 1) * group] = (weights @ v).transpose(0, 1)
    return out


def make_cache(
    spec: KVSpec | None = None,
    *,
    shape: KVShape = SHAPE,
    pages: int = 64,
    packed_pages: int = 64,
    slots: int = 4,
    max_len: int = 128,
) -> PagedCache:
    return PagedCache(
        shape,
        KVSpec() if spec is None else spec,
        pages=pages,
        packed_pages=packed_pages,
        slots=slots,
        max_len=max_len,
        dtype=torch.float32,
        device=CPU,
        attend=naive_attend,
    )


def make_seq(
    tokens: Seq[int], prompt_len: int | None = None, max_tokens: int = 16, **params: Any
) -> Sequence:
    return Sequence(
        id="s",
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        tokens=list(tokens),
        params=SamplingParams(max_tokens=max_tokens, **params),
    )


@cache
def _row(token: int, pos: int, layer: int, shape: KVShape) -> Tensor:
    noise = torch.Generator().manual_seed(1_000_000 * layer + 1000 * token + pos)
    return torch.randn(shape.q_heads + 2 * shape.kv_heads, shape.head_dim, generator=noise)


def qkv(seq: Sequence, start: int, count: int, layer: int, shape: KVShape = SHAPE) -> list[Tensor]:
    """q, k, v of some tokens: the same token at the same position has the same ones."""
    rows = [_row(seq.tokens[pos], pos, layer, shape) for pos in range(start, start + count)]
    split = [shape.q_heads, shape.kv_heads, shape.kv_heads]
    return list(torch.split(torch.stack(rows), split, dim=1))


def step(cache: PagedCache, rows: Seq[tuple[Sequence, int, int]]) -> list[Tensor]:
    """Run rows of (sequence, slot, count), all reserved; the outputs of each, [L, count, Hq, D]."""
    starts = [cache.computed(slot) for _, slot, _ in rows]
    kv = cache.plan([(slot, s, n) for (_, slot, n), s in zip(rows, starts, strict=True)])
    layers = []
    for layer in range(cache.shape.layers):
        parts = [
            qkv(seq, s, n, layer, cache.shape) for (seq, _, n), s in zip(rows, starts, strict=True)
        ]
        q, k, v = (torch.cat(p) for p in zip(*parts, strict=True))
        layers.append(kv.attend(layer, q, k, v))
    kv.finish()
    return list(torch.split(torch.stack(layers), [n for _, _, n in rows], dim=1))


def catch_up(cache: PagedCache, seq: Sequence, slot: int, chunk: int = 1000) -> Tensor:
    """Run all of a sequence's tokens that aren't computed; outputs [L, T, Hq, D]."""
    outs = []
    while (left := len(seq.tokens) - cache.computed(slot)) > 0:
        count = cache.reserve(seq, slot, min(left, chunk))
        assert count > 0, "no room"
        outs += step(cache, [(seq, slot, count)])
        cache.compress([slot])
    return torch.cat(outs, dim=1) if outs else torch.empty(cache.shape.layers, 0)


def dense(seq: Sequence, shape: KVShape = SHAPE) -> Tensor:
    """Causal attention of the whole sequence without a cache, [L, T, Hq, D]."""
    outs = []
    for layer in range(shape.layers):
        q, k, v = (x.transpose(0, 1) for x in qkv(seq, 0, len(seq.tokens), layer, shape))
        k, v = (x.repeat_interleave(shape.group, dim=0) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        outs.append(out.transpose(0, 1))
    return torch.stack(outs)
