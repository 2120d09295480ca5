"""Make the stored answers that the tests compare with, by an independent implementation.

    python -m bench.golden --gguf FILE --out tests/golden/NAME.json     make them
    python -m bench.golden --check tests/golden/NAME.json --model NAME  compare the engine's own

transformers reads the GGUF file with its own converter (tokenizer, weights, permutation) and
continues each prompt greedily in float32, end-of-sequence ignored. Stored: the prompt's ids, the
continuation, and of each position the best logit and its lead over the second, which tells a
rounding flip from an error. Making them needs the extras `bench` (transformers, accelerate).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from engine import Engine, SamplingParams

LENGTH = 64
NEAR_TIE = 2e-4
"""A lead of the best logit that float32 rounding may turn round."""

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders\n",
    '{"name": "Ada", "born": 1815, "languages": [',
    "Die Hauptstadt von Deutschland ist",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e",
    "\u041c\u043e\u0441\u043a\u0432\u0430 - \u044d\u0442\u043e",
    "\u0627\u0644\u0639\u0627\u0635\u0645\u0629 \u0647\u064a",
    "I love pizza \U0001f355\U0001f600 and",
    "caf\u00e9 na\u00efve \u00bd \u2014 \u201cquoted\u201d",
    "   leading spaces\tand tabs\n\n\n",
    "a",
    CHAT.format("What is 17 + 25? Think step by step."),
    CHAT.format("Write a haiku about rain."),
    CHAT.format("List three prime numbers above 100."),
    "<|im_start|>system\nYou answer in one word.<|im_end|>\n" + CHAT.format("Colour of grass?"),
    "\n".join(f"Line {i}: the {i}th square is {i * i}." for i in range(1, 61)) + "\nLine 61:",
)


@torch.inference_mode()
def continue_greedily(model: Any, ids: list[int]) -> dict[str, list[Any]]:
    tokens: list[int] = []
    best: list[float] = []
    lead: list[float] = []
    step = torch.tensor([ids])
    past = None
    for _ in range(LENGTH):
        out = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        values, order = out.logits[0, -1].float().topk(2)
        tokens.append(int(order[0]))
        best.append(round(float(values[0]), 4))
        lead.append(round(float(values[0] - values[1]), 5))
        step = order[None, :1]
    return {"tokens": tokens, "best": best, "lead": lead}


def make(gguf: Path, out: Path) -> None:
    import transformers

    where = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **where
    )
    model.eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        cases.append({"prompt": prompt, "ids": ids, **continue_greedily(model, ids)})
        print(f"{len(ids):4d} tokens: {tokenizer.decode(cases[-1]['tokens'])[:60]!r}", flush=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    record = {"file": gguf.name, "made_by": made_by, "cases": cases}
    out.write_text(json.dumps(record, ensure_ascii=True, separators=(",", ":")) + "\n")


def check(stored: Path, name: str) -> int:
    """Continue the stored prompts, all at once; how many differ past a near-tie."""
    cases = json.loads(stored.read_text())["cases"]
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    with Engine(name) as engine:
        outputs = engine.generate([case["ids"] for case in cases], params)
    wrong = 0
    for case, output in zip(cases, outputs, strict=True):
        pairs = zip(case["tokens"], output.token_ids, strict=True)
        split = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
        if split is not None:
            lead = case["lead"][split]
            wrong += lead > NEAR_TIE
            print(f"{case['prompt'][:40]!r} differs at token {split}, where the lead is {lead}")
    print(f"{len(cases)} prompts of {LENGTH} tokens, {wrong} differ where there's no near-tie")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--model")
    args = parser.parse_args()
    if args.check is not None:
        return int(check(args.check, args.model) > 0)
    make(args.gguf, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
