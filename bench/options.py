"""Command-line options that the measurements share. No torch here."""

from __future__ import annotations

import argparse


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--weights",
        default="float",
        help="bf16, int8, nvfp4; rtn8 to rtn2: rounded to so many bits",
    )
    parser.add_argument(
        "--activations", default="float", help="int16 or int8: rounded, under int8 or nvfp4 weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="all CPUs of the process without it")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--kv-policy", help="such as 'snapkv(recent=16)'; all is kept without it")
    parser.add_argument("--kv-allocation", help="such as 'reasonalloc()'; even without it")
    parser.add_argument("--kv-budget", type=int, help="cells a head after a compaction")
    parser.add_argument("--kv-budget-bytes", type=int, help="bytes of a sequence's cells instead")
    parser.add_argument(
        "--kv-format", default="auto", help="fp32, bf16; packed: int8, int4, int2; or calibrated"
    )
    parser.add_argument("--kv-tail", type=int, default=64, help="last cells left plain by those")
    parser.add_argument("--kv-tail-format", default="auto", help="of plain cells: fp32, bf16")
    parser.add_argument("--kv-window", type=int, default=128, help="cells between compactions")
    parser.add_argument("--kv-bytes", type=int, help="memory of the KV cache; what fits without it")


def add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", metavar="FILE")
