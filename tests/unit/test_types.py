"""The records that cross borders check their own fields: a wrong request is refused here, by name, in one line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from outrider.errors import RequestError
from outrider.types import Distributions, SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 100.1, NAN, INF, -INF, "hot", None, True, 10**400]),
        ("top_p", [0, 0.0, -0.1, 1.1, NAN, INF, "x", None, False]),
        ("min_p", [-0.1, 1.1, NAN, INF, "x", None]),
        ("presence_penalty", [-2.1, 2.1, NAN, INF, "x", None]),
        ("frequency_penalty", [-2.1, 2.1, NAN, -INF, "x", None]),
        ("repetition_penalty", [0, -1, 1e-9, 100.5, NAN, INF, "x", None]),
        ("n", [0, -1, 1.0, "1", None, True]),
        ("top_k", [-2, 1.5, NAN, "x", None, True]),
        ("seed", [1.5, "x", NAN, True, -(2**63) - 1]),
        ("max_tokens", [0, -1, 2.0, "x", NAN, True]),
        ("min_tokens", [-1, 2.0, "x", NAN, None, 17]),
        ("logprobs", [-1, 2.0, "x", NAN, True]),
        ("stop", ["", [""], ["a", ""], [3], [None], 5, {"a": 1}]),
        ("stop_token_ids", [5, "12", [1.0], ["1"], [None], [True]]),
        (
            "logit_bias",
            [{1: NAN}, {1: INF}, {1: "x"}, {1: None}, {1: True}, {1: 1e39}, {1: 10**400}]
            + [{"x": 1.0}, {1.5: 1.0}, {None: 1.0}, {True: 1.0}, {"-1": 1.0}, [1], "x", 3],
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value
        assert field in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 0.0, 1e-30, 2, 100]),
        ("top_p", [1e-9, 0.5, 1, 1.0]),
        ("min_p", [0, 1]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-2.0, 2]),
        ("repetition_penalty", [0.001, 1, 100]),
        ("n", [1, 5]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("seed", [None, 0, -1, 2**64, -(2**63)]),
        ("max_tokens", [None, 1, 10**6]),
        ("min_tokens", [0, 16]),
        ("logprobs", [None, 0, 20]),
    ],
)
def test_the_edges_of_a_range_are_taken(field: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_lists_are_kept_as_tuples_and_none_is_empty() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**nothing) == SamplingParams()


def test_biases_are_kept_by_number() -> None:
    text_keys: Any = {"7": 1, 8: -2.5}
    assert SamplingParams(logit_bias=text_keys).logit_bias == {7: 1.0, 8: -2.5}


def test_min_tokens_may_not_pass_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=400, max_tokens=None).min_tokens == 400
    with pytest.raises(RequestError, match="above max_tokens 4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_penalties_are_noticed() -> None:
    assert not SamplingParams().has_penalties
    for field, value in (("presence_penalty", 0.1), ("frequency_penalty", -0.1), ("repetition_penalty", 1.1)):
        changes: dict[str, Any] = {field: value}
        assert SamplingParams(**changes).has_penalties


def test_params_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(RequestError):
        dataclasses.replace(SamplingParams(), temperature=NAN)


def test_a_row_of_distributions_stands_for_itself() -> None:
    dist = Distributions(
        torch.tensor([3, 1, 4, 0, 2]), torch.tensor([1.0, 0.5, 0.5, 0.9, 0.1]), torch.tensor([0, 1, 3, 5])
    )
    assert dist.num_rows == 3
    row = dist.row(2)
    assert (row.num_rows, row.ids.tolist(), row.starts.tolist()) == (1, [0, 2], [0, 2])
    assert dist.row(0).ids.tolist() == [3]
