"""Weights leave the ranks a bucket at a time, so that no process holds a second whole model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from streaming_ranks import BUCKET
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from polyturn.core.errors import EngineError
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.stream import StreamedTensors, TensorKind
from polyturn.training.hf import as_checkpoint, save_model
from support.refusals import refuses

WORKER = Path(__file__).with_name("streaming_ranks.py")
SLACK = 12 * 2**20
"""The allocator's, and of a tensor that is gathered while a bucket is nearly full."""


def streamed(weights, *, limit):
    """Return `weights` as a stream, and the list of the names that each transfer brings."""
    brought = []

    def bring(names):
        brought.append(list(names))
        return {name: weights[name].clone() for name in names}

    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    return StreamedTensors(kinds, bring, limit=limit), brought


def test_stream_brings_a_bucket_at_a_time():
    weights = {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.arange(9.0), "d": torch.zeros(1)}
    made, brought = streamed(weights, limit=16)
    assert [list(bucket) for bucket in made.buckets()] == [["a", "b"], ["c"], ["d"]] == brought
    assert torch.equal(made["c"], weights["c"]) and torch.equal(made["c"], weights["c"])
    assert len(brought) == 4, "the bucket that was brought last is held"
    assert list(made) == list(weights) and len(made) == 4


def test_stream_is_written_in_shards(tmp_path):
    weights = {f"w{i}": torch.full((4,), float(i)) for i in range(5)}
    (tmp_path / "config.json").write_text("{}")
    with WeightFolder(tmp_path, root=tmp_path) as files:
        written = files.write(streamed(weights, limit=32)[0])
        assert sorted(path.name for path in written.folder.glob("*.safetensors")) == [
            f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
        ]
        again = {name: t for path in written.folder.glob("*.safetensors") for name, t in load_file(path).items()}
        assert again.keys() == weights.keys() and all(torch.equal(again[name], t) for name, t in weights.items())


def test_folder_that_rank_0_does_not_see_is_refused(tmp_path):
    def use_there(pieces, use):
        (tmp_path / "seen").rename(tmp_path / "elsewhere")  # to rank 0, on another machine, it does not exist
        return use(iter([]), None)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "seen").mkdir()
    kinds = {"w": TensorKind((2,), torch.float32)}
    with WeightFolder(tmp_path, root=tmp_path / "seen") as files:
        far = StreamedTensors(kinds, bring=pytest.fail, use_there=use_there)
        refuses(lambda: files.write(far), EngineError, "the machine of rank 0 does not see", "engine.weights_folder")


def test_function_is_sent_to_the_process_that_has_the_tensors():
    weights = {f"w{i}": torch.full((4,), float(i)) for i in range(3)}
    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}

    def use_there(pieces, use):
        return use(({name: weights[name] for name in names} for names in pieces), None)

    elsewhere = StreamedTensors(kinds, bring=pytest.fail, limit=32, use_there=use_there)
    assert elsewhere.over(lambda pieces: [list(piece) for piece in pieces]) == [["w0", "w1"], ["w2"]], "nothing was brought"


def test_experts_are_streamed_one_by_one(tmp_path):
    """A layer comes at once, whatever the limit, because its experts are one tensor here and many there."""
    config = MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "whole")
    whole, made = load_file(tmp_path / "whole/model.safetensors"), as_checkpoint(model, streamed(weights, limit=64)[0])
    assert made.keys() == whole.keys() != weights.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in whole.items())
    again = AutoModelForCausalLM.from_pretrained(save_model(model, tmp_path / "m", tensors=streamed(weights, limit=64)[0]))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in weights.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="the most memory is read from /proc")
def test_rank_needs_at_most_two_buckets_above_its_shards(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = str(Path(__file__).parents[2])
    shared["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory is given back, and not kept for later
    command = [sys.executable, str(WORKER), str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(800) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    leader, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert leader["bytes"] > 10 * BUCKET and leader["num_files"] > 10 and leader["is_same"], leader
    assert leader["most"] < 2 * BUCKET + SLACK, leader
    assert other["most"] < 2 * BUCKET + SLACK, other
