"""A checkpoint becomes a folder that the engine and transformers read alike."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from bench.abacus import card, package
from bench.abacus.export import write_folder
from bench.abacus.network import Network, Shape
from bench.abacus.problems import sample
from bench.abacus.train import VOCABULARY, Recipe, Trainer
from bench.abacus.vocabulary import build, example
from engine import Engine, SamplingParams, abacus
from engine.model.tokenizer import tokenizer_from_folder

SHAPE = Shape(VOCABULARY, 2, 64, 128, 4, 2, 32)


@pytest.fixture(scope="module")
def network() -> Network:
    """Random, of values that bfloat16 has."""
    torch.manual_seed(0)
    network = Network(SHAPE)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter).mul(0.1).add(around).bfloat16())
    return network


@pytest.fixture(scope="module")
def folder(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("abacus")
    write_folder(path, network)
    return path


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """A whole example."""
    return example(build(), sample(Random(3), "loop", 60, 90)).tokens


@torch.no_grad()
def own_logits(network: Network, tokens: list[int]) -> Tensor:
    every = torch.ones(1, len(tokens), dtype=torch.bool)
    logits: Tensor = network(torch.tensor([tokens]), every)  # [T, V]
    return logits


def test_the_engine_computes_the_same(network: Network, folder: Path, tokens: list[int]) -> None:
    """The engine's log-probabilities of a whole example, and its greedy tokens after it."""
    wanted = own_logits(network, tokens).log_softmax(-1)[:-1]  # [T - 1, V]
    of_tokens = wanted.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    with Engine(str(folder)) as engine:
        (output,) = engine.generate([tokens], params)
    assert output.prompt_logprobs is not None
    found = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
    torch.testing.assert_close(found, of_tokens, rtol=1e-4, atol=1e-4)
    whole = [*tokens, *output.token_ids]
    best = own_logits(network, whole)[len(tokens) - 1 : -1]
    chosen = best.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert (best.max(-1).values - chosen).max() < 1e-4


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_same(network: Network, folder: Path, tokens: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    assert type(peer).__name__ == "Qwen3ForCausalLM"
    with torch.no_grad():
        theirs = peer(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(theirs, own_logits(network, tokens), rtol=1e-4, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "a=1; loop 2: a:a+3; a?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ours = tokenizer_from_folder(folder)
    assert text == ours.apply_chat_template(asked)
    assert tokenizer.encode(text) == ours.encode(text, add_special=False)


def test_a_prompt_is_what_training_showed(folder: Path) -> None:
    problem = sample(Random(3), "ledger", 60, 90)
    tokenizer = tokenizer_from_folder(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
    shown = example(build(), problem)
    assert tokenizer.encode(text, add_special=False) == shown.tokens[: shown.learned.index(True)]


def test_a_package_has_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abacus, "folder", lambda name: tmp_path / "package" / name)
    source = tmp_path / "build" / "abacus"
    source.mkdir(parents=True)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        package.package("abacus", tmp_path / "build", "a CPU")
    trainer = Trainer(Recipe(SHAPE, pools=30, seed=5), torch.device("cpu"))
    trainer.pools, trainer.tokens, trainer.seconds = 25, 2_600_000, 5400.0
    trainer.save(source / "checkpoint.pt")
    row = '{"pool": %d, "longest": 99, "loss": 0.12345, "exact": 0.5, "tokens": 1e6, "seconds": 36}'
    (source / "log.jsonl").write_text("".join(row % pool + "\n" for pool in range(1, 26)))
    folder = package.package("abacus", tmp_path / "build", "a CPU")
    text = (folder / "README.md").read_text()
    for words in (
        "seed 5, 25 of 30 pools",
        "3 M learned tokens in 1.5 hours on a CPU",
        "5 pools of its",
    ):
        assert words in text
    assert text.count("| 99 | 0.1235 | 50.0% | 1.0 | 0.01 |") == 9
    assert "| 25 | 99 |" in text
    card.fill("abacus", "| a | b |")
    card.fill("abacus", "| c | d |")
    text = (folder / "README.md").read_text()
    assert "| a | b |" not in text
    assert f"{card.BEGIN}\n| c | d |\n{card.END}\n" in text
    with Engine(str(folder)) as engine:
        assert engine.generate("a=1", SamplingParams(max_tokens=2))[0].finish_reason == "length"
