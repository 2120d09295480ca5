"""The command `taut`: generate, chat, quantize, calibrate, info."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Taut: an inference engine for reasoning models.",
)

UsageError: type[Exception] = typer.BadParameter.__mro__[
    2
]  # ClickException; some typers bring their own click

DEFAULT_MODEL = "smollm2"

Model = Annotated[
    str, typer.Option(help="A packaged name, a Hugging Face folder, a GGUF file or a hub id.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; left out: the model's own default.")
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.")]
TopK = Annotated[int | None, typer.Option(help="Only the k best tokens.")]
MinP = Annotated[float | None, typer.Option(help="Only tokens at least this share of the best.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
ThinkingBudget = Annotated[
    int | None, typer.Option(help="Close the thinking after this many tokens.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Weights = Annotated[
    str,
    typer.Option(help="float (as stored), bf16, int8 or nvfp4; rtn8 to rtn2 only round (bits)."),
]
KVPolicy = Annotated[
    str | None, typer.Option(help="Bound the KV cache: 'snapkv', 'sinks_recent(sinks=4)'.")
]
KVAllocation = Annotated[
    str | None,
    typer.Option(help="Cells of each layer and head: 'reasonalloc', 'adakv(safe=0.2)'; else even."),
]
KVBudget = Annotated[int | None, typer.Option(help="Cells a head keeps after a compaction.")]
KVBudgetBytes = Annotated[
    int | None, typer.Option(help="Bytes of a sequence's cells instead: fewer bits, more cells.")
]
KVFormat = Annotated[str, typer.Option(help="auto, fp32, bf16, or packed: int8, int4, int2.")]
KVWindow = Annotated[int, typer.Option(help="Cells appended between compactions.")]
MaxLen = Annotated[int | None, typer.Option(help="Longest prompt and output together.")]
Defaults = Annotated[
    bool, typer.Option(help="Use the model's own sampling defaults (or neutral ones).")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine chooses.")]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPTS", help="Texts; - reads stdin.")],
    model: Model = DEFAULT_MODEL,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    n: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="<str>", help="End before this text; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end-of-sequence ids.")
    ] = False,
    thinking_budget: ThinkingBudget = None,
    dtype: Dtype = "auto",
    weights: Weights = "float",
    kv_policy: KVPolicy = None,
    kv_allocation: KVAllocation = None,
    kv_budget: KVBudget = None,
    kv_budget_bytes: KVBudgetBytes = None,
    kv_format: KVFormat = "auto",
    kv_window: KVWindow = 128,
    max_model_len: MaxLen = None,
    generation_defaults: Defaults = True,
    verbose: Verbose = False,
) -> None:
    """Continue prompts (or answer them, with --chat).

    The text goes to stdout as it is made; thinking goes apart: to stderr where stdout is a file or
    a pipe.
    """
    from engine.request import SamplingParams
    from engine.terminal import print_all, print_stream

    _log(verbose)
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        thinking_token_budget=thinking_budget,
    )
    texts = _texts(prompts)
    asked: list[Any] = [[{"role": "user", "content": t}] if chat else t for t in texts]
    with _engine(
        model,
        dtype,
        weights,
        kv_policy,
        kv_allocation,
        kv_budget,
        kv_budget_bytes,
        kv_format,
        kv_window,
        max_model_len,
        generation_defaults,
    ) as engine:
        if len(asked) == 1 and n == 1:
            outputs = [print_stream(engine.stream(asked[0], params))]
        else:
            outputs = engine.generate(asked, params)
            print_all(texts, outputs)
    _fail_with_errors(outputs)


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most.")] = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    thinking_budget: ThinkingBudget = None,
    dtype: Dtype = "auto",
    weights: Weights = "float",
    kv_policy: KVPolicy = None,
    kv_allocation: KVAllocation = None,
    kv_budget: KVBudget = None,
    kv_budget_bytes: KVBudgetBytes = None,
    kv_format: KVFormat = "auto",
    kv_window: KVWindow = 128,
    max_model_len: MaxLen = None,
    generation_defaults: Defaults = True,
    verbose: Verbose = False,
) -> None:
    """Talk with a model; its thinking is shown apart."""
    from engine.request import SamplingParams
    from engine.terminal import chat_loop

    _log(verbose)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        thinking_token_budget=thinking_budget,
    )
    with _engine(
        model,
        dtype,
        weights,
        kv_policy,
        kv_allocation,
        kv_budget,
        kv_budget_bytes,
        kv_format,
        kv_window,
        max_model_len,
        generation_defaults,
    ) as engine:
        chat_loop(engine, params, system)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="As --model of the other commands.")],
    out: Annotated[Path, typer.Option(help="The folder to write; new or empty.")],
    format: Annotated[str, typer.Option(help="nvfp4, as compressed-tensors has it.")] = "nvfp4",
    scale: Annotated[
        str, typer.Option(help="Block scales: max (fast), or mse (searched: nearer values).")
    ] = "max",
    verbose: Verbose = False,
) -> None:
    """Write a folder with 4-bit weights.

    Other engines load it too: it is in the layout of compressed-tensors.
    """
    from engine.terminal import print_quantized

    _log(verbose)
    if format != "nvfp4":
        raise ValueError(f"--format must be nvfp4, not {format!r}")
    print_quantized(model, out, scale)


calibrate = typer.Typer(rich_markup_mode=None, help="Measure a model once, for methods to use.")
app.add_typer(calibrate, name="calibrate")


@calibrate.command("kv-wave")
def kv_wave(
    model: Annotated[str, typer.Argument(help="As --model of the other commands.")],
    dtype: Dtype = "auto",
    weights: Weights = "float",
    coverage: Annotated[float, typer.Option(help="Part of the attention that counts.")] = 0.93,
    prompts: Annotated[
        Path | None, typer.Option(help="A JSON list of texts; else 8 of the engine's own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Else beside the model.")] = None,
) -> None:
    """Write how many cells each layer's attention needs: what reasonalloc shares cells out by."""
    from engine.calibrate.kv_wave import calibrate
    from engine.config import ModelSpec
    from engine.terminal import print_wave

    spec = ModelSpec(model, dtype=dtype, weights=weights)  # type: ignore[arg-type]
    print_wave(calibrate(spec, prompts, coverage, out))


@app.command()
def info(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    weights: Weights = "float",
    kv_policy: KVPolicy = None,
    kv_allocation: KVAllocation = None,
    kv_budget: KVBudget = None,
    kv_budget_bytes: KVBudgetBytes = None,
    kv_format: KVFormat = "auto",
    kv_window: KVWindow = 128,
    max_model_len: MaxLen = None,
    generation_defaults: Defaults = True,
) -> None:
    """Show machine, backends and why, model and cache."""
    from engine.terminal import print_info

    print_info(
        _config(
            model,
            dtype,
            weights,
            kv_policy,
            kv_allocation,
            kv_budget,
            kv_budget_bytes,
            kv_format,
            kv_window,
            max_model_len,
            generation_defaults,
        )
    )


def _texts(prompts: list[str]) -> list[str]:
    """With stdin for "-", less the newline that ends it."""
    if prompts.count("-") > 1:
        raise ValueError("- stands for stdin, which can be read only once")
    return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]


def _fail_with_errors(outputs: list[Any]) -> None:
    errors = [c.stop_reason for o in outputs for c in o.choices if c.finish_reason == "error"]
    for error in errors:
        sys.stderr.write(f"taut: {error}\n")
    if errors:
        raise typer.Exit(1)


def _config(
    model: str,
    dtype: str,
    weights: str,
    kv_policy: str | None,
    kv_allocation: str | None,
    kv_budget: int | None,
    kv_budget_bytes: int | None,
    kv_format: str,
    kv_window: int,
    max_model_len: int | None,
    generation_defaults: bool,
) -> Any:
    from engine.cache.policy import KVSpec
    from engine.cache.registry import allocation_from_text, policy_from_text
    from engine.config import EngineConfig, ModelSpec

    if kv_policy is not None and kv_budget is None and kv_budget_bytes is None:
        raise ValueError(
            "--kv-policy needs --kv-budget, the cells that a head keeps, or --kv-budget-bytes"
        )
    kv = KVSpec(
        policy=None if kv_policy is None else policy_from_text(kv_policy),
        allocation=allocation_from_text(kv_allocation or "uniform"),
        budget_tokens=kv_budget,
        budget_bytes=kv_budget_bytes,
        format=kv_format,  # type: ignore[arg-type]
        window=kv_window,
    )
    spec = ModelSpec(
        model,
        dtype=dtype,  # type: ignore[arg-type]
        kv=kv,
        generation_defaults=generation_defaults,
        weights=weights,
    )
    return EngineConfig(models={"main": spec}, max_model_len=max_model_len)


def _engine(*options: Any) -> Any:
    from engine.engine import Engine

    return Engine(_config(*options))


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s"
    )


def main() -> None:
    """Errors of the user's are one line and exit code 2; others keep their traceback."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="taut", standalone_mode=False)
    except UsageError as error:
        _refuse(error.format_message())  # type: ignore[attr-defined]
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"taut: {' '.join(message.split())}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
