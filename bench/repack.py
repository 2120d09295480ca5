"""What packing a packed cell again costs: its error against packing once, and time against a step.

`python -m bench.repack` needs no model: the squared error left, in parts of the cells' own, after
one packing and after each further one. Half of a page's cells go, and the rest of two pages are
packed as one, which is the worst that `engine/cache/repack.py` does to a cell. `--model smollm2`
also packs one page of every head, as one sequence does every 64 tokens, and times it beside the
median step of one stream with such cells.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bench.common import environment, fixed_length, make_engine, random_prompts, timed, write_json
from bench.options import add_engine_options, add_output_option
from bench.steps import steps_of, summary
from engine.cache.format import PACKED
from engine.cache.packed_store import PackedStore
from engine.kernels.packed import PACK, pack_keys, pack_values, unpack_keys, unpack_values

TIMES = 4
"""Packings of a cell."""

PAGES = 128
"""At first; each packing leaves half of them."""

ROUNDS = 15


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_engine_options(parser)
    add_output_option(parser)
    parser.set_defaults(model=None)
    parser.add_argument("--output-len", type=int, default=160)
    return parser.parse_args()


def cells(dim: int, spread: float) -> Tensor:
    """[pages, 64, D]: normal; sizes of channels differ by e^spread, as those of keys do."""
    rng = torch.Generator().manual_seed(dim)
    sizes = torch.randn(dim, generator=rng).mul_(spread).exp_()
    return torch.randn(PAGES, PACK, dim, generator=rng) * sizes


def errors(x: Tensor, again: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Relative squared error after each packing; `again` packs and unpacks [n, 64, D]."""
    left, rng = x, torch.Generator().manual_seed(1)
    found = []
    for _ in range(TIMES):
        left = again(left, torch.full((len(left),), PACK))
        found.append(float((left - x).square().sum() / x.square().sum()))
        stays = torch.rand(x.shape[:2], generator=rng).argsort(1)[:, : PACK // 2].sort(1).values
        index = stays[..., None].expand(-1, -1, x.shape[2])
        x, left = (t.gather(1, index).view(-1, PACK, x.shape[2]) for t in (x, left))
    return found


def error_table(dim: int) -> dict[str, list[float]]:
    """By format and kind of cell."""
    table = {}
    for name, bits in PACKED.items():

        def keys(x: Tensor, count: Tensor, bits: int = bits) -> Tensor:
            return unpack_keys(*pack_keys(x, count, bits), bits)

        def values(x: Tensor, count: Tensor, bits: int = bits) -> Tensor:
            return unpack_values(*pack_values(x, count, bits), bits)

        table[f"{name} keys"] = errors(cells(dim, 1.0), keys)
        table[f"{name} values"] = errors(cells(dim, 0.0), values)
    return table


def times(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of packing a page of every head, and of a step; the first in 64 of the other."""
    engine = make_engine(args)
    shape, bits = engine.models["main"].shape, PACKED[args.kv_format]
    prompts = random_prompts(1, PACK, engine.tokenizer.vocab_size, args.seed)
    steps = list(steps_of(engine, prompts, fixed_length(args.output_len)))
    engine.close()
    step = float(summary(steps)["step_seconds_median"])  # type: ignore[arg-type]
    pages = shape.layers * shape.kv_heads
    store = PackedStore(pages, shape.head_dim, bits, torch.device("cpu"), bias=False)
    k, v = (torch.randn(pages, PACK, shape.head_dim) for _ in range(2))
    ids, count = torch.arange(pages), torch.full((pages,), PACK)
    pack = statistics.median(timed(lambda: store.write(ids, k, v, count)) for _ in range(ROUNDS))
    return {
        "pages": pages,
        "pack_ms": 1e3 * pack,
        "step_ms": 1e3 * step,
        "share": pack / step / PACK,
    }


def main() -> None:
    args = arguments()
    if args.model is not None and args.kv_format not in PACKED:
        raise SystemExit(f"--kv-format must be one of {', '.join(PACKED)} to time packing")
    table = error_table(64)
    print(f"squared error left after 1 to {TIMES} packings, relative")
    for name, row in table.items():
        print(f"{name:12}", *(f"{value:9.2e}" for value in row))
    timing = None
    if args.model is not None:
        timing = times(args)
        print(
            f"packing a page of each of {timing['pages']} heads: {timing['pack_ms']:.2f} ms every "
            f"{PACK} tokens, {100 * timing['share']:.2f} % of steps of {timing['step_ms']:.2f} ms"
        )
    write_json(
        args.output_json,
        {"errors": table, "times": timing, "arguments": vars(args), "environment": environment()},
    )


if __name__ == "__main__":
    main()
