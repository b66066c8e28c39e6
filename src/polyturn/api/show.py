"""Show a run or one of its trajectories, in a terminal or in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from rich.text import Text

from polyturn.core.messages import Message
from polyturn.core.printable import printable
from polyturn.core.trajectory import Trajectory
from polyturn.infra.console import make_console

if TYPE_CHECKING:
    from polyturn.api.run import Run

COLOURS = {"system": "gray", "user": "teal", "tool": "olive", "assistant": "green"}


def show(run: Run, trajectory: str | None) -> None:
    """Show a run, or its trajectory with this id."""
    picture: Any = run if trajectory is None else TrajectoryPicture(run.trajectories[trajectory])
    if _is_notebook():
        from IPython.display import display

        display(picture)
    else:
        make_console().print(Text(picture.text()), soft_wrap=True)


def _is_notebook() -> bool:
    import sys

    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class TrajectoryPicture:
    """One trajectory as a conversation."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def text(self) -> str:
        """Return the trajectory as lines."""
        lines = [f"{message.role}: {message_text(message)}" for message in self._trajectory.messages]
        return "\n".join([*lines, self._end()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="color:{COLOURS.get(message.role, "inherit")};vertical-align:top">{escape(message.role)}</td>'
            f'<td style="text-align:left;white-space:pre-wrap">{escape(printable(message_text(message)))}</td></tr>'
            for message in self._trajectory.messages
        )
        return f"<table>{rows}</table><p>{escape(printable(self._end()))}</p>"

    def _end(self) -> str:
        one = self._trajectory
        reward = "no reward" if one.reward is None else f"reward {one.reward.total:g}"
        return f"{one.id}: {one.error or one.stop_reason.value}, {reward}"


def message_text(message: Message) -> str:
    """Return a message's text with its calls."""
    calls = [f"-> {call.name}({dict(call.arguments)})" if call.error is None else call.raw for call in message.tool_calls]
    return "\n".join([*([message.text] if message.text else []), *map(str, calls)])
