"""How many tokens to draft and to verify in a step: one rule for all methods; it never asks a method's name.

A request's ceiling is what the configuration, the request itself and the room that is left allow. Below it the rule
chooses what gives most committed tokens a second: with survivals (how likely drafts 1 to i of a request are all
accepted) sorted over all requests, B drafts cost draft_s + verify_s of B rows more and give the sum of the B largest.
Survivals do not rise along a chain, so the B largest are a prefix of each. Costs have steps, so the maximum is taken
over every B and N. Sources: vLLM 0.32, `v1/spec_decode/dynamic` and `spec_decode/adaptive_verification`; DSpark,
algorithm 1. Legend: `survival` has a chain for each request that may draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from outrider.config import SpeculativeConfig
from outrider.engine.sequence import Sequence

Chains = Items[Items[float]]


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The best proposal length N and number of drafts B to verify, and the committed tokens a second that they give."""

    num_tokens: int
    num_verified: int
    tokens_per_s: float


def best_length(survival: Chains, num_requests: int, draft_s: Items[float], verify_s: Items[float]) -> Choice:
    """Choose N and B for a step in which `num_requests` commit a token for certain; not drafting is N = B = 0.

    draft_s: by N from 0 on; verify_s: by drafts verified from 0 to the most. Of equal choices, the shortest. Cost: a
    sort of all survivals, and a walk through them for each N that might be better.
    """
    ranked = _ranked(survival)
    best = Choice(0, 0, num_requests / verify_s[0])
    for num_tokens in range(1, len(draft_s)):
        values = [-value for value, _, place in ranked if place < num_tokens][: len(verify_s) - 1]
        if num_requests + sum(values) > best.tokens_per_s * (draft_s[num_tokens] + verify_s[0]):
            num_verified, rate = _best_rate(values, num_requests, draft_s[num_tokens], verify_s)
            if rate > best.tokens_per_s:
                best = Choice(num_tokens, num_verified, rate)
    return best


def best_budget(survival: Chains, num_requests: int, drafted_s: float, verify_s: Items[float]) -> Choice:
    """B for drafts that are made already: `drafted_s` is spent whatever B is, the rest as in `best_length`."""
    values = sorted((value for chain in survival for value in chain), reverse=True)
    num_verified, rate = _best_rate(values[: len(verify_s) - 1], num_requests, drafted_s, verify_s)
    return Choice(max(map(len, survival), default=0), num_verified, rate)


def allocate(survival: Chains, num_verified: int) -> list[int]:
    """Drafts of each request among the `num_verified` likeliest to survive; chains do not rise."""
    counts = [0] * len(survival)
    for _, request, _ in _ranked(survival)[:num_verified]:
        counts[request] += 1
    return counts


def _ranked(survival: Chains) -> list[tuple[float, int, int]]:
    """(-survival, request, place) of each draft, likeliest first."""
    return sorted(
        (-value, request, place) for request, chain in enumerate(survival) for place, value in enumerate(chain)
    )


def _best_rate(values: Items[float], num_requests: int, drafted_s: float, verify_s: Items[float]) -> tuple[int, float]:
    """How many of these drafts, likeliest first, give most tokens a second, and how many that is."""
    committed = float(num_requests)
    best, rate = 0, committed / (drafted_s + verify_s[0])
    for count, value in enumerate(values, start=1):
        committed += value
        found = committed / (drafted_s + verify_s[count])
        if found > rate:
            best, rate = count, found
    return best, rate
