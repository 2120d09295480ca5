"""Taut behind the wire."""

from __future__ import annotations

from typing import Any

from bench.peers.workers.wire import Generate, Job, serve, versions

ROOM_TOKENS = 16  # beyond prompt and output, so that no output ends at the context's end


def load(job: Job) -> tuple[Generate, dict[str, Any]]:
    from engine import Engine, EngineConfig, ModelSpec, SamplingParams

    held = {name: job[name] for name in ("dtype", "weights") if name in job}
    engine = Engine(
        EngineConfig(
            models={"main": ModelSpec(job["model"], **held)},
            threads=job["threads"],
            max_num_seqs=job["streams"],
            max_model_len=job["context_tokens"] + ROOM_TOKENS,
            backends=tuple(job.get("backends", ())),
        )
    )

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params, progress=False)
        return [list(output.token_ids) for output in outputs]

    return generate, {"versions": versions("torch"), "flags": held}


if __name__ == "__main__":
    serve(load)
