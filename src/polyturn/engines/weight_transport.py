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
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args
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


def buckets(weights: Mapping[str, Tensor], *, limit: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """Yield `weights` in pieces of at most `limit` bytes, in order."""
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
