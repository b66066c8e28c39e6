"""Measures the size of the code: the path of a sample, the files of a turn, lines, keys, cycles. Prints one JSON line.

    python benchmarks/house.py [--show way|turn|circles|classes|long|wide|commands|keys|…]    the names behind a figure
    python benchmarks/house.py --document docs/one-sample.md                         writes the path into the page

**The path of a sample** (`way_*`). The script runs one optimizer step from the command line, with the embedded engine, a
row of a file, a tool that the model calls in its first turn, an interaction that answers the next turns, and a reward
function. It records the stack at each milestone, where the sample changes its type or leaves polyturn's code: a `Task`,
`Span`, `Turn`, `Trajectory`, `TrainSample` or `MicroBatch` is created; a chat template is rendered; the model computes; the
tool, the interaction, the reward, the estimator or the loss is called; `Tensor.backward`. A stack has the calls inside the
training loop; that of an asyncio task follows the stack that created the task. Functions on any of these stacks are on the
path. So functions that only read (a metric, a log line, a check), helpers that returned earlier, and callers of the training
loop (commands, building) do not count, but functions that pass the sample on do. The path returns to a file (`way_returns`)
when the next new function is in another file that it has left before.

**The files of a turn** (`turn_files`) are the files that someone must read to see all code between prompt, completion, tool
call and answer: those of the functions on stacks between an episode's first rendered prompt and its record, from the point
where the stacks differ (the loop over turns), without the inside of the engine.

A reader who followed the calls by hand and counted only relevant functions found 76 functions in 41 files with 18 returns,
and 14 files for a turn. A stack also has functions in between (wrappers, deadlines, checks of rendered text), and lacks
functions that returned the sample unchanged before the next milestone (a filter, a buffer's `put`). So compare figures of
this script only with one another.

`lines` are all lines of the files, including comments and blank lines, like `wc -l`. `keys` are the leaf paths of a
configuration; a section that can occur in a list or under any name counts once. `plugin_keys` are the options of parts that
are selected by name (an engine, a loss, an estimator, an environment, …) and are counted separately; the part itself is one
key, its name, or its section if it has no name. In both, a section that occurs in several paths (optimizers, sources of
tasks, models, engines, sampling) is one class with the same keys, and counts once, at its shortest path; `key_paths` counts
the keys of all paths, including plug-ins. `circles` are the sets of modules that import one another, directly or indirectly,
by package; imports at the top and under `if TYPE_CHECKING:` count, imports inside functions do not. `duplicate_classes` are
class names with more than one definition in src. A function's lines are those from `def` to its end, with the docstring; its
parameters are all but `self`, `cls`, `*args` and `**kwargs`. Functions of `cli` are not in `functions_over_8_parameters` but
in `commands_over_8_parameters`: their parameters are the flags of a command, which only typer uses.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import functools
import io
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import polyturn

SRC = Path(polyturn.__file__).parent
COUNTED = ("core", "tokens", "rollout", "batching", "algorithms", "buffer", "training", "build", "config", "data")
"""The packages whose lines have a limit."""
MAX_LINES, MAX_PARAMETERS = 60, 8
COMMANDS = "polyturn.cli."
"""Prefix of the modules with functions for typer, whose parameters are options of a command."""
SHAPES = {
    "Task": "polyturn.core.task",
    "Span": "polyturn.core.trajectory",
    "Turn": "polyturn.core.trajectory",
    "Trajectory": "polyturn.core.trajectory",
    "TrainSample": "polyturn.core.sample",
    "MicroBatch": "polyturn.batching.layout",
}
"""Type of a sample on its path -> the module that defines it."""


# The source.


def trees() -> dict[str, ast.Module]:
    """Return module name -> source, for all modules of polyturn."""
    out = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = ("polyturn", *path.relative_to(SRC).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        out[name] = ast.parse(path.read_text(encoding="utf-8"))
    return out


def package(module: str) -> str:
    """polyturn.rollout.episode -> rollout"""
    return [*module.split("."), ""][1]


def num_lines() -> dict[str, int]:
    """Return package -> number of lines of its files."""
    counts: Counter[str] = Counter()
    for path in SRC.rglob("*.py"):
        counts[path.relative_to(SRC).parts[0].removesuffix(".py")] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(counts)


def circles(modules: dict[str, ast.Module]) -> list[list[str]]:
    """Return the sets of modules that import one another, including imports for types."""
    graph = {name: _imports(name, tree, modules) for name, tree in modules.items()}
    return sorted(sorted(group) for group in _components(graph) if len(group) > 1)


def _imports(name: str, tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    out: set[str] = set()
    for node in _outside_of_functions(tree):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            targets = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = targets & modules.keys()
            out |= inner
            if len(inner) < len(targets) and node.module in modules:
                out.add(node.module)
    return out - {name}


def _outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_of_functions(child)


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components: modules that reach each other."""
    reach = {name: _reached(graph, name) for name in graph}
    groups: dict[frozenset[str], set[str]] = {}
    for name in graph:
        both = frozenset({other for other in reach[name] if name in reach[other]} | {name})
        groups.setdefault(both, set()).update(both)
    return list(groups.values())


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for other in graph[left.pop()] - seen:
            seen.add(other)
            left.append(other)
    return seen


class Sized(NamedTuple):
    """A name in a file with an amount, such as a number of lines."""

    where: str
    amount: int


def duplicate_classes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return class name -> the modules that define it, for classes with several definitions."""
    modules_of: dict[str, list[str]] = {}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules_of.setdefault(node.name, []).append(name)
    return {name: places for name, places in sorted(modules_of.items()) if len(places) > 1}


def functions(modules: dict[str, ast.Module], measure: Callable[[Any], int], limit: int) -> list[Sized]:
    """Return the functions for which `measure` is above `limit`, the largest first."""
    large = [
        Sized(f"{name}:{node.lineno} {node.name}", measure(node))
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and measure(node) > limit
    ]
    return sorted(large, key=lambda one: (-one.amount, one.where))


def lines_of(node: Any) -> int:
    """Return the number of lines of a function, from `def` on."""
    return int(node.end_lineno) - int(node.lineno) + 1


def parameters_of(node: Any) -> int:
    """Return the number of a function's parameters."""
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([a for i, a in enumerate(arguments) if i or a not in {"self", "cls"}])


class Keys(NamedTuple):
    """The leaf paths of a configuration."""

    of_runs: list[str]
    of_plugins: list[str]
    """Paths that only one kind of a plug-in has, such as `engine.launch.replicas` of servers."""
    paths: list[str]
    """All paths, with repeated sections."""


def keys() -> Keys:
    """Return the leaf paths of a configuration, as `polyturn config` lists them."""
    from polyturn.config.models import RunConfig
    from polyturn.config.schema import schema_table

    rows = schema_table(RunConfig)
    inner = {row.key.rpartition(".")[0].removesuffix(".<name>").removesuffix("[]") for row in rows}
    leaves = [row for row in rows if row.key not in inner]
    names = [row.key.replace("<name>.", "").replace("[]", "") for row in leaves]
    ordered = sorted(zip(names, leaves, strict=True), key=lambda one: (one[0].count("."), one[0]), reverse=True)
    firsts = {row.declared: (name, bool(row.of)) for name, row in ordered}
    of_plugins = {name for name, is_of_plugin in firsts.values() if is_of_plugin}
    of_runs = {name for name, _ in firsts.values()} - of_plugins
    of_runs |= {row.key for row in rows if not row.of and _is_part(row.key, names, of_plugins)}
    return Keys(sorted(of_runs), sorted(of_plugins), sorted(set(names)))


def _is_part(section: str, names: Sequence[str], of_plugins: set[str]) -> bool:
    inside = [name for name in names if name.startswith(f"{section}.")]
    return bool(inside) and all(name in of_plugins for name in inside)


# The traced run.

CONFIG = """
name: house
out: runs
num_threads: 1
model:
  init: {model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
         head_dim: 8, intermediate_size: 32, max_position_embeddings: 1024, tie_word_embeddings: true}
  tokenizer: {corpus: "plugins.py:corpus", vocab_size: 300}
data: {train: {files: tasks.jsonl}, shuffle: false}
rollout:
  parser: "plugins.py:Reader"
  scheduler: "plugins.py:GoesOn"
  tools: {functions: ["plugins.py:look"]}
  interactions: [{name: asks, class_name: "plugins.py:Asks", config: {}}]
  limits: {max_turns: 3, max_tokens_per_turn: 6, max_context: 1024}
  tokenization_sanity_check_mode: disable
  max_concurrent: 1
engine: {num_slots: 8}
reward: {function: "plugins.py:score"}
algorithm: {advantage: "plugins.py:estimate", loss: "plugins.py:loss"}
train: {steps: 1, groups_per_step: 1, group_size: 2}
"""
ROW = {
    "id": "row",
    "prompt": [{"role": "user", "content": "Look."}],
    "data_source": "house",
    "interaction": {"name": "asks"},
}
PLUGINS = '''
import numpy as np
from house_milestones import passed

import polyturn
from polyturn.algorithms.losses import ppo_clip
from polyturn.tokens.parsers import ParsedTurn


def corpus():
    return ["Look. Why? It is 4."] * 9


class Reader:
    """Parses the first completion of the random model as a tool call, and all others as text."""

    def parse(self, text, *, id_prefix="call", tools=()):
        if not id_prefix.endswith("_0"):
            return ParsedTurn(content=text)
        call = polyturn.ToolCall(id=id_prefix, name="look", arguments={"name": "x"}, raw=text)
        return ParsedTurn(content="", tool_calls=(call,))


class GoesOn(polyturn.MultiTurnScheduler):
    stateless = True

    def check_finished(self, episode, turn):
        return None


@polyturn.tool
async def look(name: str) -> str:
    """Look.

    Args:
        name: What to look at.
    """
    passed("tool")
    return "4"


class Asks(polyturn.BaseInteraction):
    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        passed("interaction")
        return False, "Why?", 0.5, {}


async def score(trajectory):
    passed("reward")
    return float(trajectory.id.endswith("1"))


def estimate(rewards_G, samples_G):
    passed("estimator")
    gains = [reward - np.mean(rewards_G) for reward in rewards_G]
    return [[np.where(s.loss_weights != 0, gain, 0.0) for s in samples] for gain, samples in zip(gains, samples_G)]


def loss(logprobs, old_logprobs, advantages):
    passed("loss")
    return ppo_clip(logprobs, old_logprobs, advantages)
'''


class Function(NamedTuple):
    """A function of polyturn."""

    file: str
    name: str


class Stack(NamedTuple):
    """The stack at a milestone, the outermost function first."""

    milestone: str
    calls: tuple[Function, ...]


class Recorder:
    """Records the stacks at milestones."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = []
        self._made_by: dict[int, tuple[Function, ...]] = {}

    def passed(self, milestone: str) -> None:
        """Record the current stack, if it is inside the training loop."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self.stacks.append(Stack(milestone, self._calls(sys._getframe(1))))

    def _calls(self, frame: FrameType | None) -> tuple[Function, ...]:
        calls: list[Function] = []
        while frame is not None and not frame.f_code.co_filename.endswith("asyncio/events.py"):
            if (function := function_of(frame.f_code)) is not None:
                calls.append(function)
            frame = frame.f_back
        task = asyncio.current_task()
        return (*self._made_by.get(id(task), ()), *reversed(calls))

    def record_task(self, task: Any) -> None:
        """Record the stack that creates an asyncio task."""
        with contextlib.suppress(RuntimeError):
            self._made_by[id(task)] = ()
            asyncio.get_running_loop()
            self._made_by[id(task)] = self._calls(sys._getframe(1))


def function_of(code: CodeType) -> Function | None:
    """Return the function of a code object; None if it is not polyturn's, or has no name."""
    if not code.co_filename.startswith(str(SRC)) or code.co_name.startswith("<"):
        return None
    file = str(Path(code.co_filename).relative_to(SRC))
    return None if file.startswith("cli/") else Function(file, code.co_qualname)  # commands are above the training loop


@contextlib.contextmanager
def milestones(recorder: Recorder) -> Iterator[None]:
    """Patch the functions of all milestones to record their stacks."""
    import importlib
    import types

    import jinja2
    import torch

    def saying(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.passed(name)
            return original(*args, **kwargs)

        return call

    def before_module(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            recorder.passed("model")

    class RecordedTask(asyncio.Task):  # type: ignore[type-arg]
        """An asyncio task that records its creation, by id, because the record is needed before `__init__` ends."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            recorder.record_task(self)
            super().__init__(*args, **kwargs)

    sys.modules["house_milestones"] = types.SimpleNamespace(passed=recorder.passed)  # type: ignore[assignment]
    places: list[tuple[Any, str, Any]] = [(asyncio, "Task", RecordedTask), (asyncio.tasks, "Task", RecordedTask)]
    for name, module in SHAPES.items():
        shape = getattr(importlib.import_module(module), name)
        places.append((shape, "__init__", saying(name, shape.__init__)))
    places.append((jinja2.Template, "render", saying("template", jinja2.Template.render)))
    places.append((torch.Tensor, "backward", saying("backward", torch.Tensor.backward)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(before_module)
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        hook.remove()


def traced() -> list[Stack]:
    """Run the step and return the records from the first rendered prompt to the last `backward`."""
    from polyturn.cli.main import main

    recorder = Recorder()
    output = io.StringIO()
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="house-") as folder, milestones(recorder):
        for name, text in (("config.yaml", CONFIG), ("plugins.py", PLUGINS), ("tasks.jsonl", json.dumps(ROW) + "\n")):
            Path(folder, name).write_text(text, encoding="utf-8")
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                main(["train", "config.yaml"])
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"the traced run ended with {ended.code}:\n{output.getvalue()}") from ended
        finally:
            os.chdir(here)
    stacks = recorder.stacks
    passed = [stack.milestone for stack in stacks]
    missing = {*SHAPES, "template", "model", "tool", "interaction", "reward", "estimator", "loss", "backward"} - set(passed)
    if missing:
        raise RuntimeError(f"the traced run never came to {sorted(missing)}:\n{output.getvalue()}")
    first = max(i for i, name in enumerate(passed[: passed.index("template")]) if name == "Task")
    return stacks[first : len(passed) - passed[::-1].index("backward")]


def path_of(stacks: Sequence[Stack]) -> list[Function]:
    """Return the functions on the path, in the order of their first occurrence on a stack."""
    return list(dict.fromkeys(function for stack in stacks for function in stack.calls))


TRACED = "<!-- traced: written by `make docs` from a run -->\n"
"""Marker in a page; the path is written from here to the end of the page."""


def documented(functions: Sequence[Function], *, root: str = "../src/polyturn") -> str:
    """Return the path as Markdown: a line for each visit of a file, with the names of its functions."""
    lines = []
    for file, of_file in itertools.groupby(functions, key=lambda one: one.file):
        names = [one.name.replace(".<locals>.", ".") for one in of_file]
        lines.append(f"- [`{file}`]({root}/{file}): {', '.join(f'`{name}`' for name in names)}\n")
    return "".join(lines)


def num_returns(functions: Sequence[Function]) -> int:
    """Return the number of returns of the path to a file that it has left."""
    files = [one.file for i, one in enumerate(functions) if not i or functions[i - 1].file != one.file]
    return len(files) - len(set(files))


def turn(stacks: Sequence[Stack]) -> list[Function]:
    """Return the functions of a turn: from where an episode's stacks differ, without the inside of the engine."""
    passed = [stack.milestone for stack in stacks]
    inside = [stack for stack in stacks[passed.index("template") : passed.index("Turn")] if stack.milestone != "model"]
    shared = len(os.path.commonprefix([stack.calls for stack in inside]))  # noqa: RUF071 (it takes any sequences)
    return path_of([stack._replace(calls=stack.calls[max(shared - 1, 0) :]) for stack in inside])


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--show",
        choices=["way", "turn", "circles", "classes", "long", "wide", "commands", "keys", "plugin_keys", "key_paths"],
    )
    parser.add_argument("--document", type=Path, metavar="PAGE", help="write the path into this page, and measure nothing")
    options = parser.parse_args()
    stacks = traced()
    on_way, of_turn = path_of(stacks), turn(stacks)
    if options.document is not None:
        text, mark, _ = options.document.read_text(encoding="utf-8").partition(TRACED)
        options.document.write_text(f"{text}{mark or TRACED}{documented(on_way)}", encoding="utf-8")
        return
    modules = trees()
    found_circles, twice, leaves = circles(modules), duplicate_classes(modules), keys()
    long, found_wide = functions(modules, lines_of, MAX_LINES), functions(modules, parameters_of, MAX_PARAMETERS)
    commands = [one for one in found_wide if one.where.startswith(COMMANDS)]
    wide = [one for one in found_wide if one not in commands]
    listed: dict[str, Sequence[Any]] = {
        "way": on_way,
        "turn": of_turn,
        "circles": found_circles,
        "classes": [f"{name}: {', '.join(places)}" for name, places in twice.items()],
        "long": long,
        "wide": wide,
        "commands": commands,
        "keys": leaves.of_runs,
        "plugin_keys": leaves.of_plugins,
        "key_paths": leaves.paths,
    }
    for one in listed.get(options.show, ()):
        print(" ".join(map(str, one)) if isinstance(one, tuple) else one)
    lines = num_lines()
    by_package = Counter(package(module) for group in found_circles for module in group)
    figures = {
        "way_functions": len(on_way),
        "way_files": len({one.file for one in on_way}),
        "way_returns": num_returns(on_way),
        "turn_files": len({one.file for one in of_turn}),
        "lines": {name: lines[name] for name in COUNTED},
        "lines_counted": sum(lines[name] for name in COUNTED),
        "lines_all": sum(lines.values()),
        "files_all": len(modules),
        "keys": len(leaves.of_runs),
        "plugin_keys": len(leaves.of_plugins),
        "key_paths": len(leaves.paths),
        "circles": len(found_circles),
        "files_in_circles": dict(sorted(by_package.items())),
        "duplicate_classes": len(twice),
        "functions_over_60_lines": len(long),
        "functions_over_8_parameters": len(wide),
        "commands_over_8_parameters": len(commands),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
