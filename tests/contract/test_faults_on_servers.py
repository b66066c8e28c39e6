"""Real servers that die, hang, fail, answer slowly or forget their weights: no request is lost, and no call hangs.

Nothing here races a server: a server that must be lost in the middle of its answers is stopped (SIGSTOP) before it is
asked. The kernel still accepts the connections, so that it holds the requests and cannot answer them.
"""

import asyncio
import contextlib
import logging
import signal
from urllib.parse import urlsplit

import pytest
from engine_servers import CLIENTS, READY_S, launch_spec, on_servers
from faulty_proxy import FaultyProxy

from polyturn.core.generation import Completion, FinishReason
from polyturn.engines.launcher import files_in_use, shared_files
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.weights.folder import WeightFolder
from polyturn.infra.process import session_of, signal_session
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_sync import WeightSync
from support.served_model import VOCAB, ask, changed_model, logprob_gaps, small_model

pytestmark = pytest.mark.engines

POOL_LOG = "polyturn.engines"


@pytest.fixture(params=on_servers())
def kind(request):
    return request.param


@pytest.fixture
def server(kind, server_of):
    return server_of(kind)


def client(kind, url="", *, folder=None, supervisor=None, **options):
    model = ServedModel(vocab_size=VOCAB, max_context=2048, folder=folder)
    options = ServerOptions(kind=kind, **{"health_s": 60.0} | options)
    return CLIENTS[kind](url, model, options=options, supervisor=supervisor)


@contextlib.asynccontextmanager
async def pool_of(model_folder, *engines, within_s=240, **options):
    pool = EnginePool(engines, files=WeightFolder(model_folder), **options)
    try:
        async with asyncio.timeout(within_s):  # no fault may hang a run
            yield pool
    finally:
        await pool.close()


@contextlib.contextmanager
def stopped(pid):
    """Stop the processes of a server, and let them go on at the end unless they were killed."""
    signal_session(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_session(pid, signal.SIGCONT)


def start_all(pool, count, *, prefix="r", max_tokens=80):
    requests = [ask(f"{prefix}{i}", max_tokens=max_tokens, seed=1) for i in range(count)]
    return [asyncio.create_task(pool.generate(request)) for request in requests]


async def until(condition, *, within_s=120.0):
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - a server decides when it holds
            await asyncio.sleep(0.05)


def check(completion: Completion, *, model, length=80):
    """Check that every token is there once, with the logprob that the model gives it."""
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == len(completion.logprobs) == length
    assert logprob_gaps(model, completion).max() < 1e-4


def num_lines(caplog, text):
    return sum(text in record.message for record in caplog.records)


def memory_of(pid):
    """Return the shared memory that the processes of a server hold."""
    inodes = files_in_use(session_of(pid))
    return {path for inode, path in shared_files().items() if inode in inodes}


@pytest.mark.timeout(3 * READY_S, func_only=True)  # it starts a server twice
@pytest.mark.parametrize("kind", on_servers(slow="sglang"))
async def test_killed_server_returns_with_run_weights(kind, server, model_folder, caplog):
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    trainer = local_policy(changed_model(), optim=OptimSettings(lr=1e-3))
    model = trainer.backend.model
    supervisor = ServerSupervisor(launch_spec(kind, model_folder), max_restarts=1)
    launched = client(kind, supervisor=supervisor)
    async with pool_of(model_folder, client(kind, server), launched, within_s=2 * READY_S) as pool:
        replica = pool.replicas[1]
        await WeightSync(pool, trainer, WeightProbe(vocab_size=VOCAB)).start(3)
        memory = memory_of(supervisor.server.pid)
        assert memory, "both servers share memory between their processes"
        with stopped(supervisor.server.pid):
            asked = start_all(pool, 8, max_tokens=250)
            await until(lambda: replica.load == 4)
            await asyncio.sleep(0.5)  # until they are sent; nothing can answer them meanwhile
            signal_session(supervisor.server.pid, signal.SIGKILL)
            for task in asked:
                answer = await task
                check(answer, model=model, length=250)
                assert answer.policy_versions == ((0, 3),)
        assert pool.num_lost >= 4 and pool.num_redone == 4
        assert num_lines(caplog, "replica 1 is left out (EngineLostError")

        await until(lambda: replica.is_live, within_s=READY_S)
        check(await launched.generate(ask("after", max_tokens=80)), model=model)
        assert num_lines(caplog, "replica 1 is back, with the weights of policy version 3 sent anew and verified") == 1
        assert launched.num_restarts == 1
        assert not memory & set(shared_files().values())

        signal_session(supervisor.server.pid, signal.SIGKILL)  # more often than it may be started again
        for task in start_all(pool, 4, prefix="new"):
            check(await task, model=model)
        await until(lambda: replica.is_gone)
        assert num_lines(caplog, "replica 1 is out for good") == 1


async def test_silent_server_is_left_out_until_it_speaks(kind, server, running_server, model_folder, caplog):
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    async with pool_of(model_folder, client(kind, server, health_s=3)) as pool:
        await pool.update_weights(1, weights=small_model().state_dict())
        with stopped(running_server(kind).pid):
            asked = start_all(pool, 4, max_tokens=250)
            await until(lambda: not pool.replicas[0].is_live)
            assert not any(task.done() for task in asked), "there is no other server, so that they wait"
        for task in asked:
            check(await task, model=small_model(), length=250)
        assert pool.num_redone == 4
        assert num_lines(caplog, "is left out (EngineLostError: ")
        assert num_lines(caplog, "replica 0 is back, unharmed")


@pytest.mark.parametrize("status", [500, pytest.param(503, marks=pytest.mark.slow)])
async def test_server_that_fails_for_a_while_costs_only_time(kind, server, model_folder, status, caplog):
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    async with FaultyProxy(server) as proxy, pool_of(model_folder, client(kind, proxy.url)) as pool:
        await pool.update_weights(1, weights=small_model().state_dict())
        proxy.fails_with = status
        asked = start_all(pool, 6)
        await until(lambda: pool.num_lost == 6 if status == 500 else proxy.num_failed >= 8)
        proxy.fails_with = None
        for task in asked:
            check(await task, model=small_model())
        if status == 500:
            assert pool.num_redone == 6
            assert num_lines(caplog, "answered 500") and num_lines(caplog, "replica 0 is back, unharmed")
        else:  # a server that is full has lost nothing
            assert pool.num_lost == 0
            assert pool.replicas[0].engine.num_busy >= 6


async def test_trickling_answer_is_asked_of_another_server(kind, server, model_folder, caplog):
    async with (
        FaultyProxy(server) as proxy,
        pool_of(model_folder, client(kind, proxy.url, timeout_s=3.0), client(kind, server)) as pool,
    ):
        await pool.update_weights(0)  # asks both what they can do, without the limit of 3 s
        proxy.bytes_per_s = 100
        for task in start_all(pool, 4):
            assert len((await task).token_ids) == 80
        assert pool.num_redone == 2
        assert num_lines(caplog, "did not answer within 3 s")


async def test_unread_answer_does_not_block_other_requests(kind, server, model_folder):
    async with FaultyProxy(server) as proxy, pool_of(model_folder, client(kind, proxy.url)) as pool:
        await pool.update_weights(1, weights=small_model().state_dict())
        await pool.generate(ask("unread", max_tokens=800))
        path, body = proxy.last
        address = urlsplit(server)
        _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1)
        head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        for task in start_all(pool, 4):
            check(await task, model=small_model())
        writer.close()


async def test_updates_during_requests_lose_no_token(kind, server, model_folder, caplog):
    caplog.set_level(logging.DEBUG, logger=POOL_LOG)
    old, new = small_model(), changed_model()
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
        check(await pool.generate(ask("after", max_tokens=80)), model=new)
        for version in range(1, 4):
            assert num_lines(caplog, f"policy version {version} reached 1 of 1 servers") == 1


async def test_foreign_weights_are_found_and_replaced(kind, server, model_folder, caplog):
    """As after a restart by another hand: the server is well and serves weights that this run did not send."""
    caplog.set_level(logging.INFO, logger=POOL_LOG)
    trainer = local_policy(changed_model(), optim=OptimSettings(lr=1e-3))
    stranger = client(kind, server, folder=model_folder)
    async with pool_of(model_folder, client(kind, server)) as pool:
        await WeightSync(pool, trainer, WeightProbe(vocab_size=VOCAB)).start(0)
        await stranger.update_weights(0, weights=small_model().state_dict())
        for answer in await asyncio.gather(*start_all(pool, 3)):
            check(answer, model=trainer.backend.model)
        assert pool.num_stale == 3
        assert num_lines(caplog, "is left out (EngineError: it answers as policy version -1 and was sent 0") == 1
        assert num_lines(caplog, "is back, with the weights of policy version 0 sent anew and verified") == 1
    await stranger.close()


async def test_interrupted_update_does_not_leave_the_server_paused(kind, server, model_folder):
    engine = client(kind, server, folder=model_folder)
    await engine.update_weights(0, weights=small_model().state_dict())
    load, is_loading = engine.load_folder, asyncio.Event()

    async def never(folder):
        is_loading.set()
        await asyncio.Event().wait()

    engine.load_folder = never
    update = asyncio.create_task(engine.update_weights(1, weights=small_model().state_dict()))
    async with asyncio.timeout(120):
        await is_loading.wait()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    engine.load_folder = load
    async with asyncio.timeout(120):
        check(await engine.generate(ask("after", max_tokens=80)), model=small_model())
    await engine.close()


async def test_client_reports_the_capabilities_of_its_server(kind, server):
    engine = client(kind, server)
    await engine.generate(ask(max_tokens=1))
    assert engine.capabilities.max_context == 2048
    assert engine.capabilities.seeded == (kind == "vllm")
    await engine.close()
