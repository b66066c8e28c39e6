"""Which transport new weights take to a server, and in which buckets."""

import socket
from typing import get_args

import pytest
import torch

from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.config.schema import keys_of
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.engines.weight_transport import WAYS, address_towards, buckets, choose_way, is_here


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        (socket.gethostname(), True),
        ("192.0.2.7", False),
        ("near.test", True),
        ("far.test", False),
        ("both.test", False),
        ("unknown.test", False),
    ],
)
def test_url_of_this_machine_is_recognised(host, expected, monkeypatch):
    """Names are looked up in a table, because some resolvers answer everything."""
    table = {"near.test": ["127.0.0.1"], "far.test": ["192.0.2.7"], "both.test": ["127.0.0.1", "192.0.2.7"]}

    def getaddrinfo(name, port):
        addresses = table.get(name, [name] if name[0].isdigit() else [])
        if not addresses:
            raise socket.gaierror(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert is_here(f"http://{host}:8000") is expected


def test_auto_is_the_folder_where_all_servers_see_it():
    near, far = "http://127.0.0.1:8000", "http://192.0.2.7:8000"
    assert choose_way("auto", []) == "folder"
    assert choose_way("auto", [near], has_gpu=True) == "folder"
    assert choose_way("auto", [near, far]) == "gloo"
    assert choose_way("auto", [near, far], has_gpu=True) == "nccl"
    assert choose_way("auto", [near, far], is_shared=True) == "folder"


@pytest.mark.parametrize(
    ("value", "successor"),
    [("shared_memory", "folder"), ("disk", "folder, with"), ("http", "gloo"), ("group", "nccl between GPUs, or gloo")],
)
def test_retired_transport_names_its_successor(value, successor, tmp_path):
    with pytest.raises(ConfigError, match=rf"{value} .*{successor}"):
        load_config(RunConfig, None, [f"out={tmp_path}", "engine.kind=vllm", f"engine.weights={value}"])


def test_server_on_this_machine_uses_loopback():
    assert address_towards(["http://127.0.0.1:8000"]) == "127.0.0.1"


def test_tensor_larger_than_a_bucket_goes_alone():
    weights = {name: torch.zeros(size) for name, size in [("a", 10), ("b", 10), ("big", 100), ("c", 10)]}
    assert [list(bucket) for bucket in buckets(weights, limit=80)] == [["a", "b"], ["big"], ["c"]]
    assert list(buckets({}, limit=80)) == []


def test_config_offers_every_transport():
    assert set(get_args(keys_of(ServerOptions)["weights"].annotation)) == {"auto", *WAYS}


@pytest.mark.parametrize(
    ("transport", "urls", "words"),
    [
        ("nccl", [], "engine.weights is nccl"),
        ("ipc", [], "engine.weights is ipc"),
        ("folder", ["http://127.0.0.1:8000", "http://192.0.2.7:8000"], r"192\.0\.2\.7:8000 .*engine\.weights_folder"),
        ("ipc", ["http://127.0.0.1:8000", "http://192.0.2.7:8000"], r"192\.0\.2\.7:8000"),
    ],
)
def test_transport_that_cannot_work_is_refused(transport, urls, words):
    with pytest.raises(ConfigError, match=words):
        choose_way(transport, urls)
