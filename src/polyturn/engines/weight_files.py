"""New weights for a server: a folder with safetensors files, in shared memory if the system has it.

    with WeightFolder(model_folder) as files:
        files.write({"model.embed_tokens.weight": tensor, …}).folder      the server reads it

The folder also holds the model's config, because servers read a checkpoint, not a file. Each write gets a folder of its own
and removes the one before it, so that a server which is still reading never sees half of the next one. Of adapters the
latest few stay: servers read the adapter of a request from its folder whenever it is not in their memory.

A killed process leaves its folder behind, and the next process that makes one removes folders without an owner. The owner
holds a lock on a file in the folder, which the system releases with the process. Process ids would not do: they are reused,
and differ between containers.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol

from polyturn.engines.launcher import RunningServer
from polyturn.engines.weight_transport import StreamedTensors, buckets, untied

if TYPE_CHECKING:
    from torch import Tensor

_IN_MEMORY = Path("/dev/shm")
_PREFIX = "polyturn-weights-"
_OWNER = "owner"
"""The file that the owner of a folder has locked."""
_FORMER_ADAPTERS = 2
"""So many adapters before the latest stay. A request that reaches a server during an update may have the adapter before it,
and is ended by the next update, which begins with the writing of another."""


class FolderServer(Protocol):
    """A server that loads weights from a folder."""

    @property
    def process(self) -> RunningServer | None:
        """The server's process, if its client started it."""
        ...

    async def load_folder(self, folder: Path) -> None:
        """Let it load the checkpoint in `folder`.

        Raises:
            EngineError: it cannot.
        """
        ...

    async def load_adapter(self, folder: Path) -> None:
        """Let it load the adapter in `folder`, in place of the one before.

        Raises:
            EngineError: it cannot.
        """
        ...


class ServerWeights(ABC):
    """One set of weights for servers."""

    is_all_or_nothing: ClassVar[bool] = True
    """Whether a server keeps its old weights if loading fails."""

    def given_to(self, server: Any) -> AbstractContextManager[None]:
        """Enter before the first wait of a server's update, and leave at its end."""
        return nullcontext()

    @abstractmethod
    async def load(self, server: Any) -> None:
        """Let a paused server load them.

        Raises:
            EngineError: it cannot.
        """

    async def settle(self) -> None:
        """Let go of the trainer's tensors, which are about to change."""
        return


class WrittenWeights(ServerWeights):
    """Weights in a checkpoint, or an adapter in peft's format."""

    def __init__(self, folder: Path, *, is_adapter: bool = False) -> None:
        self.folder = folder
        self._is_adapter = is_adapter

    async def folder_at(self, server: RunningServer | None) -> Path:
        """Return the folder as `server` sees it, which was started by its client, or not (None)."""
        return self.folder

    async def load(self, server: FolderServer) -> None:
        """Let a server read them."""
        folder = await self.folder_at(server.process)
        await (server.load_adapter(folder) if self._is_adapter else server.load_folder(folder))


def write_safetensors(pieces: Iterable[Mapping[str, Tensor]], folder: Path, *, name: str = "model") -> None:
    """Write the weights of a checkpoint as they arrive, each piece into a file of its own, and the index of the files."""
    from safetensors.torch import save_file

    # The number of files stands in each one's name and is known only at the end, so that they are renamed then.
    drafts: list[Path] = []
    file_of: dict[str, int] = {}
    size = 0
    for piece in pieces:
        number = len(drafts)
        drafts.append(folder / f".piece-{number}")
        save_file({name: t.detach().cpu().contiguous() for name, t in piece.items()}, drafts[-1], metadata={"format": "pt"})
        file_of |= dict.fromkeys(piece, number)
        size += sum(tensor.nbytes for tensor in piece.values())
        del piece  # before the next one comes
    names = [f"{name}-{i + 1:05d}-of-{len(drafts):05d}.safetensors" for i in range(len(drafts))]
    if len(drafts) == 1:
        names = [f"{name}.safetensors"]
    for draft, file in zip(drafts, names, strict=True):
        draft.rename(folder / file)
    if len(drafts) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": {tensor: names[i] for tensor, i in file_of.items()}}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2))


class WeightStore(Protocol):
    """The transport of a pool's weights to all of its servers."""

    keeps: ClassVar[bool]
    """Whether a server that comes back can get them again."""

    def write(self, weights: Mapping[str, Tensor]) -> ServerWeights:
        """Write `weights`, replacing the previous ones, or prepare them for sending."""
        ...

    def close(self) -> None:
        """Remove everything."""
        ...


class WeightFolder:
    """Writes checkpoints that a server on the same machine reads."""

    keeps: ClassVar[bool] = True

    def __init__(
        self,
        model: Path,
        *,
        root: Path | None = None,
        owns_model: bool = False,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a place for checkpoints.

        Args:
            model: Where the model's config lies.
            root: Where to make it; shared memory by default.
            owns_model: Whether `close` removes `model` too.
            adapter: peft's settings of the adapter, where weights are an adapter's alone.
        """
        if root is None and _IN_MEMORY.is_dir():
            root = _IN_MEMORY
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = _lock(self._root)
        for folder in self._root.parent.glob(f"{_PREFIX}*"):
            if folder != self._root and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self._config = model / "config.json"
        self.adapter = adapter
        """The form of an adapter, which `write` writes beside its weights."""
        self._own = model if owns_model else None
        self._number = 0
        self._written: list[Path] = []
        """What is still there, the latest last."""

    @property
    def last(self) -> Path | None:
        """The latest weights that are still there."""
        return self._written[-1] if self._written else None

    def write(self, weights: Mapping[str, Tensor]) -> WrittenWeights:
        """Write `weights` as a checkpoint, a bucket in each file; a tied tensor is written once, under its first name."""
        folder = self._root / f"{self._number:08d}"
        self._number += 1
        folder.mkdir()
        if self.adapter is None:
            shutil.copy(self._config, folder / "config.json")
            if not (isinstance(weights, StreamedTensors) and weights.write(folder)):
                write_safetensors(buckets(untied(weights)), folder)
        else:
            (folder / "adapter_config.json").write_text(json.dumps(self.adapter))
            write_safetensors([dict(weights)], folder, name="adapter_model")
        self.drop()
        self._written.append(folder)
        return WrittenWeights(folder, is_adapter=self.adapter is not None)

    def drop(self) -> None:
        """Remove what was written, but for the latest few adapters."""
        while len(self._written) > (_FORMER_ADAPTERS if self.adapter is not None else 0):
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._lock.close()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def _lock(folder: Path) -> IO[str]:
    """Make the owner's file and lock it before it gets its name: an unlocked file then means that its owner is gone."""
    file = (folder / f".{_OWNER}").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    Path(file.name).rename(folder / _OWNER)
    return file


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / _OWNER).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it has an owner, is another user's, or is not yet whole
        return False
    return True
