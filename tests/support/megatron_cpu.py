"""What megatron-core asks of CUDA where there is none, answered for tests: device, streams, copies to the CPU, dropout."""

import contextlib

import torch


class Stream:
    """A stream on which everything has happened already; its event is itself."""

    def record_event(self):
        return self

    def synchronize(self):
        pass


def on_cpu(tensor, as_numpy=False, record_stream=False):
    """Return a tensor as megatron-core has it after a copy from a GPU; it converts nothing that is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def pretend() -> None:
    """Let this process run megatron-core on the CPU; dropout is 0, so no random number is ever drawn."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import token_dispatcher

    from polyturn.training.megatron import placement as megatron

    megatron.require_no_cuda = lambda *args: None
    stream = Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.stream = contextlib.nullcontext
    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
