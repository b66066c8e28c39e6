"""Short samples for tests of what trains on them.

sample_of(("g", "0", 0), [5, 6, 7], [0, 1, 1], advantages=[0, 1, 1])      group, trajectory, segment; ids; loss weights
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyturn.core.sample import SampleId, TrainSample


def sample_of(id: tuple[str, str, int], token_ids: Any, loss_weights: Any, **fields: Any) -> TrainSample:
    """Return a sample whose tokens are all of turn 0, unless `turn_ids` is given."""
    fields.setdefault("turn_ids", np.zeros(len(token_ids), np.int32))
    return TrainSample(id=SampleId(*id), token_ids=token_ids, loss_weights=loss_weights, **fields)
