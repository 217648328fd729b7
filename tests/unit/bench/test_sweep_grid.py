"""What a sweep measures: every combination, in a random order that a seed decides, and one line for what it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.bench.context import encode_prompts, lengthened, read_texts
from outrider.bench.grid import PLAIN, Choice, Setting, name_methods
from outrider.errors import ConfigError, LoadError
from tests.kit import sweeps


def test_every_combination_is_measured_as_often_as_asked() -> None:
    grid = sweeps.grid(workloads=["math", "code"], concurrency=[1, 4], temperatures=[0.0, 0.8], num_prompts=4)
    blocks = list(grid.blocks())
    per_repeat = 2 * 2 * (4 + 1)  # workloads, temperatures; four groups at 1, one at 4
    assert len(blocks) == len(set(blocks)) == 3 * per_repeat
    assert all(block.repeat == 0 for block in blocks[:per_repeat]), "all once before any twice"
    assert sorted(grid.order(blocks[0])) == sorted([PLAIN, *grid.choices]) and len(grid.choices) == 4


def test_the_order_is_random_and_the_seeds() -> None:
    grid, again, other = sweeps.grid(), sweeps.grid(), sweeps.grid(seed=1)
    assert list(grid.blocks()) == list(again.blocks()) != list(other.blocks())
    orders = {tuple(grid.order(block)) for block in grid.blocks()}
    assert len(orders) > 3 and {order.index(PLAIN) for order in orders} > {0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lengths": {"ngram": [0], "draft_model": [2]}}, "num_speculative_tokens has 0"),
        ({"methods": {}}, "methods is empty"),
        ({"workloads": []}, "workloads is empty"),
        ({"methods": {"ngrm": {"method": "ngrm"}}, "lengths": {"ngrm": [2]}}, "did you mean ngram"),
        ({"concurrency": [0]}, "concurrency has 0"),
        ({"context_lens": [-1]}, "context_lens has -1"),
        ({"repeats": 0}, "repeats has 0"),
        ({"stop_below": 1.5}, "stop_below is 1.5"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweeps.grid(**changes)


def test_a_method_is_called_by_what_tells_it_from_others() -> None:
    found = name_methods(
        [{"method": "ngram", "num-speculative-tokens": 6}, {"method": "eagle3", "model": "a"}, {"method": "eagle3"}],
        [1, 3],
    )
    assert found["lengths"] == {"ngram": [6], "eagle3 model=a": [1, 3], "eagle3": [1, 3]}
    assert found["methods"]["ngram"] == {"method": "ngram"}
    with pytest.raises(ConfigError, match="twice"):
        name_methods([{"method": "ngram"}, {"method": "ngram"}], [1])


def encode(text: str) -> tuple[int, ...]:
    return tuple(range(len(text.split())))


def test_prompts_are_filled_up_to_a_length_and_keep_their_question() -> None:
    filler = [f"w{index}" for index in range(30)]
    text = lengthened("what is it?", filler, 3, 100, encode)
    assert len(encode(text)) == 100 and text.endswith("\n\nwhat is it?")
    assert lengthened("what is it?", filler, 3, 0, encode) == "what is it?"
    assert lengthened("what is it?", filler, 3, 2, encode) == "what is it?", "nothing fits"
    assert lengthened("what?", filler, 0, 50, encode) != lengthened("what?", filler, 1, 50, encode)


def test_prompts_that_are_too_few_or_too_long_are_refused() -> None:
    grid = sweeps.grid(context_lens=[0, 500], num_prompts=2)
    texts = read_texts(["math"], 2, None)
    prompts = encode_prompts(grid, texts, encode, 1000)
    assert {len(ids) for ids in prompts["math", 500]} == {500} and len(prompts["math", 0]) == 2
    with pytest.raises(ConfigError, match="math at context length 500"):
        encode_prompts(grid, texts, encode, 550)
    with pytest.raises(ConfigError, match="num_prompts"):
        read_texts(["math"], 1000, None)
    with pytest.raises(LoadError, match="mth"):
        read_texts(["mth"], 1, None)


def test_a_setting_and_a_choice_are_what_rows_are_found_by() -> None:
    grid = sweeps.grid()
    assert grid.settings == [Setting("math", 1, 0.0, 0)]
    assert grid.config(Choice("ngram", 4)).num_speculative_tokens == 4
