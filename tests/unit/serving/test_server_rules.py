"""The rules that all servers share, without a socket: which clients may ask, how often, and with which bodies."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.serving import body
from polyturn.serving.auth import Guard, ServerRules, request_tokens
from polyturn.serving.listen import check_exposure
from polyturn.serving.rate_limit import ClientRateLimit, ClientRates
from support.refusals import refuses, refuses_later

HERE = {"host": "127.0.0.1:8000"}


async def unasked(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the rules are asked, and not the application")


def guard(rules: ServerRules | None = None) -> Guard:
    return Guard(unasked, rules or ServerRules())


def status(gate: Guard, headers: dict[str, str] | None = None, *, method: str = "POST", path: str = "/x") -> int | None:
    refused = gate.refusal(method, path, {**HERE, **(headers or {})}, "10.0.0.1")
    return None if refused is None else refused.status


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:9", "127.8.8.8", "[::1]:9", "LOCALHOST.", "::1"])
def test_names_of_this_machine_are_answered(host: str):
    assert status(guard(), {"host": host if host != "::1" else "[::1]"}) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "10.0.0.1", "0.0.0.0", "[::2]"]
)
def test_loopback_server_answers_to_no_other_name(host: str):
    assert status(guard(), {"host": host}) == 421
    assert status(guard(ServerRules(is_loopback=False, token="t")), {"host": host, "x-api-key": "t"}) is None


def test_allowed_name_is_answered():
    gate = guard(ServerRules(allowed_hosts=frozenset({"box.internal"})))
    assert status(gate, {"host": "box.internal:443"}) is None
    assert status(gate, {"origin": "https://box.internal"}) is None
    assert status(gate, {"host": "other.internal"}) == 421


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://[bad"}, {"sec-fetch-site": "cross-site"},
     {"origin": "http://127.0.0.1:8000"}],
)  # fmt: skip
def test_pages_may_not_ask_a_server_without_pages(headers: dict[str, str]):
    assert status(guard(), headers) == 403


def test_only_its_own_pages_may_ask_a_server():
    gate = guard(ServerRules(for_browsers=True))
    assert status(gate, {"origin": "http://127.0.0.1:8000"}) is None
    assert status(gate, {"sec-fetch-site": "same-origin"}, method="GET") is None
    for headers in ({"origin": "http://127.0.0.1:9999"}, {"origin": "null"}, {"sec-fetch-site": "same-site"}):
        assert status(gate, headers) == 403
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert status(gate, visit, method="GET") is None, "a link on another page may be followed"
    assert status(gate, visit) == 403, "a form of another page may not be sent"


def test_token_comes_in_a_header_or_a_cookie():
    gate = guard(ServerRules(token="sesame", cookie="c", for_browsers=True, open_paths=frozenset({"/health"})))
    right = ({"authorization": "Bearer sesame"}, {"authorization": "bearer  sesame"}, {"x-api-key": "sesame"},
             {"cookie": "a=b; c=sesame"})  # fmt: skip
    wrong = ({}, {"authorization": "sesame"}, {"authorization": "Basic sesame"}, {"authorization": "Bearer sesam"},
             {"authorization": "Bearer "}, {"x-api-key": "sesame\udcff"}, {"cookie": "d=sesame"})  # fmt: skip
    assert [status(gate, h) for h in right] == [None] * 4
    assert [status(gate, h) for h in wrong] == [401] * 7
    assert status(gate, path="/health") is None
    assert list(request_tokens({"cookie": "c=x"})) == []


def test_body_is_refused_by_its_head():
    gate = guard(ServerRules(max_body_bytes=10, body_limits={"/big": 100}))
    assert status(gate, {"content-length": "11"}) == 413
    assert status(gate, {"content-length": "11"}, path="/big") is None
    assert status(gate, {"content-length": "-1"}) == 400
    assert status(gate, {"content-length": "9" * 400}) == 400
    assert status(gate, {"content-encoding": "gzip"}) == 415
    assert status(gate, {"content-encoding": "identity"}) is None
    assert status(gate, {"content-length": "5", "transfer-encoding": "chunked"}) == 400, "a body has one length"
    assert status(gate, {"transfer-encoding": "chunked"}) is None
    assert status(gate, {"transfer-encoding": "gzip, chunked"}) == 400


def test_client_that_asks_too_often_waits():
    now = [0.0]
    rates = ClientRates(ClientRateLimit.parse("2/s:3"), clock=lambda: now[0])
    assert [rates.count("10.0.0.1") for _ in range(4)] == [0, 0, 0, 1]
    assert rates.count("10.0.0.2") == 0
    now[0] = 0.5
    assert [rates.count("10.0.0.1") for _ in range(2)] == [0, 1]


def test_client_with_the_token_has_its_own_rate():
    gate = guard(ServerRules(rate=ClientRateLimit.parse("1/h:3"), token="t"))
    assert [status(gate) for _ in range(4)] == [401, 401, 401, 429]
    assert [status(gate, {"x-api-key": "t"}) for _ in range(4)] == [None, None, None, 429]


def test_rates_are_parsed():
    assert ClientRateLimit.parse("20") == ClientRateLimit.parse("20/s") == ClientRateLimit(per_s=20, burst=40)
    assert ClientRateLimit.parse("600/min:50") == ClientRateLimit(per_s=10, burst=50)
    assert ClientRateLimit.parse("1/min").burst == 1
    for text in ("", "fast", "0/s", "5/d", "5/s:0", "-1"):
        with pytest.raises(ConfigError, match="600/min"):
            ClientRateLimit.parse(text)


@pytest.mark.parametrize("token", ["", "  ", "a b\n", "schlüssel", "a\x00b"])
def test_token_that_no_header_carries_is_refused(token: str):
    refuses(lambda: guard(ServerRules(token=token)), ConfigError, "the token")


def test_open_address_needs_a_long_token():
    for token in (None, "short", "x" * 16):
        check_exposure("127.0.0.1", token)
    refuses(lambda: check_exposure("0.0.0.0", None), ConfigError, "POLYTURN_TOKEN")
    refuses(lambda: check_exposure("0.0.0.0", "short"), ConfigError, "openssl rand")
    check_exposure("0.0.0.0", "x" * 16)


def test_rules_do_not_show_their_token():
    assert "sesame" not in repr(ServerRules(token="sesame"))


HOSTILE = (b"", b"{", b"\xff", b"NaN", b'{"a": Infinity}', b"1e999", b'"\\ud800"', b"[" * 70 + b"]" * 70, b"[" * 100_000,
           b'{"a":' * 2000, b"1" * 5000)  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE)
def test_body_beyond_json_is_refused(content: bytes):
    refuses(lambda: body.loads(content), body.BodyError, "the body")


def test_body_is_an_object():
    assert body.loads(b'{"deep": [[[[]]]]}') == {"deep": [[[[]]]]}
    refuses(lambda: body.loads(b"[]"), body.BodyError, "list, not a JSON object")


async def test_long_body_is_read_in_a_thread(monkeypatch):
    read, threads = body.loads, []

    def watched(body, **bounds):
        threads.append(threading.current_thread() is threading.main_thread())
        return read(body, **bounds)

    monkeypatch.setattr(body, "loads", watched)
    assert await body.read_object(b"{}") == {}
    assert len((await body.read_object(b'{"a": "%s"}' % (b"x" * body.LONG_BODY)))["a"]) == body.LONG_BODY
    assert threads == [True, False]
    await refuses_later(
        lambda: body.read_object(b'{"a": [{}, [], []]}', max_values=3), body.BodyError, "more than 3 lists and objects"
    )
    assert await body.read_object(b'{"a": [{}, []]}', max_values=3)
