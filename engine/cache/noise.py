"""Random numbers of a compaction, the same whatever the batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine import noise
from engine.cache.view import LayerView


def uniform(view: LayerView) -> Tensor:
    """A number in (0, 1) for each cell on offer, [S, H, N] float64.

    Keyed by the view's key (seed, lineage, position of the compaction), layer, kv head and the
    cell's own position: so padding and other slots change nothing.
    """
    assert view.key is not None
    heads = np.arange(view.pos.shape[1], dtype=np.uint64)[None, :, None]
    pos = view.pos.cpu().numpy().astype(np.uint64)  # [S, H, N]
    key = view.key.cpu().numpy().astype(np.uint64)[:, None, None]
    hashes = noise.hashed(key, noise.words([view.layer]), heads, pos)
    drawn = np.maximum(noise.fractions(hashes), 2.0**-54)
    return torch.from_numpy(drawn).to(view.pos.device)
