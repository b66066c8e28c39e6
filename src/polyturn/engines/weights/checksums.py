"""Infer from checksums how a server's tensors are composed of the trainer's, to check later weights.

    the server's   layers.0.self_attn.qkv_proj.weight   = q_proj + k_proj + v_proj of the trainer's layer 0
    on two ranks   sum over ranks                       = q_proj + 2 k_proj + 2 v_proj, if each rank has all heads of keys

Checksums are additive (`server_side/polyturn_weights.py`), so the checksum of a fused or sharded tensor is a small sum over
its parts. No list of models is needed: the test at the start (the canary, `training/weight_sync.py`) changes all tensors to
different values, so only one sum matches each tensor of the server. A tensor that no sum matches (a quantised one, a packed
copy) is not compared.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

from polyturn.engines.weights.stream import streamed

if TYPE_CHECKING:
    from torch import Tensor

_MAX_PARTS = 3
_SHOWN = 3

Folds = Mapping[tuple[str, str], int]
"""(the trainer's name, dtype) -> checksum of that tensor in that dtype."""


class HeldTensor(NamedTuple):
    """A tensor of a server, over all of its processes."""

    dtype: str
    fold: int
    """Sum of the checksums over the processes with the tensor or a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChecksums:
    """Checksums that a server reports."""

    tensors: Mapping[str, HeldTensor]
    num_workers: int

    @classmethod
    def read(cls, workers: Sequence[Mapping[str, str]]) -> Self | None:
        """Combine the checksums of a server's processes; None if they have another format."""
        from polyturn.engines.server_side.polyturn_weights import PREFIX, total

        tensors: dict[str, HeldTensor] = {}
        for answer in workers:
            for name, text in answer.items():
                prefix, _, rest = text.partition(" ")
                dtype, _, fold = rest.partition(" ")
                if prefix != PREFIX:
                    return None
                before = tensors.get(name, HeldTensor(dtype, 0))
                tensors[name] = HeldTensor(dtype, total([(1, before.fold), (1, int(fold, 16))]))
        return cls(tensors=tensors, num_workers=max(1, len(workers))) if tensors else None


@runtime_checkable
class Checked(Protocol):
    """An engine that can report checksums of its weights."""

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of its tensors; None if the server cannot compute them.

        Raises:
            EngineLostError: the server did not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a server as a sum of the trainer's tensors."""

    name: str
    dtype: str
    terms: tuple[tuple[int, str], ...]
    """(count, the trainer's name) of each term."""

    @property
    def described(self) -> str:
        """Its name, with the names of its terms if they differ."""
        names = [name for _, name in self.terms]
        return self.name if names == [self.name] else f"{self.name} (from {' + '.join(_first_items(names))})"


@dataclass(frozen=True, slots=True)
class Composition:
    """The composition of a server's tensors, as far as known."""

    parts: tuple[Part, ...]

    @classmethod
    def find(cls, checksums: ServerChecksums, weights: Mapping[str, Tensor]) -> Self:
        """Infer the composition from a server's checksums while it serves `weights`, whose tensors all differ."""
        names = floating_names(weights)
        dtypes = {tensor.dtype for tensor in checksums.tensors.values()}
        folds = fold_all(weights, ((name, dtype) for name in names for dtype in dtypes))
        known: dict[tuple[str, int], tuple[tuple[int, str], ...]] = {}
        for dtype in dtypes:
            for terms in _sums(names, checksums.num_workers):
                known.setdefault((dtype, _total(terms, dtype, folds)), terms)
        explained = ((name, tensor, known.get((tensor.dtype, tensor.fold))) for name, tensor in checksums.tensors.items())
        return cls(tuple(Part(name, tensor.dtype, terms) for name, tensor, terms in explained if terms is not None))

    @property
    def names(self) -> frozenset[str]:
        """Names of the trainer's tensors that are compared."""
        return frozenset(name for part in self.parts for _, name in part.terms)

    @property
    def needed(self) -> frozenset[tuple[str, str]]:
        """(the trainer's name, dtype) of the checksums for a comparison."""
        return frozenset((name, part.dtype) for part in self.parts for _, name in part.terms)

    def problem(self, checksums: ServerChecksums, folds: Folds) -> str | None:
        """Return the server's tensors that do not match `folds`; None if all match."""
        wrong = [
            part.described
            for part in self.parts
            if (tensor := checksums.tensors.get(part.name)) is None
            or tensor != HeldTensor(part.dtype, _total(part.terms, part.dtype, folds))
        ]
        if not wrong:
            return None
        return f"{', '.join(_first_items(wrong))} of {len(self.parts)} tensors"


def fold_all(weights: Mapping[str, Tensor], wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the checksums of the (name, dtype) pairs `wanted`, computed in the process that has the tensors."""
    dtypes: dict[str, list[str]] = {}
    for name, dtype in wanted:
        dtypes.setdefault(name, []).append(dtype)
    if not dtypes:
        return {}
    return streamed(weights).over(functools.partial(_fold_pieces, dtypes))


def _fold_pieces(dtypes: Mapping[str, Sequence[str]], pieces: Iterable[Mapping[str, Tensor]]) -> dict[tuple[str, str], int]:
    import torch

    from polyturn.engines.server_side.polyturn_weights import fold

    folds: dict[tuple[str, str], int] = {}
    for name, tensor in (item for piece in pieces for item in piece.items()):
        if tensor.is_floating_point():
            folds |= {(name, dtype): fold(tensor.detach().to(getattr(torch, dtype))) for dtype in dtypes.get(name, ())}
    return folds


def floating_names(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of floating-point tensors; tied tensors have the first name."""
    kinds = streamed(weights).kinds
    return [name for name, kind in kinds.items() if kind.dtype.is_floating_point and kind.nbytes]


def _sums(names: Sequence[str], num_workers: int) -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield the sums that a server may have made of a module's tensors, the likeliest first."""
    copies = [count for count in range(1, num_workers + 1) if num_workers % count == 0]
    for parts in _modules(names):
        for size in range(1, min(_MAX_PARTS, len(parts)) + 1):
            for chosen in itertools.combinations(parts, size):
                for count in copies:
                    yield tuple((count, name) for part in chosen for name in part)
                for single in range(size if size > 1 else 0):  # one tensor cut over the ranks, the others on several ranks
                    for count in copies[1:]:
                        yield tuple((1 if at == single else count, n) for at, part in enumerate(chosen) for n in part)


def _modules(names: Sequence[str]) -> list[list[list[str]]]:
    """Return for each module its parts; a part is one tensor, or all experts' tensors of the same name.

    layers.0.self_attn.{q_proj,k_proj,v_proj,o_proj}.weight  ->  one module of four parts
    layers.0.mlp.experts.{0,1,…}.{gate_proj,up_proj,down_proj}.weight  ->  one module of three parts
    """
    modules: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in names:
        part = re.sub(r"(?<=experts\.)\d+(?=\.)", "*", name)
        path = part.split(".")
        modules.setdefault((".".join(path[:-2]), path[-1]), {}).setdefault(part, []).append(name)
    return [list(parts.values()) for parts in modules.values()]


def _total(terms: Iterable[tuple[int, str]], dtype: str, folds: Folds) -> int:
    from polyturn.engines.server_side.polyturn_weights import total

    return total((count, folds[name, dtype]) for count, name in terms)


def _first_items(items: Sequence[str]) -> list[str]:
    return [*items[:_SHOWN], *([f"{len(items) - _SHOWN} more"] if len(items) > _SHOWN else [])]
