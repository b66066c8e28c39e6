"""vLLM's weight transfer over gloo: a backend for the registry of its workers.

    --weight-transfer-config.backend gloo     started with this flag, a server joins the trainer's `engines/weights/group.py`

It is vLLM's nccl backend with another group; phases and loading are the same as between GPUs. It is for servers without a
GPU and for tests on a CPU. Tensors arrive in buckets, one call of `/update_weights` for each.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

_TIMEOUT = timedelta(seconds=120)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """The meeting point of the group; rank 0 is the trainer."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """A worker's end."""

    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info):
        """Join the trainer's group. The steps, names and stores must be those of `WeightGroup`."""
        parallel, size, name = self.parallel_config, init_info.world_size, init_info.group_name
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = TCPStore(init_info.master_address, init_info.master_port, size, is_master=False, timeout=_TIMEOUT)
        group, _ = _new_process_group_helper(
            size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=GroupName(name), timeout=_TIMEOUT
        )
        _world.pg_group_ranks[group] = {number: number for number in range(size)}
        self.model_update_group = group

    def update_weights(self, update_info):
        """Receive and load a bucket; no device work is pending afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        """Receive all tensors of a bucket, then load them."""
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            for dtype, shape in zip(update_info.dtype_names, update_info.shapes, strict=True)
        ]
        options = BroadcastOptions()
        options.rootRank = 0
        for work in [self.model_update_group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        self.model.load_weights(list(zip(update_info.names, tensors, strict=True)))

    def shutdown(self):
        """Leave the group."""
        if self.model_update_group is not None:
            torch.distributed.destroy_process_group(self.model_update_group)
            self.model_update_group = None
