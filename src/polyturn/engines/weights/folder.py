"""Write new weights for servers to a folder of safetensors files, in shared memory if available.

    with WeightFolder(model_folder) as files:
        files.write({"model.embed_tokens.weight": tensor, …}).folder      the server reads it

The folder also contains the model's config, because servers read a checkpoint. Each write makes a new folder and removes the
previous one, so that a server that is still reading never sees partial weights. The latest few adapters stay: servers read
an adapter from its folder whenever it is not in their memory.

Shared memory is open to all users of a machine, so there only the trainer's user can read the weights. A folder that the
configuration names is the owner's choice: all users who can read that folder can read the weights.

A killed process leaves its folder behind, and the next process that makes one removes folders without an owner. The owner
holds a lock on a file in the folder, which the system releases when the process ends. Process ids would not work, because
they are reused and differ between containers.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol

from polyturn.core.errors import EngineError, PolyturnError, one_line
from polyturn.engines.weights.stream import streamed

if TYPE_CHECKING:
    from torch import Tensor

_IN_MEMORY = Path("/dev/shm")
_PREFIX = "polyturn-weights-"
_OWNER = "owner"
"""Name of the file that the owner of a folder locks."""
_FORMER_ADAPTERS = 2
"""Number of adapters to keep besides the latest. A request that reaches a server during an update may use the previous
adapter until the next update. That update writes another adapter before it ends the request, so two former ones are kept."""


class FolderServer(Protocol):
    """A server that loads weights from a folder."""

    async def load_folder(self, folder: Path) -> None:
        """Make the server load the checkpoint in `folder`.

        Raises:
            EngineError: the server cannot load it.
        """
        ...

    async def load_adapter(self, folder: Path) -> None:
        """Make the server load the adapter in `folder` in place of the previous one.

        Raises:
            EngineError: the server cannot load it.
        """
        ...


class ServerWeights(ABC):
    """One version of the weights for servers."""

    is_all_or_nothing: ClassVar[bool] = True
    """Whether a server that refuses to load them keeps its former weights."""

    def given_to(self, server: Any) -> AbstractContextManager[None]:
        """Context of a server's update; enter it before the first await."""
        return nullcontext()

    @abstractmethod
    async def load(self, server: Any) -> None:
        """Make a paused server load the weights.

        Raises:
            EngineError: the server cannot load them.
        """

    async def settle(self) -> None:
        """Stop using the trainer's tensors, which are about to change."""
        return


class WrittenWeights(ServerWeights):
    """Weights in a checkpoint folder, or an adapter in peft's format."""

    def __init__(self, folder: Path, *, is_adapter: bool = False) -> None:
        self.folder = folder
        self._is_adapter = is_adapter

    async def load(self, server: FolderServer) -> None:
        """Make a server read the weights."""
        await (server.load_adapter(self.folder) if self._is_adapter else server.load_folder(self.folder))


def write_safetensors(pieces: Iterable[Mapping[str, Tensor]], folder: Path, *, name: str = "model") -> None:
    """Write the weights of a checkpoint as they arrive, one file per piece, and the index of the files."""
    from safetensors.torch import save_file

    # Each file's name contains the number of files, which is known only at the end, so rename the files then.
    drafts: list[Path] = []
    file_of: dict[str, int] = {}
    size = 0
    for piece in pieces:
        number = len(drafts)
        drafts.append(folder / f".piece-{number}")
        save_file({name: t.detach().cpu().contiguous() for name, t in piece.items()}, drafts[-1], metadata={"format": "pt"})
        file_of |= dict.fromkeys(piece, number)
        size += sum(tensor.nbytes for tensor in piece.values())
        del piece  # frees the memory before the next piece
    names = [f"{name}-{i + 1:05d}-of-{len(drafts):05d}.safetensors" for i in range(len(drafts))]
    if len(drafts) == 1:
        names = [f"{name}.safetensors"]
    for draft, file in zip(drafts, names, strict=True):
        let_others_read(draft)
        draft.rename(folder / file)
    if len(drafts) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": {tensor: names[i] for tensor, i in file_of.items()}}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def let_others_read(file: Path) -> None:
    """Give a file of safetensors, which only its owner can read, the permissions of its folder: a server may be another
    user."""
    with suppress(PermissionError):  # on exFAT, for example, where files have no permissions of their own
        file.chmod(file.parent.stat().st_mode & 0o666)


def _write_checkpoint(pieces: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    if not folder.is_dir():
        raise EngineError(
            f"new weights go to {folder}, which the machine of rank 0 does not see; set engine.weights_folder to a folder "
            "that all machines see, or engine.weights to gloo or nccl"
        )
    with _disk_errors(folder):
        write_safetensors(pieces, folder)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn a failure to write weights into an error with the folder and its free space, and remove the partial weights.

    Raises:
        EngineError: the disk is full or broken.
    """
    from safetensors import SafetensorError

    try:
        yield
    except PolyturnError:
        raise
    except (OSError, SafetensorError) as problem:
        free = f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free there" if folder.is_dir() else ""
        shutil.rmtree(folder, ignore_errors=True)
        raise EngineError(
            f"new weights cannot be written to {folder} ({one_line(problem)}{free}); free space and resume, or set "
            "engine.weights_folder to a folder on a larger disk, or engine.weights to gloo or nccl"
        ) from problem


class WeightStore(Protocol):
    """Sends a pool's weights to all of its servers."""

    keeps: ClassVar[bool]
    """Whether the weights stay available for a server that comes back."""

    def write(self, weights: Mapping[str, Tensor]) -> ServerWeights:
        """Write `weights` in place of the previous ones, or prepare to send them."""
        ...

    def close(self) -> None:
        """Remove everything."""
        ...


class WeightFolder:
    """Writes checkpoints for servers on the same machine."""

    keeps: ClassVar[bool] = True

    def __init__(
        self,
        model: Path,
        *,
        root: Path | None = None,
        owns_model: bool = False,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a folder for checkpoints.

        Args:
            model: Folder with the model's config.
            root: Parent folder, which also decides who may read the weights; None takes shared memory, where only this
                process's user may.
            owns_model: Whether `close` also removes `model`.
            adapter: peft's settings of the adapter, if only adapters are written.
        """
        parent = _IN_MEMORY if root is None and _IN_MEMORY.is_dir() else root
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if root is not None:
            with suppress(PermissionError):
                self._root.chmod(0o700 | root.stat().st_mode & 0o055)
        self._lock = _lock(self._root)
        for folder in self._root.parent.glob(f"{_PREFIX}*"):
            if folder != self._root and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self._config = model / "config.json"
        self.adapter = adapter
        """peft's settings, which `write` writes with an adapter's weights."""
        self._own = model if owns_model else None
        self._number = 0
        self._written: list[Path] = []
        """The existing folders of weights, the latest last."""

    @property
    def last(self) -> Path | None:
        """The folder of the latest weights; None without any."""
        return self._written[-1] if self._written else None

    def write(self, weights: Mapping[str, Tensor]) -> WrittenWeights:
        """Write `weights` as a checkpoint, one file per bucket; a tied tensor is written once, under its first name.

        Raises:
            EngineError: the process that has the tensors does not see the folder, or cannot write there.
        """
        folder = self._root / f"{self._number:08d}"
        self._number += 1
        with _disk_errors(folder):
            folder.mkdir()
            if self.adapter is None:
                shutil.copy(self._config, folder / "config.json")
                streamed(weights).over(partial(_write_checkpoint, folder=folder))
            else:
                (folder / "adapter_config.json").write_text(json.dumps(self.adapter))
                write_safetensors([dict(weights)], folder, name="adapter_model")
        self.drop()
        self._written.append(folder)
        return WrittenWeights(folder, is_adapter=self.adapter is not None)

    def drop(self) -> None:
        """Remove the written weights, except for the latest few adapters."""
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
    """Make and lock the owner's file before renaming it, so that an unlocked file means that its owner is gone."""
    file = (folder / f".{_OWNER}").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    Path(file.name).rename(folder / _OWNER)
    return file


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / _OWNER).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it has an owner, belongs to another user, or is incomplete
        return False
    return True
