"""Snapshots: state by which a plug-in lets a live conversation survive the end of its process.

    class Counter(BaseTool):                                    class LookUp(BaseTool):
        async def snapshot(self, instance_id):                      stateless = True
            return self._counts[instance_id]
        async def restore(self, instance_id, state):            what it keeps of an episode comes from `create`
            self._counts[instance_id] = state                   alone, and no call changes it

A run that is resumed calls `create` (or `start_interaction`) again, then `restore` with what `snapshot` returned behind the
last complete turn; no call of that turn or of one before it is made again. A plug-in that declares neither counts as
stateful: its conversations restart from their tasks. The state is what JSON can write. Both methods may be plain or
async; `snapshot` changes nothing. A scheduler's two take the episode in place of the id; an environment's, which serves one
episode, take none.
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
    """Whose it is: "tool 'search'"."""
    snapshot: Callable[..., Any] | None = None
    restore: Callable[..., Any] | None = None
    why_not: str | None = None
    """Why its conversations restart from their tasks; None where they can go on."""

    @classmethod
    def of(cls, plugin: Any, *, label: str) -> SnapshotHooks:
        """Read off a plug-in, which may inherit nothing of ours, what it offers."""
        offers = [name for name in ("snapshot", "restore") if callable(inspect.getattr_static(plugin, name, None))]
        if len(offers) == 2:
            return cls(label=label, snapshot=plugin.snapshot, restore=plugin.restore)
        if offers:
            missing = "restore" if offers == ["snapshot"] else "snapshot"
            return cls(label=label, why_not=f"{label} offers {offers[0]} without {missing}")
        if inspect.getattr_static(plugin, "stateless", False) is True:
            return cls(label=label)
        return cls(label=label, why_not=f"{label} offers no snapshot and is not declared stateless")
