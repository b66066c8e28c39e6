"""Nothing that is written or said shows a secret: by a key's name, by what stands before it, by the environment."""

from __future__ import annotations

import pytest

from polyturn.core.errors import RewardError, ToolError, one_line
from polyturn.core.hiding import is_secret_name, masked
from polyturn.tools.failures import reason_of

SECRET = "5ecr3t-w0rd"


@pytest.mark.parametrize(
    "said",
    [
        f"Authorization: Bearer {SECRET}",
        f"the header was Bearer {SECRET}",
        f"{{'Cookie': 'sid={SECRET}'}}",
        f"Set-Cookie: a=b; sid={SECRET}",
        f"Set-Cookie: a=b; token: {SECRET}{SECRET}",
        f"Cookie: a=b; pw: '{SECRET}'",
        f"password={SECRET}",
        f'{{"api_key": "{SECRET}"}}',
        f"https://me:{SECRET}@host/x?token={SECRET}",
        f"https://host/x?sig={SECRET}&X-Amz-Signature={SECRET}",
        f"Authorization: token {SECRET}",
        f"authorization: {SECRET}{SECRET}",
        f"x-api-key: {SECRET}{SECRET}",
        f"run --api-key {SECRET} --hub-token={SECRET}",
        f'{{"token": "{SECRET}{SECRET}"}}',
        f"token={SECRET}{SECRET}",
    ],
)
def test_what_an_exception_quotes_is_said_without_its_secret(said: str) -> None:
    assert SECRET not in one_line(ValueError(said))
    assert SECRET not in reason_of(ToolError(said), tool="t")
    assert SECRET not in str(masked({"plain": said}))


def test_the_word_behind_a_flag_of_a_command_is_masked() -> None:
    command = ["serve", "--api-key", SECRET, "--token-file", "file", "--port", "80"]
    assert masked({"command": command}) == {"command": ["serve", "--api-key", "***", "--token-file", "file", "--port", "80"]}


@pytest.mark.parametrize(
    "said",
    [
        "the stop token='<|im_end|>' is missing",
        "token: 151645",
        "Authorization: Bearer, or x-api-key: TOKEN",
        "--token-file x/y",
    ],
)
def test_what_is_no_secret_is_said(said: str) -> None:
    assert one_line(ValueError(said)) == f"ValueError: {said}"


@pytest.mark.parametrize("key", ["sk-" + "a1" * 12, "hf_" + "Ab1" * 8, "ghp_" + "a1" * 15, "AKIA" + "A1" * 8])
def test_keys_that_their_beginning_tells_are_hidden(key: str) -> None:
    assert key not in one_line(ValueError(f"wrong key {key} given"))


def test_a_secret_of_the_environment_is_hidden_in_every_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a word without any sign of it")
    assert one_line(RewardError("sent a word without any sign of it")) == "RewardError: sent ***"


@pytest.mark.parametrize(
    "name",
    [
        "cookie",
        "Cookie",
        "cookies",
        "set-cookie",
        "pw",
        "db_pw",
        "pwd",
        "passwd",
        "jwt",
        "basic_auth",
        "auth",
        "pass",
        "db_pass",
        "MY_PASS",
        "GH_PAT",
        "bearer",
    ],
)
def test_these_names_hold_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert masked({name: "x", "a": [{name: 123456}]}) == {name: "***", "a": [{name: "***"}]}


@pytest.mark.parametrize(
    "name",
    ["eos_token", "max_tokens", "PWD", "OLDPWD", "password_field_name", "compass", "COMPASS", "PATH", "tokens", "auth_type"],
)
def test_these_names_do_not(name: str) -> None:
    assert not is_secret_name(name)


def test_a_value_that_is_a_header_is_masked_under_any_name() -> None:
    assert masked({"x": "Bearer onlyletters", "y": "bearer of news", "z": "Bearer ${oc.env:T}"}) == {
        "x": "Bearer ***", "y": "bearer of news", "z": "Bearer ${oc.env:T}",
    }  # fmt: skip
