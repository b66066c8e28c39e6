"""The embedded engine in a process of its own: the same answers, weights that change while it samples, and its end.

The process takes seconds to start, so the tests share one where they can, and one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.process import ProcessEngine
from polyturn.engines.weight_memory import WeightMemory, tensors_of
from support.forked import Forked
from support.models import tiny_model
from support.refusals import refuses_later

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch

VOCAB = 64
on_one_loop = pytest.mark.asyncio(loop_scope="module")


ENDLESS = 131_000
"""More tokens than the process samples in a minute; it caches that many in a few hundred megabytes."""


def model() -> PreTrainedModel:
    return tiny_model(VOCAB, intermediate=32, max_positions=131_072, spread=0.2)


MODEL = model()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread, which is faster for a model of this size; the process takes the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[ProcessEngine]:
    process_engine = ProcessEngine(MODEL, num_slots=8, deterministic=True)
    yield process_engine
    await process_engine.close()


def ask(name: str, *, prompt: object = (1, 2, 3), **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        session_id=name,
        prompt_ids=list(prompt),  # type: ignore[call-overload]
        sampling=SamplingParams(**{"max_tokens": 12, "seed": 5, **sampling}),  # type: ignore[arg-type]
    )


@contextlib.asynccontextmanager
async def held(engine: ProcessEngine, request: GenerateRequest) -> AsyncIterator[asyncio.Task[Completion]]:
    """Send a request to the stopped process, so that it cannot be answered before what the block sends next."""
    await engine.generate(ask("starts", max_tokens=1))
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        running = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGCONT)


def gaps(of: PreTrainedModel, completion: Completion) -> np.ndarray:
    """Return how far each logprob is from the model's own."""
    ids = torch.tensor([[1, 2, 3, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(of(ids).logits[0], dim=-1)
    own = logprobs[2:-1].gather(1, ids[0, 3:, None])[:, 0].numpy()
    return np.abs(own - completion.logprobs)


@on_one_loop
async def test_process_engine_answers_as_the_embedded_one_bit_for_bit(engine: ProcessEngine):
    assert isinstance(engine, Engine)
    here = EmbeddedEngine(MODEL, num_slots=8, deterministic=True)
    assert engine.capabilities == dataclasses.replace(here.capabilities, shares_loop=False)
    theirs, ours = [
        await asyncio.gather(*(e.generate(ask(f"r{i}", seed=i, max_tokens=20)) for i in range(12))) for e in (engine, here)
    ]
    for a, b in zip(theirs, ours, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and np.array_equal(a.logprobs, b.logprobs)
    assert engine.busy_s > 0 and engine.stats.completions >= 12


def write_to_log_of(engine: ProcessEngine) -> None:
    with Path(f"/proc/{engine.pid}/fd/2").open("ab", buffering=0) as log:
        log.write(b"a last word\n")


@on_one_loop
async def test_abort_reaches_a_starting_process_and_death_is_told():
    engine = ProcessEngine(MODEL, num_slots=8)
    first = asyncio.create_task(engine.generate(ask("first", max_tokens=1)))
    aborted = asyncio.create_task(engine.generate(ask("aborted", max_tokens=2000)))
    while engine.pid is None:  # noqa: ASYNC110 (from here on it reads its model, for seconds)
        await asyncio.sleep(0)
    await engine.abort("aborted")
    assert (await aborted).finish_reason is FinishReason.ABORT
    assert len((await first).token_ids) == 1
    write_to_log_of(engine)
    async with held(engine, ask("long", max_tokens=2000)) as running:
        os.kill(engine.pid, signal.SIGKILL)
        await refuses_later(lambda: running, EngineLostError, "status -9", "a last word")
    await refuses_later(lambda: engine.update_weights(1), EngineLostError, "status -9")
    await engine.close()
    await refuses_later(lambda: engine.generate(ask("late")), EngineError, "closed")


@on_one_loop
@pytest.mark.parametrize("passes", range(3))
async def test_close_while_starting_fails_every_waiting_request(passes: int):
    engine = ProcessEngine(MODEL, num_slots=8)
    asked = [asyncio.create_task(engine.generate(ask(name, max_tokens=1))) for name in "ab"]
    for _ in range(passes):
        await asyncio.sleep(0)
    await engine.close()
    for problem in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 120):
        assert isinstance(problem, EngineError) and "closed" in str(problem)


@on_one_loop
async def test_update_sends_current_weights_and_tags_each_token(engine: ProcessEngine):
    old = model()
    await engine.update_weights(0)
    with torch.no_grad():
        for parameter in MODEL.parameters():
            parameter.mul_(1.1)
    unseen = await engine.generate(ask("unseen", max_tokens=20))
    assert gaps(old, unseen).max() < 1e-4, "an unpublished change must not show"
    running = asyncio.create_task(engine.generate(ask("endless", max_tokens=ENDLESS)))
    await asyncio.sleep(0)
    await engine.generate(ask("beside", max_tokens=1))  # prompts are prefilled before a step, which samples for both
    await engine.update_weights(7)
    new = await engine.generate(ask("new", max_tokens=20))
    await engine.abort("endless")
    completion = await running
    assert new.policy_versions == ((0, 7),)
    assert gaps(MODEL, new).max() < 1e-4 < 0.05 < gaps(old, new).max()
    (_, first), (change, second) = completion.policy_versions
    assert (first, second) == (0, 7)
    assert gaps(old, completion)[:change].max() < 1e-4
    assert gaps(MODEL, completion)[change:].max() < 1e-4
    await engine.update_weights(8, weights=old.state_dict())
    assert gaps(old, await engine.generate(ask("back", max_tokens=20))).max() < 1e-4
    MODEL.load_state_dict(old.state_dict())


@on_one_loop
async def test_unknown_parameter_is_refused(engine: ProcessEngine):
    with pytest.raises(EngineError, match=r"embed_token\.weight"):
        await engine.update_weights(9, weights={"model.embed_token.weight": torch.zeros(1)})
    assert len((await engine.generate(ask("fine", max_tokens=2))).token_ids) == 2


@on_one_loop
async def test_process_that_cannot_make_its_engine_shows_why():
    engine = ProcessEngine(MODEL, num_slots=0)
    for name in ("first", "second"):
        await refuses_later(lambda name=name: engine.generate(ask(name)), EngineLostError, "first answer", "num_slots is 0")
    await engine.close()


STARTS = """
import asyncio
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.process import ProcessEngine
from support.models import tiny_model
async def main():
    engine = ProcessEngine(tiny_model(64, max_positions=2048), num_slots=8)
    for number in (1, 2000):
        sampling = SamplingParams(max_tokens=number)
        await engine.generate(GenerateRequest(request_id=f"r{number}", session_id="s", prompt_ids=[1, 2], sampling=sampling))
        print(engine.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_engine_process_dies_with_its_parent(tmp_path: Path):
    (tmp_path / "starts.py").write_text(STARTS)
    parent = Forked(tmp_path / "starts.py", call="support.forked:run_file")
    try:
        parent.wait_until(lambda: "\n" in parent.out)
        end = os.pidfd_open(int(parent.out.split()[0]))
    finally:
        parent.kill()
    parent.wait()
    ended, _, _ = select.select([end], [], [], 120)
    os.close(end)
    assert ended


def test_writing_one_slot_of_weight_memory_leaves_the_other():
    memory = WeightMemory.of(MODEL)
    memory.write(0, tensors_of(MODEL))
    memory.write(1, {"model.norm.weight": torch.full((32,), 7.0)})
    first, second = memory.views(0), memory.views(1)
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors_of(MODEL).items())
    assert all(torch.equal(second[name], first[name]) for name in first if name != "model.norm.weight")
    assert second["model.norm.weight"].eq(7).all() and not first["model.norm.weight"].eq(7).any()
    memory.close()
