"""The shape of the code, read from its sources: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).parent.parent / "engine"

# A module imports only from its own package and from rows below its own.
ROWS = (
    ("cli", "demo", "inspect_kv", "terminal"),
    ("server",),
    ("service",),
    ("engine", "build", "calibrate", "assembler", "progress", "prompt", "choices"),
    ("config", "options", "output"),
    ("executor",),
    ("cache", "scheduler", "model", "sampling"),
    ("kernels", "request", "metrics", "host", "noise", "abacus"),
)
ROW = {name: i for i, row in enumerate(ROWS) for name in row}


def part_of(path: Path) -> str:
    return path.relative_to(ENGINE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "engine":
                names = [f"engine.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("engine.")}
    return found


FILES = sorted(p for p in ENGINE.rglob("*.py") if p != ENGINE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ENGINE)))
def test_imports_go_down(path: Path) -> None:
    part = part_of(path)
    assert part in ROW, f"{part} has no row in the import order"
    flat = {"cli", *ROWS[0], *ROWS[3], *ROWS[4]}
    wrong = {
        other
        for other in imports_of(path) - {part}
        if ROW[other] < ROW[part] or (ROW[other] == ROW[part] and other not in flat)
    }
    assert not wrong, f"{part} may not import {sorted(wrong)}"


def test_only_the_engine_sees_its_config() -> None:
    for path in FILES:
        if ROW[part_of(path)] > ROW["config"]:
            assert "EngineConfig" not in path.read_text(), path
