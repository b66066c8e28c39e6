"""Snapshots: the state of a plug-in that lets a live conversation continue after its process has ended.

    class Counter(BaseTool):                                    class LookUp(BaseTool):
        async def snapshot(self, instance_id):                      stateless = True
            return self._counts[instance_id]
        async def restore(self, instance_id, state):            `create` sets all its state of an episode,
            self._counts[instance_id] = state                   and no call changes that state

A resumed run calls `create` (or `start_interaction`) again, then `restore` with the result of `snapshot` after the last
complete turn. No call of that turn or an earlier turn is repeated. If a plug-in has neither these methods nor
`stateless = True`, its conversations restart from their tasks. The state must be JSON data. Both methods may be plain or
async, and `snapshot` must not change the state. A scheduler's methods take the episode instead of the id. An environment
serves only one episode, so its methods take no id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHooks:
    """The snapshot methods of one plug-in."""

    label: str
    """The plug-in's name in messages: "tool 'search'"."""
    snapshot: Callable[..., Any] | None = None
    restore: Callable[..., Any] | None = None
    why_not: str | None = None
    """Why conversations restart from their tasks; None if they can be restored."""

    @classmethod
    def of(cls, plugin: Any, *, label: str) -> SnapshotHooks:
        """Collect the snapshot methods of a plug-in, which need not inherit from a base class."""
        offers = [name for name in ("snapshot", "restore") if callable(inspect.getattr_static(plugin, name, None))]
        if len(offers) == 2:
            return cls(label=label, snapshot=plugin.snapshot, restore=plugin.restore)
        if offers:
            missing = "restore" if offers == ["snapshot"] else "snapshot"
            return cls(label=label, why_not=f"{label} offers {offers[0]} without {missing}")
        if inspect.getattr_static(plugin, "stateless", False) is True:
            return cls(label=label)
        return cls(label=label, why_not=f"{label} offers no snapshot and is not declared stateless")
