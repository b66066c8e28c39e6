"""ToolBox: the tools of a run, as the loop over turns sees them.

box = ToolBox([search, calculator], ToolOptions(timeout_s=60))
async with box.session("train-7/2") as session: ...        the tools in one episode; see `session.py`
"""

from __future__ import annotations

from polyturn.tools.run_tools import RunTools
from polyturn.tools.session import ToolSession
from polyturn.tools.tool_lifecycle import ToolStartError

__all__ = ["ToolBox", "ToolSession", "ToolStartError"]


class ToolBox(RunTools):
    """Every tool of a run and the limits of each call. Shared by all episodes."""

    def session(self, episode_id: str) -> ToolSession:
        """Return the tools' part of one episode, which is also the id that the tools get."""
        return ToolSession(self, episode_id)
