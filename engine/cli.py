"""The command `taut`: generate, chat, demo, serve, quantize, calibrate, info, inspect-kv."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from engine.options import ModelOptions, SamplingOptions, options_of

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Taut: an inference engine for reasoning models.",
)

UsageError: type[Exception] = typer.BadParameter.__mro__[
    2
]  # ClickException; some typers bring their own click

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine chooses.")]

Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat", help="Ask through the chat template; left out: if there is one."
    ),
]

Command = TypeVar("Command", bound=Callable[..., None])


def with_options(command: Command) -> Command:
    """For typer: each parameter that is a dataclass of options becomes a flag for each of them."""
    signature = inspect.signature(command, eval_str=True)
    parameters, kinds = list[inspect.Parameter](), dict[str, type]()
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter)
            continue
        kinds[parameter.name] = kind
        for name, type_, default, words in options_of(kind):
            said = f"{words.help[:1].upper()}{words.help[1:]}."
            flag = typer.Option(help=said, metavar=words.metavar or None)
            parameters.append(
                parameter.replace(name=name, default=default, annotation=Annotated[type_, flag])
            )

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in kinds.items():
            given[name] = kind(
                **{option.name: given.pop(option.name) for option in options_of(kind)}
            )
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run  # type: ignore[return-value]


@app.command()
@with_options
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPTS", help="Texts; - reads stdin.")],
    options: ModelOptions,
    sampling: SamplingOptions,
    chat: Chat = None,
    n: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="<str>", help="End before this text; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end-of-sequence ids.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Answer prompts (or continue them, with --no-chat).

    The text goes to stdout as it is made; thinking goes apart: to stderr where stdout is a file or
    a pipe.
    """
    from engine.terminal import print_all, print_stream

    _log(verbose)
    params = sampling.params(n=n, stop=tuple(stop or ()), ignore_eos=ignore_eos)
    texts = _texts(prompts)
    with _engine(options) as engine:
        if chat is None:
            chat = engine.tokenizer.chat_template is not None
        asked: list[Any] = [[{"role": "user", "content": t}] if chat else t for t in texts]
        if len(asked) == 1 and n == 1:
            outputs = [print_stream(engine.stream(asked[0], params))]
        else:
            outputs = engine.generate(asked, params)
            print_all(texts, outputs)
    _fail_with_errors(outputs)


@app.command()
@with_options
def chat(
    options: ModelOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    verbose: Verbose = False,
) -> None:
    """Talk with a model; its thinking is shown apart."""
    from engine.terminal import chat_loop

    _log(verbose)
    params = sampling.params()
    with _engine(options) as engine:
        chat_loop(engine, params, system)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(ctx: typer.Context) -> None:
    """Serve a model to OpenAI's clients: taut serve MODEL."""
    from engine.server.serve import main as run

    _log(False)
    run(ctx.args)


@app.command()
@with_options
def demo(
    options: ModelOptions,
    question: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Instead of the packaged ones; repeatable."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most.")] = 1024,
) -> None:
    """Watch the packaged model think: no download.

    The options show what cuts cost: --weights rtn3, or --kv-policy sinks_recent --kv-budget 32
    --kv-window 16.
    """
    from engine import abacus
    from engine.demo import check, show
    from engine.request import SamplingParams

    questions = question or abacus.questions()
    check(questions)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with _engine(options) as engine:
        show(engine, questions, params)


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
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    weights: Annotated[str, typer.Option(help="float (as stored), bf16, int8, nvfp4.")] = "float",
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


@calibrate.command("kv-bits")
def kv_bits(
    model: Annotated[str, typer.Argument(help="As --model of the other commands.")],
    budget_bytes: Annotated[int, typer.Option(help="As --kv-budget-bytes of the others.")],
    problems: Annotated[
        Path, typer.Option(help="JSON lines with question, answer, perhaps instruction.")
    ],
    kv_policy: Annotated[str, typer.Option(help="What bounds the cache.")] = "snapkv()",
    kv_window: Annotated[int, typer.Option(help="Cells appended between compactions.")] = 128,
    kv_tail: Annotated[int, typer.Option(help="Last cells that stay plain.")] = 64,
    kv_tail_format: Annotated[str, typer.Option(help="Of those: auto, fp32 or bf16.")] = "bf16",
    limit: Annotated[int | None, typer.Option(help="Problems from the beginning.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    weights: Annotated[str, typer.Option(help="float (as stored), bf16, int8, nvfp4.")] = "float",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Try 16, 8, 4 and 2 bits at a budget in bytes, and write which is most often right.

    --kv-format calibrated takes it from there.
    """
    from engine.calibrate.kv_bits import calibrate
    from engine.config import ModelSpec
    from engine.request import SamplingParams
    from engine.terminal import print_bits

    options = ModelOptions(
        kv_policy=kv_policy,
        kv_budget_bytes=budget_bytes,
        kv_window=kv_window,
        kv_tail=kv_tail,
        kv_tail_format=kv_tail_format,
    )
    spec = ModelSpec(model, dtype=dtype, weights=weights, kv=options.kv())  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    file, chosen = calibrate(spec, problems, params, limit=limit, threads=threads, show=print_bits)
    sys.stdout.write(f"{chosen.format}, written to {file}\n")


@app.command()
@with_options
def info(options: ModelOptions) -> None:
    """Show machine, backends and why, model and cache."""
    from engine.terminal import print_info

    print_info(options.config())


@app.command("inspect-kv")
@with_options
def inspect_kv(
    prompt: Annotated[str, typer.Argument(help="A text; - reads stdin.")],
    options: ModelOptions,
    sampling: SamplingOptions,
    out: Annotated[Path | None, typer.Option(help="The HTML file to write.")] = None,
    json: Annotated[Path | None, typer.Option(help="The same as JSON.")] = None,
    chat: Chat = None,
) -> None:
    """Write a page of what each layer and head kept of a run."""
    from engine.inspect_kv.page import check_paths, write
    from engine.inspect_kv.trace import record

    check_paths(out, json)
    (text,) = _texts([prompt])
    with _engine(options) as engine:
        if chat is None:
            chat = engine.tokenizer.chat_template is not None
        asked = [{"role": "user", "content": text}] if chat else text
        trace = record(engine, asked, sampling.params())
    _fail_with_errors([trace.output])
    write(trace, out, json)


def _texts(prompts: list[str]) -> list[str]:
    """With stdin for "-", less the newline that ends it."""
    if prompts.count("-") > 1:
        raise ValueError("- stands for stdin, which can be read only once")
    texts = [sys.stdin.read().removesuffix("\n") if p == "-" else p for p in prompts]
    if "" in texts:
        raise ValueError("the prompt is empty")
    return texts


def _fail_with_errors(outputs: list[Any]) -> None:
    errors = [c.stop_reason for o in outputs for c in o.choices if c.finish_reason == "error"]
    for error in errors:
        sys.stderr.write(f"taut: {error}\n")
    if errors:
        raise typer.Exit(1)


def _engine(options: ModelOptions) -> Any:
    from engine.engine import Engine

    return Engine(options.config())


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
