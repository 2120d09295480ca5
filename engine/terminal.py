"""What the command line shows: streams, the chat, the table of `taut info`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine import build
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.host import available_bytes, usable_cpus
from engine.kernels.attention import ATTENTION, AttentionSpec
from engine.kernels.dispatch import Op
from engine.kernels.linear import LINEAR, LinearSpec
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.output import Delta, Output
from engine.request import MAIN, SamplingParams


def print_stream(deltas: Iterator[Delta], console: Console | None = None) -> str:
    """Write an answer as it comes, its thinking dim and apart; returns the answer."""
    console = console or Console(highlight=False, soft_wrap=True, emoji=False)
    answer = []
    thinking = False
    for delta in deltas:
        if delta.thinking:
            thinking = True
            console.print(delta.thinking, end="", style="dim", markup=False)
        if delta.text:
            if thinking:
                console.print("\n" + "-" * 8 + "\n", end="", style="dim")
                thinking = False
            answer.append(delta.text)
            console.print(delta.text, end="", markup=False)
        if delta.finish_reason == "error":
            console.print(f"\n[error: {delta.stop_reason}]", style="red", markup=False)
    console.print()
    return "".join(answer)


def print_all(prompts: Seq[str], outputs: Seq[Output]) -> None:
    """Every prompt's choices, in order."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        console.rule(prompt.strip().split("\n")[0][:60] or "prompt", align="left")
        for choice in output.choices:
            if choice.thinking:
                console.print(choice.thinking, style="dim", markup=False)
            console.print(choice.text, markup=False)


def chat_loop(engine: Engine, params: SamplingParams, system: str | None) -> None:
    """Read, answer, remember; Ctrl-C stops an answer, Ctrl-D or /exit ends, /new starts afresh."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    console.print("/new starts afresh, /exit or Ctrl-D ends, Ctrl-C stops an answer", style="dim")
    while (line := _read(console)) is not None:
        if line == "/new":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            messages = _answer(engine, params, messages, console)


def _answer(
    engine: Engine, params: SamplingParams, messages: list[dict[str, str]], console: Console
) -> list[dict[str, str]]:
    """The conversation with the answer, or without the question if it couldn't be taken."""
    deltas = engine.stream(messages, params)
    try:
        text = print_stream(deltas, console)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return messages[:-1]
    except KeyboardInterrupt:
        deltas.close()  # type: ignore[attr-defined]
        console.print("\n[stopped]", style="dim", markup=False)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": text}]


def _read(console: Console) -> str | None:
    try:
        line = console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line == "/exit" else line


def print_info(config: EngineConfig) -> None:
    """The machine, each op's backends with their reasons, the model, its cache."""
    spec = config.models[MAIN]
    checkpoint = open_checkpoint(spec.model)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for rows in (_host_rows(), _backend_rows(spec, checkpoint), _model_rows(spec, checkpoint)):
        for name, value in rows:
            table.add_row(name, value)
        table.add_row("", "")
    for name, value in _cache_rows(config, spec, checkpoint):
        table.add_row(name, value)
    Console(highlight=False).print(table)


Rows = Iterator[tuple[str, str]]


def _host_rows() -> Rows:
    yield (
        "taut",
        f"{version('taut')}, torch {torch.__version__}, Python {platform.python_version()}",
    )
    yield "cpu", f"{_cpu_name()}, {usable_cpus()} usable, {torch.backends.cpu.get_cpu_capability()}"
    yield "memory", f"{available_bytes() / 2**30:.1f} GiB available"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "gpu", ", ".join(names) or "none seen by torch"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _backend_rows(spec: ModelSpec, checkpoint: Checkpoint) -> Rows:
    device = build.device_of(spec.device)
    dtype = build.dtype_of(spec.dtype, torch.device(device))
    c = checkpoint.config
    attention = AttentionSpec(c.head_dim, c.q_heads // c.kv_heads, device, dtype, dtype)
    yield "attention", _choice(ATTENTION, attention)
    yield "linear", _choice(LINEAR, LinearSpec(device, dtype))


def _choice(op: Op[Any], spec: object) -> str:
    chosen = False
    words = []
    for backend, reason in op.reasons(spec):
        if reason is not None:
            words.append(f"{backend} refused ({reason})")
        else:
            words.append(f"{backend} {'available' if chosen else 'chosen'}")
            chosen = True
    return ", ".join(words)


def _model_rows(spec: ModelSpec, checkpoint: Checkpoint) -> Rows:
    c, g = checkpoint.config, checkpoint.generation
    tokenizer = build.load_tokenizer(checkpoint)
    markers = build.markers_for(spec.reasoning, tokenizer)
    yield "model", checkpoint.source
    yield (
        "shape",
        f"{c.family}, {c.layers} layers, hidden {c.hidden_size}, {c.q_heads} query and "
        f"{c.kv_heads} kv heads of {c.head_dim}, vocabulary {c.vocab_size}",
    )
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
    cache = build.RoleCache(build.shape_of(c), spec.kv, dtype, build.slots_of(config, MAIN))
    max_len = config.max_model_len or c.max_positions
    plan = build.plan_kv(config, {MAIN: cache}, max_len)
    policy = spec.kv.policy
    bound = f"{policy}, budget {spec.kv.budget_tokens}"
    yield "kv policy", "full cache" if policy is None else bound
    sizes = (
        f"{plan.cell_bytes / 2**30:.2f} GiB, and {plan.side_bytes / 2**20:.0f} MiB of side state"
    )
    yield "kv cache", f"{plan.tokens} tokens, {sizes}"
    yield "kv bytes a token", f"{cache.token_bytes:.0f}"
