"""A trace as one HTML file that reads from disk, with nothing outside it.

Its size is bounded by the trace's: a byte for each token of each head (two beyond 255 compactions),
a third more as base64, beside the text itself and 30 KB of page.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from engine.inspect_kv.trace import Trace


def check_paths(html_file: Path | None, json_file: Path | None) -> None:
    """ValueError: nothing to write, or no place for it."""
    if html_file is None and json_file is None:
        raise ValueError("give --out FILE.html, --json FILE, or both: where the picture goes")
    for name, path in (("--out", html_file), ("--json", json_file)):
        if path is not None and path.is_dir():
            raise ValueError(f"{name} {path} is a folder; name a file")
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{name} {path}: there is no folder {path.parent}")


def write(trace: Trace, html_file: Path | None, json_file: Path | None) -> None:
    """Write what is asked for, and say what it came to."""
    if html_file is not None:
        write_page(html_file, trace)
    if json_file is not None:
        json_file.write_text(json.dumps(trace.as_dict()) + "\n", encoding="utf-8")
    share = 100 * trace.held(len(trace.compactions)).sum() / trace.removed.size
    names = " and ".join(str(path) for path in (html_file, json_file) if path is not None)
    sys.stdout.write(
        f"{names}: {len(trace.token_ids)} tokens, {len(trace.compactions)} compactions,"
        f" {share:.0f} % of the cells held at the end\n"
    )


def write_page(path: Path, trace: Trace) -> None:
    """Write it; the same trace gives the same bytes. Text of models and prompts is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = size
    html = environment.get_template("page.html.j2").render(
        trace=trace,
        data=_data(trace),
        parts=_parts(trace),
        cells=int(trace.held(len(trace.compactions)).sum()),
        compactions=[
            (at, trace.before(i), int(trace.held(i).sum()), trace.cell_bytes[at])
            for i, at in enumerate(trace.compactions)
        ],
        style=_own("page.css"),
        script=_own("page.js"),
    )
    path.write_text(html, encoding="utf-8")


def _own(name: str) -> Markup:
    return Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))


def _data(trace: Trace) -> dict[str, Any]:
    """`Trace.as_dict()` with `removed_by` packed; what the page doesn't read is left out."""
    data = trace.as_dict()
    wide = len(trace.compactions) > 255
    packed = trace.removed.astype("<u2" if wide else "u1").tobytes()
    unread = ("token_ids", "side_bytes", "model", "policy", "allocation", "finish_reason")
    data = {name: value for name, value in data.items() if name not in unread}
    return data | {"removed_by": base64.b64encode(packed).decode(), "wide": wide}


def _parts(trace: Trace) -> list[tuple[str, list[str]]]:
    """The text in pieces: the prompt, then thought by thought; (title, its tokens)."""
    parts = [("Prompt", trace.texts[: trace.prompt_len])]
    for number, (start, end) in enumerate(trace.thoughts, start=1):
        parts.append((f"Thought {number}", trace.texts[start:end]))
    return parts


def size(nbytes: int) -> str:
    """In the unit that leaves one to four digits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
