"""The decoder against the oracle, against transformers, and against itself in other company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.architecture import RopeConfig
from engine.model.decoder import Decoder, StepContext
from tests import oracle
from tests.kernels.invariance import assert_same_rows
from tests.tiny import FAMILIES, ROPES, TinyCheckpoint, tiny_checkpoint, write_folder

VARIANTS: dict[str, TinyCheckpoint] = {
    **{family: tiny_checkpoint(family) for family in FAMILIES},
    **{f"rope-{kind}": tiny_checkpoint("llama", rope=rope) for kind, rope in ROPES.items()},
    "untied": tiny_checkpoint("llama", tied_embeddings=False),
    "biased": tiny_checkpoint("llama", qkv_bias=True, out_bias=True),
    "group-1": tiny_checkpoint("mistral", kv_heads=4),
    "group-4": tiny_checkpoint("qwen2", kv_heads=1, q_heads=4),
    "wide-heads": tiny_checkpoint("llama", head_dim=32),
}


class DenseKV:
    """A dense cache of several sequences; one step may hold rows of any of them.

    `rows` [(sequence, count)] is set before each step.
    """

    def __init__(self, sequences: int, layers: int) -> None:
        empty: list[list[Tensor | None]] = [[None] * layers for _ in range(sequences)]
        self.keys, self.values = empty, [list(row) for row in empty]
        self.rows: list[tuple[int, int]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = [count for _, count in self.rows]
        parts = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
        return torch.cat(
            [self._one(seq, layer, *qkv) for (seq, _), qkv in zip(self.rows, parts, strict=True)]
        )

    def _one(self, seq: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = self.keys[seq][layer], self.values[seq][layer]
        k = k if old_k is None else torch.cat((old_k, k))
        v = v if old_v is None else torch.cat((old_v, v))
        self.keys[seq][layer], self.values[seq][layer] = k, v
        group = q.shape[1] // k.shape[1]
        # one query at a time: the bits of a query never depend on the chunk
        return torch.cat(
            [_attend_last(q[i], k[: len(k) - len(q) + i + 1], v, group) for i in range(q.shape[0])]
        )


def _attend_last(q: Tensor, k: Tensor, v: Tensor, group: int) -> Tensor:
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v[: len(k)]))
    weights = torch.softmax((keys * q.float()).sum(-1) / q.shape[-1] ** 0.5, 0)  # [N, Hq]
    return (weights[..., None] * values).sum(0, keepdim=True).to(q.dtype)


def run(decoder: Decoder, kv: DenseKV, steps: list[list[tuple[int, Tensor]]]) -> list[Tensor]:
    """Feed steps of (sequence, ids) rows; the logits of every sequence, in order."""
    fed = [0] * len(kv.keys)
    out: list[list[Tensor]] = [[] for _ in kv.keys]
    for step in steps:
        kv.rows = [(seq, len(ids)) for seq, ids in step]
        positions = [torch.arange(fed[seq], fed[seq] + len(ids)) for seq, ids in step]
        ctx = StepContext(torch.cat(positions), kv)
        logits = decoder.logits(decoder.forward(torch.cat([ids for _, ids in step]), ctx))
        for (seq, ids), rows in zip(
            step, torch.split(logits, [len(i) for _, i in step]), strict=True
        ):
            fed[seq] += len(ids)
            out[seq].append(rows)
    return [torch.cat(parts) for parts in out]


def load(checkpoint: TinyCheckpoint, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return Decoder.load(checkpoint, dtype=dtype, device="cpu", **options)


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(seed))


def alone(decoder: Decoder, ids: Tensor) -> Tensor:
    return run(decoder, DenseKV(1, decoder.config.layers), [[(0, ids)]])[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_oracle(name: str) -> None:
    checkpoint = VARIANTS[name]
    ids = random_ids(40)
    truth = oracle.logits(checkpoint.config, checkpoint.tensors, ids)
    assert truth.std() > 0.1
    torch.testing.assert_close(alone(load(checkpoint), ids), truth, rtol=1e-4, atol=1e-4)


def test_backends_agree() -> None:
    checkpoint = VARIANTS["biased"]
    ids = random_ids(20)
    plain = load(checkpoint, prefer=("reference",))
    torch.testing.assert_close(
        alone(load(checkpoint), ids), alone(plain, ids), rtol=1e-4, atol=1e-4
    )


def test_bfloat16_is_near_float32() -> None:
    checkpoint = VARIANTS["qwen3"]
    ids = random_ids(40)
    low = alone(load(checkpoint, torch.bfloat16), ids)
    truth = oracle.logits(checkpoint.config, checkpoint.tensors, ids)
    assert low.dtype == torch.float32
    assert (low - truth).norm() < 0.03 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_batch(family: str, dtype: torch.dtype) -> None:
    decoder = load(VARIANTS[family], dtype)
    prompts = [random_ids(3 + 5 * (i % 4), seed=i) for i in range(32)]
    kv = DenseKV(32, decoder.config.layers)
    last = [(i, ids[-2:]) for i, ids in enumerate(prompts)]
    together = run(decoder, kv, [[(i, ids[:-2]) for i, ids in enumerate(prompts)], last])
    for ids, rows in list(zip(prompts, together, strict=True))[:6]:
        assert_same_rows(rows, alone(decoder, ids), dtype)


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_logits_do_not_depend_on_the_chunks(chunk: int) -> None:
    decoder = load(VARIANTS["qwen2"])
    ids = random_ids(65)
    steps = [[(0, part)] for part in torch.split(ids, chunk)]
    assert_same_rows(run(decoder, DenseKV(1, 2), steps)[0], alone(decoder, ids))


def test_nbytes_counts_the_held_weights() -> None:
    held = sum(t.nbytes for t in VARIANTS["llama"].tensors.values())
    assert load(VARIANTS["llama"]).nbytes == held  # tied: the head is the table
    untied = VARIANTS["untied"].tensors
    held = sum(t.nbytes for t in untied.values()) - untied["model.embed_tokens.weight"].nbytes
    assert load(VARIANTS["untied"]).nbytes == held


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        load(VARIANTS["llama"], torch.float16)


def _peer_logits(folder: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: Tensor = model(ids[None]).logits[0]  # from_pretrained leaves it in eval mode
    return logits


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"biased"}))
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = VARIANTS[name]
    folder = write_folder(tmp_path, checkpoint.config, checkpoint.tensors)
    ids = random_ids(150)
    torch.testing.assert_close(
        alone(load(checkpoint), ids), _peer_logits(folder, ids), rtol=1e-4, atol=1e-4
    )


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_dynamic_rope_equals_transformers_at_its_raised_length(tmp_path: Path) -> None:
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_positions=64)
    raised = tiny_checkpoint("llama", rope=rope, max_positions=100)
    short = tiny_checkpoint("llama", rope=ROPES["dynamic"], max_positions=64).config
    folder = write_folder(tmp_path, short, raised.tensors)
    ids = random_ids(100)
    torch.testing.assert_close(
        alone(load(raised), ids), _peer_logits(folder, ids), rtol=1e-4, atol=1e-4
    )
