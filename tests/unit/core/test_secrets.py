"""Nothing that is written or logged shows a secret: known by its key's name, its text, a header, or the environment."""

from __future__ import annotations

import logging

import pytest

from polyturn.core.errors import ConfigError, RewardError, ToolError, one_line
from polyturn.core.secrets import SHOWN, HideSecrets, bearer, hide, is_secret_name, masked, secrets_in_query, token_from
from polyturn.tools.failures import reason_of

SECRET = "5ecr3t-w0rd"
SECRET_NAMES = (
    "token", "api_key", "apiKey", "api-key", "auth_token", "Authorization", "db.password", "client_secret", "hf_token",
    "aws_secret_access_key", "WANDB_API_KEY", "credentials", "X-Api-Key", "cookie", "Cookie", "cookies", "set-cookie", "pw",
    "db_pw", "pwd", "passwd", "jwt", "basic_auth", "auth", "pass", "db_pass", "MY_PASS", "GH_PAT", "bearer",
)  # fmt: skip
PLAIN_NAMES = (
    "max_tokens", "tokenizer", "eos_token", "pad_token", "token_env", "tokens", "key", "num_tokens", "stop_token_ids",
    "api_key_env", "keys", "TOKENIZERS_PARALLELISM", "secretary", "author", "PWD", "OLDPWD", "password_field_name",
    "compass", "COMPASS", "PATH", "auth_type",
)  # fmt: skip


def test_secret_names_are_told_from_similar_ones() -> None:
    assert [n for n in SECRET_NAMES if not is_secret_name(n)] == []
    assert [n for n in PLAIN_NAMES if is_secret_name(n)] == []


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"the header was Bearer {SECRET}",
        f"{{'Cookie': 'sid={SECRET}'}}",
        f"Set-Cookie: a=b; token: {SECRET}{SECRET}",
        f"Cookie: a=b; pw: '{SECRET}'",
        f"password={SECRET}",
        f'{{"api_key": "{SECRET}"}}',
        f"https://me:{SECRET}@host/x?token={SECRET}",
        f"https://host/x?sig={SECRET}&X-Amz-Signature={SECRET}",
        f"Authorization: token {SECRET}",
        f"x-api-key: {SECRET}{SECRET}",
        f"run --api-key {SECRET} --hub-token={SECRET}",
        f'{{"token": "{SECRET}{SECRET}"}}',
    ],
)
def test_quoted_text_is_shown_without_its_secret(text: str) -> None:
    assert SECRET not in one_line(ValueError(text))
    assert SECRET not in reason_of(ToolError(text), tool="t")
    assert SECRET not in str(masked({"plain": text}))


@pytest.mark.parametrize("key", ["sk-" + "a1" * 12, "hf_" + "Ab1" * 8, "ghp_" + "a1" * 15, "AKIA" + "A1" * 8])
def test_keys_of_known_services_are_hidden(key: str) -> None:
    assert key not in one_line(ValueError(f"wrong key {key} given"))


@pytest.mark.parametrize(
    "text",
    [
        "the stop token='<|im_end|>' is missing",
        "token: 151645",
        "Authorization: Bearer, or x-api-key: TOKEN",
        "--token-file x/y",
    ],
)
def test_text_without_a_secret_is_shown(text: str) -> None:
    assert one_line(ValueError(text)) == f"ValueError: {text}"


def test_secret_of_the_environment_is_hidden_in_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a word without any sign of it")
    assert one_line(RewardError("sent a word without any sign of it")) == "RewardError: sent ***"


def test_configuration_is_masked_wherever_a_secret_lies() -> None:
    config = {
        "tools": [{"config": {"url": "http://me:pw@host/x?token=abc&topk=3", "token": "s3cr3t", "topk": 3}}],
        "headers": {"Authorization": "Bearer s3cr3t", "X-Api-Key": ["a", "b"], "Accept": "text/html", "x": "Bearer letters"},
        "engine": {
            "api_key": "${oc.env:KEY}",
            "max_tokens": 5,
            "password": None,
            "credentials": {"user": "u", "pin": 123456},
        },
        "prompt": "The Bearer of the ring asks basic questions",
        "command": ["serve", "--api-key", "s3cr3t", "--token-file", "file", "--port", "80"],
    }
    assert masked(config) == {
        "tools": [{"config": {"url": "http://***@host/x?token=***&topk=3", "token": SHOWN, "topk": 3}}],
        "headers": {"Authorization": SHOWN, "X-Api-Key": [SHOWN, SHOWN], "Accept": "text/html", "x": "Bearer ***"},
        "engine": {
            "api_key": "${oc.env:KEY}",
            "max_tokens": 5,
            "password": None,
            "credentials": {"user": SHOWN, "pin": SHOWN},
        },
        "prompt": "The Bearer of the ring asks basic questions",
        "command": ["serve", "--api-key", "***", "--token-file", "file", "--port", "80"],
    }


def test_given_secrets_are_hidden_in_text() -> None:
    assert hide("no such key: s3cr3t-1 (s3cr3t-1)", "s3cr3t-1", None) == "no such key: *** (***)"
    assert hide("longer s3cr3t-11 first", "s3cr3t-1", "s3cr3t-11") == "longer *** first"
    assert hide("a short one stays, it occurs by chance: abc", "abc").endswith("abc")


def test_token_comes_from_settings_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "s3cr3t")
    assert token_from({}, where="x") is None
    assert bearer(None) == {}
    assert token_from({"token": "s"}, where="x") == "s"
    assert bearer(token_from({"token_env": "SEARCH_TOKEN"}, where="x")) == {"Authorization": "Bearer s3cr3t"}
    for wrong in ({"token_env": "NOT_THERE"}, {"token": "a", "token_env": "SEARCH_TOKEN"}, {"token": 5}, {"token": "a\nb"}):
        with pytest.raises(ConfigError, match=r"tools\.yaml"):
            token_from(wrong, where="tools.yaml")


def test_log_record_is_kept_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    hiding = HideSecrets({"MY_TOKEN": "s3cr3t-token", "HOME": "/root", "EMPTY_TOKEN": ""})
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
    assert "s3cr3t-token" not in caplog.text
    assert "asked with *** at /root" in caplog.text
    assert "ValueError: the server said ***" in caplog.text


class _Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(("text", "args"), [("%d of %d", ("one",)), ("%(step)d", ({"a": 1},)), ("%s", (_Unprintable(),))])
def test_record_that_cannot_be_formatted_is_kept(text: str, args: tuple[object, ...]) -> None:
    record = logging.LogRecord("polyturn.test", logging.WARNING, __file__, 1, text, args, None)
    assert HideSecrets({}).filter(record), "the handler reports the error"


# --- Secrets in texts that are shown: values of YAML, and our own URL in the answer of a server


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
