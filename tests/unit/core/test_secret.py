"""What is a secret, where it comes from, and that nothing that is said shows it."""

from __future__ import annotations

import logging

import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.secret import SHOWN, HideSecrets, bearer, hide, is_secret_name, masked, token_from


def test_names_that_hold_secrets_are_told_from_names_that_only_sound_so():
    secret = ("token", "api_key", "apiKey", "api-key", "auth_token", "Authorization", "db.password", "client_secret",
              "hf_token", "aws_secret_access_key", "WANDB_API_KEY", "POLYTURN_TOKEN", "credentials",
              "X-Api-Key")  # fmt: skip
    plain = ("max_tokens", "tokenizer", "eos_token", "pad_token", "token_env", "image_token", "tokens", "key", "num_tokens",
             "stop_token_ids", "api_key_env", "keys", "TOKENIZERS_PARALLELISM", "secretary", "author")  # fmt: skip
    assert [n for n in secret if not is_secret_name(n)] == []
    assert [n for n in plain if is_secret_name(n)] == []


def test_a_configuration_is_masked_wherever_a_secret_lies():
    given = {
        "tools": [{"config": {"url": "http://me:pw@host/x?token=abc&topk=3", "token": "s3cr3t", "topk": 3}}],
        "headers": {"Authorization": "Bearer s3cr3t", "X-Api-Key": ["a", "b"], "Accept": "text/html"},
        "engine": {"api_key": "${oc.env:KEY}", "max_tokens": 5, "password": None, "credentials": {"user": "u"}},
        "prompt": "The Bearer of the ring asks basic questions",
    }
    assert masked(given) == {
        "tools": [{"config": {"url": "http://***@host/x?token=***&topk=3", "token": SHOWN, "topk": 3}}],
        "headers": {"Authorization": SHOWN, "X-Api-Key": [SHOWN, SHOWN], "Accept": "text/html"},
        "engine": {"api_key": "${oc.env:KEY}", "max_tokens": 5, "password": None, "credentials": {"user": SHOWN}},
        "prompt": "The Bearer of the ring asks basic questions",
    }


def test_a_text_is_said_without_its_secrets():
    assert hide("no such key: s3cr3t-1 (s3cr3t-1)", "s3cr3t-1", None) == "no such key: *** (***)"
    assert hide("longer s3cr3t-11 first", "s3cr3t-1", "s3cr3t-11") == "longer *** first"
    assert hide("it got {'Authorization': 'Bearer abcdefgh'}") == "it got {'Authorization': 'Bearer ***'}"
    assert hide("GET http://u:p@h/a?api_key=xyz HTTP/1.1") == "GET http://***@h/a?api_key=*** HTTP/1.1"
    assert hide("a short one stays, it occurs by chance: abc", "abc").endswith("abc")


def test_a_token_comes_from_the_settings_or_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEARCH_TOKEN", "s3cr3t")
    assert token_from({}, where="x") is None and bearer(None) == {}
    assert token_from({"token": "s"}, where="x") == "s"
    assert bearer(token_from({"token_env": "SEARCH_TOKEN"}, where="x")) == {"Authorization": "Bearer s3cr3t"}
    for wrong in ({"token_env": "NOT_THERE"}, {"token": "a", "token_env": "SEARCH_TOKEN"}, {"token": 5}, {"token": "a\nb"}):
        with pytest.raises(ConfigError, match=r"tools\.yaml"):
            token_from(wrong, where="tools.yaml")


def test_a_log_record_is_kept_without_secrets(caplog: pytest.LogCaptureFixture):
    hiding = HideSecrets.of_environment({"MY_TOKEN": "s3cr3t-token", "HOME": "/root", "EMPTY_TOKEN": ""})
    caplog.handler.addFilter(hiding)
    logger = logging.getLogger("polyturn.test")
    try:
        logger.warning("asked with %s at %s", "s3cr3t-token", "/root")
        try:
            raise ValueError("the server said s3cr3t-token")
        except ValueError:
            logger.exception("it broke")
    finally:
        caplog.handler.removeFilter(hiding)
    assert "s3cr3t-token" not in caplog.text and "asked with *** at /root" in caplog.text
    assert "ValueError: the server said ***" in caplog.text


def test_a_record_that_cannot_be_written_down_is_left_to_logging():
    record = logging.LogRecord("polyturn.test", logging.WARNING, __file__, 1, "%d of %d", ("one",), None)
    assert HideSecrets(()).filter(record) and record.args == ("one",)
