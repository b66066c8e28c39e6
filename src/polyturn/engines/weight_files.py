"""New weights on their way to a server: a folder with safetensors files, in memory where the system offers that.

    with WeightFolder(model_folder) as files:
        files.write({"model.embed_tokens.weight": tensor, …}).folder      the server reads it

The folder also holds the model's config, because servers read a checkpoint, not a file. Each write gets a folder of its own
and removes the one before it, so that a server which is still reading never sees half of the next one.

A process that is killed removes nothing, so whoever makes such a folder removes those beside it whose owner is gone. An
owner holds a lock on a file in its folder, which the system takes back with the process; ids of processes are used again,
and mean nothing in another container.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from polyturn.core.errors import EngineError
from polyturn.engines.launcher import RunningServer
from polyturn.engines.weight_transport import StreamedTensors, buckets, first_names

if TYPE_CHECKING:
    from torch import Tensor

_IN_MEMORY = Path("/dev/shm")
_PREFIX = "polyturn-weights-"
_OWNER = "owner"
"""The file that the owner of a folder has locked."""


class WrittenWeights(Mapping[str, Any]):
    """Weights that lie in a checkpoint already: name -> tensor for whoever wants tensors, a folder for a server.

    While they are pushed for the first time the trainer's own tensors are at hand as well, and tensors are these: what is
    on a GPU goes from there to servers that take tensors. After `settle` they are the file's.
    """

    def __init__(self, folder: Path, *, live: Mapping[str, Tensor] | None = None) -> None:
        self.folder = folder
        self._live = live

    async def folder_at(self, server: RunningServer | None) -> Path:
        """Return the folder as `server` sees it, which was started by its client, or not (None)."""
        return self.folder

    def settle(self) -> None:
        """Forget the trainer's own tensors, which are about to change."""
        self._live = None

    @cached_property
    def _file(self) -> Mapping[str, Tensor]:
        from safetensors.torch import load_file

        try:
            files = [load_file(file) for file in sorted(self.folder.glob("*.safetensors"))]
        except FileNotFoundError:
            files = []
        if files:
            return {name: tensor for file in files for name, tensor in file.items()}
        raise EngineError(f"the weights in {self.folder} have been replaced by newer ones")

    @property
    def _tensors(self) -> Mapping[str, Tensor]:
        return self._file if self._live is None else self._live

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write_safetensors(pieces: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    """Write the weights of a checkpoint as they come, each piece into a file of its own, and the index that names these."""
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
    names = [f"model-{i + 1:05d}-of-{len(drafts):05d}.safetensors" for i in range(len(drafts))]
    if len(drafts) == 1:
        names = ["model.safetensors"]
    for draft, name in zip(drafts, names, strict=True):
        draft.rename(folder / name)
    if len(drafts) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": {name: names[i] for name, i in file_of.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


class WeightStore(Protocol):
    """The place where a pool writes weights once for all of its servers."""

    def write(self, weights: Mapping[str, Tensor]) -> WrittenWeights:
        """Write `weights` in place of those before."""
        ...

    def close(self) -> None:
        """Remove everything."""
        ...


class WeightFolder:
    """Writes checkpoints that a server on the same machine reads."""

    def __init__(self, model: Path, *, root: Path | None = None, owns_model: bool = False) -> None:
        """Make a place for checkpoints.

        Args:
            model: Where the model's config lies.
            root: Where to make it; shared memory by default.
            owns_model: Whether `close` removes `model` too.
        """
        if root is None and _IN_MEMORY.is_dir():
            root = _IN_MEMORY
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = _lock(self._root)
        for folder in self._root.parent.glob(f"{_PREFIX}*"):
            if folder != self._root and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self._config = model / "config.json"
        self._own = model if owns_model else None
        self._number = 0
        self.last: Path | None = None
        """The latest weights that are still there."""

    def write(self, weights: Mapping[str, Tensor]) -> WrittenWeights:
        """Write `weights` as a checkpoint, a bucket in each file; a tied tensor is written once, under its first name."""
        folder = self._root / f"{self._number:08d}"
        self._number += 1
        folder.mkdir()
        shutil.copy(self._config, folder / "config.json")
        first = first_names(weights)
        is_streamed = isinstance(weights, StreamedTensors)
        live = weights if is_streamed else {name: weights[name].detach() for name in dict.fromkeys(first.values())}
        write_safetensors(buckets(live), folder)
        self.drop()
        self.last = folder
        return WrittenWeights(folder, live=None if is_streamed else live)

    def drop(self) -> None:
        """Remove what was written last."""
        if self.last is not None:
            shutil.rmtree(self.last, ignore_errors=True)
            self.last = None

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
    """Make the owner's file and lock it before it gets its name: whoever finds it unlocked finds no owner."""
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
