"""Context parallelism: a row of ranks splits the flat axis of a packed micro-batch, for conversations too long for one rank.

    flat axis of N tokens, padded to M     0 1 2 3 4 5 6 .        in 2n chunks for n ranks
    rank r has the chunks r and 2n-1-r     rank 0: 0 1 6 .        a token attends to earlier ones, so an early and a late
                                           rank 1: 2 3 4 5        chunk together are the same work for every rank

A rank computes each layer for its share of the tokens. Only attention gathers the keys and values of the whole axis, by the
all-gather of torch's context parallelism (`flex_cp_allgather`, whose backward pass is a reduce-scatter). So packed rows and
shared prefixes attend to the same tokens as on one rank. Source: Llama Team 2024 (The Llama 3 Herd of Models, section
3.3.2).

Every rank of the row gathers the results (such as log-probabilities) at all targets, and computes the same loss, so losses
that need a whole sequence work too. A rank's backward pass runs through its share of the tokens, so the ranks' gradients add
up to the gradient that one rank would compute (I7).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather

from polyturn.batching.layout import MicroBatch
from polyturn.batching.packing import Packing
from polyturn.core.errors import ConfigError


class ContextRow:
    """The ranks that split the tokens of the same micro-batches."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    @classmethod
    def of(cls, device: torch.device, *, size: int, inner: int = 1) -> ContextRow:
        """Return this rank's row of `size` ranks. `inner` tensor-parallel ranks at each position have the same tokens.

        Raises:
            ConfigError: the ranks do not divide into such rows.
        """
        ranks = dist.get_world_size()
        if ranks % (size * inner):
            each = f", each of {inner} ranks that split layers" if inner > 1 else ""
            product = f"{inner} times context_parallel" if inner > 1 else "context_parallel"
            raise ConfigError(
                f"train.distributed.context_parallel is {size}{each}, and there are {ranks} ranks; choose context_parallel "
                f"such that {product} divides the number of ranks"
            )
        return _row(dist.group.WORLD, device.type, size, inner)

    def cut(self, batch: MicroBatch) -> tuple[MicroBatch, ContextShare]:
        """Return this rank's share of the tokens and targets of a packed `batch`, and the description of the share."""
        assert batch.packing is not None
        share = ContextShare(self, batch.packing, batch.input_ids_BT.device)
        # Looked up on the CPU: on the device, the host would have to wait for the number of this rank's targets.
        local_S = share.local_M[batch.host_flat_S]
        mine = np.flatnonzero(local_S >= 0)
        share.mine, share.num_targets = share.upload(mine), len(local_S)
        return dataclasses.replace(
            batch,
            input_ids_BT=share.take(batch.input_ids_BT[0])[None],
            position_ids=share.take(batch.position_ids[0])[None],
            flat_S=share.upload(local_S[mine]),
            host_flat_S=local_S[mine],
            targets_S=batch.targets_S[share.mine],
            temperature_S=None if batch.temperature_S is None else batch.temperature_S[share.mine],
            support_SK=None if batch.support_SK is None else batch.support_SK[share.mine],
            routes_NLK=None if batch.routes_NLK is None else share.take(batch.routes_NLK, fill=-1),
            sample_S=batch.sample_S[mine],
        ), share


@functools.cache
def _row(world: Any, device_type: str, size: int, inner: int) -> ContextRow:
    # Cached by shape, because every process group starts threads: policy, critic and reference share one group.
    shape = (world.size() // (size * inner), size, inner)
    return ContextRow(init_device_mesh(device_type, shape, mesh_dim_names=("rows", "cp", "inner"))["cp"].get_group())


class ContextShare:
    """One rank's share of a flat axis."""

    def __init__(self, row: ContextRow, packing: Packing, device: torch.device) -> None:
        """Divide the axis of `packing` over `row`."""
        self._row = row
        self._device = device
        self._num_tokens = packing.num_tokens
        chunks = np.arange(2 * row.size * -(-packing.num_tokens // (2 * row.size))).reshape(2 * row.size, -1)
        order_M = np.concatenate([chunks[[rank, -1 - rank]].reshape(-1) for rank in range(row.size)])
        own_L = order_M.reshape(row.size, -1)[row.rank]
        local_M = np.full(len(order_M), -1)
        local_M[own_L] = np.arange(len(own_L))
        # Padding attends to itself, because attention to no token would be NaN. No real token attends to it, because it
        # comes last.
        until_M = np.concatenate([packing.until_N, np.full(len(order_M) - packing.num_tokens, len(order_M))])
        self.own_L = self.upload(own_L)
        """[L] for each token of this rank, its position on the flat axis; positions from N on are padding."""
        self.local_M = local_M
        """[M] index of each token among this rank's tokens; -1 for tokens of other ranks. In the machine's memory."""
        self.until_M = self.upload(until_M)
        """[M] token q attends to token k if k <= q < until[k]."""
        self.mine = torch.empty(0, dtype=torch.int64)
        """Indices of the targets that this rank's tokens predict."""
        self.num_targets = 0
        self._back_M = self.upload(np.argsort(order_M))

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        """Return an array as a tensor on the device, without waiting for the kernels before it."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def take(self, along_N: Tensor, *, fill: int = 0) -> Tensor:
        """Return [L, …] the entries of [N, …] at this rank's tokens, and `fill` at padding."""
        is_real = self.own_L < self._num_tokens
        taken = along_N[self.own_L.clamp(max=self._num_tokens - 1)]
        return torch.where(is_real.reshape(-1, *(1,) * (taken.dim() - 1)), taken, fill)

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values [1, KV, L, D] of all ranks into [1, KV, M, D]; the call is collective."""
        key, value = flex_cp_allgather(key, value, 2, self._row.group.group_name)
        return key.index_select(2, self._back_M), value.index_select(2, self._back_M)

    def sees(self, own: slice) -> Tensor:
        """Return [Q, M] whether each of the tokens `own` of this rank attends to each token of the axis."""
        at_Q1, every_M = self.own_L[own, None], torch.arange(len(self.until_M), device=self.own_L.device)
        return (every_M <= at_Q1) & (at_Q1 < self.until_M)

    def of_targets(self, values: Tensor) -> Tensor:
        """Return [S], the results at all targets, from the results at this rank's targets. All ranks must call it."""
        return self._summed(values, self.mine, self.num_targets)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return [N, …], the results at all tokens, from [L, …], those at this rank's tokens. All ranks must call it."""
        return self._summed(values, self.own_L, len(self.until_M))[: self._num_tokens]

    def _summed(self, values: Tensor, at: Tensor, count: int) -> Tensor:
        among = values.new_zeros(count, *values.shape[1:]).index_copy(0, at, values)
        return _Summed.apply(among, self._row.group)  # type: ignore[no-any-return]


class _Summed(torch.autograd.Function):
    """The sum over a row whose ranks all compute the same loss: the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = values.contiguous().clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
