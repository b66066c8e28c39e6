"""Transports of new weights to servers, and the buckets in which tensors are sent.

folder       the server reads a checkpoint in this machine's memory, or in a shared folder
gloo, nccl   the server's transfer: tensors are broadcast to all servers at once    needs a network in both directions
adapter      like folder, with only the adapter; the server adds it to its base weights; SGLang also takes it over HTTP
ipc          the server's transfer: it opens the trainer's memory                       needs the same GPU
"""

from __future__ import annotations

import functools
import ipaddress
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
Transport = Literal["folder", "gloo", "nccl", "ipc", "adapter"]
BUCKET_BYTES = 256 * 2**20
"""Largest size of a bucket, in bytes; a larger tensor is a bucket by itself."""


def choose_transport(
    transport: Transport | Literal["auto"], urls: Sequence[str], *, has_gpu: bool = False, is_shared: bool = False
) -> Transport:
    """Return the transport to the servers at `urls`; empty for servers that this process starts. `auto` is folder if all
    servers can read it, otherwise nccl if the trainer has a GPU, otherwise gloo.

    Args:
        transport: The configured transport.
        urls: Addresses of running servers.
        has_gpu: Whether the trainer has a GPU.
        is_shared: Whether other machines see the folder too.

    Raises:
        ConfigError: a server on another machine cannot read this one's memory, or there is no GPU for nccl or ipc.
    """
    far = [] if is_shared else [url for url in urls if not is_here(url)]
    if transport == "auto":
        return "folder" if not far else "nccl" if has_gpu else "gloo"
    if transport in {"folder", "adapter", "ipc"} and far:
        raise ConfigError(
            f"engine.weights is {transport}, and {far[0]} is on another machine, which cannot read this machine's "
            "memory; use nccl or gloo, or an engine.weights_folder that both machines see"
        )
    if transport in {"nccl", "ipc"} and not has_gpu:
        raise ConfigError(f"engine.weights is {transport}, which needs a GPU for the trainer; use folder or gloo")
    return transport


def is_here(url: str) -> bool:
    """Return whether `url` is on this machine. A container with this machine's network looks the same."""
    host = urlsplit(url).hostname or ""
    if host in {"localhost", socket.gethostname()}:
        return True
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback or _is_own(str(address)) for address in addresses
    )


def _is_own(address: str) -> bool:
    """Return whether this machine has `address`, by trying to listen on it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(urls: Sequence[str]) -> str:
    """Return an address of this machine that the servers at `urls` can reach: not loopback if a server is on another
    machine."""
    parts = urlsplit(next((url for url in urls if not is_here(url)), urls[0]))
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # connecting a datagram socket sends nothing; it only chooses the route
        return str(probe.getsockname()[0])


class TensorKind(NamedTuple):
    """The shape and type of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Number of bytes of its values."""
        return int(math.prod(self.shape) * self.dtype.itemsize)


class UseThere(Protocol):
    """Calls a function in the process that has the tensors of a stream."""

    def __call__(self, pieces: Sequence[Sequence[str]], use: Callable[..., Any]) -> Any:
        """Return the result of `use(tensors, group_end)` there. `tensors` yields name -> tensor for each of `pieces`, and
        `group_end` is the `GroupEnd` of that process. Both `use` and its result are pickled."""
        ...


class StreamedTensors(Mapping[str, "Tensor"]):
    """Tensors on ranks, in files or in this process, fetched lazily in buckets.

    Iterating in order keeps at most two buckets in memory.
    """

    def __init__(
        self,
        kinds: Mapping[str, TensorKind],
        bring: Callable[[Sequence[str]], Mapping[str, Tensor]],
        *,
        limit: int = BUCKET_BYTES,
        groups: Iterable[Sequence[str]] | None = None,
        use_there: UseThere | None = None,
    ) -> None:
        """Fetch name -> tensor with `bring`, at most `limit` bytes at once; names of a group are always fetched together.

        `use_there` is None if this process fetches the tensors itself.
        """
        self.kinds = dict(kinds)
        self.use_there = use_there
        self.pieces = names_of_buckets(self.kinds, limit=limit, groups=groups)
        """The names in each bucket."""
        self._bring = bring
        self._at = {name: number for number, names in enumerate(self.pieces) for name in names}
        self._held: tuple[int, Mapping[str, Tensor]] = (-1, {})

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield all tensors in buckets, without keeping a reference."""
        self._held = (-1, {})
        for names in self.pieces:
            yield self._bring(names)

    def over(self, use: Callable[[Iterator[Mapping[str, Tensor]]], _T]) -> _T:
        """Return the result of `use` on all buckets, called in the process that has the tensors."""
        if self.use_there is None:
            return use(self.buckets())
        result: _T = self.use_there(self.pieces, functools.partial(_on_tensors, use))
        return result

    def __getitem__(self, name: str) -> Tensor:
        number, (at, bucket) = self._at[name], self._held
        if at != number:
            bucket, self._held = {}, (-1, {})  # frees the bucket before fetching the next: two may not fit
            bucket = self._bring(self.pieces[number])
            self._held = (number, bucket)
        return bucket[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _on_tensors(use: Callable[[Iterator[Mapping[str, Tensor]]], _T], tensors: Iterator[Mapping[str, Tensor]], _: Any) -> _T:
    return use(tensors)


def names_of_buckets(
    kinds: Mapping[str, TensorKind], *, limit: int = BUCKET_BYTES, groups: Iterable[Sequence[str]] | None = None
) -> list[list[str]]:
    """Return the names of `kinds` in buckets of at most `limit` bytes, in order; names of a group stay together."""
    pieces: list[list[str]] = []
    size = 0
    for names in groups or ([name] for name in kinds):
        more = sum(kinds[name].nbytes for name in names)
        if not pieces or size + more > limit:
            pieces.append([])
            size = 0
        pieces[-1] += names
        size += more
    return pieces


def streamed(weights: Mapping[str, Tensor], *, limit: int = BUCKET_BYTES) -> StreamedTensors:
    """Return a stream unchanged, and tensors of this process as a stream: each once, under the first of its tied names.

    Names with the same memory are tied.
    """
    if isinstance(weights, StreamedTensors):
        return weights
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in weights.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    own = {name: weights[name].detach() for name in first.values()}
    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
    return StreamedTensors(kinds, functools.partial(_chosen, own), limit=limit)


def _chosen(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}
