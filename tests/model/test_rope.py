"""Rotations against the oracle's formulas, one pair at a time, and against transformers'."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.layers import rotate
from engine.model.architecture import DecoderConfig, RopeConfig
from engine.model.rope import Rope
from tests import oracle
from tests.kernels.invariance import assert_same_rows
from tests.tiny import ROPES, hf_config, tiny_config

KINDS: dict[str, RopeConfig] = {
    **ROPES,
    "llama3-wide": RopeConfig(
        kind="llama3",
        theta=500_000.0,
        factor=32.0,
        low_freq_factor=2.0,
        high_freq_factor=16.0,
        original_max_positions=256,
    ),
    "yarn-factor": replace(ROPES["yarn"], attention_factor=0.7, beta_fast=16.0, beta_slow=2.0),
    "yarn-mscale": replace(ROPES["yarn"], mscale=1.2, mscale_all_dim=0.5, theta=1e6),
    "yarn-untruncated": replace(ROPES["yarn"], truncate=False),
    "yarn-own-length": replace(ROPES["yarn"], original_max_positions=None),
}


def config_of(kind: str, head_dim: int = 64) -> DecoderConfig:
    return tiny_config("llama", head_dim=head_dim, rope=KINDS[kind])


def cos_sin(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    return Rope(config, "cpu").angles(positions)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_equal_the_formulas(kind: str, head_dim: int) -> None:
    config = config_of(kind, head_dim)
    positions = torch.tensor([0, 1, 5, 100, 255, 256, 511])
    angle = torch.tensor(
        [
            [p * oracle.frequency(config, pair, p) for pair in range(head_dim // 2)]
            for p in positions
        ],
        dtype=torch.float64,
    )
    cos, sin = cos_sin(config, positions)
    scale = oracle.loudness(config)
    torch.testing.assert_close(cos.double(), angle.cos() * scale, rtol=0, atol=2e-4)
    torch.testing.assert_close(sin.double(), angle.sin() * scale, rtol=0, atol=2e-4)


def test_dynamic_raises_the_base_past_the_original_length() -> None:
    config = config_of("dynamic")
    plain = replace(config, rope=replace(config.rope, kind="default"))
    within = torch.arange(256)
    assert torch.equal(cos_sin(config, within)[0], cos_sin(plain, within)[0])
    # factor 2 and twice the length: the base grows by (2 * 2 - 1) ** (64 / 62)
    raised = replace(plain, rope=replace(plain.rope, theta=10_000.0 * 3 ** (64 / 62)))
    end = torch.tensor([511])
    torch.testing.assert_close(cos_sin(config, end)[0], cos_sin(raised, end)[0], rtol=0, atol=1e-4)


def test_rotation_turns_pairs_and_keeps_relative_positions() -> None:
    config = config_of("default", 16)
    x = torch.randn(1, 3, 16).expand(8, 3, 16)
    cos, sin = cos_sin(config, torch.arange(8))
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close((turned[1] * turned[3]).sum(-1), (turned[5] * turned[7]).sum(-1))
    torch.testing.assert_close(turned.transpose(0, 1), oracle.rotate(config, x.transpose(0, 1)))
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_angles_of_a_position_do_not_depend_on_the_others() -> None:
    config = config_of("dynamic")
    positions = torch.randint(512, (70,), generator=torch.Generator().manual_seed(0))
    whole = torch.cat(cos_sin(config, positions), -1)
    for rows in (1, 3, 16, 33):
        assert_same_rows(torch.cat(cos_sin(config, positions[:rows]), -1), whole[:rows])


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_equal_transformers(kind: str, head_dim: int) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_of(kind, head_dim)
    peer = LlamaRotaryEmbedding(LlamaConfig(**hf_config(config)))
    within, last = torch.arange(256), torch.tensor([511])
    for positions in (within, last):
        theirs = peer(torch.zeros(1), positions[None])  # cos and sin, [1, T, D]
        ours = cos_sin(config, positions)
        assert_near(ours, theirs, head_dim)


def assert_near(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], head_dim: int) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other[0, :, : head_dim // 2], rtol=0, atol=1e-4)
