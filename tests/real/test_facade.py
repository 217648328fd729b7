"""The library as its users call it, on SmolLM2: streams, early ends, choices, and nothing left behind."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import OutriderError, RequestError

pytestmark = pytest.mark.real
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        return LLM("smollm2", speculative_config={"method": "ngram", "num_speculative_tokens": 3}, seed=1)
    except OutriderError as error:
        pytest.skip(f"the built-in model cannot be had here: {error}")


def test_deltas_add_up_to_the_text(llm: LLM) -> None:
    whole = llm.generate("Numbers: one, two, three, one, two,", SHORT)[0].outputs[0]
    deltas = list(llm.stream("Numbers: one, two, three, one, two,", SHORT))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


def test_streams_can_be_read_in_turns(llm: LLM) -> None:
    prompts = ("The sea is", "One and one is")
    alone = [llm.generate(prompt, SHORT)[0].outputs[0].text for prompt in prompts]
    streams, texts = [llm.stream(prompt, SHORT) for prompt in prompts], ["", ""]
    for _ in range(7):
        for index, stream in enumerate(streams):
            if (delta := next(stream, None)) is not None:
                texts[index] += delta.text
    assert texts == alone and not llm.engine.has_work


def test_who_leaves_early_leaves_nothing_behind(llm: LLM) -> None:
    next(llm.stream("The sea is", SHORT))
    unread = llm.stream("The sea is", SHORT)
    del unread
    assert not llm.engine.has_work and not llm._mail
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_a_choice_that_had_ended_keeps_its_reason(llm: LLM) -> None:
    generation = llm.start("The sea is", SHORT)
    for delta in generation:
        if delta.finish_reason is not None:
            break
    assert generation.outputs[0].outputs[0].finish_reason == "length"


def test_choices_differ_and_repeat_under_a_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=5, logprobs=2)
    first, again = (llm.generate("Once upon a time", params)[0].outputs for _ in range(2))
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in again]
    assert len({tuple(choice.token_ids) for choice in first}) == 3
    for choice in first:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        assert choice.cumulative_logprob is not None and choice.cumulative_logprob < 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    assert llm.chat(messages, SHORT)[0].prompt_token_ids == llm.tokenizer.encode_chat(messages)


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompts in ("", [[]], [[10**9]], ["fine", ""]):
        with pytest.raises(RequestError):
            llm.generate(prompts, SHORT)
    with pytest.raises(RequestError, match="params has 2 entries for 1 prompts"):
        llm.generate("one", [SHORT, SHORT])
    assert not llm.engine.has_work
