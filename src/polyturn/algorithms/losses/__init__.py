"""Policy losses: the loss of each token, before it is weighted and averaged.

    token.py        ppo_clip (dapo), policy_gradient (gpg), cispo, sapo, none      the ratio of one token
    sequence.py     gspo, gspo_sequence (luspo), geo_mean, vespo                   the ratio of a sequence
    divergence.py   dppo_tv, dppo_kl, dro                                          how far a probability moved
    covariance.py   clip_cov, kl_cov                                               another loss for a few tokens

A policy loss returns a number for each token, and `aggregate.py` a coefficient for each token. The trainer's loss is the sum
over tokens of number x coefficient. So a policy loss need not know the whole batch, and gradients of micro-batches add up.
"""

from polyturn.algorithms.losses.base import (
    MAX_LOG_RATIO,
    PolicyLoss,
    Selection,
    TokenLoss,
    bind,
    mark,
    marks,
    policy_losses,
    selection_of,
    takes_option,
)
from polyturn.algorithms.losses.covariance import clip_cov, kl_cov
from polyturn.algorithms.losses.divergence import dppo_kl, dppo_tv, dro
from polyturn.algorithms.losses.sequence import geo_mean, gspo, gspo_sequence, vespo
from polyturn.algorithms.losses.token import cispo, none, policy_gradient, ppo_clip, sapo

__all__ = [
    "MAX_LOG_RATIO", "PolicyLoss", "Selection", "TokenLoss", "bind", "cispo", "clip_cov", "dppo_kl",
    "dppo_tv", "dro", "geo_mean", "gspo",
    "gspo_sequence", "kl_cov", "mark", "marks", "none", "policy_gradient", "policy_losses", "ppo_clip", "sapo",
    "selection_of", "takes_option", "vespo",
]  # fmt: skip
