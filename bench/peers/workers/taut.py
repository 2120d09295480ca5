"""Taut behind the wire."""

from __future__ import annotations

from typing import Any

from bench.peers.workers.wire import Generate, Job, serve, versions

ROOM_TOKENS = 16  # beyond prompt and output, so that no output ends at the context's end


def load(job: Job) -> tuple[Generate, dict[str, Any]]:
    from engine import Engine, SamplingParams
    from engine.options import ModelOptions

    held = {name: job[name] for name in ("weights", "activations", "kv_format") if name in job}
    options = ModelOptions(
        model=job["model"],
        threads=job["threads"],
        max_model_len=job["context_tokens"] + ROOM_TOKENS,
        **held,
    )
    engine = Engine(options.config(max_num_seqs=job["streams"]))

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params, progress=False)
        return [list(output.token_ids) for output in outputs]

    return generate, {"versions": versions("torch"), "flags": held}


if __name__ == "__main__":
    serve(load)
