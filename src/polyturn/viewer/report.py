"""The report of one or more runs: the viewer's pages and their data in one HTML file.

    report.html    the pages' script and styles, and the answers of the viewer's server as JSON

The file loads nothing, and its content security policy allows only its own script, by hash. Text from environments is
stored as JSON with escaped tags, and the pages insert it as text, so it cannot run as code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from polyturn.core.errors import DataError
from polyturn.viewer.curves import Window
from polyturn.viewer.highlights import NUM_HIGHLIGHTS
from polyturn.viewer.panels import panels_of
from polyturn.viewer.run_view import MAX_CURVES, RunView

STATIC = Path(__file__).parent / "static"
MAX_TOKENS = 3000
"""Number of a segment's tokens to show, from the beginning."""
_POLICY = "img-src data:; base-uri 'none'; form-action 'none'"
_IMPORT = re.compile(r'^import \{ (.*) \} from "/static/(.*)";\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.M)
_LOADED = re.compile(r'<link rel="stylesheet"[^>]*>\n|<script [^>]*></script>\n')


def write_report(runs: Sequence[Path], out: Path, *, num_trajectories: int = NUM_HIGHLIGHTS) -> Path:
    """Write the report of `runs` to `out` and return it.

    Raises:
        DataError: no folder has metrics or trajectories.
    """
    for folder in runs:
        if not folder.is_dir():
            raise DataError(f"there is no folder {str(folder)!r}; use a run's folder")
    views = [RunView(folder) for folder in runs]
    summaries = [view.summary() for view in views]
    if not any(one["num_metrics"] or one["num_trajectories"] for one in summaries):
        raise DataError(f"there are no metrics and no trajectories in {', '.join(map(str, runs))}, so there is no report")
    answers: dict[str, Any] = {"runs": [{"index": number, **one} for number, one in enumerate(summaries)]}
    for number, view in enumerate(views):
        answers |= {f"runs/{number}/{name}": answer for name, answer in _answers(view, num_trajectories).items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_page(answers, title=" and ".join(view.name for view in views)), encoding="utf-8")
    return out


def _answers(view: RunView, num_trajectories: int) -> dict[str, Any]:
    """Return request -> answer for a run's pages; requests for a trajectory have its id, step and split."""
    metrics = view.metrics()
    metrics["num_left_out"] = max(0, len(metrics["names"]) - MAX_CURVES)
    metrics["names"] = dict(list(metrics["names"].items())[:MAX_CURVES])
    metrics["panels"] = panels_of(metrics["names"])
    chosen = view.highlights(num_trajectories)
    answers = {
        "metrics": metrics,
        "curves": view.curves(list(metrics["names"]), Window()),
        "overview": view.overview(),
        "highlights": chosen,
        "config": view.config(),
    }
    for split in view.summary()["splits"] or ["train"]:
        answers[f"distributions {split}"] = view.distributions(split)
    for one in chosen:
        id, step, split = one["id"], one["step"], one["split"]
        answers[f"trajectory {id} {step} {split}"] = view.trajectory(id, step=step, split=split, page_size=MAX_TOKENS)
        answers[f"advantage {id} {step} {split}"] = view.advantage(id, step=step, split=split)
    return answers


def _page(answers: dict[str, Any], *, title: str) -> str:
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("uplot.css", "style.css"))
    script = f"{(STATIC / 'uplot.js').read_text(encoding='utf-8')}\n{bundle('app.js')}"
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; {_POLICY}"
    data = json.dumps(answers, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = _LOADED.sub("", (STATIC / "index.html").read_text(encoding="utf-8"))
    head = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n<style>{style}</style>\n</head>'
    tail = f'<script type="application/json" id="kept">{data}</script>\n<script>{script}</script>\n</body>'
    return page.replace("<title>polyturn<", f"<title>{escape(title)}<").replace("</head>", head).replace("</body>", tail)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(entry: str) -> str:
    """Return a module and its imports as one script, in which each module is a function that is called once."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (STATIC / name).read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(text):
            if other not in parts:
                add(other)
        names = ", ".join(_EXPORT.findall(text))
        text = _IMPORT.sub(lambda match: f"const {{ {match[1].replace(' as ', ': ')} }} = modules[{match[2]!r}];\n", text)
        parts[name] = f"modules[{name!r}] = (() => {{\n{_EXPORT.sub('', text)}\nreturn {{ {names} }};\n}})();\n"

    add(entry)
    return "const modules = {};\n" + "".join(parts.values())
