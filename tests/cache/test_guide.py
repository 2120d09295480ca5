"""The example of docs/adding-a-policy.md works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.cache.policy import KVSpec, ScorePolicy
from engine.cache.view import LayerView

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "adding-a-policy.md"


def example(monkeypatch: pytest.MonkeyPatch) -> type[ScorePolicy]:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code == (ROOT / "engine/cache/policies/keydiff.py").read_text()
    guide: Any = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", guide)  # dataclasses look their module up
    exec(compile(code, str(GUIDE), "exec", dont_inherit=True), vars(guide))
    found: type[ScorePolicy] = guide.KeyDiff
    return found


def test_the_example_keeps_the_odd_key_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = example(monkeypatch)
    policy = make(sinks=0, recent=0)
    KVSpec(policy=policy, budget_tokens=4)  # it refuses nothing of that
    k = torch.ones(1, 1, 8, 4)
    k[0, 0, 5] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    index = torch.arange(8).view(1, 1, 8)
    view = LayerView(
        torch.tensor([0]), 0, 8, k, k, index, torch.ones(1, 1, 8, dtype=torch.bool), None, None
    )
    kept = policy.compact(view, policy.utility(view, 1), torch.tensor([[1]])).keep
    assert kept.tolist() == [[[5]]]
