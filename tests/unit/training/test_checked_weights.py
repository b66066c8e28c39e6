"""Checksums at the start, and of servers that come back, find what no logprob shows, and name the tensor."""

import copy
import itertools
from collections import Counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.server_side.polyturn_weights import checksums
from polyturn.engines.weight_checksums import Checked, ServerChecksums
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_sync import WeightSync
from support.refusals import refuses_later

VOCAB = 64
SMALL = {"vocab_size": VOCAB, "num_prompts": 2, "num_tokens": 16}
NORM = "model.norm.weight"


def make_policy() -> ModelPolicy:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1, "tie_word_embeddings": True}
    return local_policy(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads)), optim=OptimSettings(lr=1e-3))


class Server:
    """An engine with weights of its own, which may keep one tensor of those it is sent; it can say what it holds."""

    def __init__(self, policy: ModelPolicy) -> None:
        self.model = copy.deepcopy(policy.backend.model).eval()
        self._engine = EmbeddedEngine(self.model, num_slots=4)
        self.keeps = ""
        self.is_lost = False
        self.num_asked = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def update_weights(self, version, *, weights=None):
        if self.is_lost:
            raise EngineLostError("it was killed")
        kept = {name: tensor for name, tensor in weights.items() if name != self.keeps}
        await self._engine.update_weights(version, weights=kept)

    async def checksums(self) -> ServerChecksums | None:
        self.num_asked += 1
        return ServerChecksums.read([checksums(self.model.named_parameters())])


def step(policy: ModelPolicy) -> None:
    """Change one value by one bit, as an optimizer step at the end of a schedule may."""
    with torch.no_grad():
        policy.weights()[NORM].view(torch.int32)[3] ^= 1


async def test_bit_that_does_not_arrive_at_the_start_ends_the_run():
    policy = make_policy()
    server = Server(policy)
    assert isinstance(server, Checked)
    sync, load, pushes = WeightSync(server, policy, WeightProbe(**SMALL)), server.update_weights, itertools.count(1)

    async def leaky(version, *, weights):
        if next(pushes) == 3:  # after the true weights and the canary's
            step(policy)
            server.keeps = NORM
        await load(version, weights=weights)

    server.update_weights = leaky
    await refuses_later(lambda: sync.start(0), EngineError, "version 0:", "model.norm.weight")


async def test_server_is_asked_again_only_once_it_came_back():
    policy = make_policy()
    servers = [Server(policy), Server(policy)]
    pool = EnginePool(servers)
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    asked = [server.num_asked for server in servers]
    await sync.publish(1)
    assert [server.num_asked for server in servers] == asked
    servers[1].is_lost = True
    await sync.publish(2)
    servers[1].is_lost, servers[1].keeps = False, NORM
    step(policy)
    await sync.publish(3)
    assert not pool.replicas[1].is_live, "it was asked, and lacks the changed bit"
    servers[1].keeps = ""
    await sync.publish(4)
    assert pool.replicas[1].is_live
    assert [server.num_asked for server in servers] == [asked[0], asked[1] + 2]


async def test_server_lost_between_syncs_is_asked_at_the_next():
    policy = make_policy()
    servers = [Server(policy), Server(policy)]
    pool = EnginePool(servers)
    sync = WeightSync(pool, policy, WeightProbe(**SMALL))
    await sync.start(0)
    asked = [server.num_asked for server in servers]
    pool.exclude(pool.replicas[1], EngineLostError("it was killed"))
    await sync.publish(1)
    assert pool.replicas[1].is_live
    assert [server.num_asked for server in servers] == [asked[0], asked[1] + 1]


async def test_later_sync_reads_the_weights_once():
    policy = make_policy()
    reads = Counter()

    class Counted(dict):
        def __getitem__(self, name):
            reads[name] += 1
            return super().__getitem__(name)

        def items(self):
            reads.update(list(self))
            return super().items()

    server = Server(policy)
    sync = WeightSync(server, policy, WeightProbe(**SMALL), to_checkpoint=Counted)
    await sync.start(0)
    reads.clear()
    await sync.publish(1)
    assert reads[NORM] == 1


async def test_returning_server_is_held_to_the_checksums():
    policy = make_policy()
    server = Server(policy)
    sync = WeightSync(server, policy, WeightProbe(**SMALL))
    await sync.start(5)
    with torch.no_grad():
        server.model.model.norm.weight.view(torch.int32)[3] ^= 1
    await refuses_later(lambda: sync.verify(server, 5), EngineError, "version 5:", "model.norm.weight")


async def test_number_of_compared_tensors_is_logged(caplog):
    caplog.set_level("INFO", logger="polyturn.training")
    policy = make_policy()
    await WeightSync(Server(policy), policy, WeightProbe(**SMALL)).start(0)
    assert "11 of 11 tensors" in caplog.text
    silent = EmbeddedEngine(copy.deepcopy(policy.backend.model).eval(), num_slots=4)
    await WeightSync(silent, policy, WeightProbe(**SMALL)).start(0)
    assert "no checksums" in caplog.text
