"""The command line of `taut serve`, made from the settings' own descriptions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NoReturn

from pydantic_core import PydanticUndefined

from engine.server.settings import Settings, flag_of, settings_from

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
    for name in Settings.model_fields:
        heading = flag_of(name).group
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add(groups[heading], name)
    return parser


def _add(group: argparse._ArgumentGroup, name: str) -> None:
    field = Settings.model_fields[name]
    words = (field.description or "") + _default(field.default)
    if name == "model":
        group.add_argument(name, nargs="?", metavar="MODEL", help=words)
        return
    flag = f"--{name.replace('_', '-')}"
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=words)
        return
    many = isinstance(field.default, tuple)
    metavar = flag_of(name).metavar or name.upper()
    action = "append" if many else "store"
    group.add_argument(flag, metavar=metavar, action=action, help=words.replace("%", "%%"))


def _default(value: object) -> str:
    """Those that the description doesn't tell."""
    if value in (None, (), PydanticUndefined) or isinstance(value, bool):
        return ""
    return f" ({value:g})" if isinstance(value, float) else f" ({value})"
