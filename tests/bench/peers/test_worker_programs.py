"""Worker programs run in the peers' environments, which have nothing of ours."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import bench
from bench.peers.workers import wire

PROGRAMS = sorted(Path(wire.__file__).parent.glob("*.py"))
ON_THE_WAY = [Path(bench.__file__), Path(wire.__file__).parent.parent / "__init__.py"]


@pytest.mark.parametrize("path", [*PROGRAMS, *ON_THE_WAY], ids=lambda path: str(path.name))
def test_imports_at_the_top_are_the_standard_librarys(path: Path) -> None:
    """An engine is imported inside `load`, so that a failure is answered and not just printed."""
    for node in ast.parse(path.read_text()).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            known = name.split(".")[0] in sys.stdlib_module_names
            assert known or name == wire.__name__, f"{path.name} imports {name}"
