"""Served teachers on real servers: the scores of ids are the log-probabilities of the model that is served."""

import asyncio

import numpy as np
import pytest
import torch
from engine_servers import CLIENTS, on_servers

from polyturn.algorithms.options import ServedTeacherOptions
from polyturn.engines.request_limits import ServedModel
from polyturn.training.served_teachers import ServedTeacher
from support.served_model import VOCAB, small_model


@pytest.mark.parametrize("kind", on_servers())
def test_scores_are_the_log_probabilities_of_the_served_model(kind, server_of, model_folder):
    url = server_of(kind)
    model = small_model()
    ids = np.random.default_rng(0).integers(3, VOCAB - 1, 60).astype(np.int32)
    start = 7

    async def scores() -> np.ndarray:
        engine = CLIENTS[kind](url, ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder))
        await engine.update_weights(0, weights=model.state_dict())  # other tests share the server
        await engine.close()
        teacher = ServedTeacher(ServedTeacherOptions(url=url, kind=kind))
        await teacher.find_model()
        try:
            return await teacher.score(ids, start)
        finally:
            await teacher.close()

    with torch.no_grad():
        logprobs = model(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1).numpy()
    expected = logprobs[np.arange(start - 1, len(ids) - 1), ids[start:]]
    assert np.abs(asyncio.run(scores()) - expected).max() < 1e-4
