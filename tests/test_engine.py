"""The whole engine against the oracle, token for token, and its calls against each other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import Engine, Output, SamplingParams
from engine.prompt import Prompt
from tests.conftest import MakeEngine
from tests.engines import Model, Tape, assert_greedy, greedy, prompts, run_all
from tests.tiny import FAMILIES, ROPES

MakeModel = Callable[..., Model]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"rope-{kind}": ("llama", {"rope": rope}) for kind, rope in ROPES.items()},
    "head-dim-apart": ("llama", {"head_dim": 32, "q_heads": 6, "kv_heads": 3}),
    "untied-biased": ("llama", {"tied_embeddings": False, "qkv_bias": True, "out_bias": True}),
    "one-kv-head": ("mistral", {"kv_heads": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_the_oracles(
    variant: str, make_model: MakeModel, make_engine: MakeEngine
) -> None:
    """Every family and rope: requests that come one by one while others run, prompts in chunks."""
    family, flags = VARIANTS[variant]
    model = make_model(family, **flags)
    engine = make_engine(model, max_batched_tokens=48, max_num_seqs=24)
    asked = prompts(22)
    outputs: dict[str, Output] = {}
    for i, prompt in enumerate(asked):
        engine.add(prompt, greedy(12 + i), id=str(i))
        if i % 3 == 2:
            outputs |= {d.id: d.output for d in engine.step() if d.output is not None}
            engine.check()
    outputs |= run_all(engine)
    for i, prompt in enumerate(asked):
        output = outputs[str(i)]
        assert output.prompt_token_ids == tuple(prompt)
        assert len(output.token_ids) == 12 + i
        assert output.finish_reason == "length"
        assert_greedy(model, output)


def test_tiny_pool_preempts_and_changes_nothing(tiny_model: Model, make_engine: MakeEngine) -> None:
    """The pool holds about two of the eight sequences."""
    engine = make_engine(kv_tokens=176, max_batched_tokens=64, max_num_seqs=8)
    for i, prompt in enumerate(prompts(8, seed=1, longest=60)):
        engine.add(prompt, greedy(50), id=str(i), priority=i % 3)
    outputs = run_all(engine)
    assert engine.stats().scheduler.preemptions > 2
    for output in outputs.values():
        assert len(output.token_ids) == 50
        assert_greedy(tiny_model, output)


def test_priority_then_arrival(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    for id, priority in (("a", 1), ("b", 5), ("c", 0), ("d", 1)):
        engine.add([1, 2, 3], greedy(4), id=id, priority=priority)
    ended = [d.id for _ in range(16) for d in engine.step() if d.output is not None]
    assert ended == ["c", "a", "d", "b"]


def test_a_long_prompt_doesnt_starve_decodes(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batched_tokens=16, max_num_seqs=4)
    engine.add([1, 2, 3], greedy(20), id="short")
    engine.step()
    engine.add(prompts(8)[7] * 3, greedy(1), id="long")  # 270 tokens: 19 steps of its own
    for _ in range(10):
        assert [len(d.token_ids) for d in engine.step() if d.id == "short"] == [1]
    run_all(engine)


def test_outputs_keep_the_prompts_order(tiny_model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=4)
    asked = prompts(12, seed=2)
    lengths = [30 - 2 * i for i in range(12)]  # those asked for last end first
    outputs = engine.generate(asked, [greedy(n) for n in lengths])
    assert [list(o.prompt_token_ids) for o in outputs] == asked
    assert [len(o.token_ids) for o in outputs] == lengths
    for output in outputs:
        assert_greedy(tiny_model, output)


def test_text_ids_and_chat_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    encode = engine.tokenizer.encode
    chat = [{"role": "user", "content": "one and one"}]
    text = "<|im_start|>user\none and one<|im_end|>\n<|im_start|>assistant\n"
    asked: list[Prompt] = ["one and one", encode("one and one"), text]
    outputs = engine.generate(asked, greedy(8))
    assert outputs[0].token_ids == outputs[1].token_ids
    (of_chat,) = engine.generate(chat, greedy(8))
    assert of_chat.prompt_token_ids == outputs[2].prompt_token_ids
    assert of_chat.token_ids == outputs[2].token_ids


# n > 1


def test_choices_differ_and_come_again(tiny_model: Model, make_engine: MakeEngine) -> None:
    """vllm-project/vllm#11898"""
    prompt = prompts(6)[5]

    def run(n: int, **config: Any) -> list[tuple[int, ...]]:
        engine = make_engine(**config)
        params = SamplingParams(n=n, seed=7, temperature=1.2, max_tokens=20, ignore_eos=True)
        (output,) = engine.generate([prompt], params)
        assert [c.index for c in output.choices] == list(range(n))
        return [c.token_ids for c in output.choices]

    four = run(4)
    assert len(set(four)) == 4
    assert run(4) == four
    assert run(1) == four[:1]
    assert run(4, max_num_seqs=2, max_batched_tokens=8) == four  # two at a time
    assert run(4, kv_tokens=96) == four  # too few pages for all


def test_choices_share_the_prompts_pages(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=8)
    engine.add([5] * 161, greedy(8, n=8))
    for _ in range(3):
        engine.step()
    heads = 2 * 2
    assert engine.stats().kv["main"].used_pages == heads * (10 + 8)  # 10 whole pages, 8 last ones
    run_all(engine)
    # 160 tokens once, then the prompt's last one and 7 more of each
    assert engine.stats().scheduler.ran_tokens == {"main": 160 + 8 * 8}


# logprobs


def test_logprobs_are_the_oracles(tiny_model: Model, make_engine: MakeEngine) -> None:
    """The sampled tokens', the best ones', and the prompt's: in chunks, and where a prefix hit
    would have skipped them."""
    engine = make_engine(max_batched_tokens=16, max_num_seqs=4)
    prompt = prompts(8)[7]
    engine.generate([prompt], greedy(1))  # its pages are kept
    (output,) = engine.generate([prompt], greedy(20, logprobs=5, prompt_logprobs=3))
    assert output.cached_tokens == 0
    logprobs, of_prompt = output.choices[0].logprobs, output.prompt_logprobs
    assert logprobs is not None
    assert of_prompt is not None
    tokens = [*prompt, *output.token_ids]
    known = [*of_prompt, *logprobs]
    assert [p.token_id for p in known] == tokens[1:]
    truth = tiny_model.logits(tokens).log_softmax(-1)
    for at, said in enumerate(known):
        count = 3 if at < len(of_prompt) else 5
        assert said.logprob == pytest.approx(float(truth[at, tokens[at + 1]]), abs=1e-4)
        assert len(said.top) == count
        values = [value for _, value in said.top]
        assert values == pytest.approx(truth[at].topk(count).values.tolist(), abs=1e-4)
        own = [float(truth[at, token]) for token, _ in said.top]
        assert values == pytest.approx(own, abs=1e-4)


def test_prompt_logprobs_of_a_preempted_request(make_engine: MakeEngine) -> None:
    """Recomputing a prompt neither loses nor repeats its logprobs."""
    params = [greedy(60), greedy(60, logprobs=2), greedy(60, prompt_logprobs=1)]
    asked = prompts(5, seed=4)[2:]
    alone = [make_engine().generate([p], q)[0] for p, q in zip(asked, params, strict=True)]
    engine = make_engine(kv_tokens=144, max_batched_tokens=24, max_num_seqs=4)
    together = engine.generate(asked, params)
    assert engine.stats().scheduler.preemptions > 0
    for one, other in zip(alone, together, strict=True):
        assert one.choices == other.choices
        assert one.prompt_logprobs == other.prompt_logprobs


# ends


def test_stop_string_across_tokens(make_engine: MakeEngine) -> None:
    """Nothing of it, nor of what might become it, is ever shown."""
    engine = make_engine()
    letters = [engine.tokenizer.token_id(letter) for letter in "abcdefghij"]
    assert None not in letters
    free = greedy(60, allowed_token_ids=letters)
    (whole,) = engine.generate(["think"], free)
    assert len(whole.text) == 60
    stop = whole.text[20:25]
    at = whole.text.index(stop)
    decoy = stop[:3] + "!"  # begins like it, never comes
    for include in (False, True):
        params = greedy(
            60,
            allowed_token_ids=letters,
            stop=[decoy, stop],
            include_stop_str_in_output=include,
        )
        deltas = list(engine.stream("think", params))
        output = deltas[-1].output
        assert output is not None
        assert output.text == whole.text[: at + 5 * include]
        assert output.token_ids == whole.token_ids[: at + 5]
        assert (output.finish_reason, output.choices[0].stop_reason) == ("stop", stop)
        assert "".join(d.text for d in deltas) == output.text
        shown = ""
        for delta in deltas:
            shown += delta.text
            assert output.text.startswith(shown)


def test_stop_ids_and_eos(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (free,) = engine.generate([[1, 2, 3]], greedy(30))
    stop = free.token_ids[9]
    first = free.token_ids.index(stop)
    (ended,) = engine.generate([[1, 2, 3]], greedy(30, stop_token_ids=[stop]))
    assert ended.token_ids == free.token_ids[: first + 1]
    assert (ended.finish_reason, ended.choices[0].stop_reason) == ("stop", stop)
    eos = engine.tokenizer.token_id("<|im_end|>")
    assert eos is not None
    only = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=[eos, 65])
    ends = [engine.generate([[1, 2, 3]], p)[0] for p in (only, replace(only, min_tokens=4))]
    assert [len(o.token_ids) for o in ends][1] >= 4
    assert all(o.token_ids[-1] == eos or len(o.token_ids) == 9 for o in ends)


def test_no_max_tokens_runs_to_the_context(tiny_model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=80)
    (output,) = engine.generate([[1, 2, 3, 4, 5]], greedy(None))
    assert len(output.token_ids) == 75
    assert output.finish_reason == "length"
    assert_greedy(tiny_model, output)


def test_the_models_last_position(tiny_model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine()
    (output,) = engine.generate([[7] * 505], greedy(None))
    assert len(output.token_ids) == 7
    assert_greedy(tiny_model, output)


# bfloat16


def test_bfloat16_within_its_rounding(make_model: MakeModel, make_engine: MakeEngine) -> None:
    """Tokens are the float32 oracle's up to ties that bfloat16's 8 bits can't tell apart."""
    model = make_model("qwen3")
    rounded = {name: tensor.bfloat16().float() for name, tensor in model.tensors.items()}
    truth = Model(model.folder, model.config, rounded)
    engine = make_engine(model, dtype="bfloat16", max_batched_tokens=64)
    tape = Tape(engine)
    for i, prompt in enumerate(prompts(12, seed=6)):
        engine.add(prompt, greedy(16), id=str(i))
    flips = 0
    for output in run_all(engine).values():
        tokens = [*output.prompt_token_ids, *output.token_ids]
        dense = truth.logits(tokens)[len(output.prompt_token_ids) - 1 : -1]
        got = tape.stacked(output.id)
        error = (got - dense).abs().max()
        print(f"request {output.id}: logits differ by {error:.3f} of {dense.abs().max():.1f}")
        assert error <= BF16 * dense.abs().max()
        flips += assert_greedy(truth, output, tie=2 * float(error))
    assert flips <= 12 * 16 // 10


BF16 = 2.0**-4
"""Of the largest logit: two layers' worth of roundings to 8 bits."""


def test_dtype_changes_the_cells(make_engine: MakeEngine) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        engine: Engine = make_engine(dtype=dtype)
        sizes[dtype] = engine.stats().kv["main"].page_bytes
        engine.generate([[1, 2]], greedy(2))
    assert sizes == {"float32": 16 * (2 * 16 * 4 + 4), "bfloat16": 16 * (2 * 16 * 2 + 4)}
    assert torch.get_num_threads() == 1


def test_numbers_that_are_none_stay_with_their_request(
    make_model: MakeModel, make_engine: MakeEngine
) -> None:
    model = make_model()
    engine = make_engine(model, kv_tokens=96)
    decoder = engine._executors["main"].decoder
    embed = decoder._embed
    decoder._embed = lambda ids: embed(ids) * torch.nan
    (bad,) = engine.generate([prompts(8)[7]], greedy())
    assert bad.finish_reason == "error"
    decoder._embed = embed
    (good,) = engine.generate([[7, 8, 9]], greedy())  # in pages that held the other's
    assert len(good.token_ids) == 24
    assert_greedy(model, good)
