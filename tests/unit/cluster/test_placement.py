"""What is asked of a Ray cluster before anything is placed there."""

from __future__ import annotations

import pytest

from polyturn.core.errors import ConfigError


def test_an_address_where_nothing_answers_is_a_sentence_and_not_minutes() -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1' .*ray='local'"):
        placement.Cluster("127.0.0.1:1")
