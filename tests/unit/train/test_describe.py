"""The numbers of a corpus, against corpora small enough to count by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outrider.evaluate import workloads
from outrider.train.conversations import Chat
from outrider.train.corpus import Corpus, Sample
from outrider.train.describe import QUANTILES, describe


def sample(prompt: list[int], response: list[int], kind: str = "") -> Sample:
    ids = np.array(prompt + response, dtype=np.int32)
    return Sample(ids, np.arange(len(ids)) >= len(prompt), kind)


def no_text(ids: object) -> str:
    return ""


def test_counts_lengths_and_kinds() -> None:
    samples = [sample([1] * 3, [9] * 2, "a"), sample([2] * 5, [9] * 4, "b"), sample([1] * 3, [8] * 6, "a")]
    found = describe(Corpus(samples, Counter({"empty": 1, "not JSON": 2})), no_text)
    assert (found.num_conversations, found.num_prompt_tokens, found.num_response_tokens) == (3, 11, 12)
    assert list(found.refused.items()) == [("not JSON", 2), ("empty", 1)]
    assert found.kinds == {"a": 2, "b": 1} and found.num_response_ids == 2
    assert found.num_repeated_prompts == 1
    assert found.response_len[QUANTILES.index(0.5)] == 4 and found.response_len[-1] == 6
    assert found.prompt_len[QUANTILES.index(0.5)] == 3 and found.prompt_len[-1] == 5


def test_coverage_is_the_share_of_response_tokens_that_the_most_frequent_ids_make_up() -> None:
    """1024 ids appear three times each and 1024 more once; ids of prompts count for nothing."""
    often, rare = list(range(3000, 4024)), list(range(5000, 6024))
    found = describe(Corpus([sample([7] * 50_000, often * 3 + rare)]), no_text)
    assert found.coverage == {1024: 0.75, 2048: 1.0, 4096: 1.0, 8192: 1.0, 16384: 1.0, 32768: 1.0}


def test_answers_between_turns_count_as_responses() -> None:
    ids, is_response = np.arange(10, dtype=np.int32), np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], dtype=bool)
    found = describe(Corpus([Sample(ids, is_response)]), no_text)
    assert (found.num_prompt_tokens, found.num_response_tokens) == (5, 5)


@pytest.mark.parametrize("name", workloads.OWN)
def test_an_evaluation_prompt_is_found_whatever_stands_around_it(chat: Chat, name: str) -> None:
    turn = workloads.load(name, turns="all")[-1].turns[-1].replace(" ", " \n", 3)
    ids = chat.prompt_ids(
        [{"role": "system", "content": "Be good."}, {"role": "user", "content": f"Hello.\n\n  {turn} "}]
    )
    other = chat.prompt_ids([{"role": "user", "content": "Something else"}])
    corpus = Corpus([sample(ids, [9]), sample(ids, [9]), sample(other, [9])])
    found = describe(corpus, chat.tokenizer.decode).evaluation_prompts
    assert found[name] == 1 and sum(found.values()) == 1 and set(found) == set(workloads.OWN)


def test_an_evaluation_prompt_in_a_response_is_no_prompt(chat: Chat) -> None:
    turn = workloads.load("chat")[0].turns[0]
    corpus = Corpus([sample([5, 6], chat.tokenizer.encode(turn))])
    assert sum(describe(corpus, chat.tokenizer.decode).evaluation_prompts.values()) == 0
