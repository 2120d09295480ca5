"""Prompts in all their forms, and requests that are prepared before they are started."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine import Chat, Engine
from engine.config import EngineConfig
from engine.prompt import ContextLengthExceeded, IdInUse
from engine.service import QueueFull
from tests.scripted import tiny_folder, tiny_spec
from tests.services import GREEDY, PROMPT, empty, serving

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": " The answer "}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_spec(tiny_folder(tmp_path_factory.mktemp("model") / "tiny"), max_num_seqs=2)


@pytest.fixture
def engine(config: EngineConfig) -> Any:
    with Engine(config) as engine:
        yield engine


def text(engine: Engine, chat: Chat) -> str:
    return engine.tokenizer.decode(engine.tokens(chat), skip_special=False)


def test_a_chat_is_its_messages(engine: Engine) -> None:
    assert engine.tokens(Chat(messages=[USER])) == engine.tokens([USER])
    (one,) = engine.generate(Chat(messages=[USER]), GREEDY)
    both: list[Any] = [[USER], Chat(messages=[USER])]
    two = engine.generate(both, GREEDY)
    assert {output.token_ids for output in (one, *two)} == {one.token_ids}


def test_without_a_generation_prompt(engine: Engine) -> None:
    chat = Chat(messages=[USER], add_generation_prompt=False)
    assert text(engine, chat) == "<|im_start|>user\nHi<|im_end|>\n"


def test_the_last_message_is_continued(engine: Engine) -> None:
    chat = Chat(messages=[USER, BEGUN], continue_final_message=True)
    assert text(engine, chat).endswith("<|im_start|>assistant\n The answer")


@pytest.mark.parametrize(
    "messages",
    [[USER], [], [USER, {"role": "assistant", "content": ""}], [{"role": "assistant"}]],
)
def test_nothing_to_continue(engine: Engine, messages: Any) -> None:
    with pytest.raises(ValueError, match="continue_final_message"):
        engine.tokens(Chat(messages=messages, continue_final_message=True))


def test_a_template_that_hides_the_last_message(engine: Engine) -> None:
    engine.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="doesn't show"):
        engine.tokens(Chat(messages=[USER, BEGUN], continue_final_message=True))


def test_variables_and_tools_reach_the_template(engine: Engine) -> None:
    engine.tokenizer.chat_template = "{{ depth }} {{ tools[0].name }} {{ messages | length }}"
    chat = Chat(messages=[USER], tools=[{"name": "f"}], variables={"depth": 3, "messages": 9})
    assert text(engine, chat) == "3 f 1"


def test_what_is_too_long_says_so_by_its_type(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        engine.prepare([5] * 600)


def test_requests_are_started_together_or_not_at_all(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config, max_queued=1) as engine:  # room for 3
            made = [await engine.prepare(PROMPT, GREEDY, id=str(i)) for i in range(4)]
            with pytest.raises(QueueFull):
                engine.start(*made)
            again = await engine.prepare(PROMPT, GREEDY, id="0")
            with pytest.raises(IdInUse, match="'0'"):
                engine.start(made[0], again)
            assert not engine._live
            engine.check_room(3)
            twins = await engine.prepare(PROMPT, replace(GREEDY, n=4), id="n")
            with pytest.raises(QueueFull):  # every choice counts
                engine.start(twins)
            streams = engine.start(*made[:3])
            with pytest.raises(QueueFull):
                engine.check_room()
            outputs = [await stream.output() for stream in streams]
            assert len({output.token_ids for output in outputs}) == 1

    asyncio.run(main())


def test_when_a_request_left_the_queue(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            streams = [await engine.submit(PROMPT, GREEDY) for _ in range(4)]
            outputs = [await stream.output() for stream in streams]
            times = [output.started for output in outputs]
            assert None not in times
            assert times[3] > times[0]  # type: ignore[operator]  # two run at once
            waiting = [await engine.submit(PROMPT, GREEDY) for _ in range(8)]
            for stream in waiting:
                stream.cancel()
            await empty(engine)

    asyncio.run(main())


def test_edits_are_counted_by_controller(engine: Engine) -> None:
    think = engine.tokenizer.token_id("<think>")
    assert think is not None
    engine.generate([*PROMPT, think], replace(GREEDY, thinking_token_budget=3))
    edits = engine.stats().scheduler.edits
    assert edits["ThinkingBudget"] == 1
    assert edits["StopRules"] == 1
