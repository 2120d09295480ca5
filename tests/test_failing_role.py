"""Two roles in one step: what ends in the first role's batch isn't run in the second's."""

from pathlib import Path
from typing import Any

from engine import Engine, SamplingParams
from engine.request import Batch, Sequence, StepOutput
from engine.scheduler.controller import Branch, Controller, Edit, Watch
from tests.engines import assert_idle, greedy, run_all
from tests.scripted import tiny_folder, tiny_spec


class Both(Controller):
    """Prompts of 3 tokens branch on both roles, others run on the helper."""

    roles = ("main", "helper")
    children = {"main": 1, "helper": 1}  # noqa: RUF012

    def watch(self) -> Watch:
        return BothWatch()


class BothWatch(Watch):
    def begin(self, seq: Sequence) -> Any:
        if seq.prompt_len == 3:
            return [Branch(role=role, max_tokens=8) for role in ("main", "helper")]
        return Edit(role="helper")


def test_a_failing_role_ends_its_own_requests_alone(tmp_path: Path) -> None:
    helper = tiny_folder(tmp_path / "helper", seed=1)
    config = tiny_spec(
        tiny_folder(tmp_path / "main"), helper=helper, controllers=(Both(),), max_num_seqs=4
    )
    engine = Engine(config)
    main = engine._executors["main"]
    run, left = main.run, [3]

    def fails(batch: Batch) -> StepOutput:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        return run(batch)

    main.run = fails  # type: ignore[method-assign]
    params: SamplingParams = greedy(6)
    engine.add([1, 2, 3], params, id="family")
    engine.add([1, 2], params, id="beside")
    outputs = run_all(engine)
    assert outputs["family"].choices[0].stop_reason == "the model failed: RuntimeError: no memory"
    assert outputs["beside"].finish_reason == "length"
    assert_idle(engine)
