"""What the pages of docs/ say of configurations is true: each YAML snippet loads, each key and each metric exists.

A snippet is a part of a configuration, so a model is added where it has none. A line that sets a section again is one
configuration more: pages show alternatives beneath each other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from polyturn.config.models import RunConfig
from polyturn.config.schema import is_model, keys_of

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.md") if "migrate" not in p.parts and "reference" not in p.parts)
SECTIONS = set(RunConfig.model_fields)
ANY = "|".join(sorted(SECTIONS))
RECORDED = "rollout|reward|tokens|policy|loss|buffer|time|critic|engine"
SOURCE = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))


def snippets() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            for part, text in enumerate(alternatives(block)):
                keys = yaml.safe_load(text)
                if isinstance(keys, dict) and keys.keys() <= SECTIONS:
                    found.append((f"{page.relative_to(ROOT / 'docs')} {number}.{part}", text))
    return found


def alternatives(block: str) -> list[str]:
    """Cut a block before each line that sets a section a second time."""
    parts: list[list[str]] = [[]]
    seen: set[str] = set()
    for line in block.splitlines():
        section = line.split(":")[0] if line[:1].isalpha() else ""
        if section and section in seen:
            parts.append([])
            seen = set()
        seen.add(section)
        parts[-1].append(line)
    return ["\n".join(part) for part in parts]


SNIPPETS = snippets()


def test_the_pages_show_configurations():
    assert len(SNIPPETS) > 20


@pytest.mark.parametrize("text", [text for _, text in SNIPPETS], ids=[name for name, _ in SNIPPETS])
def test_a_snippet_is_a_part_of_a_configuration(text: str):
    given: dict[str, Any] = yaml.safe_load(text)
    RunConfig.model_validate({**given, "model": {"path": "there", **given.get("model", {})}})


def has_key(model: type, path: list[str]) -> bool:
    if not path:
        return True
    key = keys_of(model).get(path[0])
    if key is None:
        return False
    kinds = [key.annotation, *get_args(key.annotation)]
    inner = [kind for kind in kinds if is_model(kind)]
    return any(has_key(kind, path[1:]) for kind in inner) if inner else len(path) == 1 or "dict" in str(key.annotation)


def named(pattern: str) -> set[tuple[str, str]]:
    """Return which page names what."""
    return {(page.stem, name) for page in PAGES for name in re.findall(pattern, page.read_text(encoding="utf-8"))}


def test_every_key_that_a_page_names_exists():
    files = ("py", "yaml", "jsonl", "png", "md", "json", "parquet")
    keys = {one for one in named(rf"`((?:{ANY})(?:\.[a-z_]+)+)(?::[^`]*)?`") if one[1].rsplit(".")[-1] not in files}
    code = {one for one in keys if f"polyturn.{one[1]}" in SOURCE}
    assert not {one for one in keys - code if not has_key(RunConfig, one[1].split("."))}


def test_every_metric_that_a_page_names_is_recorded():
    """Its name, or what it begins with, stands in the source in quotes."""
    for page, name in named(rf"`((?:{RECORDED})/[a-z0-9_]+)`"):
        begins = [name.rsplit("_", k)[0] for k in range(name.count("_") + 1)]
        assert any(f'"{begin}' in SOURCE for begin in begins), (page, name)
