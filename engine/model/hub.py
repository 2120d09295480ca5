"""Models from the Hugging Face hub: only the files that are read, kept in the hub's own cache.

HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and HF_HOME work as everywhere, since huggingface_hub does the
work; its progress bar shows.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]


def is_id(name: str) -> bool:
    """Whether `name` has the form org/name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def fetch(name: str) -> Path:
    """The folder of the model's latest snapshot; of a cached one where the hub isn't reached."""
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as e:  # network libraries raise whatever they like
        raise ValueError(
            f"model {name!r}: there is no such folder here, and as a hub id it could not be "
            f"brought: {_reason(e)}"
        ) from e


def _reason(error: BaseException) -> str:
    """The hub's own words, with those of the first cause where they say more."""
    words = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    if cause := error.__cause__ or error.__context__:
        words.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
    return "; ".join(words)
