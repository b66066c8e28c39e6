"""`polyturn check`: the probe and the traits of a model's tokenizer and chat template, as one table or one JSON object."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from polyturn.api.console import quiet_transformers
from polyturn.cli.arguments import JsonFlag, declare
from polyturn.cli.console import Output
from polyturn.cli.markers import add_template_markers
from polyturn.cli.template_report import TemplateReport, TemplateTraits, report_template
from polyturn.core.errors import ConfigError, TemplateError
from polyturn.models import PACKAGED, packaged
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.templates import template_source

_LABELS = {
    "keeps_turn_before_user": "prefix-preserving after a user turn",
    "keeps_turn_before_tool": "prefix-preserving after a tool result",
    "keeps_reasoning_before_user": "prefix-preserving after reasoning, user turn",
    "keeps_reasoning_before_tool": "prefix-preserving after reasoning, tool result",
    "generation_prompt_is_header": "generation prompt equals the history header",
    "has_reasoning_field": "has a field for reasoning",
    "renders_reasoning": "renders reasoning of the last turn",
    "strips_reasoning": "strips reasoning of past turns",
    "other_end_in_history": "ends a past turn with another token",
    "takes_system": "takes a system message",
    "needs_user_first": "needs a user message first",
    "needs_alternation": "needs alternation of user and assistant",
    "writes_dates": "writes dates",
    "writes_today": "writes today's date",
}
_MAX_LEAKS, _MAX_FINDINGS = 12, 4
"""Number of sentences in the table."""


@declare("check")
def main(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="Folder or hub id of a model or tokenizer, or the folder of a run.")
    ],
    template: Annotated[
        str | None, typer.Option(help="Replaces the chat template: a Jinja file, or hermes, which supports tools.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Certify that a model's chat template trains token-exactly. Exit code 1 means that it does not."""
    began = time.monotonic()
    model = _tokenizer_of(model)
    quiet_transformers()
    name = model if template is None else template
    try:
        codec, added = _load(model, template)
        report = report_template(codec)
    except TemplateError as problem:
        _refuse(name, str(problem), time.monotonic() - began, as_json=as_json)
        raise typer.Exit(1) from problem
    seconds = time.monotonic() - began
    if as_json:
        Output().text(json.dumps(_object(report, name, added, seconds), ensure_ascii=False))
    else:
        _print(report, name, added, seconds)


def _tokenizer_of(model: str) -> str:
    """Return the tokenizer's folder in a run's folder or checkpoint; return other names unchanged.

    Raises:
        ConfigError: the path is a file, or the folder of a run without a tokenizer.
    """
    folder = Path(os.path.expanduser(model))
    if folder.is_file():
        raise ConfigError(f"{model!r} is a file; name the folder of a model, a tokenizer or a run, or a model on the hub")
    if not folder.is_dir() and model in PACKAGED:
        return str(packaged(model))
    if not folder.is_dir() or any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return model
    for subfolder in (folder / "tokenizer", folder / "model"):
        if subfolder.is_dir():
            return str(subfolder)
    if (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir():
        raise ConfigError(f"the run in {model!r} has no tokenizer/ to check; name the folder of its model")
    return model


def _refuse(name: str, error: str, seconds: float, *, as_json: bool) -> None:
    """Print the reason why there is no safe strategy; the JSON object has the keys of `_object`."""
    if as_json:
        row = {
            "template": name,
            "strategy": "none",
            "reason": error,
            "inference_strategy": "none",
            "error": error,
            "violations": [error],
            "findings": [],
            "control_tokens_from_text": 0,
            "num_dialogues": 0,
            "parser": "none",
            "stop_tokens": [],
            "properties": {trait.name: None for trait in dataclasses.fields(TemplateTraits)},
            "prefix_preserving": None,
            "added_markers": [],
            "seconds": round(seconds, 3),
        }
        Output().text(json.dumps(row, ensure_ascii=False))
        return
    table = Table("property", "value", box=None, pad_edge=False)
    table.add_row("template", name)
    table.add_row("strategy", "none")
    table.add_row("why", error)
    Output().table(table)


def _load(model: str, template: str | None) -> tuple[Codec, tuple[str, ...]]:
    """Return the codec to check, and the markers that were added to its tokenizer."""
    if template is None:
        return load_codec(model), ()
    source = template_source(template, base=Path(), key="--template")
    codec = load_codec(model, chat_template=source)
    tokenizer, added = add_template_markers(codec.tokenizer, source)
    return (Codec(tokenizer, chat_template=source) if added else codec), added


def _first(sentences: Sequence[str], num: int) -> list[str]:
    """Return the first `num` sentences, and a last line that counts the others."""
    num_more = len(sentences) - num
    return [*sentences[:num], *([f"and {num_more} more, which --json lists"] if num_more > 0 else [])]


def _object(report: TemplateReport, name: str, added: tuple[str, ...], seconds: float) -> dict[str, Any]:
    probe = report.probe
    return {
        "template": name,
        "strategy": probe.strategy,
        "reason": probe.reason,
        "inference_strategy": report.inference_strategy,
        "error": None,
        "violations": report.leaks,
        "findings": report.findings,
        "control_tokens_from_text": len(report.leaks),
        "num_dialogues": probe.num_dialogues,
        "parser": report.parser,
        "stop_tokens": report.stop_tokens,
        "properties": dataclasses.asdict(report.traits),
        "prefix_preserving": report.traits.is_prefix_preserving,
        "added_markers": added,
        "seconds": round(seconds, 3),
    }


def _print(report: TemplateReport, name: str, added: tuple[str, ...], seconds: float) -> None:
    table = Table("property", "value", box=None, pad_edge=False)
    table.add_row("template", name)
    for key, value in dataclasses.asdict(report.traits).items():
        table.add_row(_LABELS.get(key, key.replace("_", " ")), {True: "yes", False: "no", None: "-"}[value])
    table.add_row("parser of its tool calls", report.parser)
    table.add_row("stop tokens", " ".join(report.stop_tokens))
    if added:
        table.add_row("markers added to a copy of the tokenizer", " ".join(added))
    table.add_row("dialogues tried", f"{report.probe.num_dialogues} ({seconds:.1f} s in all)")
    table.add_row("control tokens from text", "\n".join((str(len(report.leaks)), *_first(report.leaks, _MAX_LEAKS))))
    if report.findings:
        table.add_row("findings", "\n".join(_first(report.findings, _MAX_FINDINGS)))
    table.add_row("strategy", f"{report.probe.strategy} (with use_inference_chat_template: {report.inference_strategy})")
    table.add_row("why", report.probe.reason)
    Output().table(table)
