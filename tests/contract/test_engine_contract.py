"""One suite for every engine: what `core.protocols.Engine` promises to the loop, on real vLLM and SGLang servers too."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_servers import CLIENTS, on_servers

from polyturn.core.errors import EngineError
from polyturn.core.generation import FinishReason
from polyturn.core.protocols import Engine
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.scripted import ScriptedEngine
from polyturn.engines.update_gate import UpdateGate
from support.refusals import refuses_later
from support.served_model import VOCAB, ask, changed_model, logprob_gaps, small_model

SAMPLING_ENGINES = ["embedded", "embedded_deterministic", "pool", "gate", *on_servers()]
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def make(kind, source, model_folder):
    if kind in CLIENTS:
        served = ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder)
        engine = CLIENTS[kind](source, served)
        await engine.update_weights(0, weights=small_model().state_dict())
        return engine
    if kind == "scripted":
        return ScriptedEngine(lambda request: np.arange(3, 3 + 64) % VOCAB, latency_s=0.001)
    engine = EmbeddedEngine(small_model(), num_slots=8, deterministic=kind.endswith("deterministic"))
    if kind == "pool":
        return EnginePool([engine], slots=32)
    return UpdateGate(engine, mode="abort_resume") if kind == "gate" else engine


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread, which is faster for a model of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kind_and_source(request, server_of):
    """Return a kind of engine, and the server's address, outside of the test's event loop: a start takes a minute."""
    return request.param, server_of(request.param) if request.param in CLIENTS else ""


@pytest.fixture(params=["scripted", *SAMPLING_ENGINES])
def address(request, server_of):
    return kind_and_source(request, server_of)


@pytest.fixture(params=SAMPLING_ENGINES)
def sampling_address(request, server_of):
    return kind_and_source(request, server_of)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(address, model_folder):
    made = await make(*address, model_folder)
    yield made
    if made is not address[1]:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sampling_engine(sampling_address, model_folder):
    made = await make(*sampling_address, model_folder)
    yield made
    if made is not sampling_address[1]:
        await made.close()


async def test_engine_states_its_capabilities(engine):
    assert isinstance(engine, Engine)
    assert engine.capabilities.logprobs


async def test_completion_has_one_logprob_per_token(engine):
    completion = await engine.generate(ask(max_tokens=7, seed=1))
    assert len(completion.token_ids) == len(completion.logprobs) == 7
    assert completion.token_ids.dtype == np.int32
    assert np.all(completion.logprobs <= 0)
    assert completion.finish_reason is FinishReason.LENGTH


async def test_stop_token_ends_the_completion_and_is_kept(engine):
    free = (await engine.generate(ask("free", max_tokens=20, temperature=0.0))).token_ids.tolist()
    stop = free[5]
    completion = await engine.generate(ask("stopped", max_tokens=20, temperature=0.0, stop_token_ids=(VOCAB - 1, stop)))
    assert completion.token_ids.tolist() == free[: free.index(stop) + 1]
    assert completion.finish_reason is FinishReason.STOP


async def test_equal_seeds_give_equal_tokens(engine):
    if not engine.capabilities.seeded:
        pytest.skip("this engine says that it has no seeds")
    first = await engine.generate(ask("a", max_tokens=12, seed=5))
    second = await engine.generate(ask("b", max_tokens=12, seed=5))
    assert first.token_ids.tolist() == second.token_ids.tolist()


async def test_concurrent_requests_get_their_own_answers(engine):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(ask(f"r{i}", max_tokens=1 + i, seed=i))) for i in range(20)]
    assert [len(t.result().token_ids) for t in tasks] == [1 + i for i in range(20)]


async def test_abort_returns_the_tokens_so_far(engine):
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=1900, seed=1)))
    await asyncio.sleep(0)
    await engine.abort("long")
    completion = await running
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) < 1900
    assert len(completion.logprobs) == len(completion.token_ids)


async def test_abort_and_end_session_accept_unknown_ids(engine):
    await engine.abort("nobody")
    await engine.end_session("nobody")
    assert len((await engine.generate(ask(max_tokens=1))).token_ids) == 1


async def test_cancelled_calls_leave_the_engine_usable(engine):
    for i in range(30):
        running = asyncio.create_task(engine.generate(ask(f"r{i}", max_tokens=200)))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len((await engine.generate(ask("after", max_tokens=3))).token_ids) == 3


async def test_completion_carries_the_version_that_sampled_it(engine):
    assert (await engine.generate(ask("old", max_tokens=2))).policy_versions == ((0, 0),)
    await engine.update_weights(7, weights=small_model().state_dict())
    assert (await engine.generate(ask("new", max_tokens=2))).policy_versions == ((0, 7),)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_the_models_after_the_temperature(sampling_engine, temperature):
    completion = await sampling_engine.generate(ask(max_tokens=40, temperature=temperature))
    assert logprob_gaps(small_model(), completion, temperature=temperature or 1.0).max() < 1e-4


async def test_logprobs_follow_an_update(sampling_engine):
    changed = changed_model()
    old = await sampling_engine.generate(ask("old", max_tokens=40))
    assert logprob_gaps(changed, old).max() > 0.1
    await sampling_engine.update_weights(1, weights=changed.state_dict())
    new = await sampling_engine.generate(ask("new", max_tokens=40))
    assert logprob_gaps(changed, new).max() < 1e-4


async def test_update_during_a_completion_loses_no_token(sampling_engine):
    changed = changed_model()
    running = asyncio.create_task(sampling_engine.generate(ask("long", max_tokens=220)))
    await asyncio.sleep(0.1)
    await sampling_engine.update_weights(1, weights=changed.state_dict())
    completion = await running
    assert len(completion.token_ids) == len(completion.logprobs) == 220
    if len(completion.policy_versions) > 1:  # the update came before its end
        (_, first), (change, second) = completion.policy_versions
        assert (first, second) == (0, 1)
        assert logprob_gaps(changed, completion)[change:].max() < 1e-4


async def test_update_to_the_served_version_drops_cached_prefixes(sampling_engine):
    await sampling_engine.generate(ask("first", max_tokens=2, prompt=range(1, 60)))
    await sampling_engine.update_weights(0)
    again = await sampling_engine.generate(ask("again", max_tokens=2, prompt=range(1, 60)))
    assert again.info["prefilled_tokens"] == 59
    assert again.policy_versions == ((0, 0),)


async def test_id_beyond_the_vocabulary_is_refused(sampling_engine):
    await refuses_later(lambda: sampling_engine.generate(ask(prompt=(1, 2, VOCAB))), EngineError, "vocabulary")
    assert len((await sampling_engine.generate(ask("after", max_tokens=3))).token_ids) == 3


@pytest.mark.parametrize("sampling_address", on_servers(), indirect=True)
async def test_late_request_returns_the_tokens_so_far(sampling_engine):
    """An engine in this process drops requests that are late before they start, and no others."""
    late = asyncio.get_running_loop().time() + 0.02
    completion = await sampling_engine.generate(ask("late", max_tokens=1900, prompt=(1, 2, 3), deadline=late))
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) < 1900


async def test_closed_engine_refuses_requests(engine):
    await engine.close()
    await refuses_later(lambda: engine.generate(ask()), EngineError, "closed")
