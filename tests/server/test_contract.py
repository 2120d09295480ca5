"""Every test that docs/server-contract.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs" / "server-contract.md"


def test_the_list_of_tests_is_true() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert len(named) > 90
    there = {
        (path.name, node.name)
        for path in HERE.glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert named <= there, named - there
