"""Settings of a training: what is refused, by name, and how they are given as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.drafting.train_config import TrainConfig
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "sgd"),
        ("dtype", "float16"),
        ("batch_tokens", 0),
        ("batch_tokens", 2.5),
        ("eval_every", True),
        ("block_size", 1),
        ("epochs", 0),
        ("epochs", float("nan")),
        ("learning_rate", "fast"),
        ("held_out", 0.6),
        ("causal", 1),
        ("taps", ()),
        ("taps", (2, 1)),
        ("taps", (1, 1)),
        ("taps", (-1, 2)),
        ("taps", 3),
    ],
)
def test_an_impossible_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*expected") as caught:
        TrainConfig(**{name: value})
    assert caught.value.param == name


def test_settings_given_as_text() -> None:
    given = ["train.epochs=2", "taps=[0, 3]", "train.init=random", "causal=false", "num_layers=null"]
    found = TrainConfig(num_layers=2).with_overrides(given)
    assert (found.epochs, found.taps, found.init, found.causal, found.num_layers) == (2, (0, 3), "random", False, None)
    assert TrainConfig(**json.loads(json.dumps(found.as_json() | {"taps": None}))).epochs == 2


@pytest.mark.parametrize("text", ["train.epoch=2", "epochs", "serve.epochs=2"])
def test_a_setting_that_is_none_is_refused_with_the_nearest(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected train\.NAME=VALUE; (did you mean train\.epochs|known: epochs)"):
        TrainConfig().with_overrides([text])
