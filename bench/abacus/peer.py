"""The engine beside transformers on the same weights: the same tokens, the same probabilities.

    python -m bench.abacus.peer --models abacus --limit 50

*Greedy*: both write whole answers, each on its own. *Teacher-forced*: transformers reads the
engine's answers, greedy and sampled at 0.6, in one dense pass each; shown is how many greedy tokens
aren't its likeliest, and the largest distance of the two log-probabilities of a token.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from bench.abacus.asking import (
    Answer,
    ask,
    engine_of,
    limit_for,
    markdown,
    models_option,
    parser_of,
    run,
)
from bench.abacus.task import ABACUS, Abacus
from engine import abacus

TASK = Abacus()


def load(model: str) -> Any:
    """In float32, as the engine computes on CPUs."""
    from transformers import AutoModelForCausalLM

    where = abacus.folder(model) if model in abacus.NAMES else model
    peer: Any = AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, attn_implementation="eager"
    )
    return peer.eval()


@torch.inference_mode()
def continue_greedily(peer: Any, answer: Answer) -> list[int]:
    """As many tokens as the engine may write, to the end of sequence."""
    prompt = torch.tensor([answer.prompt])
    made = peer.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=limit_for(TASK.max_tokens),
    )
    return list(made[0, len(answer.prompt) :].tolist())


@torch.inference_mode()
def forced(peer: Any, answer: Answer) -> Tensor:
    """Log-probabilities at each position of the engine's answer, [N, V]."""
    tokens = [*answer.prompt, *answer.choice.token_ids]
    logits = peer(torch.tensor([tokens])).logits[0, len(answer.prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)


def measure_model(model: str, *, limit: int, seed: int, threads: int | None) -> dict[str, Any]:
    problems = TASK.make(ABACUS, limit, seed)
    most = limit_for(TASK.max_tokens)
    with engine_of(model, threads) as engine:
        greedy, sampled = (
            ask(engine, problems, max_tokens=most, temperature=temperature, logprobs=0)
            for temperature in (0.0, 0.6)
        )
    peer = load(model)
    same = sum(continue_greedily(peer, a) == list(a.choice.token_ids) for a in greedy)
    tokens = others = 0
    distance = 0.0
    for answers, likeliest in ((greedy, True), (sampled, False)):
        for answer in answers:
            theirs = forced(peer, answer)
            ids = torch.tensor(answer.choice.token_ids)
            assert answer.choice.logprobs is not None
            ours = torch.tensor([entry.logprob for entry in answer.choice.logprobs])
            apart = (theirs.gather(-1, ids[:, None])[:, 0] - ours).abs().max()
            distance = max(distance, float(apart))
            tokens += len(ids)
            others += int((theirs.argmax(-1) != ids).sum()) if likeliest else 0
    return {
        "answers": len(greedy),
        "same_answers": same,
        "forced_tokens": tokens,
        "greedy_tokens_not_likeliest": others,
        "largest_logprob_distance": distance,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    options = {"limit": args.limit, "seed": args.seed, "threads": args.threads}
    found = {model: measure_model(model, **options) for model in args.models}
    names = [name.replace("_", " ") for name in next(iter(found.values()))]
    rows = [[model, *map(_short, result.values())] for model, result in found.items()]
    print(markdown(["model", *names], rows))
    return found


def _short(value: float) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = parser_of(__doc__, 50)
    models_option(parser)
    run(parser, measure)


if __name__ == "__main__":
    main()
