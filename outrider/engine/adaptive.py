"""Lengths that follow what drafts cost and bring, step by step.

Puts together measured costs (costs.py), learned survivals (survival.py), the rule (budget.py) and, where it guards, the
accounts that close what does not pay (guard.py): with the guard off every request drafts and the rest of the rule still
holds. Not here: what scheduler and engine ask, and fixed lengths (lengths.py).

Whether a sampled draft is verified may depend on tokens before it only: under `standard` and `block` the number of
drafts to verify then comes from earlier rounds, and this round's confidences only rank. Array legend: R decoding or
drafting requests, N draft positions, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TRIAL_ROUNDS = 6  # of a class, before the rule may decide for it
_PROBE_TOKENS = 3
_REVIEW_STEPS, _PLAIN_STEPS = 8, 100  # a decision not to draft holds so long; a plain step among drafting ones
_MARGIN = 1.02  # what speculation must promise before it starts
_SETTLED = 0.99  # of what a plain step is measured to take, so that a tie goes to plain decoding
_LUCK = 0.7  # of a gain is what was accepted, the rest what was expected to be: luck alone closes no account
_HORIZON = 32  # rounds over which a drafter's catching up pays itself
_LONE_STEPS, _MANY_ROUNDS = 2, 64  # of a lone request every second step is learned from, after so many rounds
_MANY_ROWS = 8  # rows to catch up on for a request, from which a round says nothing of drafting's own cost


@dataclass
class _Step:
    """The step that is being made: who decodes (`slots` [R]), beside how many rows of prompts, on which accounts.

    `plain_s`: of a step of the decoding requests alone. `rate`, `num_wanted`: what the rule expects of the step, going
    by earlier rounds: tokens a second, and drafts verified. `row_s`: what `_row_s` has found.
    """

    slots: Ints
    num_prompt_rows: int
    plain_s: float
    accounts: dict[int, Account]
    rate: float
    num_wanted: int = 0
    row_s: dict[int, float] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows without drafts."""
        return len(self.slots) + self.num_prompt_rows


@dataclass(frozen=True)
class _Drafts:
    """What was drafted in a step, [R]: whose slots, at which entries, and how much of it is verified."""

    places: list[int]
    slots: Ints
    odds: Floats
    survival: Floats
    drafted: Ints
    verified: Ints


class AdaptiveLengths:
    """The rule over `costs`; also the `Pace` of drafters that ask for one. One step at a time."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts, num_slots: int) -> None:
        self._config, self.costs = config, costs
        self._guard = Guard() if config.guard else None
        self.survival = Survival(num_slots, config.num_speculative_tokens)
        self.pace: Pace | None = self
        self._filled: Ints = np.zeros(num_slots, dtype=np.int64)
        self._running = np.ones(num_slots)
        self._is_trial = np.zeros(num_slots, dtype=np.bool_)
        self._asks, self._gain = False, 1.0
        self._answer: tuple[object, Choice, Ints] | None = None  # the rule's last, while nothing was learned since
        self._step = _Step(np.zeros(0, dtype=np.int64), 0, 0.0, {}, 0.0)
        self._drafts: _Drafts | None = None
        self._num_steps, self._num_decisions = 0, 0
        # After a decision not to draft nothing is asked again for some steps of so many requests.
        self._is_idle, self._idle_requests, self._idle_steps, self._idle_s = False, 0, 0, 0.0
        self._steps_since_plain = 0
        self._is_sampled = config.draft_sample_method != "greedy" and config.rejection_sample_method != "coupled"

    # ---- before the step ----

    def begin(self, sequence: Sequence) -> None:
        """A request's history begins with its class's."""
        self.survival.begin(sequence.slot, sequence.request.drafting.workload)
        self._filled[sequence.slot] = 0
        self._answer, self._idle_requests = None, 0

    def budgets(self, sequences: Items[Sequence], num_prompt_rows: int) -> list[int]:
        """Drafts to make: those of the rule where they pay, a few to learn from where that is not known, else none."""
        count = len(sequences)
        self._drafts = None
        self._is_idle = self._idle_requests == count and self._idle_steps < _REVIEW_STEPS
        if self._is_idle:
            self._idle_steps += 1
            return [0] * count
        slots = np.fromiter((sequence.slot for sequence in sequences), dtype=np.int64, count=count)
        self._begin_step(slots, num_prompt_rows)
        if not count:
            return []
        ceilings = np.array([draft_budget(sequence, self._config, count) for sequence in sequences])
        budgets = np.zeros(count, dtype=np.int64)
        if ceilings.any() and not (self._guard is not None and self._shows_plain()):
            lengths = np.fromiter((sequence.num_tokens for sequence in sequences), dtype=np.int64, count=count)
            budgets = self._decide(ceilings, lengths - self._filled[slots])
            self._idle_steps, self._idle_requests = 0, 0 if budgets.any() else count
        elif not ceilings.any():
            self._idle_steps, self._idle_requests = 0, count
        return [int(budget) for budget in budgets]

    def _begin_step(self, slots: Ints, num_prompt_rows: int) -> None:
        count = max(1, len(slots))
        plain_s = float(self.costs.verify(count))
        accounts = {}
        if self._guard is not None:
            for index in set(self.survival.class_of[slots].tolist()):
                accounts[index] = self._guard.account(index, count, plain_s)
        self._step = _Step(slots, num_prompt_rows, plain_s, accounts, count / plain_s)
        self._running[slots], self._is_trial[slots] = 1.0, False

    def _shows_plain(self) -> bool:
        """Whether this step goes without drafts to show what plain decoding takes.

        The first steps do, then one now and then, rarer where it loses more.
        """
        step, patience = self._step, _PLAIN_STEPS * max(1.0, 4 * (self._gain - 1))
        if step.num_prompt_rows:
            return False
        return self._steps_since_plain >= patience or not self.costs.knows_plain(len(step.slots))

    def _decide(self, ceilings: Ints, behind: Ints) -> Ints:
        """Budgets [R]; `behind` [R] tells the rows that the drafter has yet to see."""
        slots = self._step.slots
        if self._guard is None:
            return self._unguarded(ceilings)
        classes = self.survival.class_of[slots]
        is_open = np.array([not self._step.accounts[index].is_closed for index in classes.tolist()])
        may = is_open & (self.survival.num_rounds[classes] >= _TRIAL_ROUNDS) & (ceilings > 0)
        budgets = np.zeros(len(slots), dtype=np.int64)
        if may.any():
            budgets[may] = self._ruled(slots[may], ceilings[may], behind[may])
        if not budgets.all():
            self.survival.rest(slots[budgets == 0])
            self._answer = None
        for index, account in self._step.accounts.items():
            mine = np.flatnonzero((classes == index) & (ceilings > 0))
            if len(mine) and not account.is_closed and not budgets[mine].any():
                few = mine[np.argsort(behind[mine], kind="stable")][: max(1, len(mine) // 16)]
                wanted = np.minimum(ceilings[few], _PROBE_TOKENS)
                if self._affords_trial(index, account, wanted, behind[few]):
                    budgets[few], self._is_trial[slots[few]] = wanted, True
        return budgets

    def _unguarded(self, ceilings: Ints) -> Ints:
        """Every request drafts; what is never verified teaches nothing, so now and then all drafts of one are."""
        slots = self._step.slots
        self._choose(slots, ceilings)
        self._num_decisions += 1
        self._is_trial[slots[0]] = self._num_decisions % _REVIEW_STEPS == 0
        return ceilings

    def _ruled(self, slots: Ints, ceilings: Ints, behind: Ints) -> Ints:
        """What the rule gives to requests that may draft, [R]; zeros where not drafting is better."""
        fill_s = self.costs.fill_s * float(np.maximum(behind - _MANY_ROWS, 0).sum()) / _HORIZON
        num_tokens, kept = self._choose(slots, ceilings, fill_s)
        least = 1.0 if self._steps_since_plain else _MARGIN
        if num_tokens == 0 or self._gain * _SETTLED < least:
            return np.zeros(len(slots), dtype=np.int64)
        # A drafter that asks how far to go finds its own end; what the rule gave nothing is not worth a draft.
        longest = ceilings if self._asks else np.minimum(ceilings, num_tokens)
        return np.where(kept > 0, longest, 0)

    def _choose(self, slots: Ints, ceilings: Ints, fill_s: float = 0.0) -> tuple[int, Ints]:
        """The rule, going by earlier rounds: N, and drafts by request. Notes what it expects of the step."""
        step = self._step
        asked = (slots.tobytes(), ceilings.tobytes(), step.num_rows, fill_s)
        if self._answer is None or self._answer[0] != asked:
            self._answer = (asked, *self._best(slots, ceilings, fill_s))
        _, choice, kept = self._answer
        step.rate, step.num_wanted = choice.tokens_per_s, choice.num_verified
        self._gain = choice.tokens_per_s * float(self.costs.verify(step.num_rows)) / len(step.slots)
        return choice.num_tokens if choice.num_verified else 0, kept

    def _best(self, slots: Ints, ceilings: Ints, fill_s: float) -> tuple[Choice, Ints]:
        """The rule's choice, and drafts by request."""
        step, longest = self._step, int(ceilings.max())
        forecast = self.survival.forecast(slots)[:, :longest] * (np.arange(longest) < ceilings[:, None])
        draft_s = self.costs.draft(len(slots))[: longest + 1] + fill_s
        draft_s[0] = 0.0
        verify_s = self.costs.verify(step.num_rows + np.arange(int(ceilings.sum()) + 1))
        choice = best_length(forecast, len(step.slots), draft_s, verify_s)
        if not choice.num_verified:
            return choice, np.zeros_like(ceilings)
        return choice, allocate(forecast[:, : choice.num_tokens], choice.num_verified)

    def _affords_trial(self, index: int, account: Account, wanted: Ints, behind: Ints) -> bool:
        """Whether an account has what it costs to let a few of its class draft, to learn what drafts are worth.

        The first drafts of a class are hoped to go on, so that catching up pays itself over rounds to come.
        """
        is_known = self.survival.num_rounds[index] >= _TRIAL_ROUNDS
        rows = self._step.num_rows + np.array([0, int(wanted.sum())])
        plain_s, verify_s = self.costs.verify(rows).tolist()
        fill_s = self.costs.fill_s * float(behind.sum()) / (1 if is_known else _HORIZON)
        cost_s = verify_s - plain_s + self.costs.draft(len(wanted))[wanted.max()] + fill_s
        return bool(cost_s <= (account.trial_s if is_known else account.credit_s))

    # ---- while it is made ----

    def goes_on(self, place: int, slots: Ints, top_probs: Floats) -> npt.NDArray[np.bool_]:
        """Whom the next draft is worth its cost for: its chance, at the step's rate, against a row and a draft more."""
        if self._is_sampled or place + 1 == self.survival.num_tokens:
            return np.full(len(slots), self._is_sampled)
        self._asks = True
        step, survival = self._step, self.survival
        self._running[slots] *= survival.confidence_at(slots, place, log_odds(top_probs))
        hoped = self._running[slots] * survival.next_confidence(slots, place + 1)
        worth = hoped - step.rate * self._row_s(len(slots))
        wanted: npt.NDArray[np.bool_] = worth > 0
        draft_s = self.costs.draft(int(wanted.sum()))
        if worth[wanted].sum() <= step.rate * (draft_s[place + 2] - draft_s[place + 1]):
            wanted[:] = False
        return wanted | self._is_trial[slots]

    def _row_s(self, num_slots: int) -> float:
        """Seconds to verify a draft more, as a mean over those that the step wants, one each at least.

        Not the next row's own: `keep` looks at the curve's steps, and `goes_on` must not stop before one.
        """
        step = self._step
        num_wanted = max(step.num_wanted, num_slots)
        found = step.row_s.get(num_wanted)
        if found is None:
            plain_s, full_s = self.costs.verify(step.num_rows + np.array([0, num_wanted])).tolist()
            found = step.row_s[num_wanted] = (full_s - plain_s) / num_wanted
        return found

    def keep(self, entries: Items[Entry], proposal: Proposal) -> Proposal:
        """The drafts most likely to survive, as many as the rule says; those of trials all."""
        places = [index for index, tokens in enumerate(proposal.tokens) if tokens]
        if not places:
            return proposal
        slots = np.array([entries[index].sequence.slot for index in places])
        drafted = np.array([len(proposal.tokens[index]) for index in places])
        odds = self.survival.odds(proposal)[places]
        survival = self.survival.survivals(slots, odds, drafted)
        step, most = self._step, int(drafted.sum())
        if self._is_sampled:
            num_verified = min(step.num_wanted, most)
        else:
            verify_s = self.costs.verify(step.num_rows + np.arange(most + 1))
            drafted_s = float(self.costs.draft(len(places))[drafted.max()])
            num_verified = best_budget(survival, len(step.slots), drafted_s, verify_s)
        verified = np.where(self._is_trial[slots], drafted, np.minimum(allocate(survival, num_verified), drafted))
        self._drafts = _Drafts(places, slots, odds, survival, drafted, verified)
        lengths = [0] * len(entries)
        for index, length in zip(places, verified.tolist(), strict=True):
            lengths[index] = length
        return cut(proposal, lengths)

    # ---- after it ----

    def observe(self, entries: Items[Entry], verdicts: Items[Verdict | None], times: StepTimes) -> Price | None:
        """Move costs, survivals and accounts by what the step took and what was accepted."""
        if self._is_idle:
            self._idle_s += times.total_s
            return None
        step, drafts = self._step, self._drafts
        num_base = sum(entry.num_rows for entry in entries)
        is_pure = num_base == len(entries)
        num_verified = 0 if drafts is None else int(drafts.verified.sum())
        base_s, rest_s = self.costs.verify(np.array([num_base, num_base + num_verified])).tolist()
        teaches = self._teaches()
        if teaches:
            self._answer = None
        if is_pure and teaches:
            self.costs.observe_verify(num_base + num_verified, times.verify_s + times.other_s)
        if self._guard is not None:
            for account in step.accounts.values():
                self._guard.grant(account, (times.total_s + self._idle_s) / len(step.accounts), step.plain_s)
            self._idle_s = 0.0
        if drafts is None:
            self._steps_since_plain = 0 if is_pure else self._steps_since_plain
            return None
        self._steps_since_plain += 1
        fill_s, draft_s = self._observe_draft(entries, drafts, times, teaches)
        # Where prompts were read too, what the drafts' rows took is known by the tables only.
        spent_s = min(times.total_s, 1.5 * (draft_s + fill_s + rest_s)) if is_pure else times.draft_s + rest_s
        price = Price(step.plain_s, spent_s - (step.plain_s if is_pure else base_s))
        self._settle(drafts, verdicts, price, fill_s, teaches)
        return price

    def _teaches(self) -> bool:
        """Whether this step is learned from. Learning costs as much from one request as from thirty, so of a lone one
        every second step is, once enough is known of its class, or of what plain steps take.
        """
        self._num_steps += 1
        slots = self._step.slots
        if len(slots) > 1 or self._num_steps % _LONE_STEPS == 0:
            return True
        if self._drafts is None:
            return not self.costs.knows_plain(len(slots))
        return bool((self.survival.num_rounds[self.survival.class_of[slots]] < _MANY_ROUNDS).any())

    def _observe_draft(
        self, entries: Items[Entry], drafts: _Drafts, times: StepTimes, teaches: bool
    ) -> tuple[float, float]:
        """Seconds that catching up took of the drafting, and what the tables say of the rest."""
        longest, count = int(drafts.drafted.max()), len(drafts.slots)
        lengths = np.array([entries[index].sequence.num_tokens for index in drafts.places])
        behind = int((lengths - self._filled[drafts.slots]).sum())
        self._filled[drafts.slots] = lengths
        draft_s = float(self.costs.draft(count)[longest])
        if behind < _MANY_ROWS * count:
            if teaches:
                self.costs.observe_draft(count, longest, times.draft_s)
            return 0.0, draft_s
        self.costs.observe_fill(behind, times.draft_s - draft_s)
        return max(0.0, times.draft_s - draft_s), draft_s

    def _settle(
        self, drafts: _Drafts, verdicts: Items[Verdict | None], price: Price, fill_s: float, teaches: bool
    ) -> None:
        """Learn from the verdicts, and enter the step into the accounts of the classes that drafted."""
        found = [verdicts[index] for index in drafts.places]
        accepted = np.array([0 if verdict is None else verdict.num_accepted for verdict in found])
        expected = (drafts.survival * (np.arange(drafts.survival.shape[1]) < drafts.verified[:, None])).sum(axis=1)
        if teaches:
            self.survival.learn(drafts.slots, drafts.odds, drafts.drafted, drafts.verified, accepted)
        if self._guard is None:
            return
        classes, plain_s = self.survival.class_of[drafts.slots], price.plain_s
        token_s = _SETTLED * plain_s / len(self._step.slots)
        for index, account in self._step.accounts.items():
            mine = classes == index
            share = float(drafts.drafted[mine].sum() / drafts.drafted.sum())
            gain_s = token_s * float((_LUCK * accepted + (1 - _LUCK) * expected)[mine].sum())
            cost_s = share * (price.extra_s + (1 - _SETTLED) * plain_s)
            if self._is_trial[drafts.slots[mine]].any() and self.survival.num_rounds[index] > _TRIAL_ROUNDS:
                self._guard.spend_trial(account, cost_s - gain_s)
            elif share:
                self._guard.spend(account, cost_s, gain_s, share * fill_s, plain_s)
