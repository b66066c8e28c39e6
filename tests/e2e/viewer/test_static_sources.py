"""The scripts of the viewer: no text reaches a page unescaped, and no pattern of Markdown repeats without a bound."""

from __future__ import annotations

import re

from polyturn.viewer.pages import STATIC


def test_markdown_patterns_are_bounded():
    source = (STATIC / "markdown.js").read_text()
    patterns = re.findall(r"^const (?:INLINE|CODE) = /(.*)/g;$", source, re.M)
    assert len(patterns) == 2
    for pattern in patterns:
        without_escapes = re.sub(r"\\.", "", pattern)
        assert not re.search(r"[*+]|\{\d+,\}", re.sub(r"\[[^\]]*\]", "", without_escapes)), pattern
        long = [kind for kind, most in re.findall(r"(\[[^\]]*\])\{\d+,(\d+)\}", pattern) if int(most) > 2000]
        assert not [kind for kind in long for begins in "`*![" if re.fullmatch(kind, begins)], "it would be sought at each"


def test_every_text_goes_through_the_escape_of_control_characters():
    """By `el`, `svg` and `say` of base.js; elements written to directly would obey control characters."""
    for path in STATIC.glob("*.js"):
        written = re.findall(
            r"\.(?:textContent|innerText|innerHTML|outerHTML|nodeValue|title) = (?!legible)|insertAdjacent", path.read_text()
        )
        assert path.name == "uplot.js" or not written, path.name
