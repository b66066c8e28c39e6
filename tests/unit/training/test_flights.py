"""Turns of conversations in flight outlive their process, and are given again only to the same request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.scripted import ScriptedEngine
from polyturn.training.flights import Flights, JournaledEngine


def asks(episode: str = "g4/0", *, ids: tuple[int, ...] = (1, 2, 3), seed: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{episode}/0", session_id=episode, prompt_ids=np.array(ids), sampling=SamplingParams(seed=seed)
    )


def says(*ids: int, version: int = 2, reason: FinishReason = FinishReason.STOP) -> Completion:
    logprobs = np.full(len(ids), -0.5, np.float32)
    return Completion(token_ids=np.array(ids), logprobs=logprobs, finish_reason=reason, policy_versions=((0, version),))


def journal(folder: Path, *completions: tuple[GenerateRequest, Completion], step: int = 2, **kwargs: bool) -> Flights:
    """Return the journal of a run that was killed after these completions."""
    flights = Flights(folder, **kwargs)
    flights.begin(step)
    for request, completion in completions:
        flights.recall(request)
        flights.note(request, completion)
    return flights


def resumed(folder: Path, *, step: int = 2, oldest: int = 0, **kwargs: bool) -> Flights:
    flights = Flights(folder, **kwargs)
    flights.resume(step, oldest=lambda ticket: oldest)
    return flights


def test_the_same_request_gets_the_same_completion_after_a_kill(tmp_path: Path):
    journal(tmp_path, (asks(), says(7, 8)))
    flights = resumed(tmp_path)
    found = flights.recall(asks())
    assert found is not None and found.same_as(says(7, 8))
    assert flights.read_metrics() == {"rollout/resumed_flights": 1, "rollout/restarted_flights": 0}
    assert flights.recall(asks()) is None, "once"
    assert flights.read_metrics() == {"rollout/resumed_flights": 0, "rollout/restarted_flights": 0}


def test_another_prompt_or_another_way_to_sample_gets_nothing(tmp_path: Path):
    journal(tmp_path, (asks(), says(7)))
    assert resumed(tmp_path).recall(asks(ids=(1, 2, 4))) is None
    assert resumed(tmp_path).recall(asks(seed=1)) is None
    flights = resumed(tmp_path)
    flights.recall(asks(ids=(1, 2, 4)))
    assert flights.read_metrics()["rollout/restarted_flights"] == 1


def test_what_later_or_too_old_weights_sampled_is_not_of_use(tmp_path: Path):
    journal(tmp_path, (asks("g1/0"), says(7, version=3)), (asks("g1/1"), says(8, version=1)), step=2)
    flights = resumed(tmp_path, oldest=2)
    assert flights.recall(asks("g1/0")) is None and flights.recall(asks("g1/1")) is None
    assert flights.read_metrics()["rollout/restarted_flights"] == 2


def test_a_completion_that_was_cut_off_is_not_kept(tmp_path: Path):
    journal(tmp_path, (asks(), says(7, reason=FinishReason.ABORT)))
    assert resumed(tmp_path).recall(asks()) is None


def test_half_a_line_is_skipped_and_what_follows_it_is_read(tmp_path: Path):
    journal(tmp_path, (asks("g1/0"), says(7)))
    with (tmp_path / "step-000002.jsonl").open("a") as file:
        file.write('{"s": "g1/1", "k": "ab')
    between = resumed(tmp_path)
    between.note(asks("g1/2"), says(9))
    again = resumed(tmp_path)
    assert again.recall(asks("g1/0")) is not None and again.recall(asks("g1/2")) is not None


def test_the_journal_of_a_new_checkpoint_has_the_live_groups_alone(tmp_path: Path):
    flights = journal(tmp_path, (asks("g1/0"), says(7)), (asks("g2r1/0"), says(8)), (asks("g3/0"), says(9, version=9)))
    flights.forget([1])
    flights.begin(4)
    flights.begin(6)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000004.jsonl", "step-000006.jsonl"], "those of the latest two checkpoints"
    later = resumed(tmp_path, step=6)
    assert later.recall(asks("g1/0")) is None and later.recall(asks("g3/0")) is None
    assert later.recall(asks("g2r1/0")) is not None, "also of a group that stands in for another"


def test_evaluations_are_not_kept(tmp_path: Path):
    journal(tmp_path, (asks("eval-greedy-0/0"), says(7)))
    assert (tmp_path / "step-000002.jsonl").read_text() == ""


def test_in_deterministic_mode_episodes_restart_and_are_counted(tmp_path: Path):
    journal(tmp_path, (asks(), says(7)), keeps_turns=False)
    flights = resumed(tmp_path, keeps_turns=False)
    assert flights.recall(asks()) is None
    assert flights.read_metrics() == {"rollout/resumed_flights": 0, "rollout/restarted_flights": 1}


def test_the_engine_is_not_asked_for_what_is_held(tmp_path: Path):
    async def main() -> None:
        first = Flights(tmp_path)
        first.begin(0)
        engine = JournaledEngine(ScriptedEngine(lambda request: [5, 6]), first)
        said = await engine.generate(asks())
        second = Flights(tmp_path)
        second.resume(0, oldest=lambda ticket: 0)

        def fails(request: GenerateRequest) -> list[int]:
            raise AssertionError("the engine was asked")

        again = await JournaledEngine(ScriptedEngine(fails), second).generate(asks())
        assert np.array_equal(again.token_ids, said.token_ids)

    asyncio.run(main())
