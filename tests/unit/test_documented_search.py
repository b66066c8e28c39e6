"""The site's search finds words of the field at the page that is about them, and every page stands in the navigation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(
    ("word", "page"),
    [("approx_kl", "algorithms"), ("grad_norm", "algorithms"), ("grpo", "algorithms"), ("resume", "guides/resume")],
)
def test_a_word_of_the_field_is_a_word_of_its_page(word: str, page: str) -> None:
    """The index is made of what the separator leaves; `policy/approx_kl` has to be found as approx_kl."""
    (search,) = re.findall(r"separator: '(.*)'}", CONFIG)
    words = re.split(search, (ROOT / f"docs/{page}.md").read_text().lower())
    assert word in words


def test_the_search_finds_guides_first_and_no_listing_of_code() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "scripts/docs/hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    def sought(uri: str) -> dict[str, object]:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
        hooks.on_page_markdown("", page, None, None)
        return page.meta.get("search", {})

    assert sought("repository/src/polyturn/training/optim.py.md") == {"exclude": True}
    assert sought("guides/resume.md") == sought("algorithms.md") == {}
    assert sought("reference/api.md") == sought("repository/benchmarks/README.md") == {"boost": 0.001}


def test_every_page_stands_in_the_navigation_and_on_the_front_page() -> None:
    nav = yaml.safe_load(CONFIG[CONFIG.index("nav:") :])["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(nav)))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed
    front = set(re.findall(r"\]\(([\w/-]+\.md)", (ROOT / "docs/index.md").read_text())) | {"index.md"}
    assert {page for page in listed if not page.startswith("migrate/")} <= front
