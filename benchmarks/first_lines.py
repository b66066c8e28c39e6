"""Measures how many lines a first training needs and how long it takes to start. Prints one JSON line.

Lines are lines of code, without blank lines, comments and docstrings. Imports are imports of polyturn; a part of a file has
the imports of the file. The target for a whole training script is 25 lines and one import of polyturn. Seconds are measured
in a new process with a model of random weights, from the import to the log line of the first step; for commands, until they
end (targets: 0.3 for the help, 1 for lists) or print their first line (target: 3). On a shared machine, CPU seconds are more
reliable.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PIECES = {
    "tool": ("examples/02_own_tool.py", "price"),
    "interaction": ("examples/03_own_interaction.py", "Customer"),
    "environment": ("examples/04_own_environment.py", "Game"),
    "reward": ("examples/01_train_gsm8k.py", "correct"),
    "scheduler": ("docs/guides/scheduler.md", "Doubt"),
    "script": ("examples/01_train_gsm8k.py", None),
    "readme": ("README.md", None),
    "one_file_grpo": ("examples/one_file_grpo.py", None),
}


FIRST_STEP = """
import logging
import time

began = time.perf_counter()
import polyturn


class Watch(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("step 1/"):
            print(time.perf_counter() - began, time.process_time())


logging.getLogger("polyturn").addHandler(Watch())
logging.getLogger("polyturn").setLevel("INFO")
small = {"steps": 1, "groups_per_step": 2, "group_size": 4, "max_tokens_per_turn": 16, "max_turns": 1}
model = polyturn.tiny("Qwen/Qwen3-0.6B")
polyturn.train(model, ["What is 1 + 1?"], reward=lambda t: float(t.segments[0].token_ids.sum() % 5), **small)
"""


class Seconds(NamedTuple):
    """The wall-clock and CPU seconds of a process."""

    wall: float
    cpu: float


def seconds_to_first_step(scratch: Path) -> Seconds:
    """Return the time of a small run from the import to the line of its first step; runs/run stays in `scratch`."""
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], cwd=scratch, check=True, capture_output=True, text=True)
    return Seconds(*(round(float(word), 2) for word in done.stdout.split()[:2]))


def seconds_of_command(*words: str, scratch: Path, until: str | None = None) -> Seconds:
    """Return the time until a command ends, or until it prints `until` on stderr."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "polyturn", *words]
    with subprocess.Popen(command, cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        is_seen = any(until is not None and until in line for line in process.stderr)
        if not is_seen:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its CPU times can still be read
        wall = time.perf_counter() - began
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        process.kill()
    return Seconds(round(wall, 2), round(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), 2))


def measure_seconds() -> dict[str, Seconds]:
    """Return the time of each script and command."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "run.yaml").write_text("model: {path: somewhere}\n", encoding="utf-8")
        return {
            "first step": seconds_to_first_step(scratch),
            "--help": seconds_of_command("--help", scratch=scratch),
            "runs": seconds_of_command("show", scratch=scratch),
            "show": seconds_of_command("show", "runs/run", scratch=scratch),
            "train": seconds_of_command("train", "run.yaml", scratch=scratch, until="loading PyTorch"),
        }


def code_lines(text: str) -> int:
    """Return the number of lines of code."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def measure(path: str, name: str | None) -> dict[str, int]:
    """Return the lines of a file or of one definition in it, and the number of polyturn modules that it imports from."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        text = text.partition("```python\n")[2].partition("```")[0]  # the first block of a page
    tree = ast.parse(text)
    imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imports += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    if name is not None:
        node = next(n for n in tree.body if getattr(n, "name", None) == name)
        decorated = min([d.lineno for d in getattr(node, "decorator_list", [])] + [node.lineno])
        text = "\n".join(text.splitlines()[decorated - 1 : node.end_lineno]) + "\n"
    return {"lines": code_lines(text), "imports": len({n for n in imports if n.startswith("polyturn")})}


if __name__ == "__main__":
    figures = {piece: measure(path, name) for piece, (path, name) in PIECES.items()}
    print(json.dumps({"benchmark": "first_lines", **figures, "wall, cpu seconds": [measure_seconds() for _ in range(3)]}))
