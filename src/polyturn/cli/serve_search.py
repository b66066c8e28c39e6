"""`polyturn serve --search INDEX`: Search-R1's `/retrieve` over an index on this machine."""

from __future__ import annotations

from pathlib import Path

from polyturn.cli.listening import listen, needing
from polyturn.cli.serve import ServeOptions


def run(options: ServeOptions, index: Path, *, topk: int = 3, embed: str | None = None, model: str | None = None) -> None:
    """Serve until a signal asks to stop.

    Raises:
        ConfigError: the address would be open to others, or there is no index that can be read.
    """
    with needing("serve", what="a server"):
        from polyturn.serving.search import MAX_BODY_BYTES, create_app
    from polyturn.cli.index import embed_option
    from polyturn.retrieval.searcher import Searcher

    rules = options.rules(max_body_bytes=MAX_BODY_BYTES)
    searcher = Searcher.of_config({"index": str(index), "embed": embed_option(embed, model)})
    deadline_s = 30.0 if options.deadline_s is None else options.deadline_s
    app = create_app(searcher, topk=topk, deadline_s=deadline_s, rules=rules)
    said = f" ({len(searcher.index)} passages, {searcher.mode.value})"
    listen(app, options, rules, what="search", path="/retrieve", more=said)
