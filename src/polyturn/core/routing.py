"""Routes: the experts that each token of a mixture-of-experts model went to, recorded while sampling like the logprobs.

    routes     [tokens, MoE layers, top-k]   uint8, or uint16 for 256 experts or more; read-only
    no route   the largest number of the dtype: the last sampled token was never fed to the model, so it has no route

index t describes token t: the experts that the routers chose when token t was fed, to predict token t + 1. A route depends
only on the token and its prefix, so sequences with a common prefix have the same routes there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyturn.core.errors import AlignmentError

Routes = NDArray[np.uint8] | NDArray[np.uint16]
"""[T, L, K] the experts of each token in each MoE layer, in the router's order; the dtype's largest number if unknown."""


class RouteShape(NamedTuple):
    """The router sizes of a model."""

    num_layers: int
    """Number of layers with experts."""
    top_k: int
    """Number of experts that a token goes to in each of these layers."""
    num_experts: int
    layers: tuple[int, ...] = ()
    """Indices of these layers among all decoder layers, for engines that report all; () if every layer has experts."""
    num_hidden_layers: int = 0
    """Number of decoder layers; 0 if every layer has experts."""

    @property
    def dtype(self) -> Any:
        """The smallest type that holds every expert and `no route`."""
        return np.uint8 if self.num_experts < 256 else np.uint16

    def blank(self, *lead: int) -> Any:
        """Return [*lead, L, K] filled with `no route`."""
        return np.full((*lead, self.num_layers, self.top_k), np.iinfo(self.dtype).max, self.dtype)

    def read(self, values: ArrayLike) -> Any:
        """Check an engine's routes and convert them to [T, L, K].

        Raises:
            AlignmentError: the shape or type is wrong, or an expert does not exist in the model.
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
        if array.size and not 0 <= (low := int(array.min())) <= (high := int(array.max())) < self.num_experts:
            raise AlignmentError(
                f"the engine routed a token to expert {low if low < 0 else high}, and this model has {self.num_experts}; "
                "engine and trainer must hold the same model"
            )
        return routes_array(array.astype(self.dtype))


def routes_array(values: ArrayLike) -> Any:
    """Return `values` as read-only routes; only a writable array is copied.

    Raises:
        AlignmentError: the type is neither uint8 nor uint16, or there are not three axes.
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
    """Return [T] whether each token has a route."""
    known: NDArray[np.bool_] = routes[:, 0, 0] != np.iinfo(routes.dtype).max
    return known


def blank_like(routes: Any, count: int) -> Any:
    """Return [count, L, K] filled with `no route`, with the L, K and dtype of `routes`."""
    return np.full((count, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)


def fill(rows: Any | None, count: int, routes: Any, *, at: int) -> Any:
    """Return `rows`, the routes of `count` tokens, with their gaps from token `at` on filled from `routes`.

    A token that already has a route keeps it: newer weights may choose other experts, and training needs the experts that
    were used when the token was sampled.

    Raises:
        AlignmentError: `rows` and `routes` differ in shape or dtype.
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
