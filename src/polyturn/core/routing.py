"""Which experts each token of a mixture-of-experts model went to: part of what was sampled, as its logprobs are.

    routes     [tokens, MoE layers, top-k]   uint8, or uint16 from 256 experts on; read-only
    no route   the largest number of the dtype: the last token that was sampled was never fed, so no router saw it

index t describes token t: what the routers chose when token t was fed, which is what the prediction of token t + 1 comes of.
A route follows from the tokens before it alone, so a prefix that two sequences share has one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyturn.core.errors import AlignmentError

Routes = NDArray[np.uint8] | NDArray[np.uint16]
"""[T, L, K] the experts of each token in each MoE layer, in the router's order; all the largest number where unknown."""


class RouteShape(NamedTuple):
    """The router sizes of a model."""

    num_layers: int
    """Layers with experts; dense layers are not counted."""
    top_k: int
    """Experts that a token goes to in each of them."""
    num_experts: int
    layers: tuple[int, ...] = ()
    """Which decoder layers these are, for engines that speak of all; () where every layer has experts."""
    num_hidden_layers: int = 0
    """Number of decoder layers; 0 where every one has experts."""

    @property
    def dtype(self) -> Any:
        """The smallest type that holds every expert and `no route`."""
        return np.uint8 if self.num_experts < 256 else np.uint16

    def blank(self, *lead: int) -> Any:
        """Return [*lead, L, K] without a route."""
        return np.full((*lead, self.num_layers, self.top_k), np.iinfo(self.dtype).max, self.dtype)

    def read(self, values: ArrayLike) -> Any:
        """Return an engine's routes of some tokens, [T, L, K].

        Raises:
            AlignmentError: they are of another shape, no numbers of experts, or of one that the model does not have.
        """
        array = np.asarray(values)
        if self.layers and array.ndim == 3 and array.shape[1] == self.num_hidden_layers:
            array = array[:, list(self.layers)]
        if array.ndim != 3 or array.shape[1:] != (self.num_layers, self.top_k):
            raise AlignmentError(
                f"the engine returned routes of shape {array.shape}, and this model has {self.num_layers} layers with "
                f"experts of which each token takes {self.top_k}; engine and trainer must hold the same model"
            )
        if array.size and array.dtype.kind not in "iu":
            raise AlignmentError(f"the engine returned routes of type {array.dtype}, and an expert is a whole number")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.num_experts:
            raise AlignmentError(
                f"the engine routed a token to expert {int(array.max())}, and this model has {self.num_experts}; engine and "
                "trainer must hold the same model"
            )
        return routes_array(array.astype(self.dtype))


def routes_array(values: ArrayLike) -> Any:
    """Return `values` as read-only routes, copying only what can still be written to.

    Raises:
        AlignmentError: they are not uint8 or uint16, or have not three axes.
    """
    array = np.asarray(values)
    if array.dtype not in (np.uint8, np.uint16) or array.ndim != 3:
        raise AlignmentError(
            f"routed experts are uint8 or uint16 of [tokens, layers, k], not {array.dtype} of shape {array.shape}"
        )
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def has_route(routes: Any) -> NDArray[np.bool_]:
    """Return [T] which tokens have one."""
    known: NDArray[np.bool_] = routes[:, 0, 0] != np.iinfo(routes.dtype).max
    return known


def blank_like(routes: Any, count: int) -> Any:
    """Return [count, L, K] without a route, of the shape and type of `routes`."""
    return np.full((count, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)


def fill(rows: Any | None, count: int, routes: Any, *, at: int) -> Any:
    """Return the routes of `count` tokens, which have `rows` so far, with `routes` from token `at` on.

    A token keeps the route that it has: it is the one that it was sampled with, whatever newer weights chose since.

    Raises:
        AlignmentError: they are of different shapes.
    """
    if rows is not None and (rows.shape[1:], rows.dtype) != (routes.shape[1:], routes.dtype):
        raise AlignmentError(
            f"a span has routes of shape {rows.shape[1:]} ({rows.dtype}) and got some of {routes.shape[1:]} ({routes.dtype})"
        )
    whole = blank_like(routes, count) if rows is None else rows.copy()
    part = whole[at : at + len(routes)]
    is_free = ~has_route(part)
    part[is_free] = routes[is_free]
    return routes_array(whole)
