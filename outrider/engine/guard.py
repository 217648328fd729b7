"""Whether speculation may run: an account of seconds for each class of requests and load, never far below zero.

Plain decoding is the measure. What a drafting step takes longer than a plain one is a debit; the time that plain
decoding would need for the drafts that were accepted, a credit; and a small share of all time is given to each account,
for trying. An account that runs out is closed: its requests go without drafts until enough of that share has come
together for another trial. So drafts cost at most a first allowance plus that share, whatever they are worth. Not here:
how many drafts are best (budget.py), which is asked first; this is the check that the answer was right.

A drafter that catches up on a text does so for many rounds to come, so that debit is spread over some; what of it is
still owed when an account closes is due at once.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALLOWANCE, _REOPENING, _MOST, _MOST_TRIALS = 2.0, 1.5, 20.0, 3.0  # in plain steps at the account's load
_SHARE = 0.003  # of all time, to each of the two pots
_SPREAD = 1 / 32  # of what is still owed for catching up, at each drafting step


@dataclass
class Account:
    """Seconds in hand to draft where the rule says so, and to try where it does not; what is owed for catching up."""

    credit_s: float
    trial_s: float = 0.0
    owed_s: float = 0.0
    is_closed: bool = False


class Guard:
    """The accounts, by class of requests and by load, which is the number of decoding requests in powers of two."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[int, int], Account] = {}

    def account(self, workload: int, num_requests: int, plain_s: float) -> Account:
        """The account of a class at a load where a plain step takes `plain_s`; a new one has an allowance."""
        key = (workload, num_requests.bit_length())
        found = self._accounts.get(key)
        if found is None:
            found = self._accounts[key] = Account(_ALLOWANCE * plain_s)
        elif found.is_closed and found.credit_s >= _REOPENING * plain_s:
            found.is_closed = False
        return found

    def spend(self, account: Account, cost_s: float, gain_s: float, fill_s: float, plain_s: float) -> None:
        """Enter a step by the rule: what it cost beyond a plain one, `fill_s` of it to catch up, and what it gained."""
        account.owed_s += fill_s
        part = account.owed_s * _SPREAD
        account.owed_s -= part
        account.credit_s = min(account.credit_s + gain_s - (cost_s - fill_s) - part, _MOST * plain_s)
        if account.credit_s < 0:
            account.is_closed = True
            account.credit_s, account.owed_s = account.credit_s - account.owed_s, 0.0

    def spend_trial(self, account: Account, cost_s: float) -> None:
        """Enter what a trial cost that the rule did not ask for."""
        account.trial_s -= cost_s

    def grant(self, account: Account, seconds: float, plain_s: float) -> None:
        """Give an account its share of time that passed."""
        account.credit_s = min(account.credit_s + _SHARE * seconds, _MOST * plain_s)
        account.trial_s = min(account.trial_s + _SHARE * seconds, _MOST_TRIALS * plain_s)
