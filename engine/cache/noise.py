"""Random numbers of a compaction, the same whatever the batch.

Keyed by the view's key (seed, lineage, position of the compaction), its layer and the kv head, and
within a head by what each function says.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import noise
from engine.cache.view import LayerView


def uniform(view: LayerView) -> Tensor:
    """A number in (0, 1) for each cell on offer, [S, H, N] float64, keyed by the cell's own
    position: so padding and other slots change nothing."""
    return _drawn(view, view.pos.cpu().numpy().astype(np.uint64))


def normal(view: LayerView, count: int) -> Tensor:
    """`count` standard normal numbers a head, [S, H, count] float64, keyed by their index."""
    return torch.special.ndtri(_drawn(view, np.arange(count, dtype=np.uint64)))


def _drawn(view: LayerView, index: NDArray[np.uint64]) -> Tensor:
    """Numbers in (0, 1) keyed by `index`, which broadcasts to [S, H, n]."""
    assert view.key is not None
    heads = np.arange(view.pos.shape[1], dtype=np.uint64)[None, :, None]
    key, layer = (x.cpu().numpy().astype(np.uint64)[:, None, None] for x in (view.key, view.layer))
    hashes = noise.hashed(key, layer, heads, index)
    drawn = np.maximum(noise.fractions(hashes), 2.0**-54)
    return torch.from_numpy(drawn).to(view.pos.device)
