"""WeightServer: an engine with its own copy of a policy's weights, which can keep old tensors, be lost and come back.

server = WeightServer(policy, keeps="model.norm.weight")     reports that it took all new weights, and has an old norm
pool = sending_pool(server)                                  the trainer sends tensors, of which nothing is kept
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from polyturn.core.errors import EngineLostError
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.server_side.polyturn_weights import checksums
from polyturn.engines.weights.checksums import ServerChecksums
from polyturn.engines.weights.folder import WrittenWeights
from polyturn.engines.weights.transfer import SentWeights, WeightTransfer
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of

VOCAB = 64
NORM = "model.norm.weight"


def probe() -> WeightProbe:
    return WeightProbe(vocab_size=VOCAB, num_prompts=2, num_tokens=16)


def weight_policy(*, tied: bool = True) -> ModelPolicy:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}
    config = LlamaConfig(vocab_size=VOCAB, initializer_range=0.1, tie_word_embeddings=tied, **sizes, **heads)
    return local_policy(LlamaForCausalLM(config), optim=OptimSettings(lr=1e-3))


class WeightServer:
    """A server that is sent tensors, a folder, or a transfer over a link."""

    url, num_workers = "", 1

    def __init__(self, policy: ModelPolicy, *, keeps: str = "", lost_with: int = -1) -> None:
        """Copy the policy's weights.

        Args:
            keeps: Groups of parameters of which the server keeps the old ones, separated by spaces.
            lost_with: The version with which it is lost, unless it was started again before.
        """
        self.engine = EmbeddedEngine(copy.deepcopy(policy.backend.model).eval(), num_slots=4)
        self.keeps, self.lost_with = keeps, lost_with
        self.is_lost = False
        self.num_restarts = 0
        self.came: Mapping[str, torch.Tensor] | None = None
        """The tensors that a link brought last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["engine"], name)

    async def is_as_left(self) -> bool | None:
        return None if self.is_lost else True

    async def revive(self) -> None:
        self.num_restarts += self.is_lost
        self.is_lost = False

    async def update_weights(self, version: int, *, weights: Any = None) -> None:
        self.is_lost |= version == self.lost_with and not self.num_restarts
        if self.is_lost:
            raise EngineLostError("it was killed")
        if isinstance(weights, WrittenWeights):
            weights = load_file(weights.folder / "model.safetensors")
        elif isinstance(weights, SentWeights):
            with weights.given_to(self):
                await weights.load(self)
            weights = self.came
        groups = groups_of(weights) if self.keeps else {}
        kept = {weights[name].data_ptr() for group in self.keeps.split() for name in groups.get(group, [])}
        loaded = {name: tensor for name, tensor in weights.items() if tensor.data_ptr() not in kept}
        await self.engine.update_weights(version, weights=loaded)


class ChecksumServer(WeightServer):
    """A server that also reports checksums of its weights."""

    num_asked = 0

    async def checksums(self) -> ServerChecksums | None:
        self.num_asked += 1
        return ServerChecksums.read([checksums(self.engine.module.named_parameters())])


class WeightLink:
    """A transfer that copies the tensors to the servers."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self.servers = servers

    async def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        for server in self.servers:
            server.came = {name: tensor.clone() for name, tensor in weights.items()}

    async def close(self) -> None:
        pass


def sending_pool(*servers: WeightServer, link: type[WeightLink] = WeightLink) -> EnginePool:
    async def open_link(transport: Any, receivers: Sequence[Any], weights: Any) -> WeightLink:
        return link(receivers)

    return EnginePool(servers, files=WeightTransfer("gloo", open_link), patience_s=30.0)
