"""The command line of `taut serve`, made from the settings' own descriptions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NoReturn

from engine.options import Option, options_of
from engine.server.settings import Settings, settings_from

_USAGE = "taut serve [MODEL] [options]"


class _Parser(argparse.ArgumentParser):
    """Errors are ValueErrors, as everywhere in `taut`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"serve: {message} (see taut serve --help)")


def parse(args: Seq[str]) -> Settings:
    """ValueError names the flag; --help writes it and leaves."""
    given = dict(vars(_parser().parse_args(args)))
    file = given.pop("config", None)
    return settings_from(given, file)


def _parser() -> _Parser:
    parser = _Parser(
        prog="taut serve",
        usage=_USAGE,
        description="An OpenAI-compatible server. Defaults are in parentheses.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=96),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="flags from a YAML or TOML file; those of the command line win",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options_of(Settings):
        heading = option.words.group
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add(groups[heading], option)
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    words = (option.words.help + _default(option.default)).replace("%", "%%")
    if option.name == "model":
        group.add_argument("model", nargs="?", metavar="MODEL", help=words)
        return
    flag = f"--{option.name.replace('_', '-')}"
    if option.kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=words)
        return
    many = isinstance(option.default, tuple)
    metavar = option.words.metavar or option.name.upper()
    group.add_argument(flag, metavar=metavar, action="append" if many else "store", help=words)


def _default(value: object) -> str:
    """Those that the description doesn't tell."""
    if value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return " (on)" if value else " (off)"
    return f" ({value:g})" if isinstance(value, float) else f" ({value})"
