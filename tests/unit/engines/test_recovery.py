"""From a lost server to one that serves the right weights again, on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.engines.pool import EnginePool
from polyturn.engines.recovery import PoolWeights, recover
from polyturn.engines.replica import Replica
from polyturn.engines.weights.folder import WeightFolder, WrittenWeights
from support.parts import virtual
from support.refusals import refuses_later
from support.timed_engine import RestartableEngine
from support.virtual_time import run_virtual


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, session_id=name, prompt_ids=np.zeros(4, np.int32), sampling=SamplingParams(max_tokens=1000)
    )


def run_recovery(
    engine: RestartableEngine,
    *,
    verify: Any = None,
    served: Any = None,
    on_failure: Callable[[Exception], object] = lambda problem: None,
) -> tuple[Replica, list[PoolWeights]]:
    """Let a replica that was given version 3 fail and come back."""

    async def main() -> tuple[Replica, list[PoolWeights]]:
        replica = Replica(engine, "replica 0", 8, version=3)
        target = PoolWeights(3, {"w": 1})
        seen: list[PoolWeights] = []

        def on_back(found: PoolWeights) -> bool:
            seen.append(found)
            return found is (served or (lambda: target))()

        await engine.update_weights(3)
        engine.fail()
        await recover(
            replica,
            engine,
            served=served or (lambda: target),
            again=lambda served: contextlib.nullcontext(served.weights),
            verify=lambda: verify,
            on_back=on_back,
            on_failure=on_failure,
            attempt_s=60.0,
        )
        return replica, seen

    return run_virtual(main())


def test_restarted_server_gets_weights_before_it_is_back() -> None:
    engine = RestartableEngine()
    _, seen = run_recovery(engine)
    assert engine.pushed == [3, 3]
    assert [found.version for found in seen] == [3]


def test_server_that_kept_its_weights_is_not_sent_them() -> None:
    engine = RestartableEngine(keeps_weights=True)
    run_recovery(engine)
    assert engine.pushed == [3]


def test_server_that_refuses_the_adapter_is_sent_the_weights() -> None:
    class Forgetful(RestartableEngine):
        num_refused = 0

        async def generate(self, request: GenerateRequest) -> Completion:
            if self.num_restarts and len(self.pushed) == 1:
                self.num_refused += 1
                assert self.num_refused == 1, "it is asked again and again"
                raise EngineError("answered 404: the model `polyturn-adapter-1` does not exist")
            return await super().generate(request)

    engine = Forgetful()
    run_recovery(engine)
    assert engine.pushed == [3, 3]


def test_server_stays_out_until_it_passes_the_proof() -> None:
    tried: list[int] = []

    async def verify(engine: Any, version: int) -> None:
        tried.append(version)
        if len(tried) < 3:
            raise EngineError("its logprobs are others")

    engine = RestartableEngine()
    run_recovery(engine, verify=verify)
    assert tried == [3, 3, 3]
    assert engine.pushed == [3, 3, 3, 3]


def test_newer_weights_are_sent_to_a_recovering_server() -> None:
    versions = [PoolWeights(3, {"w": 1}), PoolWeights(4, {"w": 2})]
    asked: list[int] = []

    def served() -> PoolWeights:
        asked.append(1)
        return versions[0] if len(asked) == 1 else versions[1]

    engine = RestartableEngine()
    run_recovery(engine, served=served)
    assert engine.pushed == [3, 3, 4]


def test_attempt_that_takes_too_long_is_named() -> None:
    waits = iter([600.0, 0.0])

    async def verify(engine: Any, version: int) -> None:
        await asyncio.sleep(next(waits))

    problems: list[Exception] = []
    run_recovery(RestartableEngine(), verify=verify, on_failure=problems.append)
    assert [str(problem) for problem in problems] == ["sending and verifying its weights took longer than 60 s"]


@virtual
async def test_cancelled_recovery_ends_where_its_cleanup_fails() -> None:
    begun = asyncio.Event()

    class Unresumable(RestartableEngine):
        async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise EngineLostError("it cannot be resumed")

    engine = Unresumable()
    engine.fail()
    recovery = asyncio.create_task(
        recover(
            Replica(engine, "replica 0", 8, version=3),
            engine,
            served=lambda: PoolWeights(3, {"w": 1}),
            again=lambda served: contextlib.nullcontext(served.weights),
            verify=lambda: None,
            on_back=lambda served: True,
            on_failure=lambda problem: None,
            attempt_s=60.0,
        )
    )
    await begun.wait()
    recovery.cancel()
    await asyncio.wait({recovery}, timeout=600)
    assert recovery.cancelled()


class Reading(RestartableEngine):
    """A server whose restart takes as long as a step or two, and which reads a folder."""

    process = None

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self.held: list[float] = []

    async def revive(self) -> None:
        await super().revive()
        self._meanwhile()

    async def load_folder(self, folder: Path) -> None:
        try:
            self.held += [float(tensor) for tensor in load_file(folder / "model.safetensors").values()]
        except FileNotFoundError as problem:
            raise EngineError(str(problem)) from problem

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        if isinstance(weights, WrittenWeights):
            await weights.load(self)
        await super().update_weights(version, weights=weights)


@pytest.mark.parametrize("when", ["while it starts", "while it is sent them"])
def test_replaced_weights_on_disk_are_not_read(tmp_path: Path, when: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with WeightFolder(tmp_path, root=tmp_path) as files:

        def write(version: int) -> PoolWeights:
            return PoolWeights(version, files.write({"w": torch.tensor(float(version))}))

        versions = [write(3)]
        gone = versions[0]

        def replace() -> None:
            if len(versions) == 1:
                versions.append(write(4))

        engine = Reading(replace)
        asked: list[int] = []

        def served() -> PoolWeights:
            asked.append(1)
            return gone if when == "while it is sent them" and len(asked) == 1 else versions[-1]

        run_recovery(engine, served=served)
    assert engine.held == [4.0]


@virtual
async def test_dead_server_of_a_pool_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="polyturn.engines"):
        engines = [RestartableEngine(), RestartableEngine()]
        pool = EnginePool(engines)
        asyncio.get_running_loop().call_later(0.3, engines[0].fail)
        first = await asyncio.gather(*(pool.generate(ask(f"a{i}")) for i in range(8)))
        await asyncio.sleep(60)
        second = await asyncio.gather(*(pool.generate(ask(f"b{i}")) for i in range(8)))
        answers = [*first, *second]
    assert [len(answer.token_ids) for answer in answers] == [100] * 16
    assert [replica.num_done for replica in pool.replicas] == [4, 12]
    metrics = dict(pool.read_metrics())
    assert metrics.pop("engine/queue") > 0, "four waited for the server that was started again"
    assert metrics == {
        "engine/replicas": 2,
        "engine/replicas_live": 2,
        "engine/lost": 4,
        "engine/redone": 4,
        "engine/stale": 0,
        "engine/moved": 4,
        "engine/restarts": 1,
    }
    assert pool.read_metrics()["engine/lost"] == 0  # since the last look
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_requests_fail_at_once_when_all_servers_are_gone() -> None:
    async def main() -> float:
        engine = RestartableEngine(max_restarts=0)
        pool = EnginePool([engine], patience_s=10_000.0)
        engine.fail()
        loop = asyncio.get_running_loop()
        await refuses_later(lambda: pool.generate(ask("a")), EngineLostError, "all servers are lost for good")
        return loop.time()

    assert run_virtual(main()) < 10


def test_broken_recovery_loses_the_server_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RestartableEngine):
        async def revive(self) -> None:
            raise OSError("the folder of its log is gone")

    async def main() -> float:
        engine = Broken()
        pool = EnginePool([engine], patience_s=10_000.0)
        engine.fail()
        await refuses_later(lambda: pool.generate(ask("a")), EngineLostError, "all servers are lost for good")
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 10
    (said,) = [record for record in caplog.records if "out for good" in record.message]
    assert "the folder of its log is gone" in said.message and said.exc_info is not None


@virtual
async def test_restarted_server_waits_for_the_next_weights() -> None:
    engines = [RestartableEngine(), RestartableEngine()]
    pool = EnginePool(engines)
    await pool.update_weights(1)
    engines[0].fail()
    await asyncio.gather(*(pool.generate(ask(f"a{i}")) for i in range(4)))
    await asyncio.sleep(60)
    before = pool.replicas[0].is_live
    await pool.update_weights(2)
    answers = await asyncio.gather(*(pool.generate(ask(f"b{i}")) for i in range(4)))
    assert (before, pool.replicas[0].is_live) == (False, True)
    assert [answer.policy_versions[-1][1] for answer in answers] == [2] * 4


@virtual
async def test_close_ends_recoveries() -> None:
    engine = RestartableEngine(dead_s=10_000.0)
    pool = EnginePool([engine])
    engine.fail()
    asked = asyncio.create_task(pool.generate(ask("a")))
    await asyncio.sleep(5)
    asked.cancel()
    await asyncio.wait({asked})
    await pool.close()
    assert pool.replicas[0].recovery is None or pool.replicas[0].recovery.cancelled()


@virtual
async def test_reason_of_lost_servers_is_logged_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(RestartableEngine):
        num_tries = 0

        async def revive(self) -> None:
            self.num_tries += 1
            raise EngineError(f"port {8000 + self.num_tries} is in use" if self.num_tries < 5 else "no memory is left")

    with caplog.at_level(logging.WARNING):
        engines = [Refusing(), Refusing()]
        pool = EnginePool(engines, patience_s=300.0)
        await pool.update_weights(3, weights={})
        for engine in engines:
            engine.fail()
        with pytest.raises(
            EngineLostError, match=r"no server was up for 300 s \(replica 0 and 1 more: .*no memory is left\)"
        ):
            await pool.generate(ask("g/0"))
        await pool.close()
        tried = engines[0].num_tries
    said = [record.message for record in caplog.records if "no server is up" in record.message]
    assert tried > 6 and all("wait up to 300 s" in line for line in said), said
    assert len(said) == 5, said
    assert "replica 0: EngineLostError: server cannot be reached" in said[0] or "and 1 more" in said[0]
    assert "port 8001 is in use" in said[1] and "no memory is left" in said[-1]
