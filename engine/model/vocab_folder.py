"""What a Hugging Face folder says around its vocabulary file: special tokens and the template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    """None: the folder doesn't say. `added` are tokens beside those of the vocabulary file."""

    bos: str | None
    eos: str | None
    add_bos: bool | None
    legacy: bool  # a space goes in front of text after a special token too (sentencepiece)
    added: Mapping[int, AddedToken]
    chat_template: str | None


def read_folder_config(folder: Path) -> FolderConfig:
    """Of tokenizer_config.json and, where that is silent, the older files beside it."""
    config = read_json(folder / "tokenizer_config.json")
    older = read_json(folder / "special_tokens_map.json")
    try:
        return _read(folder, config, older)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: tokenizer_config.json or a file beside it holds a value of another kind "
            f"than expected: {error!r}"
        ) from error


def _read(folder: Path, config: Mapping[str, Any], older: Mapping[str, Any]) -> FolderConfig:
    added = {i: AddedToken(t) for t, i in read_json(folder / "added_tokens.json").items()}
    for i, spec in config.get("added_tokens_decoder", {}).items():
        added[int(i)] = AddedToken(**spec)
    add_bos = config.get("add_bos_token")
    return FolderConfig(
        bos=_content(config.get("bos_token") or older.get("bos_token")),
        eos=_content(config.get("eos_token") or older.get("eos_token")),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        legacy=config.get("legacy") is not False,
        added=dict(sorted(added.items())),
        chat_template=_chat_template(folder, config.get("chat_template")),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no such file. ValueError names a broken one."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(found).__name__}")
    return found


def _content(token: str | Mapping[str, Any] | None) -> str | None:
    content = token["content"] if isinstance(token, Mapping) else token
    if content is not None and not isinstance(content, str):
        raise TypeError(f"the special token {content!r}")
    return content


def _chat_template(folder: Path, found: str | list[dict[str, str]] | None) -> str | None:
    """A file of its own comes first; of several named templates, the default one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise TypeError(f"the chat_template {found!r}")
    return found
