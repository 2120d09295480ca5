"""What the command line shows: streams, the chat, the table of `taut info`."""

from __future__ import annotations

import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO, cast, get_args

import torch

from engine import build
from engine.cache.allocations.reasonalloc import read_wave
from engine.calibrate.kv_bits import Candidate
from engine.choices import backend_rows
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.host import available_bytes, usable_cpus
from engine.kernels.nvfp4 import ScaleSearch
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.quantize import WEIGHT_FORMATS
from engine.output import Delta, Output
from engine.request import MAIN, SamplingParams


class Paper:
    """Where answers are written: styled on a terminal; elsewhere answers alone, byte for byte.

    Thinking that has no place in a file or a pipe goes to stderr.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()

    def answer(self, text: str) -> None:
        self._write(sys.stdout, text)

    def thinking(self, text: str) -> None:
        self._write(sys.stdout if self._terminal else sys.stderr, text, dim=True)

    def note(self, text: str) -> None:
        """Something that isn't the model's."""
        self.thinking(text)

    def title(self, text: str) -> None:
        """Of the next text, on a terminal."""
        if self._terminal:
            self._write(sys.stdout, f"{text}\n", dim=True)

    def _write(self, file: TextIO, text: str, *, dim: bool = False) -> None:
        # rich would wrap, expand tabs and read markup: text passes through untouched instead
        if text:
            file.write(f"\x1b[2m{text}\x1b[0m" if dim and file.isatty() else text)
            file.flush()


def print_stream(deltas: Iterator[Delta]) -> Output:
    """Write an answer as it comes, its thinking apart; returns the whole."""
    paper = Paper()
    thinking, output = False, None
    try:
        for delta in deltas:
            if delta.thinking:
                thinking = True
                paper.thinking(delta.thinking)
            if delta.text:
                if thinking:
                    paper.note("\n--------\n")
                thinking = False
                paper.answer(delta.text)
            output = delta.output
    finally:
        paper.answer("\n")
    assert output is not None
    return output


def print_all(prompts: Seq[str], outputs: Seq[Output]) -> None:
    """Every prompt's choices, in order."""
    paper = Paper()
    for prompt, output in zip(prompts, outputs, strict=True):
        for choice in output.choices:
            of = f" [{choice.index + 1}/{len(output.choices)}]" if len(output.choices) > 1 else ""
            paper.title(f"--- {_first_line(prompt)}{of}")
            if choice.thinking:
                paper.thinking(f"{choice.thinking}\n")
            paper.answer(f"{choice.text}\n")


def _first_line(prompt: str) -> str:
    return (prompt.strip().splitlines() or [""])[0][:60]


def chat_loop(engine: Engine, params: SamplingParams, system: str | None) -> None:
    """Read, answer, remember; Ctrl-C stops an answer, Ctrl-D or /exit ends, /new starts afresh."""
    paper = Paper()
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    paper.note("/new starts afresh, /exit or Ctrl-D ends, Ctrl-C stops an answer\n")
    while (line := _read(paper)) is not None:
        if line == "/new":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            messages = _answer(engine, params, messages, paper)


def _answer(
    engine: Engine, params: SamplingParams, messages: list[dict[str, str]], paper: Paper
) -> list[dict[str, str]]:
    """The conversation with the answer, or without the question if it couldn't be answered."""
    try:
        with closing(engine.stream(messages, params)) as deltas:  # type: ignore[type-var]
            choice = print_stream(deltas).choices[0]
    except ValueError as error:
        paper.note(f"[{error}]\n")
        return messages[:-1]
    except KeyboardInterrupt:
        paper.note("[stopped]\n")
        return messages[:-1]
    if choice.finish_reason == "error":
        paper.note(f"[error: {choice.stop_reason}]\n")
        return messages[:-1]
    if choice.finish_reason == "length":
        paper.note("[cut at its length limit]\n")
    return [*messages, {"role": "assistant", "content": choice.text}]


def _read(paper: Paper) -> str | None:
    paper.note("> ")
    try:
        line = input().strip()
    except (EOFError, KeyboardInterrupt):
        paper.note("\n")
        return None
    return None if line == "/exit" else line


def print_info(config: EngineConfig) -> None:
    """The machine, each op's backends with their reasons, the model, its cache."""
    spec = config.models[MAIN]
    checkpoint = open_checkpoint(spec.model)
    build.check_weights(checkpoint, spec.weights)
    build.check_activations(checkpoint, spec)
    groups = [
        list(_host_rows()),
        list(backend_rows(spec, checkpoint)),
        list(_model_rows(spec, checkpoint)),
        list(_cache_rows(config, spec, checkpoint)),
    ]
    margin = 2 + max(len(name) for rows in groups for name, _ in rows)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    blocks = ("\n".join(_row(name, value, margin, width) for name, value in g) for g in groups)
    sys.stdout.write("\n\n".join(blocks) + "\n")


def _row(name: str, value: str, margin: int, width: int) -> str:
    lines = textwrap.wrap(value, max(width - margin, 20), break_on_hyphens=False)
    return name.ljust(margin) + f"\n{' ' * margin}".join(lines)


Rows = Iterator[tuple[str, str]]


def print_quantized(model: str, out: Path, scale: str) -> None:
    """Write it, then say what it came to."""
    if scale not in get_args(ScaleSearch):
        raise ValueError(
            f"--scale must be one of {', '.join(get_args(ScaleSearch))}, not {scale!r}"
        )
    from engine.model.nvfp4_write import write_nvfp4

    written = write_nvfp4(open_checkpoint(model), model, out, cast(ScaleSearch, scale))
    rest = (written.nbytes - written.packed_nbytes) / 1e6
    sys.stdout.write(
        f"{out}: {written.packed_nbytes / 1e6:.1f} MB of weights in NVFP4, and {rest:.1f} MB of "
        "embedding, LM head, norms and biases as they were\n"
    )


def _host_rows() -> Rows:
    yield (
        "taut",
        f"{_version()}, torch {torch.__version__}, Python {platform.python_version()}",
    )
    yield "cpu", f"{_cpu_name()}, {usable_cpus()} usable, {torch.backends.cpu.get_cpu_capability()}"
    yield "memory", f"{available_bytes() / 2**30:.1f} GiB available"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "gpu", ", ".join(names) or "none seen by torch"


def _version() -> str:
    try:
        return version("taut")
    except PackageNotFoundError:  # run from its sources
        return "(not installed)"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def print_wave(file: Path) -> None:
    """A profile of layers, as bars."""
    demand = read_wave(file)
    for layer, cells in enumerate(demand):
        sys.stdout.write(f"layer {layer:3} {cells:8.1f} {'#' * round(40 * cells / max(demand))}\n")
    sys.stdout.write(f"{file}\n")


def print_bits(candidate: Candidate) -> None:
    """One number of bits that was tried."""
    c = candidate
    sys.stdout.write(
        f"{c.format:5} {c.cells:6} cells a head: {c.right} of {c.problems} right, {c.capped} cut"
        f" at the limit, {c.mean_tokens:.0f} tokens on average\n"
    )
    sys.stdout.flush()


def _model_rows(spec: ModelSpec, checkpoint: Checkpoint) -> Rows:
    c, g = checkpoint.config, checkpoint.generation
    tokenizer = build.load_tokenizer(checkpoint)
    markers = build.markers_for(spec.reasoning, tokenizer)
    dtype = build.dtype_of(spec.dtype, torch.device(build.device_of(spec.device)))
    yield "model", checkpoint.source
    yield (
        "shape",
        f"{c.family}, {c.layers} layers, hidden {c.hidden_size}, {c.q_heads} query and "
        f"{c.kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size}",
    )
    stored = "" if checkpoint.stored_format is None else f" ({checkpoint.stored_format})"
    held = f"{spec.weights}: {WEIGHT_FORMATS[spec.weights].words}{stored}"
    rounded = "" if spec.activations == "float" else f", rounded to {spec.activations}"
    yield "weights", f"{held}; activations in {str(dtype).removeprefix('torch.')}{rounded}"
    yield "context", f"{c.max_positions} tokens, rope {c.rope.kind} (theta {c.rope.theta:g})"
    ends = ", ".join(f"{i} {tokenizer.token_bytes(i).decode()!r}" for i in g.eos_ids)
    yield "end of sequence", ends or "none named"
    given = [f"{n}={getattr(g, n)}" for n in build.SAMPLING_FIELDS if getattr(g, n) is not None]
    unused = "" if spec.generation_defaults else " (switched off)"
    yield "sampling defaults", (", ".join(given) or "none named: temperature 1") + unused
    thinks = tokenizer.decode(markers.start, skip_special=False) if markers.start else "no markers"
    closing = tokenizer.decode(markers.closing, skip_special=False)
    yield "thinking", f"{thinks}; closed early by {closing!r}"


def _cache_rows(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> Rows:
    c = checkpoint.config
    dtype = build.dtype_of(spec.dtype, torch.device(build.device_of(spec.device)))
    kv = spec.kv.measured(checkpoint.path).sized(build.shape_of(c), dtype)
    cache = build.RoleCache(build.shape_of(c), kv, dtype, build.slots_of(config, MAIN))
    max_len = config.max_model_len or c.max_positions
    plan = build.plan_kv(config, {MAIN: cache}, max_len)
    policy = kv.policy
    bound = f"{policy}, budget {kv.budget_tokens}, window {kv.window}"
    yield "kv policy", "full cache" if policy is None else bound
    if policy is not None:
        layers = kv.allocation.layer_budgets(cache.shape, kv.budget)
        even = f"{layers[0]} cells a head in every layer"
        each = f"cells a head by layer: {' '.join(map(str, layers))}"
        yield "kv allocation", f"{spec.kv.allocation}, {even if len(set(layers)) == 1 else each}"
    sizes = (
        f"{plan.cell_bytes / 2**30:.2f} GiB, and {plan.side_bytes / 2**20:.0f} MiB of side state"
    )
    yield "kv cache", f"{plan.tokens} tokens, {sizes}"
    yield "kv bytes a token", f"{cache.token_bytes:.0f}"
