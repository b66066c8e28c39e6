"""Checks the project's rules that no formatter checks. `make check` runs it, and each violation is a line with its position.

    python scripts/house.py [ROOT]    ->    src/polyturn/tools/base.py:12: tools imports training, which lies above it

It parses the sources with `ast` and does not import polyturn, so that it only takes seconds. A rule is a function from the
tree to violations, listed in `RULES`.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from wall_time import timed_asserts

LAYERS = (
    "core", "infra models", "tokens", "algorithms batching tracking store", "partners engines buffer",
    "tools rewards retrieval sandbox", "interactions", "data", "rollout", "evaluation", "training", "serving", "viewer",
    "cluster", "testing", "environments", "config", "build", "api", "cli", "compat", "__main__",
)  # fmt: skip
"""Packages of `src/polyturn`, from the lowest layer to the highest; packages of one layer may import one another."""
RANK_OF = {package: rank for rank, layer in enumerate(LAYERS) for package in layer.split()}
MAY_IMPORT_RAY = {"cluster", "cli", "api", "build"}
MAY_IMPORT_TORCH_AT_THE_TOP = {"training", "algorithms", "engines", "batching", "cluster", "testing", "compat"}
HEAVY = {"torch", "transformers"}
STOOD_IN_FOR = re.compile(r"\b(verl|ms-swift|swift)\b", re.IGNORECASE)
"""Libraries that only `compat` may name; other packages reach them by entry points."""

PHRASES = re.compile(
    r"\b([Rr]eturns?\s+what|Returns?\s+how|Returns?\s+where|[Ww]hoever|[Nn]obody|[Ss]omebody|(any|[Ee]very)one else)\b"
    r"|(?<![Tt]here )\bis no (?!longer|\w+er\b)"
)
"""Phrases that the style guide replaces by the name of the thing."""
VAGUE = {"found", "said", "told", "given", "held", "made", "asked", "shown", "place", "way"}
"""Variable names that do not describe the content."""

EXAMPLES = re.compile(r"(Mine|My\w+|mine|my_\w+|file|agent|tutor|managers|reward_function)\b")
"""Names in docstrings that stand for a user's code."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


class Violation(NamedTuple):
    path: Path
    line: int
    sentence: str


class Import(NamedTuple):
    """One import in a module."""

    path: Path
    line: int
    module: str
    target: str
    at_top: bool
    """Whether it runs when the module is imported."""
    runs: bool
    """False under `if TYPE_CHECKING:`."""


class Tree:
    """The sources of a checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.package = self.root / "src" / "polyturn"
        self.texts = {path: path.read_text(encoding="utf-8") for path in sorted(self.package.rglob("*.py"))}
        self.modules = {path: ast.parse(text) for path, text in self.texts.items()}
        top = [self.root / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
        pages = [*top, *sorted((self.root / "docs").rglob("*.md"))]
        self.pages = {path: path.read_text(encoding="utf-8") for path in pages if path.exists()}

    @cached_property
    def imports(self) -> list[Import]:
        return [one for path in self.modules for one in self._imports_of(path)]

    @cached_property
    def generated(self) -> set[Path]:
        """Return the pages that exist only in the built site."""
        script = self.root / "scripts" / "docs" / "reference.py"
        text = script.read_text(encoding="utf-8") if script.exists() else ""
        return {self.root / "docs" / page for page in re.findall(r'^API = "(reference/[\w-]+\.md)"', text, re.M)}

    def _imports_of(self, path: Path) -> Iterator[Import]:
        parts = path.relative_to(self.package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        waiting: list[tuple[ast.AST, bool, bool]] = [(self.modules[path], True, True)]
        while waiting:
            node, at_top, runs = waiting.pop()
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(path, node.lineno, module, alias.name, at_top, runs)
            elif isinstance(node, ast.ImportFrom):
                above = parts[: len(parts) - node.level] if node.level else ()
                base = ".".join([*above, *([node.module] if node.module else [])])
                # `from polyturn import tools` imports the package polyturn.tools
                for target in [f"{base}.{alias.name}" for alias in node.names] if base == "polyturn" else [base]:
                    yield Import(path, node.lineno, module, target, at_top, runs)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in (
                getattr(node.test, "id", ""),
                getattr(node.test, "attr", ""),
            ):
                waiting += [(child, at_top, False) for child in node.body]
                waiting += [(child, at_top, runs) for child in node.orelse]
            else:
                is_inside = isinstance(node, (*FUNCTIONS, ast.Lambda))
                waiting += [(child, at_top and not is_inside, runs) for child in ast.iter_child_nodes(node)]


def imports_point_down(tree: Tree) -> Iterator[Violation]:
    for one in tree.imports:
        root, package = one.target.partition(".")[0], _part(one.module)
        imported = _part(one.target) if root == "polyturn" else None
        is_ours = imported is not None and imported != package
        for is_wrong, sentence in (
            (package and package not in RANK_OF, f"{package} has no layer; give it one in scripts/house.py"),
            (
                is_ours and RANK_OF.get(imported or "", 0) > RANK_OF.get(package, len(LAYERS)),
                f"{package} imports {imported}, which lies above it",
            ),
            (
                package == "core" and imported != "core" and root not in {*sys.stdlib_module_names, "numpy"},
                f"core imports {one.target}; it needs the standard library and NumPy only",
            ),
            (package == "rollout" and imported == "engines", "rollout imports engines; use core.protocols"),
            (imported == "compat" and package != "compat", "compat is reached by entry points only"),
            (root == "ray" and package not in MAY_IMPORT_RAY, f"{package} imports ray"),
            (
                root in HEAVY and one.runs and one.at_top and package not in MAY_IMPORT_TORCH_AT_THE_TOP,
                f"{package} imports {root} when it is imported; import it where it is used",
            ),
        ):
            if is_wrong:
                yield Violation(one.path, one.line, sentence)


def _part(module: str) -> str:
    """Return the part of polyturn that a module belongs to; "" for polyturn/__init__.py."""
    return module.removeprefix("polyturn").removeprefix(".").partition(".")[0]


def no_cycle_of_imports(tree: Tree) -> Iterator[Violation]:
    graph: dict[str, set[str]] = defaultdict(set)
    for one in tree.imports:
        if one.at_top and one.target.startswith("polyturn"):
            graph[one.module].add(one.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield Violation(tree.package, 1, f"these modules import one another: {' <- '.join(error.args[1])}")


def only_compat_names_other_libraries(tree: Tree) -> Iterator[Violation]:
    for path, text in tree.texts.items():
        if path.relative_to(tree.package).parts[0] != "compat":
            for match in STOOD_IN_FOR.finditer(text):
                sentence = f"{match[0]} is named outside compat; ask infra.stand_in or config.dialect"
                yield Violation(path, _line(text, match), sentence)


def one_class_to_a_name(tree: Tree) -> Iterator[Violation]:
    first: dict[str, Path] = {}
    for path, module in tree.modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                other = first.setdefault(node.name, path)
                if other != path:
                    yield Violation(path, node.lineno, f"{other.relative_to(tree.root)} has a class {node.name} too")


def public_names_agree(tree: Tree) -> Iterator[Violation]:
    """Each public name occurs once in BY_TASK, and once in the imports for type checkers, as an alias of itself."""
    path = tree.package / "__init__.py"
    module = tree.modules.get(path, ast.Module([], []))
    table = next((n for n in module.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "BY_TASK"), None)
    names = [name for group in ast.literal_eval(table.value).values() for name in group] if table and table.value else []
    imports = [alias for node in ast.walk(module) if isinstance(node, ast.ImportFrom) for alias in node.names]
    typed = {alias.name for alias in imports if alias.asname == alias.name} | ({"rollout"} & {*names})  # it is a package
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Violation(path, 1, f"{name} occurs twice in BY_TASK")
    for name in sorted(typed ^ {*names}):
        yield Violation(path, 1, f"{name} is in only one of BY_TASK and the imports for type checkers")


def links_lead_somewhere(tree: Tree) -> Iterator[Violation]:
    for page, text in tree.pages.items():
        prose = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
        for match in LINK.finditer(prose):
            target, anchor = match.groups()
            path = (page.parent / target).resolve() if target else page
            if path in tree.generated:
                continue
            if not path.exists():
                yield Violation(page, _line(prose, match), f"there is no {target}")
            elif anchor and path.suffix in (".md", ".py") and not _has(path, anchor):
                yield Violation(page, _line(prose, match), f"{target or 'this page'} has no {anchor}")


def _has(path: Path, anchor: str) -> bool:
    """Return whether the anchor is a heading of the page, or a function or class of the module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        return anchor in {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
    body: list[ast.stmt] = ast.parse(text).body
    for part in anchor.split("."):
        node = next((n for n in body if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and n.name == part), None)
        if node is None:
            return False
        body = node.body
    return True


def pages_stand_in_the_navigation(tree: Tree) -> Iterator[Violation]:
    site = tree.root / "mkdocs.yml"
    text = site.read_text(encoding="utf-8") if site.exists() else ""
    listed = {tree.root / "docs" / page for page in re.findall(r"([\w\-/]+\.md)$", text, re.MULTILINE)}
    pages = {page for page in tree.pages if page.is_relative_to(tree.root / "docs")} | tree.generated
    for page in sorted(pages - listed):
        yield Violation(page, 1, "mkdocs.yml does not list this page")
    for page in sorted(listed - pages):
        yield Violation(site, 1, f"{page.relative_to(tree.root)} does not exist")


def examples_in_docstrings_exist(tree: Tree) -> Iterator[Violation]:
    """`ClassName(` and `file.py` in a module's docstring exist in the repository, or stand for a user's code."""
    names: set[str] = set()
    for module in tree.modules.values():
        for node in ast.walk(module):
            match node:
                case ast.ClassDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    names.add(name.rpartition(".")[2])
    files = {
        path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (tree.root / folder).rglob("*.py")
    }
    for path, module in tree.modules.items():
        doc = ast.get_docstring(module, clean=False) or ""
        own = set(re.findall(r"class (\w+)", doc))
        for match in re.finditer(r"\b([A-Z][a-z]\w*[a-z])\(|(?<![\w/<])(\w+)\.py\b(?!:\w)", doc):
            name, stem = match.groups()
            is_known = name in names | own if name else f"{stem}.py" in files
            if not is_known and not EXAMPLES.match(name or stem):
                yield Violation(path, _line(doc, match), f"the docstring names {name or stem + '.py'}, which does not exist")


def no_assert_on_wall_time(tree: Tree) -> Iterator[Violation]:
    for path in sorted({*(tree.root / "tests").rglob("*.py"), *(tree.root / "benchmarks").rglob("*.py")}):
        if "data" not in path.relative_to(tree.root).parts:
            for line in timed_asserts(path.read_text(encoding="utf-8")):
                yield Violation(path, line, "this assert needs a quick machine; assert on the cause, not on the time")


def prose_names_the_thing(tree: Tree) -> Iterator[Violation]:
    for path, text in (tree.texts | tree.pages).items():
        for match in PHRASES.finditer(text):
            yield Violation(path, _line(text, match), f"{match[0]!r} hides the thing that it stands for; name it")


def variables_tell_their_content(tree: Tree) -> Iterator[Violation]:
    for path, module in tree.modules.items():
        for function in ast.walk(module):
            for node in ast.walk(function) if isinstance(function, (*FUNCTIONS, ast.Lambda)) else ():
                match node:
                    case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE:
                        yield Violation(path, node.lineno, f"the variable {name!r} does not tell its content")


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


RULES = (
    imports_point_down, no_cycle_of_imports, only_compat_names_other_libraries, one_class_to_a_name, public_names_agree,
    links_lead_somewhere, pages_stand_in_the_navigation, examples_in_docstrings_exist, no_assert_on_wall_time,
    prose_names_the_thing, variables_tell_their_content,
)  # fmt: skip


def main(root: Path) -> int:
    tree = Tree(root)
    violations = [violation for rule in RULES for violation in rule(tree)]
    for path, line, sentence in violations:
        print(f"{path.relative_to(tree.root)}:{line}: {sentence}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
