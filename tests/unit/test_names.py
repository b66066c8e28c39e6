"""One word for one thing: a class has its name to itself, and names that were given up do not come back."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from pathlib import Path

import polyturn

SRC = Path(polyturn.__file__).parent

RETIRED = {
    "Accepts", "AsWritten", "Ask", "Asking", "Backstage", "Bounded", "ChatVoice", "Desk", "Drops", "EpisodeClock",
    "EpisodeHistory", "EpisodeScene", "EpisodeState", "Fate", "Flight", "FlightBook", "Flights", "Followers",
    "Gate", "GroupTeam", "Handed", "HeldWeights", "HistoryState", "Home", "InteractionHost", "Keeper", "Lanes",
    "LastWords", "LineWorker", "LiveTurn", "ModelPass", "Need", "OtherPolicy", "Partner", "Place", "PlanScheduler",
    "PolicyVoice", "Post", "RayTeam", "Said", "Scene", "SceneInteraction", "Seam", "Seat", "Seating", "Spoken",
    "Team", "Telling", "Told", "ToolBranch", "Transcript", "Voice", "VoiceOptions", "Walls", "WeightInbox", "Words",
}  # fmt: skip
"""Names of classes."""
RETIRED_MODULES = {
    "asking", "backstage", "chat_voice", "claims", "communicator", "cut", "damage", "desk", "episode_state",
    "flight", "flight_book", "flights", "followers", "held_weights", "history_state", "keeper", "kills", "lanes",
    "lifespan", "line_worker", "live_turn", "meanings", "narration", "other_policy", "outcome", "own_loop",
    "partner", "scene", "seating", "team", "telling", "told", "towers", "weight_ways", "writings",
}  # fmt: skip


def classes() -> dict[str, list[str]]:
    """Return each public class's name and the files that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(SRC)))
    return found


def test_no_two_classes_have_one_name() -> None:
    found = classes()
    assert len(found) > 500
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_retired_names_stay_retired() -> None:
    assert not RETIRED & classes().keys()
    assert not RETIRED_MODULES & {path.stem for path in SRC.rglob("*.py")}


def test_a_docstring_begins_with_what_it_describes() -> None:
    """With a noun or a verb: "The result of a tool call.", and not "What a tool call came to."."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for said in (*_docstring(node), *_field_strings(node)):
                if said.split(" ", 1)[0] in {"What", "Who", "How", "Where"}:
                    found.append(f"{path.relative_to(SRC)}: {said.splitlines()[0]}")
    assert found == []


def _docstring(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [ast.get_docstring(node) or ""]


def _field_strings(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [
        string.value.value
        for field, string in itertools.pairwise(node.body)
        if isinstance(field, ast.Assign | ast.AnnAssign)
        and isinstance(string, ast.Expr)
        and isinstance(string.value, ast.Constant)
        and isinstance(string.value.value, str)
    ]
