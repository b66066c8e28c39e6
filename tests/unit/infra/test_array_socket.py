"""Objects with large arrays reach another process, which reads the arrays where they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from polyturn.infra.array_socket import ArraySocket, Packed

Ends = tuple[ArraySocket, ArraySocket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair = ArraySocket(one), ArraySocket(other)
    yield pair
    for end in pair:
        end.close()


def sent(ends: Ends, value: object) -> object:
    packed = Packed.of(value)
    ends[0].send(packed)
    packed.close()
    return ends[1].receive()


def test_arrays_and_tensors_arrive_as_they_were(ends: Ends) -> None:
    large = np.arange(10_000)
    large.flags.writeable = False
    tensors = {"bfloat16": torch.randn(99, 101).bfloat16(), "scalar": torch.tensor(3.0), "strided": torch.randn(80, 90).T}
    arrived = sent(ends, {"large": large, "small": np.arange(3), "tensors": tensors, "function": lambda x: x + 1})
    assert isinstance(arrived, dict)
    assert (arrived["large"] == large).all() and not arrived["large"].flags.writeable, "a sample's arrays stay read-only"
    assert arrived["small"].tolist() == [0, 1, 2] and arrived["function"](1) == 2
    for name, tensor in tensors.items():
        assert torch.equal(arrived["tensors"][name], tensor) and arrived["tensors"][name].dtype == tensor.dtype


def test_receiver_changes_its_own_copy_alone(ends: Ends) -> None:
    packed = Packed.of(torch.nn.Linear(64, 64))
    ends[0].send(packed)
    ends[0].send(packed)
    packed.close()
    first, second = ends[1].receive(), ends[1].receive()
    before = second.weight.clone()
    with torch.no_grad():
        first.weight.add_(1)
    assert torch.equal(second.weight, before)


def test_large_arrays_leave_no_descriptor(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    packed = Packed.of([np.zeros(1_000_000)])
    ends[0].send(packed)
    packed.close()
    assert len(ends[1].receive()[0]) == 1_000_000
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_end_that_is_gone_is_an_error(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(ConnectionError):
        ends[1].receive()
