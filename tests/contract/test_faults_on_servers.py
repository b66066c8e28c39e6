"""What real servers do when they die, hang, fail, are slow or forget: nothing is lost, nothing hangs, one line says why."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
import torch
from engine_servers import READY_S, launch_spec
from faulty_proxy import FaultyProxy

from conftest import VOCAB, small_model
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.launcher import held, shared_files
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weight_files import WeightFolder
from polyturn.infra.process import session_of, signal_session
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_sync import WeightSync

KINDS = {"vllm": VllmEngine, "sglang": SglangEngine}
POOL_LOG = "polyturn.engines"


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


@pytest.fixture
def server(kind, server_of):
    return server_of(kind)


def client(kind, url="", *, folder=None, supervisor=None, **options):
    model = ServedModel(vocab_size=VOCAB, max_context=2048, folder=folder)
    made = KINDS[kind](url, model, options=ServerOptions(kind=kind, **{"health_s": 20.0} | options), supervisor=supervisor)
    made._link._timeout_s = 20.0
    return made


@contextlib.asynccontextmanager
async def pool_of(model_folder, *engines, within_s=240, **options):
    pool = EnginePool(engines, files=WeightFolder(model_folder), **options)
    try:
        async with asyncio.timeout(within_s):  # no fault may hang a run
            yield pool
    finally:
        await pool.close()


def other_model(scale=0.05):
    """Return the small model after a step so large that its logprobs are surely others."""
    model = small_model()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def ask(name, *, max_tokens=80):
    return GenerateRequest(
        request_id=name, session_id=name, prompt_ids=range(1, 30), sampling=SamplingParams(max_tokens=max_tokens, seed=1)
    )


def start_all(pool, count, prefix="r", **sampling):
    return [asyncio.create_task(pool.generate(ask(f"{prefix}{i}", **sampling))) for i in range(count)]


async def until(condition, *, within_s=120.0):
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is a server's doing
            await asyncio.sleep(0.05)


def check(completion: Completion, *, model, length=80):
    """Every token is there once, with the logprob that the model gives it."""
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == len(completion.logprobs) == length
    ids = torch.tensor([[*range(1, 30), *completion.token_ids.tolist()]])
    with torch.no_grad():
        own = torch.log_softmax(model(ids).logits[0, 28:-1], -1).gather(1, ids[0, 29:, None])[:, 0]
    assert np.abs(own.numpy() - completion.logprobs).max() < 1e-4


def lines(caplog, text):
    return [record.message for record in caplog.records if text in record.message]


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
async def test_a_server_killed_in_the_middle_comes_back_with_the_weights_of_the_run_not_those_it_starts_with(
    kind, server, model_folder, caplog
):
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    trainer = local_policy(other_model(), optim=OptimSettings(lr=1e-3))
    launched = client(kind, supervisor=ServerSupervisor(launch_spec(kind, model_folder), max_restarts=1))
    async with pool_of(model_folder, client(kind, server), launched, within_s=2 * READY_S) as pool:
        await WeightSync(pool, trainer, WeightProbe(vocab_size=VOCAB)).start(3)
        asked = start_all(pool, 8, max_tokens=250)
        await until(lambda: pool.replicas[1].load == 4)
        await asyncio.sleep(0.15)
        killed = launched._supervisor.server
        inodes = held(session_of(killed.pid))
        memory = {path for inode, path in shared_files().items() if inode in inodes}
        assert memory  # both servers share memory between their processes
        signal_session(killed.pid, signal.SIGKILL)
        answers = [await task for task in asked]
        for answer in answers:
            check(answer, model=trainer.backend.model, length=250)
            assert answer.policy_versions == ((0, 3),)
        assert pool.num_lost == pool.num_redone >= 1
        assert pool.read_metrics()["engine/replicas_live"] == 1
        assert len(lines(caplog, "replica 1 is left out (EngineLostError")) == 1

        await until(lambda: pool.replicas[1].is_live, within_s=READY_S)
        check(await launched.generate(ask("after")), model=trainer.backend.model)
        assert len(lines(caplog, "replica 1 is back, with the weights of policy version 3 sent anew and verified")) == 1
        assert launched.num_restarts == 1
        assert not memory & set(shared_files().values())

        signal_session(launched._supervisor.server.pid, signal.SIGKILL)  # more often than it may
        for answer in [await task for task in start_all(pool, 4, prefix="new")]:
            check(answer, model=trainer.backend.model)
        await until(lambda: pool.replicas[1].is_gone)
        assert len(lines(caplog, "replica 1 is out for good")) == 1


async def test_a_server_that_takes_requests_and_falls_silent_is_left_and_used_again_once_it_speaks(
    kind, server, running_server, model_folder, caplog
):
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    pid = running_server(kind).pid
    async with pool_of(model_folder, client(kind, server, health_s=2.5)) as pool:
        await pool.update_weights(1, weights=small_model().state_dict())
        asked = start_all(pool, 4, max_tokens=250)
        await until(lambda: pool.replicas[0].load == 4)
        await asyncio.sleep(0.05)
        signal_session(pid, signal.SIGSTOP)
        try:
            await until(lambda: not pool.replicas[0].is_live, within_s=30)
            assert not any(task.done() for task in asked)  # there is no other server; they wait
        finally:
            signal_session(pid, signal.SIGCONT)
        for task in asked:
            check(await task, model=small_model(), length=250)
        assert pool.num_redone == 4
        assert len(lines(caplog, "is left out (EngineLostError: ")) == 1
        assert len(lines(caplog, "replica 0 is back, unharmed")) == 1


@pytest.mark.parametrize("status", [500, pytest.param(503, marks=pytest.mark.slow)])
async def test_errors_for_a_while_only_cost_time(kind, server, model_folder, status, caplog):
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    async with FaultyProxy(server) as proxy, pool_of(model_folder, client(kind, proxy.url)) as pool:
        await pool.update_weights(1, weights=small_model().state_dict())
        proxy.fails_with = status
        asked = start_all(pool, 6)
        await until(lambda: proxy.num_failed >= 8)
        proxy.fails_with = None
        for task in asked:
            check(await task, model=small_model())
        if status == 500:
            assert pool.num_lost >= pool.num_redone == 6
            assert "answered 500" in lines(caplog, "replica 0 is left out")[0]
            assert len(lines(caplog, "replica 0 is back, unharmed")) == 1
        else:  # "not now" is no loss
            assert pool.num_lost == 0
            assert pool.replicas[0].engine.num_busy >= 6


async def test_an_answer_that_trickles_is_done_elsewhere(kind, server, model_folder, caplog):
    async with (
        FaultyProxy(server) as proxy,
        pool_of(model_folder, client(kind, proxy.url, timeout_s=3.0), client(kind, server)) as pool,
    ):
        for replica in pool.replicas:
            await replica.engine.generate(ask("before", max_tokens=1))
        proxy.bytes_per_s = 100
        answers = [await task for task in start_all(pool, 4)]
        assert [len(answer.token_ids) for answer in answers] == [80] * 4
        assert pool.num_redone == 2
        assert "did not answer within 3 s" in lines(caplog, "replica 0 is left out")[0]


async def test_somebody_who_never_reads_an_answer_holds_nobody_up(kind, server, model_folder):
    async with pool_of(model_folder, client(kind, server)) as pool:
        await pool.update_weights(1, weights=small_model().state_dict())
        call = pool.replicas[0].engine._call(ask("unread", max_tokens=800), "unread")
        body = orjson.dumps(call.body, option=orjson.OPT_SERIALIZE_NUMPY)
        address = urlsplit(server)
        _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1)
        head = f"POST {call.path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        for task in start_all(pool, 4):
            check(await task, model=small_model())
        writer.close()


async def test_updates_during_requests_lose_nothing_and_every_token_knows_its_weights(kind, server, model_folder, caplog):
    caplog.set_level(logging.DEBUG, logger=POOL_LOG)
    old, new = small_model(), other_model()
    async with pool_of(model_folder, client(kind, server)) as pool:
        await pool.update_weights(0, weights=old.state_dict())
        asked = start_all(pool, 6, max_tokens=200)
        for version in range(1, 4):
            await asyncio.sleep(0.05)
            await pool.update_weights(version, weights=(new if version % 2 else old).state_dict())
        for task in asked:
            answer = await task
            assert len(answer.token_ids) == len(answer.logprobs) == 200
            versions = [version for _, version in answer.policy_versions]
            assert versions == sorted(versions) and versions[-1] <= 3
        assert pool.num_lost == 0
        check(await pool.generate(ask("after")), model=new)
        for version in range(1, 4):
            assert len(lines(caplog, f"policy version {version} reached 1 of 1 servers")) == 1


async def test_weights_that_somebody_else_put_there_are_found_and_replaced(kind, server, model_folder, caplog):
    """As after a restart by another hand: the server is well and serves what this run did not send."""
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    trainer = local_policy(other_model(), optim=OptimSettings(lr=1e-3))
    stranger = client(kind, server, folder=model_folder)
    async with pool_of(model_folder, client(kind, server)) as pool:
        await WeightSync(pool, trainer, WeightProbe(vocab_size=VOCAB)).start(0)
        await stranger.update_weights(0, weights=small_model().state_dict())
        answers = [await task for task in start_all(pool, 3)]
        for answer in answers:
            check(answer, model=trainer.backend.model)
        assert pool.num_stale == 3
        assert len(lines(caplog, "is left out (EngineError: it answers as policy version -1 and was given 0")) == 1
        assert len(lines(caplog, "is back, with the weights of policy version 0 sent anew and verified")) == 1
    await stranger.close()


async def test_an_interrupted_update_does_not_leave_the_server_paused(kind, server, model_folder):
    engine = client(kind, server, folder=model_folder)
    await engine.update_weights(0, weights=small_model().state_dict())
    load = engine.load_folder

    async def never(folder):
        await asyncio.sleep(60)

    engine.load_folder = never
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await engine.update_weights(1, weights=small_model().state_dict())
    engine.load_folder = load
    async with asyncio.timeout(30):
        check(await engine.generate(ask("after")), model=small_model())
    await engine.close()


async def test_what_a_server_says_about_itself_is_what_its_client_reports(kind, server):
    engine = client(kind, server)
    await engine.generate(dataclasses.replace(ask("r"), sampling=SamplingParams(max_tokens=1)))
    assert engine.capabilities.max_context == 2048
    assert engine.capabilities.seeded == (kind == "vllm")
    assert engine.capabilities.priorities
    await engine.close()
