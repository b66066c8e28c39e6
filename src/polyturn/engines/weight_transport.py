"""The ways of new weights to a server, and which of them a server can be reached by.

    shared_memory   a checkpoint in this machine's memory, which the server reads     the server runs on this machine
    disk            a checkpoint in a folder that both see                            a shared file system
    ipc             handles of memory, in calls of the server, which opens it         the server runs on this machine
    http            the tensors themselves, in buckets, as calls of the server        wherever its address reaches
    gloo, nccl      a process group with the server's workers; a call names tensors,
                    and they are broadcast                                            a network between both, both ways

Every way starts from the same written copy, so that a server which comes back later gets exactly what the others got.
"""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Way = Literal["shared_memory", "disk", "ipc", "http", "gloo", "nccl"]
WAYS: tuple[Way, ...] = get_args(Way)
FOLDER_WAYS: frozenset[Way] = frozenset({"shared_memory", "disk"})
"""Those in which the server reads a folder by itself."""
GROUP_WAYS: frozenset[Way] = frozenset({"gloo", "nccl"})
BUCKET_BYTES = 256 * 2**20
"""So much is sent at once; a larger tensor goes alone."""


def choose_way(way: Way | Literal["auto", "group"], urls: Sequence[str], *, has_gpu: bool = False) -> Way:
    """Return the way to the servers at `urls`; none are servers that this process starts. `auto` is shared memory on this
    machine, and HTTP where a server is on another; `group` is nccl where this process has a GPU, else gloo.

    Raises:
        ConfigError: a server on another machine cannot read this one's memory, or there is no GPU for nccl.
    """
    far = [url for url in urls if not is_here(url)]
    if way == "auto":
        return "http" if far else "shared_memory"
    if way == "group":
        return "nccl" if has_gpu else "gloo"
    if way in {"shared_memory", "ipc"} and far:
        raise ConfigError(
            f"engine.weights is {way}, and {far[0]} is another machine, which cannot read this one's memory; use "
            "http, group, or disk with an engine.weights_folder that both machines see"
        )
    if way == "nccl" and not has_gpu:
        raise ConfigError("engine.weights is nccl, which needs a GPU here; use group, gloo, http or shared_memory")
    return way


def is_here(url: str) -> bool:
    """Return whether `url` names this machine. A container of its own with this machine's network looks the same."""
    host = urlsplit(url).hostname or ""
    if host in {"localhost", socket.gethostname()}:
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback or _is_own(str(address)) for address in found
    )


def _is_own(address: str) -> bool:
    """Return whether this machine has `address`: only its owner may listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(url: str) -> str:
    """Return this machine's address as the server at `url` can reach it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket sends nothing here; it only chooses the route
        return str(probe.getsockname()[0])


class TensorKind(NamedTuple):
    """The shape and type of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Number of bytes of its values."""
        return int(math.prod(self.shape) * self.dtype.itemsize)


class StreamedTensors(Mapping[str, "Tensor"]):
    """Tensors that lie elsewhere, on ranks or in files, and are brought here a bucket at a time, each when it is asked for.

    Whoever goes through them in order holds one bucket beside the one that is being brought.
    """

    def __init__(
        self,
        kinds: Mapping[str, TensorKind],
        bring: Callable[[Sequence[str]], Mapping[str, Tensor]],
        *,
        limit: int = BUCKET_BYTES,
        groups: Iterable[Sequence[str]] | None = None,
    ) -> None:
        """Bring name -> tensor by `bring`, at most `limit` bytes at once; names of one of `groups` always come together."""
        self.kinds = dict(kinds)
        self._bring = bring
        self._buckets: list[list[str]] = []
        size = 0
        for names in groups or ([name] for name in self.kinds):
            more = sum(self.kinds[name].nbytes for name in names)
            if not self._buckets or size + more > limit:
                self._buckets.append([])
                size = 0
            self._buckets[-1] += names
            size += more
        self._at = {name: number for number, names in enumerate(self._buckets) for name in names}
        self._held: tuple[int, Mapping[str, Tensor]] = (-1, {})

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield all of them, a bucket at a time, and hold none of it."""
        self._held = (-1, {})
        for names in self._buckets:
            yield self._bring(names)

    def __getitem__(self, name: str) -> Tensor:
        number, (at, held) = self._at[name], self._held
        if at != number:
            held, self._held = {}, (-1, {})  # frees the bucket before the next is brought: two may not fit
            held = self._bring(self._buckets[number])
            self._held = (number, held)
        return held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def first_names(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each name -> the first name of the same tensor: two names of one memory are a tied tensor."""
    if isinstance(weights, StreamedTensors):
        return {name: name for name in weights}
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {name: first.setdefault((t.data_ptr(), tuple(t.shape)), name) for name, t in weights.items()}


def buckets(weights: Mapping[str, Tensor], *, limit: int = BUCKET_BYTES) -> Iterator[Mapping[str, Tensor]]:
    """Yield `weights` in pieces of at most `limit` bytes, in order; those that are streamed as they come."""
    if isinstance(weights, StreamedTensors):
        yield from weights.buckets()
        return
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = {}, 0
        held[name] = tensor
        size += tensor.nbytes
    if held:
        yield held
