"""What a checkpoint says of generating: the ids that end a sequence and its sampling defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """None: the checkpoint doesn't say. `temperature` is 0.0 where it says not to sample."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
