"""vLLM's weight transfer over gloo: a backend for its trainer and worker registries.

    --weight-transfer-config.backend gloo     the worker's end, registered by the plug-in next to this file
    GlooTrainerInitInfo(...)                  the trainer's end, for vLLM's `WeightTransferTrainerFactory`

It is vLLM's nccl backend with another group; phases, handshake and loading are the same as between GPUs. It serves servers
without a GPU on other machines, and tests of the same code on a CPU.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import ClassVar

import torch
from torch.distributed import BroadcastOptions
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

_TIMEOUT = timedelta(seconds=120)


class _GlooGroup:
    """A separate process group; rank 0, the trainer, sends."""

    def __init__(self, info, rank):
        self._group = stateless_init_torch_distributed_process_group(
            info.master_address, info.master_port, rank, info.world_size, "gloo", timeout=_TIMEOUT
        )

    def broadcast(self, tensor):
        self._group.broadcast([tensor], BroadcastOptions()).wait()

    def destroy(self):
        self._group = None


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """A worker's end."""

    def init_transfer_engine(self, init_info):
        """Join the trainer's group."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = _GlooGroup(init_info, init_info.rank_offset + worker)

    def update_weights(self, update_info):
        """Receive and load the weights; no device work is pending afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        """Load each tensor as it arrives."""
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            self.model_update_group.broadcast(weight)
            self.model.load_weights([(name, weight)])


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):
    """The meeting point of the group."""

    backend: ClassVar[str] = "gloo"


class GlooTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):
    """The trainer's end."""

    init_info_cls = GlooTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        """Meet the workers."""
        engine = cls(client=client, source=source)
        info = NCCLWeightTransferInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(1) as beside:
            joining = beside.submit(client.init_weight_transfer_engine, asdict(info))
            engine.model_update_group = _GlooGroup(info, 0)
            joining.result()
        return engine

    def _broadcast(self, source, meta):
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.cpu().contiguous())


def register_trainer():
    """Register the trainer's end; a second call does nothing."""
    if "gloo" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerWeightTransferEngine)
