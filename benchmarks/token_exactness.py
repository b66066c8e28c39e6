"""Checks that tokens are exact for all templates: the long form of the property tests. Prints one JSON line.

    python benchmarks/token_exactness.py                                 all templates: minutes, on --jobs cores
    python benchmarks/token_exactness.py --docs benchmarks/README.md     and rewrite that page's table

Each published template in ../shared/data (with Qwen's vocabulary) gets 1,000 random dialogues of every kind, each
hand-written one 200 (1,000 if there are no published ones). They run as real episodes and are compared with an oracle that
renders and encodes whole conversations with the tokenizer's own functions (I1 to I5); every fifth runs once more with each
turn sampled from a full render. Another 10,000 hostile texts are divided among all templates, and each is written into
every field that an environment can set. Target: no violation, no control token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from polyturn.cli.template_report import report_template
from polyturn.testing.tiny_models import tiny_tokenizer
from support.dialogues import MARKERS, TOOLS, hostile_text
from support.exactness import Violation, examine, examine_inference, examine_text
from support.template_case import TemplateCase, load_subjects

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "tests" / "data" / "templates"
SHARED = ROOT.parent / "shared" / "data"
SHARE_AT_INFERENCE = 5
MARK = "<!-- templates: written by benchmarks/token_exactness.py -->"


def load(name: str, *, is_published: bool) -> TemplateCase:
    """Return one template with its tokenizer."""
    facts = yaml.safe_load((WRITTEN / "facts.yaml").read_text(encoding="utf-8"))
    if not is_published:
        return load_subjects(WRITTEN, facts["hand_written"], tiny_tokenizer(1024), only=[name])[0]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(SHARED / "tokenizers" / "qwen2"))
    return load_subjects(SHARED / "chat_templates", facts["published"], tokenizer, only=[name])[0]


def judge(job: tuple[str, bool, int, int, int]) -> dict[str, Any]:
    """Examine one template and return a row of the report."""
    name, is_published, num_dialogues, num_texts, seed = job
    subject = load(name, is_published=is_published)
    violations: list[Violation] = []
    began = time.perf_counter()
    index = 0
    while subject.counts["examined"] < num_dialogues:  # dialogues that the template refuses do not count
        dialogue = subject.dialogue(seed + index, subject.kinds[index % len(subject.kinds)])
        violations += examine(subject, dialogue, is_uncanonical=index % 3 == 2)
        if index % SHARE_AT_INFERENCE == 0:
            violations += examine_inference(subject, dialogue)
        index += 1
    draw = random.Random(f"{name}/{seed}")
    for _ in range(num_texts):
        violations += examine_text(subject, hostile_text(draw, (*MARKERS, *subject.markers * 3)))
    report = report_template(subject.codec)
    if report.probe.renders_tools and report.probe.renders_results:
        report = report_template(subject.codec, tools=TOOLS)
    return {
        "template": name,
        "published": is_published,
        "dialogues": subject.counts["examined"],
        "refused": subject.counts["refused"],
        "texts": num_texts,
        "violations": len(violations),
        "control_tokens": sum(v.rule == "control" for v in violations),
        "first": [f"{v.rule} ({v.kind}, seed {v.seed}): {v.detail}"[:400] for v in violations[:3]],
        "against_a_full_render": {k: n for k, n in subject.counts.items() if k in _KINDS},
        "strategy": report.probe.strategy,
        "inference_strategy": report.inference_strategy,
        "properties": dataclasses.asdict(report.traits),
        "seconds": round(time.perf_counter() - began, 1),
    }


_KINDS = ("equal", "merge", "whitespace", "tool_call_json", "generation_prompt", "reasoning_stripped", "end_token", "other")
_COLUMNS = (
    ("keeps_turn_before_user", "after a user turn"),
    ("keeps_reasoning_before_user", "after reasoning"),
    ("keeps_turn_before_tool", "after a tool result"),
    ("generation_prompt_is_header", "prompt is header"),
    ("needs_alternation", "must alternate"),
    ("writes_today", "writes today"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for the docs."""
    heads = ["template", *(label for _, label in _COLUMNS), "strategy", "at inference", "dialogues", "violations"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        marks = [{True: "yes", False: "**no**", None: "–"}[row["properties"][key]] for key, _ in _COLUMNS[:4]]
        marks += [{True: "**yes**", False: "no", None: "–"}[row["properties"][key]] for key, _ in _COLUMNS[4:]]
        cells = [f"`{row['template']}`", *marks, row["strategy"], row["inference_strategy"]]
        lines.append("| " + " | ".join([*cells, f"{row['dialogues']:,}", str(row["violations"])]) + " |")
    return "\n".join(lines)


def write_docs(page: Path, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Replace the text between the two marks of `page`."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARK)
    after = rest.partition(MARK)[2]
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["against_a_full_render"])
    words = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
    text = (
        f"{table(rows)}\n\nIn {summary['dialogues']:,} dialogues and {summary['texts']:,} hostile texts (over "
        f"{summary['templates']} templates): {summary['violations']} violations, "
        f"{summary['control_tokens']} control tokens. "
        "Compared with a full render of the same messages, the ids of the histories were, over the templates in the table: "
        f"{words}."
    )
    page.write_text(f"{before}{MARK}\n\n{text}\n\n{MARK}{after}", encoding="utf-8")


def main() -> None:
    """Examine the templates of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialogues", type=int, default=1000, help="for each published template")
    parser.add_argument("--texts", type=int, default=10_000, help="over all templates")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--docs", type=Path, help="rewrite the table of this page")
    chosen = parser.parse_args()
    facts = yaml.safe_load((WRITTEN / "facts.yaml").read_text(encoding="utf-8"))
    published = list(facts["published"]) if SHARED.exists() else []
    names = [(n, True) for n in published] + [(n, False) for n in facts["hand_written"]]
    names = [(n, p) for n, p in names if not chosen.only or n in chosen.only]
    share = -(-chosen.texts // len(names))
    few = chosen.dialogues // 5 if published else chosen.dialogues
    jobs = [(n, p, chosen.dialogues if p else few, share, chosen.seed) for n, p in names]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(chosen.jobs, len(jobs))) as pool:
        rows = []
        for row in pool.imap(judge, jobs):
            rows.append(row)
            print({k: v for k, v in row.items() if k != "properties"}, flush=True)
    summary = {
        "benchmark": "token_exactness",
        "templates": len(rows),
        "published": sum(r["published"] for r in rows),
        "dialogues": sum(r["dialogues"] for r in rows),
        "texts": sum(r["texts"] for r in rows),
        "violations": sum(r["violations"] for r in rows),
        "control_tokens": sum(r["control_tokens"] for r in rows),
        "by_template": {r["template"]: [r["dialogues"], r["violations"]] for r in rows},
        "target": 0,
        "passed": not any(r["violations"] for r in rows),
        "wall_s": round(time.perf_counter() - began),
    }
    if chosen.docs is not None:
        write_docs(chosen.docs, [r for r in rows if r["published"]] or rows, summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
