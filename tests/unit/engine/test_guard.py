"""Accounts of seconds: an allowance, a share of time, debits and credits, and what closing and opening take."""

from __future__ import annotations

import pytest

from outrider.engine.guard import Account, Guard

PLAIN_S = 0.01


def waste(guard: Guard, account: Account, cost_s: float, fill_s: float = 0.0) -> None:
    """One drafting step that brought nothing."""
    guard.spend(account, cost_s, 0.0, fill_s, PLAIN_S)


def test_a_class_has_an_account_for_each_load_in_powers_of_two() -> None:
    guard = Guard()
    found = {load: id(guard.account(0, load, PLAIN_S)) for load in (1, 2, 3, 4, 7, 8)}
    assert found[2] == found[3]
    assert found[4] == found[7]
    assert len(set(found.values())) == 4
    assert id(guard.account(1, 1, PLAIN_S)) != found[1]


def test_an_account_that_runs_out_closes_and_opens_after_its_share_of_time() -> None:
    guard = Guard()
    account, spent_s = guard.account(0, 1, PLAIN_S), 0.0
    while not account.is_closed:
        waste(guard, account, PLAIN_S / 4)
        spent_s += PLAIN_S / 4
    assert spent_s <= 4 * PLAIN_S, "a first allowance of a few plain steps"
    num_steps = 0
    while guard.account(0, 1, PLAIN_S).is_closed:
        guard.grant(account, PLAIN_S, PLAIN_S)
        num_steps += 1
    assert 200 < num_steps < 1000


def test_what_useless_drafts_cost_is_bounded_by_a_share_of_all_time() -> None:
    """Whatever a step wastes: the account is closed before it wastes much more than it was given."""
    for waste_s in (0.1 * PLAIN_S, PLAIN_S, 4 * PLAIN_S):
        guard, total_s, lost_s = Guard(), 0.0, 0.0
        for _ in range(20000):
            account = guard.account(0, 1, PLAIN_S)
            cost_s = 0.0 if account.is_closed else waste_s
            if cost_s:
                waste(guard, account, cost_s)
            total_s, lost_s = total_s + PLAIN_S + cost_s, lost_s + cost_s
            guard.grant(account, PLAIN_S + cost_s, PLAIN_S)
        assert lost_s / total_s < 0.01


def test_drafts_that_pay_keep_an_account_open_and_their_surplus_is_bounded() -> None:
    guard = Guard()
    account = guard.account(0, 1, PLAIN_S)
    for _ in range(1000):
        guard.spend(account, PLAIN_S, 1.5 * PLAIN_S, 0.0, PLAIN_S)
    assert account.credit_s <= 20 * PLAIN_S
    num_steps = 0
    while not account.is_closed:
        waste(guard, account, PLAIN_S)
        num_steps += 1
    assert num_steps <= 21, "however long it paid, it is found out soon when it does no more"


def test_catching_up_is_spread_over_the_rounds_that_it_serves() -> None:
    guard = Guard()
    account = guard.account(0, 1, PLAIN_S)
    waste(guard, account, 2 * PLAIN_S, fill_s=2 * PLAIN_S)
    assert account.credit_s > 1.9 * PLAIN_S
    assert account.credit_s == pytest.approx(account.owed_s)


def test_what_is_still_owed_is_due_when_an_account_closes() -> None:
    guard = Guard()
    account = guard.account(0, 1, PLAIN_S)
    waste(guard, account, 8 * PLAIN_S, fill_s=8 * PLAIN_S)
    while not account.is_closed:
        waste(guard, account, PLAIN_S)
    assert account.owed_s == 0
    assert account.credit_s < -6 * PLAIN_S


def test_trials_are_paid_from_a_pot_of_their_own() -> None:
    guard = Guard()
    account = guard.account(0, 1, PLAIN_S)
    before = account.credit_s
    for _ in range(5000):
        guard.grant(account, PLAIN_S, PLAIN_S)
    assert account.trial_s == pytest.approx(3 * PLAIN_S), "it does not pile up"
    guard.spend_trial(account, PLAIN_S)
    assert account.trial_s == pytest.approx(2 * PLAIN_S)
    assert account.credit_s > before
    assert not account.is_closed
