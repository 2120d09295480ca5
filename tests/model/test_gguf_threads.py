"""Rows that are looked up while a model runs, enough of them for several threads."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize

from engine.model.gguf_blocks import dequantise, unpackers


@pytest.mark.parametrize("rows", [1, 2048])
def test_rows_in_inference_mode(rows: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    weights = np.random.default_rng(0).standard_normal((rows, 512), dtype=np.float32)
    kind = GGMLQuantizationType.Q8_0
    raw = torch.from_numpy(quantize(weights, kind))
    with unpackers() as pool:
        plain = dequantise(raw, kind, pool)
        with torch.inference_mode():
            looked_up = dequantise(raw[torch.arange(rows)], kind, pool)
    torch.set_num_threads(threads)
    assert torch.equal(looked_up, plain)
    assert torch.allclose(plain, torch.from_numpy(weights), atol=0.05)
