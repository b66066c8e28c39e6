"""Which way new weights take to a server, and in what pieces."""

import re
import socket
from pathlib import Path
from typing import get_args

import pytest
import torch

from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.config.schema import keys_of
from polyturn.core.errors import ConfigError
from polyturn.engines.options import ServerOptions
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weight_transport import WAYS, address_towards, buckets, choose_way, is_here
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from support.vision import tiny_processor, vision_tokenizer


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


def test_auto_is_the_folder_where_all_servers_see_it_and_else_a_broadcast():
    near, far = "http://127.0.0.1:8000", "http://192.0.2.7:8000"
    assert choose_way("auto", []) == "folder"
    assert choose_way("auto", [near], has_gpu=True) == "folder"
    assert choose_way("auto", [near, far]) == "gloo"
    assert choose_way("auto", [near, far], has_gpu=True) == "nccl"
    assert choose_way("auto", [near, far], is_shared=True) == "folder"


@pytest.mark.parametrize("way", ["nccl", "ipc"])
def test_a_way_between_gpus_without_one_is_refused_with_a_sentence(way):
    with pytest.raises(ConfigError, match=rf"engine\.weights is {way}, which needs a GPU here; use folder, or gloo"):
        choose_way(way, [])


@pytest.mark.parametrize(
    ("value", "successor"),
    [("shared_memory", "folder"), ("disk", "folder, with"), ("http", "gloo"), ("group", "nccl between GPUs, or gloo")],
)
def test_a_way_that_is_gone_names_what_took_its_place(value, successor, tmp_path):
    with pytest.raises(ConfigError, match=rf"{value} is no longer a way of weights; use {successor}"):
        load_config(RunConfig, None, [f"out={tmp_path}", "engine.kind=vllm", f"engine.weights={value}"])


@pytest.mark.parametrize("way", ["folder", "ipc"])
def test_the_memory_of_another_machine_is_refused_with_a_sentence(way):
    with pytest.raises(ConfigError, match=rf"{way}, and .*192\.0\.2\.7:8000 is another machine.*engine\.weights_folder"):
        choose_way(way, ["http://127.0.0.1:8000", "http://192.0.2.7:8000"])


def test_a_server_on_this_machine_reaches_us_at_loopback():
    assert address_towards(["http://127.0.0.1:8000"]) == "127.0.0.1"


def test_buckets_hold_at_most_so_much_and_a_larger_tensor_goes_alone():
    weights = {name: torch.zeros(size) for name, size in [("a", 10), ("b", 10), ("big", 100), ("c", 10)]}
    assert [list(bucket) for bucket in buckets(weights, limit=80)] == [["a", "b"], ["big"], ["c"]]
    assert list(buckets({}, limit=80)) == []


def test_the_config_and_the_guide_know_every_way_and_no_other():
    chosen = set(get_args(keys_of(ServerOptions)["weights"].annotation))
    assert chosen == {"auto", *WAYS}
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")
    table = guide.split("## The way of the weights")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == chosen


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
def test_the_guide_says_what_the_clients_say(kind):
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")
    row = next(line for line in guide.splitlines() if line.startswith("| images |"))
    tokenizer = vision_tokenizer()
    media = MediaProcessor(tiny_processor(tokenizer), Codec(tokenizer))
    text, seeing = (kind("http://127.0.0.1:1", ServedModel(vocab_size=8, media=m)).capabilities for m in (None, media))
    assert text.logprobs and not text.media
    assert seeing.media and "sent as data URIs" in row
