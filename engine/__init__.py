"""Taut: a standalone inference engine for reasoning models.

The public names load on first use, so that importing a light part (`engine.request`) stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cache.policy import KVSpec
    from engine.config import EngineConfig, ModelSpec, ReasoningSpec
    from engine.engine import Engine
    from engine.output import Choice, Delta, Output
    from engine.prompt import Chat
    from engine.request import SamplingParams
    from engine.service import AsyncEngine, EngineDead, QueueFull

_HOMES = {
    "AsyncEngine": "engine.service",
    "Chat": "engine.prompt",
    "Choice": "engine.output",
    "Delta": "engine.output",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineDead": "engine.service",
    "KVSpec": "engine.cache.policy",
    "ModelSpec": "engine.config",
    "Output": "engine.output",
    "QueueFull": "engine.service",
    "ReasoningSpec": "engine.config",
    "SamplingParams": "engine.request",
}

__all__ = [
    "AsyncEngine",
    "Chat",
    "Choice",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "KVSpec",
    "ModelSpec",
    "Output",
    "QueueFull",
    "ReasoningSpec",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
