"""The small model of the contract tests: engines in this process sample from it, and real servers serve it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from support.models import tiny_model

VOCAB = 96
PROMPT = range(1, 30)


def small_model() -> PreTrainedModel:
    """Return a model with a tied head whose distributions are far from uniform, so that wrong weights show."""
    return tiny_model(VOCAB, hidden=64, intermediate=64, max_positions=2048, spread=0.2)


def changed_model(scale: float = 0.05) -> PreTrainedModel:
    """Return the small model after a step so large that its logprobs surely differ."""
    model = small_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def ask(name: str = "r", *, prompt=PROMPT, deadline: float | None = None, **sampling) -> GenerateRequest:
    """Return a request whose id is also its session."""
    sampling = SamplingParams(**sampling)
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=prompt, sampling=sampling, deadline=deadline)


def logprob_gaps(model: PreTrainedModel, completion: Completion, *, temperature: float = 1.0) -> np.ndarray:
    """Return by how much each logprob of an answer to `PROMPT` differs from the model's own."""
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
    own = logprobs[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
    return np.abs(own - completion.logprobs)
