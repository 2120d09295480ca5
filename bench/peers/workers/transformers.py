"""Hugging Face Transformers' `generate` behind the wire: one batch of prompts of one length."""

from __future__ import annotations

from typing import Any

from bench.peers.workers.wire import Generate, Job, serve, versions


def load(job: Job) -> tuple[Generate, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    flags = {"dtype": job["dtype"], "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            do_sample=False,
        )
        made: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return made

    return generate, {"versions": versions("transformers", "torch"), "flags": flags}


if __name__ == "__main__":
    serve(load)
