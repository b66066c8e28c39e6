"""Weights go from rank 0 to the servers: no tensor passes through the controller, and a failure is one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from polyturn.cluster.rank_processes import RankProcesses
from polyturn.core.errors import EngineError, EngineLostError, RankLostError
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights import group as weight_group
from polyturn.engines.weights import transfer as weight_transfer
from polyturn.engines.weights.checksums import fold_all
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.transfer import WeightTransfer
from polyturn.training.fsdp import Sharded
from polyturn.training.hf import as_checkpoint
from polyturn.training.optim import OptimSettings
from polyturn.training.options import Degrees
from polyturn.training.policy import policy_backend
from polyturn.training.process_group import join
from polyturn.training.rank_group import RankWorker
from polyturn.training.ranked import RankedBackend
from support.models import tiny_model
from support.ray_processes import wait_until
from support.weight_worker import WorkerServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
CPU = torch.device("cpu")
LIMIT_S = 60.0
"""Below the group's time limit: an error that the controller knows of does not wait for it."""


def model_of(kind: str) -> Any:
    return tiny_model(256, kind, hidden=128, layers=2)


def build() -> RankWorker:
    join()

    def make(kind: str, _: Any) -> Any:
        return policy_backend(model_of(kind), placement=Sharded(Degrees(), CPU), optim=OptimSettings())

    return RankWorker({"policy": make})


def build_with_a_full_disk() -> RankWorker:
    def save_file(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    safetensors.torch.save_file = save_file
    return build()


class CountedRanks(RankProcesses):
    """Ranks, and the number of bytes of the commands and their results."""

    num_bytes = 0

    def call(self, command: str, shares: Any) -> list[Any]:
        values = super().call(command, shares)
        self.num_bytes += len(cloudpickle.dumps((shares, values)))
        return values


@pytest.fixture
def ranks() -> Iterator[CountedRanks]:
    group = CountedRanks(build, 2, row_width=1)
    with contextlib.closing(group):
        yield group


@contextlib.asynccontextmanager
async def servers(folder: Path, *faults: str) -> AsyncIterator[list[WorkerServer]]:
    """Start a server for each of `faults`."""
    started = [await WorkerServer.start(folder / f"server-{number}", fault=fault) for number, fault in enumerate(faults)]
    try:
        yield started
    finally:
        for server in started:
            await server.stop()


def transfer() -> WeightTransfer:
    return WeightTransfer("gloo", VllmEngine.open_link)


async def push(transfer: WeightTransfer, weights: Any, receivers: list[WorkerServer]) -> list[BaseException | None]:
    """Send weights to servers, and return the error of each."""
    sent = transfer.write(weights)
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*(server.take(sent) for server in receivers), return_exceptions=True)
    await sent.settle()
    return results


def is_same(came: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return came.keys() == expected.keys() and all(torch.equal(came[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
async def test_tensors_do_not_pass_the_controller(ranks: CountedRanks, tmp_path: Path, kind: str) -> None:
    """Mixtral's experts are one tensor here, and many in its checkpoint."""
    model = model_of(kind)
    backend = RankedBackend(ranks, "policy", kind, bucket_bytes=100_000)
    expected = as_checkpoint(model, {name: tensor.detach() for name, tensor in model.named_parameters()})
    size = sum(tensor.nbytes for tensor in expected.values())
    async with servers(tmp_path, "", "") as receivers:
        sending, ranks.num_bytes = transfer(), 0
        for _ in range(2):
            weights = as_checkpoint(model, backend.weights())
            assert await push(sending, weights, receivers) == [None, None]
        wanted = [(name, "float32") for name in expected]
        assert fold_all(weights, wanted) == fold_all(expected, wanted)
        await sending.unlink()
        assert all(is_same(server.weights(), expected) for server in receivers)
    assert ranks.num_bytes < size / 10


async def test_server_that_dies_in_a_broadcast_leaves_the_others_a_new_group(ranks: CountedRanks, tmp_path: Path) -> None:
    backend = RankedBackend(ranks, "policy", "qwen3", bucket_bytes=100_000)
    async with servers(tmp_path, "", "dies") as (one, other):
        sending = transfer()
        results = await push(sending, backend.weights(), [one, other])
        assert results[0] is None and isinstance(results[1], EngineLostError)
        assert is_same(one.weights(), dict(model_of("qwen3").named_parameters()))
        await sending.unlink()


async def test_server_that_refuses_a_bucket_ends_the_broadcast(ranks: CountedRanks, tmp_path: Path) -> None:
    backend = RankedBackend(ranks, "policy", "qwen3", bucket_bytes=100_000)
    async with servers(tmp_path, "refuses") as receivers:
        sending = transfer()
        (problem,) = await push(sending, backend.weights(), receivers)
        assert isinstance(problem, EngineError) and str(problem) == "no room for this bucket"
        assert await push(sending, backend.weights(), receivers) == [None], "the ranks and the server go on"
        await sending.unlink()


def test_full_disk_of_rank_0_is_an_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        contextlib.closing(RankProcesses(build_with_a_full_disk, 2, row_width=1)) as group,
        WeightFolder(tmp_path, root=tmp_path) as files,
    ):
        backend = RankedBackend(group, "policy", "qwen3", bucket_bytes=100_000)
        for _ in range(2):  # the ranks go on
            with pytest.raises(EngineError, match=rf"{tmp_path}.*No space left.* MB are free there"):
                files.write(backend.weights())
        assert group.lost() is None and not list(tmp_path.glob("*/*/*")), "the partial weights are removed"


async def hung(server: WorkerServer) -> None:
    await asyncio.to_thread(wait_until, server.hung.exists)


async def test_killed_rank_ends_the_push_in_one_sentence(
    ranks: CountedRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_group, "SETTLE_S", 1.0)
    monkeypatch.setattr(weight_transfer, "SETTLE_S", 1.0)
    backend = RankedBackend(ranks, "policy", "qwen3", bucket_bytes=100_000)
    async with servers(tmp_path, "hangs") as receivers:
        pushing = asyncio.create_task(push(transfer(), backend.weights(), receivers))
        await hung(receivers[0])
        os.kill(ranks.pids[0], signal.SIGKILL)
        (problem,) = await pushing
    assert isinstance(problem, RankLostError) and "rank 0 was killed by SIGKILL" in str(problem)


async def test_ranks_go_on_after_an_abandoned_push(
    ranks: CountedRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_group, "SETTLE_S", 1.0)
    monkeypatch.setattr(weight_transfer, "SETTLE_S", 1.0)
    backend = RankedBackend(ranks, "policy", "qwen3", bucket_bytes=100_000)
    async with servers(tmp_path, "hangs", "") as (one, other):
        sending = transfer()
        sent = sending.write(backend.weights())
        taking = asyncio.create_task(one.take(sent))
        await hung(one)
        taking.cancel()
        await asyncio.wait({taking})
        await sent.settle()
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.to_thread(ranks.call, "policy.step_count", [(), ()]) == [0, 0]
        assert await push(sending, backend.weights(), [other]) == [None]
        await sending.unlink()
