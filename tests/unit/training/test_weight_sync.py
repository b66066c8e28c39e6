"""A weight sync is verified: any group of parameters that does not arrive is named."""

import asyncio
import copy
import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.weight_files import WeightFolder
from polyturn.engines.weight_transfer import WeightTransfer
from polyturn.infra.aio import OneThread
from polyturn.training import lora
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.ranked import GatheredWeights
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of
from polyturn.training.weight_sync import SharedGpus, WeightSync
from support.refusals import refuses_later

VOCAB = 64
SMALL = {"vocab_size": VOCAB, "num_prompts": 2, "num_tokens": 16}


def make_policy(*, tied: bool, seed: int = 0) -> ModelPolicy:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        attention_bias=True,
        mlp_bias=True,
    )
    return local_policy(LlamaForCausalLM(config), optim=OptimSettings(lr=1e-3))


class Leaky:
    """An engine with weights of its own, which says that it took new weights and keeps some of the old ones."""

    def __init__(self, policy: ModelPolicy, *, keeps: str = "") -> None:
        model = copy.deepcopy(policy.backend.model).eval()
        self.engine = EmbeddedEngine(model, num_slots=4)
        self.keeps = keeps.split()
        self.is_lost = False

    def __getattr__(self, name):
        return getattr(self.__dict__["engine"], name)

    async def update_weights(self, version, *, weights=None):
        if self.is_lost:
            raise EngineLostError("it was killed")
        groups = groups_of(weights)
        kept = {weights[name].data_ptr() for group in self.keeps for name in groups.get(group, [])}
        await self.engine.update_weights(
            version, weights={name: value for name, value in weights.items() if value.data_ptr() not in kept}
        )


@pytest.mark.parametrize("tied", [True, False])
async def test_engine_that_takes_all_weights_passes(tied):
    policy = make_policy(tied=tied)
    before = {name: value.clone() for name, value in policy.weights().items()}
    sync = WeightSync(Leaky(policy), policy, WeightProbe(**SMALL))
    report = await sync.start(3)
    assert report.noise < 1e-4
    assert report.smallest_effect > 20 * report.noise
    assert all(torch.equal(value, before[name]) for name, value in policy.weights().items())
    assert await sync.publish(4) <= 3 * report.noise


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
async def test_group_that_does_not_arrive_is_named(tied):
    policy = make_policy(tied=tied)
    for name in policy.backend.weight_groups() if tied else ("model.embed_tokens.weight", "lm_head.weight"):
        with pytest.raises(EngineError, match=name.replace(".", r"\.").replace("*", r"\*")):
            await WeightSync(Leaky(policy, keeps=name), policy, WeightProbe(**SMALL)).start(0)


class WithAdapter:
    """An engine that is sent an adapter alone, in peft's names, and keeps some of the old one."""

    def __init__(self, model: LlamaForCausalLM, *, keeps: str = "") -> None:
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
    model = make_policy(tied=False).backend.model
    lora.add_lora(model, lora.LoraSettings(rank=4))
    policy = local_policy(model, optim=OptimSettings(lr=1e-3))
    before = {name: value.clone() for name, value in lora.adapter_tensors(model).items()}
    options = {"to_checkpoint": lora.as_peft, "adapter_only": True}
    sync = WeightSync(WithAdapter(model), policy, WeightProbe(**SMALL), **options)
    report = await sync.start(0)
    assert report.num_groups == 14 and report.canary < report.smallest_effect / 4
    assert all(torch.equal(value, before[name]) for name, value in lora.adapter_tensors(model).items())
    for tensor in lora.adapter_tensors(model).values():
        tensor.add_(0.1)
    assert await sync.publish(1) <= 3 * report.noise
    for part in ("q_proj.lora_A", "down_proj.lora_B"):
        with pytest.raises(EngineError, match=rf"but still has the old model\.layers\.\*\..*{part}\.default\.weight"):
            await WeightSync(WithAdapter(model, keeps=part), policy, WeightProbe(**SMALL), **options).start(0)


class Sleepy(Leaky):
    """A server on the trainer's GPU that loses weights in its sleep: what it is sent meanwhile, or all new ones."""

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
    return SharedGpus(WeightSync(pool, policy, WeightProbe(**SMALL)), pool, policy.backend)


async def test_canary_wakes_servers_that_sleep():
    policy = make_policy(tied=True)
    report = await shared_gpus(server := Sleepy(policy), policy).start(0)
    assert report.canary < report.smallest_effect / 4
    assert server.log == ["weights", "sleep", "weights", "sleep", "weights"]


@pytest.mark.parametrize("fault", ["loses the update", "keeps old weights"])
async def test_server_that_wakes_without_new_weights_ends_the_start(fault):
    policy = make_policy(tied=True)
    channel = shared_gpus(Sleepy(policy, fault=fault), policy)
    await refuses_later(lambda: channel.start(0), EngineError, "replica 0", "did not arrive", "engine.update")


async def test_no_group_is_blamed_where_several_are_stale():
    policy = make_policy(tied=False)
    with pytest.raises(EngineError, match="several groups of parameters did not arrive"):
        await WeightSync(
            Leaky(policy, keeps="model.embed_tokens.weight lm_head.weight"), policy, WeightProbe(**SMALL)
        ).start(0)


async def test_failed_canary_puts_the_weights_back():
    policy = make_policy(tied=True)
    before = {name: value.clone() for name, value in policy.weights().items()}
    with pytest.raises(EngineError):
        await WeightSync(Leaky(policy, keeps="model.norm.weight"), policy, WeightProbe(**SMALL)).start(0)
    assert all(torch.equal(value, before[name]) for name, value in policy.weights().items())


async def test_later_sync_that_does_not_arrive_ends_the_run():
    policy = make_policy(tied=True)
    engine = Leaky(policy)
    sync = WeightSync(engine, policy, WeightProbe(**SMALL))
    await sync.start(0)
    engine.keeps = ["model.embed_tokens.weight"]
    with torch.no_grad():
        policy.weights()["model.embed_tokens.weight"].mul_(1.5)
    await refuses_later(lambda: sync.publish(1), EngineError, "does not serve the weights")


async def test_episodes_go_on_while_the_trainer_scores():
    policy = make_policy(tied=True)
    sync = WeightSync(EnginePool([Leaky(policy)]), policy, WeightProbe(**SMALL))
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


@pytest.mark.parametrize("has_thread", [True, False])
async def test_weights_are_gathered_beside_an_engine_of_its_own(has_thread):
    """An engine that samples in turns with the event loop would see half of them."""
    threads = []

    class Ranks:
        def gather(self):
            threads.append(threading.current_thread() is threading.main_thread())

    class Channel:
        async def publish(self, version):
            threads.append(version)

    thread = OneThread("trainer") if has_thread else None
    await GatheredWeights(Ranks(), Channel(), thread=thread).publish(3)
    assert threads == [not has_thread, 3]


async def test_engine_with_an_old_version_tag_is_found():
    policy = make_policy(tied=True)
    engine = Leaky(policy)
    sync = WeightSync(engine, policy, WeightProbe(**SMALL))
    await sync.start(0)
    engine.update_weights = lambda version, *, weights=None: engine.engine.update_weights(0, weights=weights)
    await refuses_later(lambda: sync.publish(1), EngineError, "version 1 was sent, and the engine reports version")


async def test_each_server_of_a_pool_is_held_to_the_weights():
    policy = make_policy(tied=True)
    pool = EnginePool([Leaky(policy), Leaky(policy, keeps="model.norm.weight")])
    with pytest.raises(EngineError, match=r"replica 1 reports that it loaded .* still has the old model\.norm\.weight"):
        await WeightSync(pool, policy, WeightProbe(**SMALL)).start(0)


@pytest.mark.parametrize("fault", ["keeps old weights", "is lost"])
async def test_server_that_goes_wrong_or_is_lost_is_left_out(fault, caplog):
    policy = make_policy(tied=True)
    engines = [Leaky(policy), Leaky(policy)]
    pool = EnginePool(engines)
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    if fault == "is lost":
        engines[1].is_lost = True
    else:
        engines[1].keeps = ["model.embed_tokens.weight"]
    with torch.no_grad():
        policy.weights()["model.embed_tokens.weight"].mul_(1.5)
    assert await sync.publish(1) <= 3 * sync.noise
    assert [replica.is_live for replica in pool.replicas] == [True, False]
    assert len([record for record in caplog.records if "replica 1 is left out" in record.message]) == 1
    engines[0].is_lost = engines[1].is_lost = True
    await refuses_later(lambda: sync.publish(2), EngineError, "version 2")


async def test_returning_server_is_held_to_the_known_logprobs():
    policy = make_policy(tied=True)
    pool = EnginePool([Leaky(policy)])
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    await sync.publish(1)
    back = Leaky(policy)
    await back.engine.update_weights(1)
    await pool.verify(back, 1)
    with torch.no_grad():
        back.engine.module.model.norm.weight.mul_(1.1)
    await refuses_later(lambda: pool.verify(back, 1), EngineError, "it serves other weights")
    await refuses_later(lambda: pool.verify(back, 2), EngineError, "there is no record of version 2 yet")


class Sent(Leaky):
    """A server that is sent tensors, of which nothing is kept; it is lost with the weights of a version."""

    url, num_workers, num_restarts, lost_with = "", 1, 0, -1

    async def is_as_left(self):
        return None if self.is_lost else True

    async def revive(self):
        self.num_restarts += self.is_lost
        self.is_lost = False

    async def update_weights(self, version, *, weights=None):
        if version == self.lost_with and not self.num_restarts:
            self.is_lost = True
        if self.is_lost:
            raise EngineLostError("it was killed")
        with weights.given_to(self):
            await weights.load(self)
        await super().update_weights(version, weights=self.came)


class Link:
    def __init__(self, servers):
        self._servers = servers

    async def send(self, weights):
        for server in self._servers:
            server.came = {name: tensor.clone() for name, tensor in weights.items()}

    async def close(self):
        pass


def sending_pool(*engines):
    async def open_link(transport, servers):
        return Link(servers)

    return EnginePool(engines, files=WeightTransfer("gloo", open_link), patience_s=30.0)


async def test_last_server_lost_with_sent_weights_is_sent_them_again():
    policy = make_policy(tied=False)
    pool = sending_pool(server := Sent(policy))
    server.lost_with = 1
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    with torch.no_grad():
        policy.weights()["model.norm.weight"].mul_(1.2)
    assert await sync.publish(1) <= 3 * sync.noise
    assert server.num_restarts == 1 and pool.replicas[0].is_live
    await pool.close()


async def test_server_lost_between_syncs_is_sent_the_trainers_weights():
    policy = make_policy(tied=False)
    pool = sending_pool(Sent(policy), lost := Sent(policy))
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    await sync.publish(1)
    lost.is_lost, lost.came = True, None
    pool.exclude(pool.replicas[1], EngineLostError("it was killed"))
    async with asyncio.timeout(60):
        await pool.replicas[1].recovery
    assert pool.replicas[1].is_live and pool.replicas[1].version == 1
    assert torch.equal(lost.came["model.norm.weight"], policy.weights()["model.norm.weight"])
    policy.backend.optimizer.step_count += 1  # the next optimizer step
    with pytest.raises(EngineError, match="moved past policy version 1"):
        async with pool.current(1):
            pass
    await sync.publish(2)
    async with pool.current(2) as weights:
        assert weights.keys() == policy.weights().keys()
    await pool.close()


async def test_trainer_waits_for_a_given_up_recovery_to_stop_sending():
    policy, thread, order = make_policy(tied=False), OneThread("trainer"), []
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Slow(Link):
        async def send(self, weights):
            if server.num_restarts:
                begun.set()
                await may_end.wait()
                order.append("sent")
            await super().send(weights)

    async def open_link(transport, servers):
        return Slow(servers)

    pool = EnginePool([server := Sent(policy)], files=WeightTransfer("gloo", open_link), patience_s=30.0)
    await WeightSync(pool, policy, WeightProbe(**SMALL), thread=thread).start(0)
    server.is_lost = True
    pool.exclude(pool.replicas[0], EngineLostError("it was killed"))
    await asyncio.wait_for(begun.wait(), 60)
    closing = asyncio.create_task(pool.close())
    step = asyncio.ensure_future(thread.submit(lambda: order.append("step")))
    await asyncio.wait({closing, step}, timeout=0.1)
    may_end.set()
    await asyncio.gather(closing, step)
    assert order == ["sent", "step"]


async def test_only_server_may_die_during_a_sync_and_return(tmp_path):
    class Mortal(Leaky):
        num_restarts = 0

        async def revive(self):
            self.num_restarts += 1

        async def update_weights(self, version, *, weights=None):
            if version == 1 and not self.num_restarts:
                raise EngineLostError("it was killed")
            await super().update_weights(version, weights=load_file(weights.folder / "model.safetensors"))

    (tmp_path / "config.json").write_text("{}")
    policy = make_policy(tied=False)
    pool = EnginePool([Mortal(policy)], files=WeightFolder(tmp_path, root=tmp_path), patience_s=20.0)
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    with torch.no_grad():
        policy.weights()["model.norm.weight"].mul_(1.2)
    assert await sync.publish(1) <= 3 * sync.noise
    assert pool.replicas[0].is_live
    await pool.close()
