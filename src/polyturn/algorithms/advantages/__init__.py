"""Advantage estimators: from rewards to one number per trained token.

    rewards_G = [1, 0, 0, 1]  ->  grpo: [+0.87, -0.87, -0.87, +0.87], the same on every weighted token of a trajectory

NumPy only, because no gradient passes through an advantage. Failed trajectories never reach an estimator. Estimators
compare the rewards of a group (`group.py`) or of the whole batch (`batch.py`), credit single turns (`turns.py`), or use a
critic's values (`gae.py`). `base.py` defines their interface, and `assign.py` applies one to samples.
"""

from polyturn.algorithms.advantages.assign import assign_advantages, bind_estimator, check_estimator
from polyturn.algorithms.advantages.base import (
    BatchAdvantages,
    Estimator,
    GroupView,
    MemberView,
    Rewards,
    Traits,
    advantages,
    components_of,
    declare,
    members_needed,
    traits_of,
)
from polyturn.algorithms.advantages.batch import (
    gdpo,
    gpg,
    hierarchical_grpo,
    rae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from polyturn.algorithms.advantages.gae import bilevel_gae, gae, turn_gae
from polyturn.algorithms.advantages.group import dr_grpo, grpo, grpo_passk, maxrl, opo, rloo
from polyturn.algorithms.advantages.turns import gigpo, mt_grpo, return_to_go

__all__ = [
    "BatchAdvantages", "Estimator", "GroupView", "MemberView", "Rewards", "Traits", "advantages", "assign_advantages",
    "bilevel_gae", "bind_estimator", "check_estimator", "components_of", "declare", "dr_grpo", "gae", "gdpo", "gigpo",
    "gpg", "grpo", "grpo_passk", "hierarchical_grpo", "maxrl", "members_needed", "mt_grpo", "opo", "rae",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "return_to_go", "rloo", "traits_of", "turn_gae",
]  # fmt: skip
