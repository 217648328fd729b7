"""Lengths that follow what drafts cost and bring, step by step.

Puts together measured costs (costs.py), learned survivals (survival.py), the rule (budget.py) and, where it guards, the
accounts that close what does not pay (guard.py): with the guard off every request drafts and the rest of the rule still
holds. Not here: what scheduler and engine ask, and fixed lengths (lengths.py).

Whether a sampled draft is verified may depend on tokens before it only: under `standard` and `block` the number of
drafts to verify then comes from earlier rounds, and this round's confidences only rank. Legend: R decoding requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from outrider.config import SpeculativeConfig
from outrider.drafting.base import Pace
from outrider.engine.budget import Choice, allocate, best_budget, best_length, draft_budget
from outrider.engine.costs import StepCosts
from outrider.engine.guard import Account, Guard
from outrider.engine.lengths import Price
from outrider.engine.safe_drafter import cut
from outrider.engine.sequence import Entry, Sequence
from outrider.engine.stats import StepTimes
from outrider.engine.survival import Survival, log_odds
from outrider.types import Proposal, Verdict

_TRIAL_ROUNDS = 2  # of a class, before the rule may decide for it
_REVIEW_STEPS, _PLAIN_STEPS = 8, 100  # a decision not to draft holds so long; a plain step among drafting ones
_MARGIN = 1.02  # what speculation must promise before it starts
_SETTLED = 0.99  # of what a plain step is measured to take, so that a tie goes to plain decoding
_LUCK = 0.7  # of a gain is what was accepted, the rest what was expected to be: luck alone closes no account
_HORIZON = 32  # rounds over which a drafter's catching up pays itself
_MANY_ROWS = 8  # rows to catch up on for a request, from which a round says nothing of drafting's own cost


@dataclass(slots=True)
class _Step:
    """The step that is being made: who decodes (`slots` [R]), beside how many rows of prompts, on which accounts.

    `plain_s`: of a step of the decoding requests alone. `rate`, `num_wanted`: what the rule expects of the step, going
    by earlier rounds: tokens a second, and drafts verified. `trials`: slots that draft to learn from. `running`: how
    likely each slot's chain is accepted so far. `made`: survivals of all drafts made.
    """

    slots: list[int]
    num_prompt_rows: int
    plain_s: float
    accounts: dict[int, Account]
    rate: float
    num_wanted: int = 0
    trials: set[int] = field(default_factory=set)
    running: dict[int, float] = field(default_factory=dict)
    made: list[float] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows without drafts."""
        return len(self.slots) + self.num_prompt_rows


@dataclass(slots=True)
class _Chain:
    """The drafts of a request in a step: at which entry, in whose slot, of which class; how many of them are verified.

    odds, survival: as the drafter and the estimates have them, a number a draft.
    """

    place: int
    slot: int
    workload: int
    odds: list[float]
    survival: list[float]
    verified: int = 0


@dataclass(slots=True)
class _Rest:
    """After a decision not to draft: for how many steps of so many requests nothing was asked, and what they took.

    `pure_s`, `num_pure`: of those without prompts, but for drafting.
    """

    num_requests: int = 0
    is_over: bool = True
    num_steps: int = 0
    seconds: float = 0.0
    num_pure: int = 0
    pure_s: float = 0.0

    def goes_on(self, num_requests: int) -> bool:
        """Whether a step of so many requests still belongs to it."""
        return not self.is_over and num_requests == self.num_requests and self.num_steps < _REVIEW_STEPS

    def observe(self, num_rows: int, times: StepTimes) -> None:
        """One of its steps was made."""
        self.seconds += times.total_s
        if num_rows == self.num_requests:
            self.num_pure += 1
            self.pure_s += times.verify_s + times.other_s


class AdaptiveLengths:
    """The rule over `costs`; also the `Pace` of drafters that ask for one. One step at a time."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts, num_slots: int) -> None:
        self._config, self.costs = config, costs
        self._guard = Guard() if config.guard else None
        self.survival = Survival(num_slots, config.num_speculative_tokens)
        self.pace: Pace | None = self
        self._filled = [0] * num_slots
        self._asks, self._gain = False, 1.0
        self._step = _Step([], 0, 0.0, {}, 0.0)
        self._chains: list[_Chain] = []
        self._num_decisions = 0
        self._rest, self._is_resting = _Rest(), False
        self._steps_since_plain = 0
        self._is_sampled = config.draft_sample_method != "greedy" and config.rejection_sample_method != "coupled"

    # ---- before the step ----

    def begin(self, sequence: Sequence) -> None:
        """A request's history begins with its class's."""
        self.survival.begin(sequence.slot, sequence.request.drafting.workload)
        self._filled[sequence.slot] = 0
        self._rest.is_over = True

    def budgets(self, sequences: Items[Sequence], num_prompt_rows: int) -> list[int]:
        """Drafts to make: those of the rule where they pay, a few to learn from where that is not known, else none."""
        count = len(sequences)
        self._chains = []
        self._is_resting = self._rest.goes_on(count)
        if self._is_resting:
            self._rest.num_steps += 1
            return [0] * count
        self._begin_step([sequence.slot for sequence in sequences], num_prompt_rows)
        ceilings = [draft_budget(sequence, self._config, count) for sequence in sequences]
        budgets, rested = [0] * count, self._rest.num_steps
        self._rest = _Rest(count)
        if any(ceilings) and self._guard is not None and self._shows_plain():
            return budgets
        if any(ceilings):
            behind = [sequence.num_tokens - self._filled[sequence.slot] for sequence in sequences]
            budgets = self._decide(ceilings, behind, rested + 1)
        self._rest.is_over = any(budgets)
        return budgets

    def _begin_step(self, slots: list[int], num_prompt_rows: int) -> None:
        count, rest = max(1, len(slots)), self._rest
        if rest.num_pure:
            self.costs.observe_verify(rest.num_requests, rest.pure_s / rest.num_pure, rest.num_pure)
        plain_s = self.costs.verify(count)
        accounts = {}
        if self._guard is not None:
            for index in {self.survival.class_of[slot] for slot in slots}:
                accounts[index] = self._guard.account(index, count, plain_s)
        self._step = _Step(slots, num_prompt_rows, plain_s, accounts, count / plain_s)
        self._grant(rest.seconds)

    def _grant(self, seconds: float) -> None:
        """Give the step's accounts their shares of time that passed."""
        step = self._step
        if self._guard is not None and seconds:
            for account in step.accounts.values():
                self._guard.grant(account, seconds / len(step.accounts), step.plain_s)

    def _shows_plain(self) -> bool:
        """Whether this step goes without drafts to show what plain decoding takes.

        The first steps do, then one now and then, rarer where it loses more.
        """
        step, patience = self._step, _PLAIN_STEPS * max(1.0, 4 * (self._gain - 1))
        if step.num_prompt_rows:
            return False
        return self._steps_since_plain >= patience or not self.costs.knows_plain(len(step.slots))

    def _decide(self, ceilings: list[int], behind: list[int], num_steps: int) -> list[int]:
        """Budgets [R]; `behind` [R]: rows that the drafter has yet to see; `num_steps`: since this was last asked."""
        slots, accounts = self._step.slots, self._step.accounts
        if self._guard is None:
            return self._unguarded(ceilings)
        classes = [self.survival.class_of[slot] for slot in slots]
        known = {index for index in accounts if self.survival.num_rounds(index) >= _TRIAL_ROUNDS}
        is_open = {index for index in known if not accounts[index].is_closed}
        may = [place for place, index in enumerate(classes) if index in is_open and ceilings[place]]
        budgets = [0] * len(slots)
        if may:
            ruled = self._ruled([slots[i] for i in may], [ceilings[i] for i in may], [behind[i] for i in may])
            for place, budget in zip(may, ruled, strict=True):
                budgets[place] = budget
        self.survival.rest((slot for slot, budget in zip(slots, budgets, strict=True) if not budget), num_steps)
        for index, account in accounts.items():
            mine = [place for place, other in enumerate(classes) if other == index and ceilings[place]]
            if mine and not account.is_closed and not any(budgets[place] for place in mine):
                few = sorted(mine, key=behind.__getitem__)[: max(1, len(mine) // 16)]
                wanted = [1] * len(few)
                if self._affords_trial(account, index in known, wanted, sum(behind[place] for place in few)):
                    for place, budget in zip(few, wanted, strict=True):
                        budgets[place] = budget
                        self._step.trials.add(slots[place])
        return budgets

    def _unguarded(self, ceilings: list[int]) -> list[int]:
        """Every request drafts; what is never verified teaches nothing, so now and then all drafts of one are."""
        slots = self._step.slots
        self._choose(slots, ceilings)
        self._num_decisions += 1
        if self._num_decisions % _REVIEW_STEPS == 0:
            self._step.trials.add(slots[0])
        return ceilings

    def _ruled(self, slots: list[int], ceilings: list[int], behind: list[int]) -> list[int]:
        """What the rule gives to requests that may draft; zeros where not drafting is better."""
        fill_s = self.costs.fill_s * sum(max(rows - _MANY_ROWS, 0) for rows in behind) / _HORIZON
        choice, kept = self._choose(slots, ceilings, fill_s)
        least = 1.0 if self._steps_since_plain else _MARGIN
        if not choice.num_verified or self._gain * _SETTLED < least:
            return [0] * len(slots)
        # A drafter that asks how far to go finds its own end; what the rule gave nothing is not worth a draft.
        longest = max(ceilings) if self._asks else choice.num_tokens
        return [min(ceiling, longest) if own else 0 for ceiling, own in zip(ceilings, kept, strict=True)]

    def _choose(self, slots: list[int], ceilings: list[int], fill_s: float = 0.0) -> tuple[Choice, list[int]]:
        """The rule, going by earlier rounds: N, and drafts by request. Notes what it expects of the step."""
        step = self._step
        forecast = [self.survival.forecast(slot, ceiling) for slot, ceiling in zip(slots, ceilings, strict=True)]
        draft_s = [seconds + fill_s for seconds in self.costs.draft(len(slots))[: max(ceilings) + 1]]
        draft_s[0] = 0.0
        verify_s = self._verify_s(sum(ceilings))
        choice = best_length(forecast, len(step.slots), draft_s, verify_s)
        kept = allocate([chain[: choice.num_tokens] for chain in forecast], choice.num_verified)
        step.rate, step.num_wanted = choice.tokens_per_s, choice.num_verified
        self._gain = choice.tokens_per_s * step.plain_s / len(step.slots)
        return choice, kept

    def _verify_s(self, most: int) -> list[float]:
        """Seconds of a step that verifies no draft, one, … `most`.

        Prompts beside it have to be read in any case, so their time says nothing of what a token is worth: of them only
        what they make drafts cost is counted.
        """
        costs_s = self.costs.verify_from(self._step.num_rows, most)
        prompts_s = costs_s[0] - self._step.plain_s
        return [seconds - prompts_s for seconds in costs_s]

    def _affords_trial(self, account: Account, is_known: bool, wanted: list[int], behind: int) -> bool:
        """Whether an account has what it costs to let a few of its class draft, to learn what drafts are worth.

        The first drafts of a class are hoped to go on, so that catching up pays itself over rounds to come.
        """
        num_rows = self._step.num_rows
        verify_s = self.costs.verify(num_rows + sum(wanted)) - self.costs.verify(num_rows)
        fill_s = self.costs.fill_s * behind / (1 if is_known else _HORIZON)
        cost_s = verify_s + self.costs.draft(len(wanted))[max(wanted)] + fill_s
        return cost_s <= (account.trial_s if is_known else account.credit_s)

    # ---- while it is made ----

    def goes_on(self, place: int, slots: Items[int], top_probs: Items[float]) -> list[bool]:
        """Whom the next draft is worth its cost for: who is in the best step with it, where that beats all without."""
        survival, step = self.survival, self._step
        if self._is_sampled or place + 1 == survival.num_tokens:
            return [self._is_sampled] * len(slots)
        self._asks = True
        further = []
        for slot, probability in zip(slots, top_probs, strict=True):
            chance = step.running.get(slot, 1.0) * survival.confidence_at(slot, place, log_odds(probability))
            step.running[slot] = chance
            step.made.append(chance)
            further.append(chance * survival.next_confidence(slot, place + 1))
        least = self._least_of_use(place, further)
        return [value >= least or slot in step.trials for slot, value in zip(slots, further, strict=True)]

    def _least_of_use(self, place: int, further: list[float]) -> float:
        """The least of these survivals of drafts after `place` that the best step verifies; infinite without any."""
        step, draft_s = self._step, self.costs.draft(len(further))
        num_requests, verify_s = len(step.slots), self._verify_s(len(step.made) + len(further))
        now = best_budget([step.made], num_requests, draft_s[place + 1], verify_s)
        then = best_budget([step.made, further], num_requests, draft_s[place + 2], verify_s)
        if then.tokens_per_s <= now.tokens_per_s:
            return math.inf
        return sorted([*step.made, *further], reverse=True)[then.num_verified - 1]

    def keep(self, entries: Items[Entry], proposal: Proposal) -> Proposal:
        """The drafts most likely to survive, as many as the rule says; those of trials all."""
        if not any(proposal.tokens):
            return proposal
        chains, class_of = [], self.survival.class_of
        for place, odds in enumerate(self.survival.odds(proposal)):
            if odds:
                slot = entries[place].sequence.slot
                chains.append(_Chain(place, slot, class_of[slot], odds, self.survival.survivals(slot, odds)))
        survival = [chain.survival for chain in chains]
        num_drafts, longest = sum(map(len, survival)), max(map(len, survival))
        if self._is_sampled:
            num_verified = min(self._step.num_wanted, num_drafts)
        else:
            verify_s = self._verify_s(num_drafts)
            drafted_s = self.costs.draft(len(chains))[longest]
            num_verified = best_budget(survival, len(self._step.slots), drafted_s, verify_s).num_verified
        lengths = [0] * len(entries)
        for chain, length in zip(chains, allocate(survival, num_verified), strict=True):
            chain.verified = lengths[chain.place] = len(chain.odds) if chain.slot in self._step.trials else length
        self._chains = chains
        return cut(proposal, lengths)

    # ---- after it ----

    def observe(self, entries: Items[Entry], verdicts: Items[Verdict | None], times: StepTimes) -> Price | None:
        """Move costs, survivals and accounts by what the step took and what was accepted."""
        num_base = sum(entry.num_rows for entry in entries)
        if self._is_resting:
            self._rest.observe(num_base, times)
            return None
        step, chains = self._step, self._chains
        num_rows = num_base + sum(chain.verified for chain in chains)
        is_pure = num_base == len(entries)
        base_s, rest_s = self.costs.verify(num_base), self.costs.verify(num_rows)
        if is_pure:
            self.costs.observe_verify(num_rows, times.verify_s + times.other_s)
        self._grant(times.total_s)
        if not chains:
            self._steps_since_plain = 0 if is_pure else self._steps_since_plain
            return None
        self._steps_since_plain += 1
        fill_s, draft_s = self._observe_draft(entries, chains, times)
        # Where prompts were read too, what the drafts' rows took is known by the tables only.
        spent_s = min(times.total_s, 1.5 * (draft_s + fill_s + rest_s)) if is_pure else times.draft_s + rest_s
        price = Price(step.plain_s, spent_s - (step.plain_s if is_pure else base_s))
        self._settle(chains, verdicts, price, fill_s)
        return price

    def _observe_draft(self, entries: Items[Entry], chains: list[_Chain], times: StepTimes) -> tuple[float, float]:
        """Seconds that catching up took of the drafting, and what the tables say of the rest."""
        longest, behind = max(len(chain.odds) for chain in chains), 0
        for chain in chains:
            num_tokens = entries[chain.place].sequence.num_tokens
            behind += num_tokens - self._filled[chain.slot]
            self._filled[chain.slot] = num_tokens
        draft_s = self.costs.draft(len(chains))[longest]
        if behind < _MANY_ROWS * len(chains):
            self.costs.observe_draft(len(chains), longest, times.draft_s)
            return 0.0, draft_s
        self.costs.observe_fill(behind, times.draft_s - draft_s)
        return max(0.0, times.draft_s - draft_s), draft_s

    def _settle(self, chains: list[_Chain], verdicts: Items[Verdict | None], price: Price, fill_s: float) -> None:
        """Learn from the verdicts, and enter the step into the accounts of the classes that drafted."""
        step = self._step
        hits: dict[int, float] = dict.fromkeys(step.accounts, 0.0)
        drafted: dict[int, int] = dict.fromkeys(step.accounts, 0)
        for chain in chains:
            verdict = verdicts[chain.place]
            accepted = 0 if verdict is None else verdict.num_accepted
            self.survival.learn(chain.slot, chain.odds, chain.verified, accepted)
            if self._guard is not None:
                expected = sum(chain.survival[: chain.verified])
                hits[chain.workload] += _LUCK * accepted + (1 - _LUCK) * expected
                drafted[chain.workload] += len(chain.odds)
        if self._guard is None:
            return
        tried = {chain.workload for chain in chains if chain.slot in step.trials}
        plain_s, num_drafts = price.plain_s, sum(drafted.values())
        for index, account in step.accounts.items():
            share = drafted[index] / num_drafts
            gain_s = _SETTLED * plain_s / len(step.slots) * hits[index]
            cost_s = share * (price.extra_s + (1 - _SETTLED) * plain_s)
            if index in tried and self.survival.num_rounds(index) > _TRIAL_ROUNDS:
                self._guard.spend_trial(account, cost_s - gain_s)
            elif share:
                self._guard.spend(account, cost_s, gain_s, share * fill_s, plain_s)
