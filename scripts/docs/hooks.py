"""Hooks for the mkdocs build of the site: they add generated pages, and resolve links out of docs/.

- The Python API of reference.py is added to the pages of docs/.
- Linked Markdown files outside docs/ (benchmarks/README.md, CONTRIBUTING.md) become pages of the site.
- Linked source files become pages with numbered lines; `…/lifespan.py#run_episode` links to the line that defines
  run_episode. In the repository, the same links open the file.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+|[^):#\s]+\.py)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json", ".jinja": "jinja"}


def line_of(path: Path, name: str) -> int | None:
    """Return the line on which `name`, or `Class.method`, is defined."""
    nodes: list[ast.stmt] = ast.parse(path.read_text()).body
    definition: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        definition = next((n for n in nodes if isinstance(n, kinds) and n.name == part), None)
        if definition is None:
            return None
        nodes = definition.body if isinstance(definition, ast.ClassDef) else []
    return definition.lineno if definition is not None else None


def targets(page: Path) -> list[tuple[str, Path, str]]:
    """Return (link as written, file, part after #) for each link of `page` out of docs/."""
    links = []
    for _, written, anchor in OUTSIDE.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / written))
        if path.is_file() and not path.is_relative_to(ROOT / "docs"):
            links.append((written, path, anchor[1:]))
    return links


def _uri(path: Path) -> str:
    inside = path.relative_to(ROOT).as_posix()
    return f"repository/{inside}" if inside.endswith(".md") else f"repository/{inside}.md"


def _listing(path: Path) -> str:
    fence = "`" * 6
    language = LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    return f'# {name}\n\n{fence}{language} linenums="1"\n{path.read_text()}\n{fence}\n'


def on_files(files: Files, config: Any) -> Files:
    """Add the Python API, and pages for linked files outside docs/."""
    from mkdocs.structure.files import File

    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "src")]  # mkdocs has removed it again
    from reference import API, pages

    files.append(File.generated(config, API, content=pages()[API]))
    seen: set[Path] = set()
    waiting = sorted((ROOT / "docs").rglob("*.md"))
    while waiting:
        page = waiting.pop()
        for _, path, _ in targets(page):
            if path in seen:
                continue
            seen.add(path)
            if path.suffix == ".md":
                waiting.append(path)
                files.append(File.generated(config, _uri(path), content=path.read_text()))
            else:
                files.append(File.generated(config, _uri(path), content=_listing(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links out of docs/ by links to pages of the site; rank references below guides in the search."""
    uri = page.file.src_uri
    is_outside = uri.startswith("repository/")
    if is_outside and not (ROOT / uri.removeprefix("repository/")).is_file():
        page.meta["search"] = {"exclude": True}
        return markdown  # a listing
    if is_outside or uri.startswith(("reference/", "migrate/")):
        page.meta["search"] = {"boost": 0.001}  # a word in a title has the weight of a thousand in a text
    here = (ROOT / uri.removeprefix("repository/")) if is_outside else ROOT / "docs" / uri

    def rewritten(match: re.Match[str]) -> str:
        start, written, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(here.parent / written))
        if path.is_relative_to(ROOT / "docs") and path.is_file():
            target = path.relative_to(ROOT / "docs").as_posix()
        elif path.is_file() and files.get_file_from_path(_uri(path)) is not None:
            target = _uri(path)
            if path.suffix == ".py" and anchor:
                anchor = f"#__codelineno-0-{line_of(path, anchor[1:])}"
        else:
            return match[0]
        return f"{start}{os.path.relpath(target, PurePosixPath(uri).parent)}{anchor})"

    pattern = re.compile(r"(\]\()([^):#\s]+)(#[^)\s]*)?\)") if is_outside else OUTSIDE
    return pattern.sub(rewritten, markdown)
