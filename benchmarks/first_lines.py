"""How much does someone write before something trains, and how long does it take? One JSON line.

Counted are lines of code: no blank lines, comments or docstrings. Imports are those of polyturn, a
piece having those of its file. The goal for a whole training script is 25 lines and one import of polyturn. Seconds are
those from `import polyturn` to the line of the first step, in a process of its own, with a model of random weights; on a
machine that others use, CPU seconds say more.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

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


def seconds_to_first_step() -> dict[str, float]:
    """Return how long a small run takes from the import to the line of its first step, and the CPU time of the process."""
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run([sys.executable, "-c", FIRST_STEP], cwd=scratch, check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split()[:2])
    return {"wall": round(wall, 2), "cpu": round(cpu, 2)}


def code_lines(text: str) -> int:
    """Return how many lines hold code."""
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
    """Return the lines of a file, or of one definition in it, and how many modules of polyturn it imports from."""
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
    seconds = [seconds_to_first_step() for _ in range(3)]
    print(json.dumps({"benchmark": "first_lines", **figures, "seconds_to_first_step": seconds}))
