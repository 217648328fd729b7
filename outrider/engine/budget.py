"""How many tokens to draft and to verify in a step: one rule for all methods; it never asks a method's name.

A request's ceiling is what the configuration, the request itself and the room that is left allow. Below it the rule
chooses what gives most committed tokens a second: with survivals (how likely drafts 1 to i of a request are all
accepted) sorted over all requests, B drafts cost draft_s + verify_s of B rows more and give the sum of the B largest.
Survivals do not rise along a chain, so the B largest are a prefix of each. Costs have steps, so the maximum is taken
over every B and N. Sources: vLLM 0.32, `v1/spec_decode/dynamic` and `spec_decode/adaptive_verification`; DSpark,
algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.config import SpeculativeConfig
from outrider.engine.sequence import Sequence

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def draft_budget(sequence: Sequence, config: SpeculativeConfig, num_requests: int) -> int:
    """Draft tokens that may be verified for this sequence now, 0 and more.

    A round commits its accepted drafts and one token more, so one less than the tokens left is the most of use; beyond
    the drafter's own length limit the request goes on without drafts.
    """
    wishes = sequence.request.drafting
    if wishes.off or sequence.drafting_error is not None:
        return 0
    room = sequence.max_output - sequence.num_output - 1
    if config.max_model_len is not None:
        room = min(room, config.max_model_len - sequence.num_tokens)
    if wishes.num_speculative_tokens is not None:
        room = min(room, wishes.num_speculative_tokens)
    return max(0, min(config.num_tokens_for(num_requests), room))


@dataclass(frozen=True)
class Choice:
    """The best proposal length N and number of drafts B to verify, and the committed tokens a second that they give."""

    num_tokens: int
    num_verified: int
    tokens_per_s: float


def best_length(survival: Floats, num_requests: int, draft_s: Floats, verify_s: Floats) -> Choice:
    """Choose N and B for a step in which `num_requests` commit a token for certain; not drafting is N = B = 0.

    survival [R, Nmax] of those that may draft, 0 where there is no draft; draft_s [Nmax + 1], by N from 0 on; verify_s
    [most + 1], by drafts verified from 0 on. Of equal choices, the shortest. Cost: a sort of Nmax x R Nmax numbers.
    """
    longest = survival.shape[1]
    lengths = np.arange(longest + 1)
    within = np.arange(longest) < lengths[:, None]
    pools = (within[:, None, :] * survival).reshape(longest + 1, -1)
    gains = _gains(pools, len(verify_s) - 1)
    rates = (num_requests + gains) / (draft_s[:, None] + verify_s[: gains.shape[1]])
    num_tokens, num_verified = np.unravel_index(int(rates.argmax()), rates.shape)
    return Choice(int(num_tokens), int(num_verified), float(rates[num_tokens, num_verified]))


def best_budget(survival: Floats, num_requests: int, drafted_s: float, verify_s: Floats) -> int:
    """B for drafts that are made already: shapes as in `best_length`, `drafted_s` is spent whatever B is."""
    gains = _gains(survival.reshape(1, -1), len(verify_s) - 1)[0]
    return int(((num_requests + gains) / (drafted_s + verify_s[: len(gains)])).argmax())


def allocate(survival: Floats, num_verified: int) -> Ints:
    """Drafts of each request among the `num_verified` likeliest to survive, [R]. Rows of `survival` do not rise."""
    order = np.argsort(-survival, axis=None, kind="stable")[:num_verified]
    return np.bincount(order // survival.shape[1], minlength=len(survival))


def _gains(pools: Floats, most: int) -> Floats:
    """Expected accepted drafts of each pool by how many of its likeliest are verified, from none to `most`."""
    ranked = -np.sort(-pools, axis=1)[:, :most]
    gains = np.zeros((len(pools), ranked.shape[1] + 1))
    np.cumsum(ranked, axis=1, out=gains[:, 1:])
    return gains
