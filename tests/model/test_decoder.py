"""The decoder against the oracle, against transformers, and against itself in other company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.attention import PAGE
from engine.kernels.layers import StepCells
from engine.kernels.linear import swiglu
from engine.model.architecture import DecoderConfig
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


class PlainKV:
    """A cache of several sequences whose pages lie in order; a step may hold rows of any of them.

    `rows` [(sequence, count)] is set before each step, `finish` ends it.
    """

    def __init__(self, sequences: int, config: DecoderConfig, tokens: int = 320) -> None:
        layers, heads, width = config.layers, config.kv_heads, tokens // PAGE
        pages = sequences * layers * heads * width
        self.table = np.arange(pages, dtype=np.int32).reshape(sequences, layers, heads, width)
        self.lengths = np.zeros((sequences, layers, heads), np.int32)
        self.k = torch.full((pages, PAGE, config.head_dim), torch.nan)
        self.v = self.k.clone()
        self.pos = torch.zeros(pages, PAGE, dtype=torch.int32)
        self.rows: list[tuple[int, int]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = [count for _, count in self.rows]
        parts = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
        return torch.cat(
            [self._one(seq, layer, *qkv) for (seq, _), qkv in zip(self.rows, parts, strict=True)]
        )

    def _one(self, seq: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages, held = torch.from_numpy(self.table[seq, layer]), int(self.lengths[seq, layer, 0])
        for pool, new in ((self.k, k), (self.v, v)):
            cells = pool[pages].flatten(1, 2)  # [H, tokens, D]
            cells[:, held : held + len(new)] = new.transpose(0, 1)
            pool[pages] = cells.view(len(cells), -1, PAGE, cells.shape[2])
        k, v = (pool[pages].flatten(1, 2).transpose(0, 1) for pool in (self.k, self.v))
        group = q.shape[1] // k.shape[1]
        # one query at a time: the bits of a query never depend on the chunk
        return torch.cat(
            [_attend_last(q[i], k[: held + i + 1], v[: held + i + 1], group) for i in range(len(q))]
        )

    def cells(self) -> StepCells:
        slots, counts = np.array(self.rows).T.copy()
        starts = self.lengths[slots, 0, 0].astype(np.int64)
        pools = (self.k, self.v, self.pos)
        return StepCells(*pools, self.table, self.lengths, slots, starts, counts, None, None)

    def finish(self) -> None:
        for seq, count in self.rows:
            self.lengths[seq] += count


def _attend_last(q: Tensor, k: Tensor, v: Tensor, group: int) -> Tensor:
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    weights = torch.softmax((keys * q.float()).sum(-1) / q.shape[-1] ** 0.5, 0)  # [N, Hq]
    return (weights[..., None] * values).sum(0, keepdim=True).to(q.dtype)


def run(decoder: Decoder, kv: PlainKV, steps: list[list[tuple[int, Tensor]]]) -> list[Tensor]:
    """Feed steps of (sequence, ids) rows; the logits of every sequence, in order."""
    fed = [0] * len(kv.table)
    out: list[list[Tensor]] = [[] for _ in kv.table]
    for step in steps:
        kv.rows = [(seq, len(ids)) for seq, ids in step]
        positions = [torch.arange(fed[seq], fed[seq] + len(ids)) for seq, ids in step]
        ctx = StepContext(torch.cat(positions), kv)
        logits = decoder.logits(decoder.forward(torch.cat([ids for _, ids in step]), ctx))
        kv.finish()
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
    return run(decoder, PlainKV(1, decoder.config), [[(0, ids)]])[0]


BACKENDS = {"composed": ("onednn", "reference"), "native": ("cpp",)}


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_oracle(name: str, backends: str) -> None:
    checkpoint = VARIANTS[name]
    ids = random_ids(270 if name == "rope-dynamic" else 40)  # past its original length
    truth = oracle.logits(checkpoint.config, checkpoint.tensors, ids)
    assert truth.std() > 0.1
    decoder = load(checkpoint, prefer=BACKENDS[backends])
    torch.testing.assert_close(alone(decoder, ids), truth, rtol=1e-4, atol=1e-4)


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
    kv = PlainKV(32, decoder.config, 32)
    last = [(i, ids[-2:]) for i, ids in enumerate(prompts)]
    together = run(decoder, kv, [[(i, ids[:-2]) for i, ids in enumerate(prompts)], last])
    for ids, rows in list(zip(prompts, together, strict=True))[:6]:
        assert_same_rows(rows, alone(decoder, ids), dtype)


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_logits_do_not_depend_on_the_chunks(chunk: int) -> None:
    decoder = load(VARIANTS["qwen2"])
    ids = random_ids(65)
    steps = [[(0, part)] for part in torch.split(ids, chunk)]
    assert_same_rows(run(decoder, PlainKV(1, decoder.config), steps)[0], alone(decoder, ids))


def test_swiglu_of_a_row_does_not_depend_on_the_rows() -> None:
    x = torch.randn(701, 2 * 136, generator=torch.Generator().manual_seed(0)) * 3
    gate, up = x.double().chunk(2, -1)
    whole = swiglu(x)
    torch.testing.assert_close(
        whole.double(), gate * torch.sigmoid(gate) * up, rtol=1e-6, atol=1e-6
    )
    for rows in (1, 2, 7, *range(481, 701, 4)):  # many odd ones: threads split them inside a row
        assert torch.equal(swiglu(x[:rows]), whole[:rows])
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert swiglu(extreme).tolist() == [[0.0, 200.0]]


def test_nbytes_counts_the_held_weights() -> None:
    held = sum(t.nbytes for t in VARIANTS["llama"].tensors.values())
    assert load(VARIANTS["llama"]).nbytes == held  # tied: the head is the table
    untied = VARIANTS["untied"].tensors
    held = sum(t.nbytes for t in untied.values()) - untied["model.embed_tokens.weight"].nbytes
    assert load(VARIANTS["untied"]).nbytes == held


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        load(VARIANTS["llama"], torch.float16)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"biased"}))
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """A prompt in one go, then tokens one by one: past the original length of a dynamic rope."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, DynamicCache

    checkpoint = VARIANTS[name]
    folder = write_folder(tmp_path, checkpoint.config, checkpoint.tensors)
    peer = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = random_ids(270)
    cache = DynamicCache()
    with torch.no_grad():
        parts = (ids[:250], *torch.split(ids[250:], 1))
        truth = torch.cat([peer(part[None], past_key_values=cache).logits[0] for part in parts])
    torch.testing.assert_close(alone(load(checkpoint), ids), truth, rtol=1e-4, atol=1e-4)
