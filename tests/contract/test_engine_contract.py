"""One suite for every engine: what `core.protocols.Engine` promises to the loop, on the real vLLM and SGLang servers too."""

import asyncio

import numpy as np
import pytest
import torch

from conftest import VOCAB, small_model
from polyturn.core.errors import EngineError
from polyturn.core.generation import FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.scripted import ScriptedEngine
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.update_gate import UpdateGate
from polyturn.engines.vllm import VllmEngine

SERVERS = {"vllm": VllmEngine, "sglang": SglangEngine}
SAMPLING_ENGINES = ["embedded", "embedded_deterministic", "pool", "gate", "vllm", "sglang"]


async def make(name, url, model_folder):
    if name in SERVERS:
        made = SERVERS[name](url, ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder))
        await made.update_weights(0, weights=small_model().state_dict())
        return made
    if name == "scripted":
        return ScriptedEngine(lambda request: np.arange(3, 3 + 64) % VOCAB, latency_s=0.001)
    torch.set_num_threads(1)
    engine = EmbeddedEngine(small_model(), num_slots=8, deterministic=name.endswith("deterministic"))
    if name == "pool":
        return EnginePool([engine], slots=32)
    return UpdateGate(engine, mode="abort_resume") if name == "gate" else engine


def started(name, server_of):
    return name, server_of(name) if name in SERVERS else None


@pytest.fixture(params=["scripted", *SAMPLING_ENGINES])
def place(request, server_of):
    return started(request.param, server_of)


@pytest.fixture(params=SAMPLING_ENGINES)
def sampling_place(request, server_of):
    return started(request.param, server_of)


@pytest.fixture
async def engine(place, model_folder):
    made = await make(*place, model_folder)
    yield made
    await made.close()


@pytest.fixture
async def sampling_engine(sampling_place, model_folder):
    made = await make(*sampling_place, model_folder)
    yield made
    await made.close()


def ask(name: str = "r", *, prompt=(1, 2, 3), session: str | None = None, **sampling) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, session_id=session or name, prompt_ids=prompt, sampling=SamplingParams(**sampling)
    )


async def test_it_is_an_engine_and_says_what_it_can_do(engine):
    assert isinstance(engine, Engine)
    assert engine.capabilities.logprobs


async def test_one_logprob_per_token_none_positive(engine):
    completion = await engine.generate(ask(max_tokens=7, seed=1))
    assert len(completion.token_ids) == len(completion.logprobs) == 7
    assert completion.token_ids.dtype == np.int32
    assert np.all(completion.logprobs <= 0)
    assert completion.finish_reason is FinishReason.LENGTH


async def test_the_stop_token_ends_the_completion_and_is_kept(engine):
    free = (await engine.generate(ask("free", max_tokens=20, temperature=0.0))).token_ids.tolist()
    stop = free[5]
    completion = await engine.generate(ask("stopped", max_tokens=20, temperature=0.0, stop_token_ids=(VOCAB - 1, stop)))
    assert completion.token_ids.tolist() == free[: free.index(stop) + 1]
    assert completion.finish_reason is FinishReason.STOP


async def test_the_same_seed_gives_the_same_tokens(engine):
    if not engine.capabilities.seeded:
        pytest.skip("this engine says that it has no seeds")
    first = await engine.generate(ask("a", max_tokens=12, seed=5))
    second = await engine.generate(ask("b", max_tokens=12, seed=5))
    assert first.token_ids.tolist() == second.token_ids.tolist()


async def test_many_requests_at_once_each_get_their_own_answer(engine):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(ask(f"r{i}", max_tokens=1 + i, seed=i))) for i in range(20)]
    assert [len(t.result().token_ids) for t in tasks] == [1 + i for i in range(20)]


async def test_abort_ends_a_running_request_with_what_there_is(engine):
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=1900, seed=1)))
    await asyncio.sleep(0)
    await engine.abort("long")
    completion = await running
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) < 1900
    assert len(completion.logprobs) == len(completion.token_ids)


async def test_abort_and_end_session_of_unknown_ids_are_fine(engine):
    await engine.abort("nobody")
    await engine.end_session("nobody")
    assert len((await engine.generate(ask(max_tokens=1))).token_ids) == 1


async def test_cancelling_the_call_leaves_the_engine_usable(engine):
    for i in range(30):
        running = asyncio.create_task(engine.generate(ask(f"r{i}", max_tokens=200)))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len((await engine.generate(ask("after", max_tokens=3))).token_ids) == 3


async def test_a_completion_carries_the_version_that_sampled_it(engine):
    assert (await engine.generate(ask("old", max_tokens=2))).policy_versions == ((0, 0),)
    await engine.update_weights(7, weights=small_model().state_dict())
    assert (await engine.generate(ask("new", max_tokens=2))).policy_versions == ((0, 7),)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_the_full_distribution_after_the_temperature(sampling_engine, temperature):
    completion = await sampling_engine.generate(ask(max_tokens=40, temperature=temperature, prompt=range(1, 30)))
    assert largest_difference(small_model(), range(1, 30), completion, temperature or 1.0) < 1e-4


async def test_logprobs_are_those_of_the_new_weights_after_an_update(sampling_engine):
    changed = small_model()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    old = await sampling_engine.generate(ask("old", max_tokens=40, prompt=range(1, 30)))
    assert largest_difference(changed, range(1, 30), old, 1.0) > 0.1
    await sampling_engine.update_weights(1, weights=changed.state_dict())
    new = await sampling_engine.generate(ask("new", max_tokens=40, prompt=range(1, 30)))
    assert largest_difference(changed, range(1, 30), new, 1.0) < 1e-4


async def test_an_update_in_the_middle_of_a_completion_loses_nothing_and_is_told_to_the_token(sampling_engine):
    changed = small_model()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    running = asyncio.create_task(sampling_engine.generate(ask("long", max_tokens=220, prompt=range(1, 30))))
    await asyncio.sleep(0.1)
    await sampling_engine.update_weights(1, weights=changed.state_dict())
    completion = await running
    assert len(completion.token_ids) == len(completion.logprobs) == 220
    if len(completion.policy_versions) > 1:  # the update came in time
        (_, first), (change, second) = completion.policy_versions
        assert (first, second) == (0, 1)
        late = gaps(changed, range(1, 30), completion, 1.0)[change:]
        assert late.max() < 1e-4


async def test_prefixes_are_forgotten_when_the_served_version_is_named_again(sampling_engine):
    await sampling_engine.generate(ask("first", max_tokens=2, prompt=range(1, 60)))
    await sampling_engine.update_weights(0)
    again = await sampling_engine.generate(ask("again", max_tokens=2, prompt=range(1, 60)))
    assert again.info["prefilled_tokens"] == 59
    assert again.policy_versions == ((0, 0),)


async def test_an_id_beyond_the_vocabulary_never_reaches_the_model(sampling_engine):
    with pytest.raises(EngineError, match="vocabulary"):
        await sampling_engine.generate(ask(prompt=(1, 2, VOCAB)))
    assert len((await sampling_engine.generate(ask("after", max_tokens=3))).token_ids) == 3


async def test_a_late_request_returns_what_there_is(sampling_engine):
    if not isinstance(sampling_engine, tuple(SERVERS.values())):
        pytest.skip("an engine in this process drops requests that are late before they start, and no others")
    request = GenerateRequest(
        request_id="late",
        session_id="late",
        prompt_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=1900),
        deadline=asyncio.get_running_loop().time() + 0.02,
    )
    completion = await sampling_engine.generate(request)
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) < 1900


def gaps(model, prompt, completion, temperature) -> np.ndarray:
    """Return how far the completion's logprobs are from the model's own, token by token."""
    prompt = list(prompt)
    ids = torch.tensor([prompt + completion.token_ids.tolist()])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
    own = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return np.abs(own - completion.logprobs)


def largest_difference(model, prompt, completion, temperature) -> float:
    return float(gaps(model, prompt, completion, temperature).max())


async def test_a_closed_engine_refuses_with_a_sentence(engine):
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask())
