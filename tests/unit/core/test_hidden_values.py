"""Secrets in texts that are shown: values of YAML, and what a server echoes of our own URL."""

import pytest

from polyturn.core.secrets import hide, secrets_in_query


@pytest.mark.parametrize("text", ["{client_secret: s3cr3tvalue}", "tools: {api_key: abcdef, n: 1}", "password: hunter22"])
def test_unquoted_value_of_yaml_is_hidden(text: str) -> None:
    shown = hide(text)
    assert "***" in shown
    assert not any(secret in shown for secret in ("s3cr3tvalue", "abcdef", "hunter22"))


@pytest.mark.parametrize("text", ["api_key: Input should be a valid string", "password: null", "api_key: ${oc.env:KEY}"])
def test_prose_and_expressions_stay(text: str) -> None:
    assert hide(text) == text


def test_keys_of_a_url_are_known_as_written_and_decoded() -> None:
    assert secrets_in_query("http://host/search?key=s3cr%2Ft&q=cats") == ("s3cr%2Ft", "s3cr/t")
    assert secrets_in_query("http://host/search?q=cats") == ()
