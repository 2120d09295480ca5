"""Whole answers against transformers: a random model of every family, prompts of every kind.

The packaged model's answers are stored instead, see test_golden.py.
"""

import pytest
import torch

from bench.golden import PROMPTS
from tests.conftest import MakeEngine
from tests.engines import TIE, greedy, write_model
from tests.tiny import FAMILIES

LONGEST = 400  # tokens; with an answer of 64 within the tiny models' 512


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers(
    family: str, make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chat, code, other scripts, emoji, one token, several chunks: 64 tokens each, all at once.

    One dense pass of theirs tells whether every token is the best after those before it, and so
    whether they are what transformers alone would have said.
    """
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path_factory.mktemp(family), family)
    peer = AutoModelForCausalLM.from_pretrained(
        model.folder, dtype=torch.float32, attn_implementation="eager"
    )
    engine = make_engine(model, max_batched_tokens=64, max_num_seqs=20, kv_tokens=1 << 14)
    asked = [engine.tokenizer.encode(prompt)[-LONGEST:] for prompt in PROMPTS]
    sizes = [len(ids) for ids in asked]
    assert len(asked) == 20
    assert (min(sizes), max(sizes)) == (1, LONGEST)
    for ids, output in zip(asked, engine.generate(asked, greedy(64)), strict=True):
        tokens = torch.tensor(output.token_ids)
        with torch.no_grad():
            logits = peer(torch.tensor([[*ids, *output.token_ids]])).logits[0, len(ids) - 1 : -1]
        gaps = logits.max(-1).values - logits.gather(-1, tokens[:, None])[:, 0]
        assert len(tokens) == 64
        assert gaps.max() <= TIE, f"{len(ids)} prompt tokens: {gaps.max():.2e} below the best"
