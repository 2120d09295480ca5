"""OpenVINO GenAI's continuous batching behind the wire."""

from __future__ import annotations

from typing import Any

from bench.peers.workers.wire import Generate, Job, serve, versions

BLOCK_TOKENS = 32  # of its paged cache on a CPU
SPARE_BLOCKS = 2  # a stream


def load(job: Job) -> tuple[Generate, dict[str, Any]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    blocks = -(-job["context_tokens"] // BLOCK_TOKENS) + SPARE_BLOCKS
    flags = {
        "num_kv_blocks": job["streams"] * blocks,
        "max_num_seqs": job["streams"],
        "max_num_batched_tokens": max(2304, job["streams"] * job["prompt_tokens"]),
        "dynamic_split_fuse": True,
        "enable_prefix_caching": False,
    }
    for name, value in flags.items():
        setattr(scheduler, name, value)
    properties = {"INFERENCE_NUM_THREADS": job["threads"], **job.get("properties", {})}
    pipeline = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        asked = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(asked, [config] * len(asked))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate, {
        "versions": versions("openvino-genai", "openvino"),
        "flags": {**flags, **properties},
    }


if __name__ == "__main__":
    serve(load)
