"""The scripted engine: where answers come from, and how they are cut."""

import asyncio

import pytest

from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.scripted import ScriptedEngine
from support.refusals import refuses_later
from support.virtual_time import run_virtual


def request(number: int = 0, *, session: str = "s", prompt=(1, 2, 3), **sampling) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}", session_id=session, prompt_ids=prompt, sampling=SamplingParams(**sampling)
    )


async def test_list_answers_in_the_order_of_requests():
    engine = ScriptedEngine([[9, 2], [5, 2]], logprob=-0.5)
    first, second = await engine.generate(request(0)), await engine.generate(request(1))
    assert first.token_ids.tolist() == [9, 2]
    assert second.token_ids.tolist() == [5, 2]
    assert first.logprobs.tolist() == [-0.5, -0.5]
    assert engine.num_requests == 2


async def test_mapping_answers_per_session():
    engine = ScriptedEngine({"a": [[1], [2]], "b": [[3]]})
    answers = [await engine.generate(request(i, session=s)) for i, s in enumerate("aba")]
    assert [a.token_ids.tolist() for a in answers] == [[1], [3], [2]]


async def test_function_sees_the_request_and_may_return_a_completion():
    given = Completion(token_ids=[4], logprobs=[-2.0], finish_reason=FinishReason.LENGTH, policy_versions=((0, 7),))
    engine = ScriptedEngine(lambda r: given if r.session_id == "whole" else r.prompt_ids[:1])
    assert await engine.generate(request(0, session="whole")) is given
    assert (await engine.generate(request(1, prompt=[8, 9]))).token_ids.tolist() == [8]


async def test_answers_are_cut_after_the_stop_token_and_at_max_tokens():
    engine = ScriptedEngine(lambda r: [5, 6, 2, 7])
    stopped = await engine.generate(request(0, stop_token_ids=(2,)))
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([5, 6, 2], FinishReason.STOP)
    cut = await engine.generate(request(1, stop_token_ids=(2,), max_tokens=2))
    assert (cut.token_ids.tolist(), cut.finish_reason) == ([5, 6], FinishReason.LENGTH)
    unstopped = await engine.generate(request(2, stop_token_ids=(3,)))
    assert (unstopped.token_ids.tolist(), unstopped.finish_reason) == ([5, 6, 2, 7], FinishReason.LENGTH)


@pytest.mark.parametrize("script", [[OSError("lost")], lambda r: (_ for _ in ()).throw(OSError("lost"))])
async def test_exception_in_the_script_is_an_engine_error(script):
    await refuses_later(lambda: ScriptedEngine(script).generate(request()), EngineError, "'r0'", "OSError: lost")


async def test_script_that_runs_out_says_so():
    await refuses_later(lambda: ScriptedEngine([]).generate(request()), EngineError, "no answer left for request 1")
    await refuses_later(lambda: ScriptedEngine({"other": []}).generate(request()), EngineError, "'s'")


def test_every_request_takes_its_latency():
    async def ask() -> tuple[list[int], float]:
        completion = await ScriptedEngine(lambda r: [1], latency_s=20.0).generate(request())
        return completion.token_ids.tolist(), asyncio.get_running_loop().time()

    assert run_virtual(ask()) == ([1], 20.0)
