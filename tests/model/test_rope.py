"""Rotations against the oracle's formulas, one pair at a time, and against transformers'."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.model.architecture import DecoderConfig, RopeConfig
from engine.model.rope import Rope, rotate
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
    frequencies = torch.tensor(
        [oracle.frequency(config, pair) for pair in range(head_dim // 2)], dtype=torch.float64
    )
    positions = torch.tensor([0, 1, 5, 100, 511])
    angle = positions.double()[:, None] * frequencies
    cos, sin = cos_sin(config, positions)
    scale = oracle.loudness(config)
    torch.testing.assert_close(cos[:, 0].double(), angle.cos() * scale, rtol=0, atol=2e-4)
    torch.testing.assert_close(sin[:, 0].double(), angle.sin() * scale, rtol=0, atol=2e-4)


def test_dynamic_is_unscaled_until_the_length_is_raised() -> None:
    config = config_of("dynamic")
    plain = replace(config, rope=replace(config.rope, kind="default"))
    positions = torch.arange(512)
    assert torch.equal(cos_sin(config, positions)[0], cos_sin(plain, positions)[0])
    raised = replace(
        config, rope=replace(config.rope, original_max_positions=512), max_positions=2048
    )
    # factor 2 and four times the length: the base grows by (2 * 4 - 1) ** (64 / 62)
    stretched = replace(plain, rope=replace(plain.rope, theta=10_000.0 * 7 ** (64 / 62)))
    torch.testing.assert_close(
        cos_sin(raised, positions)[0], cos_sin(stretched, positions)[0], rtol=0, atol=1e-4
    )


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
    config = config_of("llama3")
    positions = torch.randint(512, (70,), generator=torch.Generator().manual_seed(0))
    whole = torch.cat(cos_sin(config, positions), -1)
    for rows in (1, 3, 16, 33):
        assert_same_rows(torch.cat(cos_sin(config, positions[:rows]), -1), whole[:rows])


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_equal_transformers(kind: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_of(kind, head_dim)
    peer = LlamaRotaryEmbedding(LlamaConfig(**hf_config(config)))
    positions = torch.arange(512)
    theirs = peer(torch.zeros(1), positions[None])  # cos and sin, [1, T, D]
    for ours, other in zip(cos_sin(config, positions), theirs, strict=True):
        torch.testing.assert_close(ours[:, 0], other[0, :, : head_dim // 2], rtol=0, atol=1e-4)
