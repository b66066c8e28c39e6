"""`polyturn data index`: passages on disk become an index that the search tool and the search server read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError

EMBED_TOKEN_VARIABLE = "POLYTURN_EMBED_TOKEN"


def run(
    sources: Sequence[Path],
    *,
    out: Path,
    vectors: Path | None = None,
    embed: str | None = None,
    model: str | None = None,
) -> int:
    """Build an index and return how many passages it holds.

    Raises:
        ConfigError: the folder exists, or options contradict each other.
        DataError: a source cannot be read.
    """
    from polyturn.retrieval.dense import read_matrix
    from polyturn.retrieval.embedders import embed_all, read_embedder
    from polyturn.retrieval.index import build_index
    from polyturn.retrieval.passages import read_passages

    passages = (passage for source in sources for passage in read_passages(source))
    embedder = read_embedder(embed_option(embed, model))
    if vectors is not None:
        name = None if embedder is None else embedder.name
        return build_index(passages, out, vectors=read_matrix(vectors), embedder=name)
    if embedder is None:
        return build_index(passages, out)
    all_passages = list(passages)
    if not all_passages:
        return build_index(all_passages, out)
    all_vectors = embed_all([passage.contents for passage in all_passages], embedder)
    return build_index(all_passages, out, vectors=all_vectors, embedder=embedder.name)


def embed_option(embed: str | None, model: str | None) -> Any:
    """Return `--embed` and `--embed-model` as the config of an embedder; the token comes from the environment.

    Raises:
        ConfigError: a URL has no model, or a model no URL.
    """
    is_url = embed is not None and embed.startswith(("http://", "https://"))
    if is_url != (model is not None):
        raise ConfigError("--embed URL and --embed-model NAME go together; --embed file.py:function needs no model")
    return {"url": embed, "model": model, "token": os.environ.get(EMBED_TOKEN_VARIABLE)} if is_url else embed
