"""The engines that can race, and what `--peers` and `--taut` may say."""

from __future__ import annotations

from collections.abc import Mapping

from bench.peers import llamacpp, openvino, taut, transformers, vllm
from bench.peers.peer import Configuration, Peer

_ALL = (taut, llamacpp, openvino, vllm, transformers)
ENGINES: Mapping[str, Peer] = {module.PEER.name: module.PEER for module in _ALL}


def configurations(
    text: str, *, only: str | None = None, engines: Mapping[str, Peer] | None = None
) -> list[Configuration]:
    """Of "llamacpp,openvino:int4": an engine's defaults, or one of its configurations by name.

    Of `engines`, or all that race offline. With `only`, the items are names of that engine's
    configurations. ValueError: unknown, twice.
    """
    engines = ENGINES if engines is None else engines
    found: list[Configuration] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, which = (only, ":", item) if only else item.partition(":")
        peer = engines.get(name)
        if peer is None or (only is None and name == taut.NAME):
            known = ", ".join(each for each in engines if each != taut.NAME)
            raise ValueError(f"{name!r} is no peer; known are {known}")
        found += peer.chosen(which or None)
    labels = [each.label for each in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{twice[0]} is named twice")
    return found
