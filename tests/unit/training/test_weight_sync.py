"""A weight sync is verified: any group of parameters that does not arrive is named, by logprobs and by checksums."""

import asyncio
import copy
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.weights.checksums import Checked
from polyturn.engines.weights.folder import WeightFolder
from polyturn.infra.aio import OneThread
from polyturn.training import lora
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.weight_sync import SharedWeights, WeightSync
from support.refusals import refuses_later
from support.weight_server import NORM, ChecksumServer, WeightLink, WeightServer, probe, sending_pool, weight_policy


def scale(policy: ModelPolicy, name: str = NORM) -> None:
    with torch.no_grad():
        policy.weights()[name].mul_(1.5)


def flip_bit(parameter: torch.Tensor) -> None:
    """Change one value by one bit, as an optimizer step at the end of a schedule may."""
    with torch.no_grad():
        parameter.view(torch.int32)[3] ^= 1


@contextmanager
def weights_stay(policy: ModelPolicy) -> Iterator[None]:
    before = {name: value.clone() for name, value in policy.weights().items()}
    yield
    assert all(torch.equal(value, before[name]) for name, value in policy.weights().items())


@pytest.mark.parametrize("tied", [True, False])
async def test_engine_that_takes_all_weights_passes(tied):
    policy = weight_policy(tied=tied)
    sync = WeightSync(WeightServer(policy), policy, probe())
    with weights_stay(policy):
        report = await sync.start(3)
    assert report.noise < 1e-4
    assert report.smallest_effect > 20 * report.noise
    assert await sync.publish(4) <= 3 * report.noise


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
async def test_group_that_does_not_arrive_is_named(tied):
    policy = weight_policy(tied=tied)
    for name in policy.backend.weight_groups() if tied else ("model.embed_tokens.weight", "lm_head.weight", NORM):
        sync = WeightSync(WeightServer(policy, keeps=name), policy, probe())
        with weights_stay(policy):
            await refuses_later(lambda sync=sync: sync.start(0), EngineError, name)


async def test_no_group_is_blamed_where_several_are_stale():
    policy = weight_policy(tied=False)
    sync = WeightSync(WeightServer(policy, keeps="model.embed_tokens.weight lm_head.weight"), policy, probe())
    await refuses_later(lambda: sync.start(0), EngineError, "several groups of parameters did not arrive")


class WithAdapter:
    """An engine that is sent an adapter alone, in peft's names, and keeps some of the old one."""

    def __init__(self, model, *, keeps: str = "") -> None:
        self._model = copy.deepcopy(model).eval()
        self.engine = EmbeddedEngine(self._model, num_slots=4)
        self.keeps = keeps

    def __getattr__(self, name):
        return getattr(self.__dict__["engine"], name)

    async def update_weights(self, version, *, weights=None):
        own = lora.as_peft(lora.adapter_tensors(self._model))
        assert weights.keys() == own.keys()
        for name, value in weights.items():
            if not self.keeps or self.keeps not in name:
                own[name].copy_(value)
        await self.engine.update_weights(version)


async def test_adapter_is_proved_part_by_part():
    """Its second matrices are zero at the start, so that no change of a first one would show by itself."""
    model = weight_policy(tied=False).backend.model
    lora.add_lora(model, lora.LoraSettings(rank=4))
    policy = local_policy(model, optim=OptimSettings(lr=1e-3))
    before = {name: value.clone() for name, value in lora.adapter_tensors(model).items()}
    options = {"to_checkpoint": lora.as_peft, "adapter_only": True}
    sync = WeightSync(WithAdapter(model), policy, probe(), **options)
    report = await sync.start(0)
    assert report.num_groups == 14 and report.canary < report.smallest_effect / 4
    assert all(torch.equal(value, before[name]) for name, value in lora.adapter_tensors(model).items())
    for tensor in lora.adapter_tensors(model).values():
        tensor.add_(0.1)
    assert await sync.publish(1) <= 3 * report.noise
    for part in ("q_proj.lora_A", "down_proj.lora_B"):
        with pytest.raises(EngineError, match=rf"but still has the old model\.layers\.\*\..*{part}\.default\.weight"):
            await WeightSync(WithAdapter(model, keeps=part), policy, probe(), **options).start(0)


class Sleepy(WeightServer):
    """A server on the trainer's GPU that loses weights in its sleep: those sent meanwhile, or all new ones."""

    def __init__(self, policy, *, fault=""):
        super().__init__(policy)
        self.fault = fault
        self.log = []

    async def sleep(self):
        self.log.append("sleep")

    async def update_weights(self, version, *, weights=None):
        wakes = self.log[-1:] == ["sleep"]
        self.log.append("weights")
        if wakes and self.fault == "loses the update":  # its memory was released and is empty
            weights = {name: torch.zeros_like(value) for name, value in weights.items()}
        elif wakes and self.fault == "keeps old weights":
            weights = None
        await self.engine.update_weights(version, weights=weights)


def shared_gpus(server, policy):
    pool = EnginePool([server])
    return WeightSync(pool, policy, probe(), sleeper=pool)


async def test_canary_wakes_servers_that_sleep():
    policy = weight_policy()
    report = await shared_gpus(server := Sleepy(policy), policy).start(0)
    assert report.canary < report.smallest_effect / 4
    assert server.log == ["weights", "sleep", "weights", "sleep", "weights"]


@pytest.mark.parametrize("fault", ["loses the update", "keeps old weights"])
async def test_server_that_wakes_without_new_weights_ends_the_start(fault):
    policy = weight_policy()
    channel = shared_gpus(Sleepy(policy, fault=fault), policy)
    await refuses_later(lambda: channel.start(0), EngineError, "replica 0", "did not arrive", "engine.update")


async def test_later_sync_that_does_not_arrive_ends_the_run():
    policy = weight_policy()
    engine = WeightServer(policy)
    sync = WeightSync(engine, policy, probe())
    await sync.start(0)
    engine.keeps = "model.embed_tokens.weight"
    scale(policy, engine.keeps)
    await refuses_later(lambda: sync.publish(1), EngineError, "does not serve the weights")


async def test_engine_with_an_old_version_tag_is_found():
    policy = weight_policy()
    engine = WeightServer(policy)
    sync = WeightSync(engine, policy, probe())
    await sync.start(0)
    engine.update_weights = lambda version, *, weights=None: engine.engine.update_weights(0, weights=weights)
    await refuses_later(lambda: sync.publish(1), EngineError, "version 1 was sent, and the engine reports")


async def test_episodes_go_on_while_the_trainer_scores():
    policy = weight_policy()
    sync = WeightSync(EnginePool([WeightServer(policy)]), policy, probe())
    await sync.start(0)
    score, scores, may_end = policy.score, threading.Event(), threading.Event()

    def slow(samples):
        scores.set()
        assert may_end.wait(30), "the event loop was held up"
        return score(samples)

    policy.score = slow
    publishing = asyncio.create_task(sync.publish(1))
    assert await asyncio.to_thread(scores.wait, 30)
    may_end.set()
    assert await publishing <= 3 * sync.noise


async def test_weights_are_gathered_before_their_version_is_published():
    calls = []

    class Engine:
        async def update_weights(self, version):
            calls.append(version)

    channel = SharedWeights(Engine(), gather=lambda: calls.append("gather"))
    await channel.start(2)
    await channel.publish(3)
    assert calls == ["gather", 2, "gather", 3]


async def test_each_server_of_a_pool_is_held_to_the_weights():
    policy = weight_policy()
    pool = EnginePool([WeightServer(policy), WeightServer(policy, keeps=NORM)])
    sync = WeightSync(pool, policy, probe())
    await refuses_later(lambda: sync.start(0), EngineError, "replica 1", f"still has the old {NORM}")


@pytest.mark.parametrize("fault", ["keeps old weights", "is lost"])
async def test_server_that_goes_wrong_or_is_lost_is_left_out(fault, caplog):
    policy = weight_policy()
    engines = [WeightServer(policy), WeightServer(policy)]
    pool = EnginePool(engines)
    sync = WeightSync(pool, policy, probe())
    await sync.start(0)
    engines[1].is_lost, engines[1].keeps = fault == "is lost", "model.embed_tokens.weight"
    scale(policy, engines[1].keeps)
    assert await sync.publish(1) <= 3 * sync.noise
    assert [replica.is_live for replica in pool.replicas] == [True, False]
    assert "replica 1 is left out" in caplog.text
    engines[0].is_lost = engines[1].is_lost = True
    await refuses_later(lambda: sync.publish(2), EngineError, "version 2")


async def test_returning_server_is_held_to_the_known_logprobs():
    policy = weight_policy()
    sync = WeightSync(pool := EnginePool([WeightServer(policy)]), policy, probe())
    await sync.start(0)
    await sync.publish(1)
    back = WeightServer(policy)
    await back.engine.update_weights(1)
    await pool.verify(back, 1)
    with torch.no_grad():
        back.engine.module.model.norm.weight.mul_(1.1)
    await refuses_later(lambda: pool.verify(back, 1), EngineError, "the engine serves other weights")
    await refuses_later(lambda: pool.verify(back, 2), EngineError, "there is no record of version 2 yet")


async def test_returning_server_is_held_to_the_checksums():
    policy = weight_policy()
    sync = WeightSync(server := ChecksumServer(policy), policy, probe())
    await sync.start(5)
    with torch.no_grad():
        flip_bit(server.engine.module.model.norm.weight)
    await refuses_later(lambda: sync.verify(server, 5), EngineError, "version 5:", NORM)


@pytest.mark.parametrize("by", ["link", "folder"])
async def test_only_server_may_die_during_a_sync_and_return(by, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    policy = weight_policy(tied=False)
    server = WeightServer(policy, lost_with=1)
    folder = EnginePool([server], files=WeightFolder(tmp_path, root=tmp_path), patience_s=20.0)
    pool = sending_pool(server) if by == "link" else folder
    sync = WeightSync(pool, policy, probe())
    await sync.start(0)
    scale(policy)
    assert await sync.publish(1) <= 3 * sync.noise
    assert server.num_restarts == 1 and pool.replicas[0].is_live
    await pool.close()


async def test_server_lost_between_syncs_is_sent_the_trainers_weights():
    policy = weight_policy(tied=False)
    pool = sending_pool(WeightServer(policy), lost := WeightServer(policy))
    sync = WeightSync(pool, policy, probe())
    await sync.start(0)
    await sync.publish(1)
    lost.is_lost, lost.came = True, None
    pool.exclude(pool.replicas[1], EngineLostError("it was killed"))
    async with asyncio.timeout(60):
        await pool.replicas[1].recovery
    assert pool.replicas[1].is_live and pool.replicas[1].version == 1
    assert torch.equal(lost.came[NORM], policy.weights()[NORM])
    policy.backend.optimizer.step_count += 1  # the next optimizer step
    with pytest.raises(EngineError, match="moved past policy version 1"):
        async with pool.current(1):
            pass
    await sync.publish(2)
    async with pool.current(2) as weights:
        assert weights.keys() == policy.weights().keys()
    await pool.close()


async def test_trainer_waits_for_a_given_up_recovery_to_stop_sending():
    policy, thread, order = weight_policy(tied=False), OneThread("trainer"), []
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Slow(WeightLink):
        async def send(self, weights):
            if server.num_restarts:
                begun.set()
                await may_end.wait()
                order.append("sent")
            await super().send(weights)

    pool = sending_pool(server := WeightServer(policy), link=Slow)
    await WeightSync(pool, policy, probe(), thread=thread).start(0)
    server.is_lost = True
    pool.exclude(pool.replicas[0], EngineLostError("it was killed"))
    await asyncio.wait_for(begun.wait(), 60)
    closing = asyncio.create_task(pool.close())
    step = asyncio.ensure_future(thread.submit(lambda: order.append("step")))
    await asyncio.wait({closing, step}, timeout=0.1)
    may_end.set()
    await asyncio.gather(closing, step)
    assert order == ["sent", "step"]


# --- checksums find differences that no logprob shows


async def test_bit_that_does_not_arrive_at_the_start_ends_the_run():
    policy = weight_policy()
    server = ChecksumServer(policy)
    assert isinstance(server, Checked)
    sync, load, pushes = WeightSync(server, policy, probe()), server.update_weights, itertools.count(1)

    async def leaky(version, *, weights):
        if next(pushes) == 3:  # after the true weights and the canary's
            flip_bit(policy.weights()[NORM])
            server.keeps = NORM
        await load(version, weights=weights)

    server.update_weights = leaky
    await refuses_later(lambda: sync.start(0), EngineError, "version 0:", NORM)


async def test_server_is_asked_for_checksums_again_once_it_came_back():
    policy = weight_policy()
    servers = [ChecksumServer(policy), ChecksumServer(policy)]
    pool = EnginePool(servers)
    sync = WeightSync(pool, policy, probe())
    await sync.start(0)
    asked = [server.num_asked for server in servers]
    await sync.publish(1)
    assert [server.num_asked for server in servers] == asked
    servers[1].is_lost = True
    await sync.publish(2)
    servers[1].is_lost, servers[1].keeps = False, NORM
    flip_bit(policy.weights()[NORM])
    await sync.publish(3)
    assert not pool.replicas[1].is_live, "it was asked, and lacks the changed bit"
    servers[1].keeps = ""
    await sync.publish(4)
    assert pool.replicas[1].is_live
    assert [server.num_asked for server in servers] == [asked[0], asked[1] + 2]
    pool.exclude(pool.replicas[1], EngineLostError("it was killed"))  # between two syncs
    await sync.publish(5)
    assert pool.replicas[1].is_live
    assert [server.num_asked for server in servers] == [asked[0], asked[1] + 3]


async def test_later_sync_reads_the_weights_once():
    policy = weight_policy()
    reads = Counter()

    class Counted(dict):
        def __getitem__(self, name):
            reads[name] += 1
            return super().__getitem__(name)

        def items(self):
            reads.update(list(self))
            return super().items()

    sync = WeightSync(ChecksumServer(policy), policy, probe(), to_checkpoint=Counted)
    await sync.start(0)
    reads.clear()
    await sync.publish(1)
    assert reads[NORM] == 1


async def test_number_of_compared_tensors_is_logged(caplog):
    caplog.set_level("INFO", logger="polyturn.training")
    policy = weight_policy()
    await WeightSync(ChecksumServer(policy), policy, probe()).start(0)
    count = len({tensor.data_ptr() for tensor in policy.weights().values()})
    assert f"{count} of {count} tensors" in caplog.text
    await WeightSync(WeightServer(policy), policy, probe()).start(0)
    assert "no checksums" in caplog.text
