"""The predicted work of an episode, from its own turns, its group's and all others'."""

from __future__ import annotations

from polyturn.core.arrays import ids_array
from polyturn.core.generation import GenerateRequest
from polyturn.engines.predictor import WorkPredictor


def ask(session: str, turn: int = 0) -> GenerateRequest:
    return GenerateRequest(request_id=f"{session}/{turn}", session_id=session, prompt_ids=ids_array([1]))


def run(predictor: WorkPredictor, session: str, turn_s: list[float], *, ends: bool = True, at: float = 0.0) -> None:
    """Let an episode have turns of these lengths; then it ends, or asks for one more."""
    for number, seconds in enumerate(turn_s):
        predictor.arrived(ask(session, number), now=at)
        predictor.admitted(ask(session, number), waited_s=0.0)
        at += seconds
        predictor.answered(ask(session, number), now=at)
    if ends:
        predictor.ended(session)
    else:
        predictor.arrived(ask(session, len(turn_s)), now=at)


def predicted(predictor: WorkPredictor, session: str) -> float:
    predictor.arrived(ask(session), now=0.0)
    return predictor.remaining_s(ask(session))


def test_new_predictor_predicts_nothing():
    assert predicted(WorkPredictor(), "g0/0") == 0.0


def test_group_is_known_by_turns_of_running_members():
    predictor = WorkPredictor()
    run(predictor, "short/0", [1.0], ends=False)
    run(predictor, "long/0", [10.0], ends=False)
    assert predicted(predictor, "long/1") > 1.5 * predicted(predictor, "short/1")


def test_episode_with_long_turns_is_predicted_to_go_on():
    predictor = WorkPredictor()
    for number in range(4):
        run(predictor, f"g/{number}", [1.0, 1.0, 1.0])
    run(predictor, "g/usual", [1.0, 1.0], ends=False)
    run(predictor, "g/giant", [20.0, 20.0], ends=False)
    assert predictor.remaining_s(ask("g/giant")) > 3 * predictor.remaining_s(ask("g/usual"))


def test_remaining_turns_are_those_of_comparable_episodes():
    predictor = WorkPredictor()
    for number in range(50):
        run(predictor, f"g{number}/0", [1.0] * 4)
    run(predictor, "new/0", [1.0] * 2, ends=False)
    run(predictor, "late/0", [1.0] * 3, ends=False)
    assert 1.9 < predictor.remaining_s(ask("new/0")) < 2.2
    assert 0.9 < predictor.remaining_s(ask("late/0")) < 1.2


def test_time_in_the_queue_is_no_work():
    predictor = WorkPredictor()
    predictor.arrived(ask("g/0"), now=0.0)
    predictor.admitted(ask("g/0"), waited_s=100.0)
    predictor.answered(ask("g/0"), now=101.0)
    predictor.ended("g/0")
    assert predicted(predictor, "g/1") < 3.0
