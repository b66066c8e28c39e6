"""Both ways to the logits give the same log-probabilities, and the model decides between them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyturn.batching.layout import LayoutSettings, MicroBatch, layout
from polyturn.training.head import HeadScores
from polyturn.training.hf import build_model
from polyturn.training.model import TargetForward
from support.models import tiny_model
from support.samples import sample_of


def batch(vocab: int, temperature: float = 1.0) -> MicroBatch:
    rng = np.random.default_rng(0)
    samples = [
        sample_of(
            ("g", str(n), 0),
            rng.integers(0, vocab, n),
            np.array([0.0, *rng.choice([0.0, 1.0], n - 2), 1.0], np.float32),
            temperature=temperature,
        )
        for n in (5, 9, 12)
    ]
    (made,) = layout(samples, coefs=[s.loss_weights for s in samples], settings=LayoutSettings())
    return made


def expected(model: torch.nn.Module, made: MicroBatch, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=made.input_ids_BT).logits.flatten(0, 1)[made.flat_S] / temperature
        return torch.log_softmax(logits, -1).gather(1, made.targets_S[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_tempered_vocabulary(kind, temperature):
    model = tiny_model(64, kind)
    forward = TargetForward(model)
    made = batch(64, temperature)
    scores = forward(made, entropy_grad=False)
    assert forward.reads_hidden_states
    assert torch.allclose(scores.logprobs_S, expected(model, made, temperature), atol=1e-5)
    assert scores.logprobs_S.requires_grad
    assert not scores.entropy_S.requires_grad
    assert ((scores.entropy_S > 0) & (scores.entropy_S <= np.log(64) + 1e-5)).all()


@pytest.mark.parametrize("cap", [0.05, 30.0])
def test_model_that_caps_its_logits_computes_all_of_them(cap: float):
    """Gemma 2 bends its logits after the output embedding, so gathering hidden states first would be wrong.

    It is found out too where the cap is so high that the small logits of random weights hardly feel it.
    """
    config = {
        "model_type": "gemma2",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "final_logit_softcapping": cap,
        "attn_implementation": "eager",
    }
    model = build_model(config, seed=0)
    forward = TargetForward(model)
    made = batch(64)
    assert not forward.reads_hidden_states
    assert torch.allclose(forward(made).logprobs_S, expected(model, made, 1.0), atol=1e-5)


def test_half_precision_model_gives_float32_logprobs():
    forward = TargetForward(tiny_model(64).to(torch.bfloat16))
    assert forward(batch(64)).logprobs_S.dtype == torch.float32


def test_size_of_logit_chunks_depends_on_the_device(monkeypatch):
    """The ranks' models are made on the processor and moved."""
    model = tiny_model(2**15, layers=1)
    forward = TargetForward(model)
    sizes = []
    zeros = HeadScores(torch.zeros(299), None)
    monkeypatch.setattr("polyturn.training.model.target_scores", lambda *a, chunk, **b: (sizes.append(chunk), zeros)[1])
    sample = sample_of(("g", "0", 0), np.arange(300), (np.arange(300) > 0).astype(np.float32))
    for device in ("cpu", "meta"):
        model.to(device)
        (made,) = layout([sample], coefs=[sample.loss_weights], settings=LayoutSettings(), device=device)
        read = SimpleNamespace(
            last_hidden_state=torch.zeros(*made.input_ids_BT.shape, model.config.hidden_size, device=device)
        )
        monkeypatch.setattr(model.base_model, "forward", lambda read=read, **inputs: read)
        with torch.no_grad():
            forward(made)
    assert sizes == [128, 2**27 // 2**15]
