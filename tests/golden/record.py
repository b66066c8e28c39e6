"""Records what scripted runs leave behind, through the command line alone, so that a change of everything inside shows here.

    python tests/golden/record.py --write [NAME …]           records fixtures/NAME.json anew
    python tests/golden/record.py --compare OTHER_CHECKOUT   runs both codes on this machine; all that is recorded must be
                                                             equal, logprobs and metrics to the last bit
    run("tools", folder) -> {"asked": […], "rows": […], "loss_weights": {…}, "metrics": […]}      plain data, as JSON has it

A scenario is a folder under `scenarios/`, as a user would write it: config.yaml, plug-in files, tasks.jsonl, and says.yaml,
the completions that the scripted server (`golden_server.py`) gives in this order. `COMMON` is merged under its config.yaml.
Only what users rely on is touched: the command line, keys of the configuration, plug-in files by path, public names,
SGLang's routes, and the files of a run. Where a change renames keys of the configuration, they are renamed in `COMMON` and
in the scenarios; where it renames columns of rows or metrics, `renames.yaml` says from what to what.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fnmatch
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from golden_model import write_model
from golden_server import ScriptedServer

HERE = Path(__file__).resolve().parent
PATH = tuple(sys.path)
"""Before any test ran. One may have left a folder with another plugins.py."""
SCENARIO_FOLDER = HERE / "scenarios"
FIXTURES = HERE / "fixtures"
RENAMES = HERE / "renames.yaml"

COMMON: dict[str, Any] = {
    "name": "golden",
    "out": "runs",
    "seed": 0,
    "num_threads": 1,
    "model": {"path": "model"},
    "data": {"train": {"files": "tasks.jsonl"}, "shuffle": False},
    "rollout": {"max_concurrent": 1, "sanity_every": 1, "limits": {"max_tokens_per_turn": 160, "max_context": 2048}},
    "train": {"steps": 1, "groups_per_step": 1, "group_size": 2, "optim": {"lr": 1.0e-3}},
}
"""Under every scenario. One episode at a time, so that no order depends on how quick anything is."""
IN_VERL: dict[str, Any] = {name: COMMON[name] for name in ("num_threads", "rollout")}
"""What of it has no key of verl's."""
SERVED: dict[str, Any] = {"engine": {"kind": "sglang", "max_in_flight": 8}}
"""Under those whose completions come from a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a scenario's folder does not say."""

    command: str = "train"
    template: str = "data/templates/chatml.jinja"
    """The chat template, under tests."""
    is_vision: bool = False
    is_verl: bool = False
    """The configuration is in verl's keys; ours go under `polyturn`."""
    has_example: bool = False
    """The configuration names a scheduler of the folder examples/schedulers, which is copied beside it."""
    is_killed: bool = False
    """The run is killed with SIGKILL when the script holds a request, then resumed."""


SCENARIOS: dict[str, Scenario] = {
    "tools": Scenario(),
    "interaction": Scenario(),
    "edits": Scenario(),
    "compaction": Scenario(),
    "inference": Scenario(template="data/templates/strips_reasoning.jinja"),
    "forks": Scenario(),
    "tree": Scenario(has_example=True),
    "thinking_tips": Scenario(has_example=True),
    "math_tips": Scenario(has_example=True),
    "gym": Scenario(),
    "multimodal": Scenario(command="rollout", template="golden/shows_images.jinja", is_vision=True),
    "multimodal_step": Scenario(template="golden/shows_images.jinja", is_vision=True),
    "endpoint": Scenario(),
    "swift": Scenario(),
    "verl": Scenario(is_verl=True),
    "journal": Scenario(is_killed=True),
    "step": Scenario(),
}

LEFT_OUT: dict[str, str] = {
    "metrics: time/*": "how long things took",
    "metrics: *_s": "how long things took",
    "metrics: system/*": "what the machine did",
    "metrics: rollout/state_*": "how long things took",
    "metrics: engine/queue": "how long requests waited",
    "metrics: engine/kv_use": "for how long how much was in use",
    "metrics: rollout/loop_blocked": "whether this machine was busy",
    "rows: entropies": "came later than the fixtures, and tests of its own look at it",
    "rows: messages.written": "came later than the fixtures, and tests of its own look at it",
    "rows: messages.own": "came later than the fixtures, and tests of its own look at it",
    "rows: generate_s": "how long it took",
    "rows: tools_s": "how long it took",
    "rows: interaction_s": "how long it took",
    "rows: metrics.*_s": "how long it took",
    "rows: tool_results.duration_s": "how long it took",
    "rows: turns.timings": "when a turn began and how long it took",
    "asked: rid": "a request's id on the wire is random",
}
"""What is recorded of no run, and why: times, durations, random ids. Paths are replaced in `_without_paths`."""
NEARLY = ("logprobs", "policy_logprobs")
"""Columns of rows that a model computed: equal to 1e-5 to the fixture, and to the last bit on one machine."""


# One run.


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a scenario in a folder that is not there yet, and return its record."""
    scenario = SCENARIOS[name]
    shutil.copytree(SCENARIO_FOLDER / name, folder)
    if scenario.has_example:
        shutil.copytree(HERE.parents[1] / "examples" / "schedulers", folder / "schedulers")
    write_model(folder / "model", template=HERE.parent / scenario.template, is_vision=scenario.is_vision)
    own = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    if not (folder / "says.yaml").is_file():
        _write_config(folder, COMMON, own)
        _call(folder, scenario.command)
        return _left(folder)
    says = yaml.safe_load((folder / "says.yaml").read_text(encoding="utf-8"))
    with ScriptedServer(folder / "model", says, is_vision=scenario.is_vision) as server:
        engine = _merged(SERVED, {"engine": {"urls": [server.url]}})
        if scenario.is_verl:
            _write_config(folder, {"polyturn": _merged(IN_VERL, engine)}, own)
        else:
            _write_config(folder, COMMON, engine, own)
        flags = ["--verl"] if scenario.is_verl else []
        found: dict[str, Any] = {}
        if scenario.is_killed:
            _kill(folder, server)
            found["num_asked_before_the_kill"] = len(server.asked)
            flags.append("--resume")
        _call(folder, scenario.command, *flags)
        found |= {"asked": _shortened(server.asked), "num_left_in_script": server.num_left}
    return _without_paths(found, folder) | _left(folder)


def _write_config(folder: Path, *layers: Mapping[str, Any]) -> None:
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merged(merged, layer)
    (folder / "config.yaml").write_text(yaml.safe_dump(merged), encoding="utf-8")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        is_both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if is_both else value
    return out


def _call(folder: Path, command: str, *flags: str) -> None:
    """Call a command of polyturn in this process and in `folder`.

    Raises:
        RuntimeError: it failed; the message is what it printed.
    """
    from polyturn.cli.main import main

    said = io.StringIO()
    code: Any = 0
    with _as_a_process(folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main([command, "config.yaml", *flags])
        except SystemExit as ended:
            code = ended.code
    if code:
        raise RuntimeError(f"polyturn {command} ended with {code} in the scenario {folder.name}:\n{said.getvalue()}")


@contextlib.contextmanager
def _as_a_process(folder: Path) -> Iterator[None]:
    """Stand in `folder`, without modules and folders of earlier tests, and without matplotlib, which takes longer than the
    step."""
    here, path, before = Path.cwd(), list(sys.path), dict(sys.modules)
    hidden = [name for name in before if name.split(".")[0] in ("matplotlib", "plugins")]
    for name in hidden:
        del sys.modules[name]
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    os.chdir(folder)
    sys.path[:] = PATH
    importlib.invalidate_caches()
    try:
        yield
    finally:
        os.chdir(here)
        sys.path[:] = path
        del sys.modules["matplotlib"]
        for name in [name for name in sys.modules if name.split(".")[0] == "plugins"]:
            del sys.modules[name]
        sys.modules.update({name: before[name] for name in hidden})


def _kill(folder: Path, server: ScriptedServer) -> None:
    """Run the scenario in a process of its own, and kill that when the server holds a request."""
    import polyturn

    source = str(Path(polyturn.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    log = folder / "killed.log"
    with log.open("w", encoding="utf-8") as out:
        line = [sys.executable, "-m", "polyturn", "train", "config.yaml"]
        child = subprocess.Popen(line, cwd=folder, env=environment, stdout=out, stderr=out)
        while not server.is_holding.wait(0.1) and child.poll() is None:
            pass
        child.kill()
        child.wait()
    if not server.is_holding.is_set():
        raise RuntimeError(f"the run ended before it was killed:\n{log.read_text(encoding='utf-8')}")
    server.forget()


# What it left.


def _left(folder: Path) -> dict[str, Any]:
    """Return the stored rows, the loss weights that they stand for, and the metrics of the one run in `folder`."""
    import polyturn

    (place,) = (folder / "runs").iterdir()
    rows = [_row(row, folder) for row in _stored(place / "trajectories")]
    weights = {
        trajectory.id: [_runs(segment.loss_weights) for segment in trajectory.segments]
        for trajectory in polyturn.Run(place).trajectories()
    }
    written = place / "metrics.jsonl"
    lines = written.read_text(encoding="utf-8").splitlines() if written.is_file() else []
    return {"rows": rows, "loss_weights": weights, "metrics": [_kept(json.loads(line), "metrics") for line in lines]}


def _stored(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the trajectory store as its files have them, in the order of their ids."""
    import pyarrow.parquet as pq

    rows = [_as_lists(row) for file in sorted(folder.rglob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return sorted(rows, key=lambda row: (row["split"], row["step"], row["id"]))


def _as_lists(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its trajectory as the fixtures have it: lists of messages, calls, results, turns and spans."""
    read = json.loads(row["trajectory"])
    lists: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("segments", "media", "spans", "messages", "tool_calls", "tool_results", "turns")
    }
    number_of: dict[tuple[int, int], int] = {}
    routed = []
    for number, segment in enumerate(read["segments"]):
        parent = segment["parent"] or (None, None)
        lists["segments"].append({"agent": segment["agent"], "parent_segment": parent[0], "parent_length": parent[1]})
        lists["media"] += [
            {"segment": number, "kind": one["kind"], "source": json.dumps(one["source"])} for one in segment["media"]
        ]
        for index, span in enumerate(segment["spans"]):
            number_of[number, index] = len(number_of)
            shape = span.pop("routes_shape")
            routed += [] if shape is None else [(len(number_of) - 1, shape)]
            lists["spans"].append({"segment": number, **span})

    def add(message: Mapping[str, Any], turn: int) -> None:
        calls = [{"message": len(lists["messages"]), "turn": turn, **call} for call in message["tool_calls"]]
        lists["tool_calls"] += calls
        rest = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
        lists["messages"].append({"turn": turn, **_content(message), **rest})

    for message in read["task"]["prompt"]:
        add(message, -1)
    for number, turn in enumerate(read["turns"]):
        for message in (turn.pop("message"), *turn.pop("observation")):
            add(message, number)
        for result in turn.pop("tool_results"):
            rest = {name: value for name, value in result.items() if name != "content"}
            lists["tool_results"].append({"turn": number, **_content(result), **rest})
        lists["turns"].append({**turn, "spans": [number_of[segment, span] for segment, span in turn["spans"]]})
    return {
        **{name: value for name, value in row.items() if name not in ("trajectory", "texts")},
        **lists,
        "task": json.dumps(read["task"]),
        "reward_info": None if read["reward"] is None else json.dumps(read["reward"]["info"]),
        "metrics": json.dumps(read["metrics"]),
        "routes_shape": routed[0][1] if routed else None,
        "routed_spans": [number for number, _ in routed] or None,
    }


def _content(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a message or a result as text, or as JSON of its parts."""
    content = value["content"]
    return {"text": content, "parts": None} if isinstance(content, str) else {"text": None, "parts": json.dumps(content)}


def _row(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row without what is left out, with short forms of what is long."""
    plain: dict[str, Any] = {}
    for name, held in row.items():
        value = _opened(held)
        if name in {"weights", "advantages", "trained_weights"} and value is not None:
            value = _runs(value)
        elif isinstance(value, Mapping):
            value = _kept(value, f"rows: {name}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            value = [_kept(one, f"rows: {name}") for one in value]
        elif isinstance(value, list) and value and isinstance(value[0], tuple):
            value = dict(value)  # a column of maps
        plain[name] = value
    return _without_paths(_kept(plain, "rows"), folder)


def _opened(value: Any) -> Any:
    """Parse strings that contain JSON, in columns and in the structs of their lists."""
    if isinstance(value, Mapping):
        return {name: _opened(one) for name, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [_opened(one) for one in value]
    if isinstance(value, str) and value[:1] in {"{", "["}:
        with contextlib.suppress(ValueError):
            return json.loads(value, object_hook=lambda one: {k: v for k, v in one.items() if k not in {"written", "own"}})
    return value


def _kept(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values that `LEFT_OUT` does not name; `where` is "metrics", "rows" or "rows: COLUMN"."""
    between = "." if ":" in where else ": "
    return {
        name: value
        for name, value in values.items()
        if not any(fnmatch.fnmatchcase(f"{where}{between}{name}", pattern) for pattern in LEFT_OUT)
    }


def _runs(values: Iterable[float]) -> list[list[Any]]:
    """[0, 0, 1, 1, 1] -> [[0.0, 2], [1.0, 3]]; each number as short as its float32 can be written."""
    out: list[list[Any]] = []
    for value in values:
        short = float(str(np.float32(value)))
        if out and out[-1][0] == short:
            out[-1][1] += 1
        else:
            out.append([short, 1])
    return out


def _shortened(asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return requests in which the beginning of a prompt that an earlier one had too is said by reference.

    {"begins_as": [2, 40], "ids": […]}: the first 40 ids are those of request 2
    """
    out: list[dict[str, Any]] = []
    prompts = [list(request["input_ids"]) for request in asked]
    for number, request in enumerate(asked):
        mine = prompts[number]
        shared = [_num_common(mine, other) for other in prompts[:number]]
        begins = [shared.index(max(shared)), max(shared)] if any(shared) else None
        rest = mine[begins[1] :] if begins else mine
        short = {name: value for name, value in _kept(request, "asked").items() if name != "input_ids"}
        out.append({"begins_as": begins, "ids": rest, **short})
    return out


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two lists."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _without_paths(value: Any, folder: Path) -> Any:
    """Replace the run's folder, and pictures by what they show: a PNG's bytes depend on who compressed it."""
    text = json.dumps(value).replace(json.dumps(str(folder))[1:-1], "FOLDER")
    return json.loads(re.sub(r"data:image/png;base64,([A-Za-z0-9+/=]+)", lambda found: _picture(found[1]), text))


def _picture(data: str) -> str:
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(data)))
    pixels = hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()[:16]
    return f"picture {image.width}x{image.height} {pixels}"


# Fixtures, and what they are compared with.


def load_renames() -> dict[str, dict[str, str]]:
    """Return {"rows": {old: new}, "metrics": {old: new}}; a field of a column is `column.field`, under its old column."""
    found = yaml.safe_load(RENAMES.read_text(encoding="utf-8")) or {}
    return {kind: found.get(kind) or {} for kind in ("rows", "metrics")}


def later_columns() -> dict[str, Any]:
    """Return the columns of rows that are newer than the fixtures, with what they hold in a run as was recorded."""
    return (yaml.safe_load(RENAMES.read_text(encoding="utf-8")) or {}).get("later") or {}


def renamed(record: Mapping[str, Any], renames: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return a record with the new names of its rows and metrics, and with columns that rows have had since."""
    columns = renames["rows"]

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        return {**{columns.get(name, name): field(name, value) for name, value in one.items()}, **renames.get("later", {})}

    def field(column: str, value: Any) -> Any:
        if isinstance(value, list):
            return [field(column, item) for item in value] if value and isinstance(value[0], Mapping) else value
        if not isinstance(value, Mapping):
            return value
        return {columns.get(f"{column}.{name}", f".{name}").rpartition(".")[2]: held for name, held in value.items()}

    metrics = [{renames["metrics"].get(name, name): value for name, value in line.items()} for line in record["metrics"]]
    return {**record, "rows": [row(one) for one in record["rows"]], "metrics": metrics}


def names(record: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the names of a record's columns, with the fields of those that have some, and of its metrics."""
    rows: set[str] = set()
    for row in record["rows"]:
        rows |= set(row)
        for column, value in row.items():
            items = value if isinstance(value, list) else [value]
            rows |= {f"{column}.{field}" for item in items if isinstance(item, Mapping) for field in item}
    return {"rows": rows, "metrics": {name for line in record["metrics"] for name in line}}


def differences(old: Any, new: Any, *, near: float, at: str = "") -> list[str]:
    """Return the differences of two records: logprobs beyond `near`, metrics beyond that share of them, of all else any."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        gone = [f"{at}/{name} is gone" for name in old if name not in new]
        come = [f"{at}/{name} is new: {_brief(new[name])}" for name in new if name not in old]
        both = [name for name in old if name in new]
        return [*gone, *come, *(d for name in both for d in differences(old[name], new[name], near=near, at=f"{at}/{name}"))]
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [
                f"{at} has {len(new)} items and had {len(old)}; the first that differs is number {_num_common(old, new)}"
            ]
        pairs = enumerate(zip(old, new, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, near=near, at=f"{at}/{i}")]
    if old == new and type(old) is type(new):
        return []
    if isinstance(old, float) and isinstance(new, float):
        is_metric, is_logprob = at.startswith("/metrics/"), at.split("/")[-2] in NEARLY
        allowed = near * max(1.0, abs(old)) if is_metric else near if is_logprob else 0.0
        if abs(old - new) <= allowed:
            return []
    return [f"{at} is {_brief(new)} and was {_brief(old)}"]


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."


def fixture(name: str) -> dict[str, Any]:
    """Return the record of a scenario."""
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def write(name: str, record: Mapping[str, Any]) -> None:
    """Write a fixture: sorted, compact, a line for each row, request and line of metrics; a model's numbers to 7 digits."""
    parts = []
    for key in sorted(record):
        value = _rounded(record[key], is_model=key == "metrics")
        items = value if isinstance(value, list) else [value]
        text = ",\n".join(json.dumps(item, sort_keys=True, separators=(",", ":"), ensure_ascii=False) for item in items)
        parts.append(f'"{key}":[\n{text}\n]' if isinstance(value, list) else f'"{key}":{text}')
    FIXTURES.mkdir(exist_ok=True)
    (FIXTURES / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _rounded(value: Any, *, is_model: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(one, is_model=is_model or name in NEARLY) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one, is_model=is_model) for one in value]
    return float(f"{value:.7g}") if is_model and isinstance(value, float) else value


def record_all(chosen: Sequence[str]) -> dict[str, Any]:
    """Run scenarios, each in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="golden-") as made:
        return {name: run(name, Path(made).resolve() / name) for name in chosen}


def _record_of(checkout: Path, chosen: Sequence[str], out: Path) -> dict[str, Any]:
    """Record with the code of a checkout, by the recorder and scenarios that it has, else by these."""
    own = checkout / "tests" / "golden" / "record.py"
    script = own if own.is_file() else HERE / "record.py"
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, "--out", out, *chosen], env=environment, check=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _compare(checkout: Path, chosen: Sequence[str]) -> list[str]:
    """Return the differences, to the last bit, between this code and another checkout on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = _record_of(checkout.resolve(), chosen, Path(folder) / "theirs.json")
        ours = _record_of(HERE.parents[1], chosen, Path(folder) / "ours.json")
    maps = {**load_renames(), "later": later_columns()}
    return [
        f"{name}{problem}"
        for name in chosen
        for problem in differences(renamed(theirs[name], maps), renamed(ours[name], maps), near=0.0)
    ]


def main() -> None:
    """Record, compare, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SCENARIOS, []], help="scenarios; all by default")
    parser.add_argument("--write", action="store_true", help="write fixtures anew")
    parser.add_argument("--compare", type=Path, metavar="CHECKOUT", help="compare with the code of another checkout")
    parser.add_argument("--out", type=Path, help="write all that was recorded to this file, with every digit")
    options = parser.parse_args()
    chosen = options.names or list(SCENARIOS)
    if options.compare is not None:
        problems = _compare(options.compare, chosen)
        print("\n".join(problems) or f"{len(chosen)} scenarios are equal, to the last bit")  # noqa: T201
        raise SystemExit(bool(problems))
    found = record_all(chosen)
    if options.out is not None:
        options.out.write_text(json.dumps(found, sort_keys=True), encoding="utf-8")
    if options.write:
        for name, record in found.items():
            write(name, record)


if __name__ == "__main__":
    main()
