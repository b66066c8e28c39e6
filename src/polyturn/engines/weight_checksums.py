"""The composition of a server's tensors, inferred from checksums, so that later ones can be held to the trainer's.

    the server's   layers.0.self_attn.qkv_proj.weight   = q_proj + k_proj + v_proj of the trainer's layer 0
    on two ranks   sum over ranks                       = q_proj + 2 k_proj + 2 v_proj, where the keys' heads are on both

Checksums are additive (`server_side/polyturn_weights.py`), so a fused or sharded tensor's is a small sum of those of its
parts. Which sum is not looked up in a list of models: while the canary's weights are served all tensors differ, and
the one sum that comes out right is what that tensor is made of. A tensor that no sum explains (a quantised one, a packed
copy) is not compared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

from polyturn.engines.weight_transport import StreamedTensors, first_names

if TYPE_CHECKING:
    from torch import Tensor

_MAX_PARTS = 3
_SHOWN = 3

Folds = Mapping[tuple[str, str], int]
"""(the trainer's name, dtype) -> checksum of that tensor in that dtype."""


class HeldTensor(NamedTuple):
    """One tensor of a server, over all its processes."""

    dtype: str
    fold: int
    """The sum over the processes that hold it, or a piece of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChecksums:
    """Checksums that a server reports."""

    tensors: Mapping[str, HeldTensor]
    num_workers: int

    @classmethod
    def read(cls, workers: Sequence[Mapping[str, str]]) -> Self | None:
        """Return the checksums of each process of a server; None if it reported something else."""
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
    """An engine that can say what weights it holds."""

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of its tensors; None where the server cannot say.

        Raises:
            EngineLostError: it did not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a server, as a sum of the trainer's."""

    name: str
    dtype: str
    terms: tuple[tuple[int, str], ...]
    """(how often, the trainer's name)"""

    @property
    def described(self) -> str:
        """Its name, and those of what it was made of where they are others."""
        names = [name for _, name in self.terms]
        return self.name if names == [self.name] else f"{self.name} (from {' + '.join(_shown(names))})"


@dataclass(frozen=True, slots=True)
class Composition:
    """The composition of one server's tensors, as far as it is known."""

    parts: tuple[Part, ...]

    @classmethod
    def find(cls, checksums: ServerChecksums, weights: Mapping[str, Tensor]) -> Self:
        """Find out from what a server holds and the weights that it was given, all of which differ."""
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
        """The trainer's tensors that are compared."""
        return frozenset(name for part in self.parts for _, name in part.terms)

    @property
    def needed(self) -> frozenset[tuple[str, str]]:
        """(the trainer's name, dtype) of each checksum that a comparison needs."""
        return frozenset((name, part.dtype) for part in self.parts for _, name in part.terms)

    def problem(self, checksums: ServerChecksums, folds: Folds) -> str | None:
        """Return which tensors are not what `folds` says; None if all are."""
        wrong = [
            part.described
            for part in self.parts
            if (tensor := checksums.tensors.get(part.name)) is None
            or tensor != HeldTensor(part.dtype, _total(part.terms, part.dtype, folds))
        ]
        if not wrong:
            return None
        return f"{', '.join(_shown(wrong))} of {len(self.parts)} tensors"


def fold_all(weights: Mapping[str, Tensor], wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the checksums of `wanted`, (name, dtype) each."""
    import torch

    from polyturn.engines.server_side.polyturn_weights import fold

    dtypes: dict[str, list[str]] = {}
    for name, dtype in wanted:
        dtypes.setdefault(name, []).append(dtype)
    folds: dict[tuple[str, str], int] = {}
    for name, tensor in weights.items() if dtypes else ():  # in their own order, in which they may have to be brought here
        if tensor.is_floating_point():
            folds |= {(name, dtype): fold(tensor.detach().to(getattr(torch, dtype))) for dtype in dtypes.get(name, ())}
    return folds


def floating_names(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of floating point, of a tied one the first."""
    names = dict.fromkeys(first_names(weights).values())
    if isinstance(weights, StreamedTensors):
        return [name for name in names if weights.kinds[name].dtype.is_floating_point and weights.kinds[name].nbytes]
    return [name for name in names if weights[name].is_floating_point() and weights[name].numel()]


def _sums(names: Sequence[str], num_workers: int) -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield what a server may have made of the tensors of one module, the likeliest first."""
    copies = [count for count in range(1, num_workers + 1) if num_workers % count == 0]
    for parts in _modules(names):
        for size in range(1, min(_MAX_PARTS, len(parts)) + 1):
            for chosen in itertools.combinations(parts, size):
                for count in copies:
                    yield tuple((count, name) for part in chosen for name in part)
                for single in range(size if size > 1 else 0):  # one of them cut over the ranks, the others on several
                    for count in copies[1:]:
                        yield tuple((1 if at == single else count, n) for at, part in enumerate(chosen) for n in part)


def _modules(names: Sequence[str]) -> list[list[list[str]]]:
    """Return for each module its parts: a tensor each, or all experts' tensors of one name.

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


def _shown(items: Sequence[str]) -> list[str]:
    return [*items[:_SHOWN], *([f"{len(items) - _SHOWN} more"] if len(items) > _SHOWN else [])]
