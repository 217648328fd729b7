"""Theorem 5: a request ends where it must, at every position of an accepted run, and nothing comes after it.

Ends are stop tokens, stop strings, token limits and the context's edge; each is held against plain decoding, which adds
one token at a time and so cannot overrun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.engine import Engine
from outrider.errors import CapacityError, RequestError
from outrider.models.llama import LlamaModel
from outrider.text.detokenizer import Detokenizer
from outrider.types import Request, SamplingParams
from tests.kit import scripted, tiny
from tests.kit.scripted import Oracle, Truth

PROMPT = tiny.random_prompt(6, 9)
N = 5


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(8)


@pytest.fixture(scope="module")
def truth(model: LlamaModel) -> Truth:
    return Truth(model, [tiny.make_request("truth", PROMPT, max_tokens=60)])


@pytest.fixture(scope="module")
def text(model: LlamaModel) -> list[int]:
    """What the target says after the prompt when nothing stops it."""
    return tiny.tokens_of(tiny.make_engine(model), [tiny.make_request("text", PROMPT, max_tokens=60)])["text"]


def first_places(text: Sequence[int], most: int) -> list[int]:
    """Places before `most` whose token has not been said before."""
    return [place for place in range(most) if text[place] not in text[:place]]


def drafted(model: LlamaModel, truth: Truth, request: Request, **settings: Any) -> tiny.Result:
    """The request with drafts that are all right, so that every end falls into an accepted run."""
    engine = tiny.make_engine(model, Oracle(truth), N, **settings)
    return tiny.run(engine, [request])[request.request_id]


@pytest.mark.parametrize("kind", ["stop_token_ids", "eos"])
def test_a_stop_token_ends_at_every_place_of_a_run(kind: str, model: LlamaModel, truth: Truth, text: list[int]) -> None:
    places = first_places(text, 24)
    assert {(place - 1) % (N + 1) for place in places} == set(range(N + 1)), "every place of a run is among them"
    for place in places:
        stop = text[place]
        request = tiny.make_request("a", PROMPT, max_tokens=60, **{kind: (stop,)})
        for result in (drafted(model, truth, request), tiny.run(tiny.make_engine(model), [request])["a"]):
            assert result.tokens == text[: place + 1]
            assert result.finish == "stop"
            assert result.stop_reason == (stop if kind == "stop_token_ids" else None)


def test_a_stop_that_is_also_an_end_of_text_is_named(model: LlamaModel, truth: Truth, text: list[int]) -> None:
    request = tiny.make_request("a", PROMPT, eos=(text[0],), stop_token_ids=(text[0],))
    assert drafted(model, truth, request).stop_reason == text[0]


def test_ignore_eos_ignores_the_end_of_text_only(model: LlamaModel, truth: Truth, text: list[int]) -> None:
    place = first_places(text, 24)[-1]
    ignoring = tiny.make_request("a", PROMPT, eos=text[:5], ignore_eos=True, max_tokens=30)
    assert drafted(model, truth, ignoring).tokens == text[:30]
    stopped = replace(ignoring, params=replace(ignoring.params, stop_token_ids=(text[place],)))
    result = drafted(model, truth, stopped)
    assert (result.tokens, result.finish) == (text[: place + 1], "stop")


def test_a_stopper_does_not_end_a_text_that_goes_on(model: LlamaModel, text: list[int]) -> None:
    stop = next(token for token in range(tiny.VOCAB) if token not in text[:30])
    request = tiny.make_request("a", PROMPT, stop_token_ids=(stop,), max_tokens=30)
    engine = tiny.make_engine(model, scripted.Stopper(stop), N)
    assert tiny.run(engine, [request])["a"].tokens == text[:30]


@pytest.mark.parametrize("limit", range(1, 20))
def test_max_tokens_ends_at_every_place_of_a_run(limit: int, model: LlamaModel, truth: Truth, text: list[int]) -> None:
    result = drafted(model, truth, tiny.make_request("a", PROMPT, max_tokens=limit))
    assert (result.tokens, result.finish, result.stop_reason) == (text[:limit], "length", None)
    assert result.stats is not None
    # No draft is verified that could never be used: a round never holds more drafts than tokens left, less one.
    assert result.stats.num_drafted < limit


def test_a_stop_token_at_the_limit_is_a_stop_and_beyond_it_a_limit(
    model: LlamaModel, truth: Truth, text: list[int]
) -> None:
    for place in first_places(text, 20):
        request = tiny.make_request("a", PROMPT, max_tokens=place + 1, stop_token_ids=(text[place],))
        result = drafted(model, truth, request)
        assert (result.tokens, result.finish) == (text[: place + 1], "stop")
        if place:
            beyond = replace(request, params=replace(request.params, max_tokens=place))
            result = drafted(model, truth, beyond)
            assert (result.tokens, result.finish) == (text[:place], "length")


@pytest.mark.parametrize("least", range(1, 16))
def test_min_tokens_counts_tokens_not_rounds(least: int, model: LlamaModel) -> None:
    """With every end wanted badly, the text ends right after `least` tokens, drafted or not."""
    stop = 17
    for temperature in (0.0, 1.0):
        request = tiny.make_request(
            "a",
            PROMPT,
            stop_token_ids=(stop,),
            logit_bias={stop: 90.0},
            min_tokens=least,
            max_tokens=40,
            temperature=temperature,
        )
        for drafter in (None, scripted.Stopper(stop), Oracle(Truth(model, [request]))):
            result = tiny.run(tiny.make_engine(model, drafter, N if drafter else None), [request])["a"]
            assert len(result.tokens) == least + 1
            assert stop not in result.tokens[:-1]
            assert (result.tokens[-1], result.finish) == (stop, "stop")


# ---- stop strings ----


@dataclass
class Letters:
    """A sink that writes token t as the letter of t; it remembers what it was given."""

    stops: tuple[str, ...]
    text: str = ""
    ended: bool = False

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        assert not self.ended, "a token came after the stop"
        self.text += chr(0x100 + token_id)
        found = next((stop for stop in self.stops if self.text.endswith(stop)), None) if check_stop else None
        self.ended = found is not None
        return found


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(0x100 + token) for token in tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_string_ends_at_every_place_of_a_run(
    length: int, model: LlamaModel, truth: Truth, text: list[int]
) -> None:
    for end in range(length, 22):
        stop = letters(text[end - length : end])
        where = letters(text).index(stop) + length
        request = tiny.make_request("a", PROMPT, stop=stop, sink=Letters((stop,)), max_tokens=60)
        result = drafted(model, truth, request)
        assert (result.tokens, result.finish, result.stop_reason) == (text[:where], "stop", stop)


def test_a_stop_string_at_the_limit_is_a_stop(model: LlamaModel, truth: Truth, text: list[int]) -> None:
    for end in range(2, 15):
        stop = letters(text[end - 2 : end])
        where = letters(text).index(stop) + 2
        request = tiny.make_request("a", PROMPT, stop=stop, sink=Letters((stop,)), max_tokens=where)
        result = drafted(model, truth, request)
        assert (result.tokens, result.finish) == (text[:where], "stop")


def test_a_stop_string_does_not_count_before_min_tokens(model: LlamaModel, truth: Truth, text: list[int]) -> None:
    places = [place for place in range(20) if text[place] == text[0]]
    request = tiny.make_request("a", PROMPT, stop="x", max_tokens=60)
    for least in range(1, 12):
        stops = (letters(text[:1]),)
        params = replace(request.params, stop=stops, min_tokens=least, max_tokens=20)
        result = drafted(model, truth, replace(request, sink=Letters(stops), params=params))
        where = next((place + 1 for place in places if place >= least), 20)
        assert result.tokens == text[:where]


def test_stop_tokens_are_no_part_of_the_text_unless_asked_for(model: LlamaModel, truth: Truth, text: list[int]) -> None:
    place = first_places(text, 20)[-1]
    for include in (False, True):
        sink = Letters(())
        request = tiny.make_request(
            "a", PROMPT, sink=sink, stop_token_ids=(text[place],), include_stop_str_in_output=include, max_tokens=60
        )
        drafted(model, truth, request)
        assert sink.text == letters(text[: place + include])


class _Vocabulary:
    """As much of a tokenizer as a byte-level detokenizer needs: token t is one byte, or half of a two-byte letter."""

    is_byte_level = True
    special_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([0xC3]) if token_id % 4 == 3 else bytes([0x80 + token_id]) if token_id % 4 == 1 else b"ab"


def test_the_real_detokenizer_says_the_same_with_and_without_drafts(
    model: LlamaModel, truth: Truth, text: list[int]
) -> None:
    tokenizer: Any = _Vocabulary()
    whole = Detokenizer(tokenizer, SamplingParams())
    for token in text[:24]:
        whole.push(token, check_stop=False)
    said = whole.take() + whole.finish()
    stops = {said[start : start + length] for length in (1, 2, 3) for start in range(len(said) - length)}
    for stop in sorted(stops):
        for include in (False, True):
            outcomes = []
            for drafter in (None, Oracle(truth)):
                sink = Detokenizer(tokenizer, SamplingParams(stop=stop, include_stop_str_in_output=include))
                request = tiny.make_request(
                    "a", PROMPT, stop=stop, include_stop_str_in_output=include, sink=sink, max_tokens=24
                )
                result = tiny.run(tiny.make_engine(model, drafter, N if drafter else None), [request])["a"]
                outcomes.append((result.tokens, result.finish, result.stop_reason, sink.take() + sink.finish()))
            assert outcomes[0] == outcomes[1]
            shown = said[: said.index(stop) + len(stop) * include]
            assert outcomes[0][1:] == ("stop", stop, shown)


# ---- the context's edge ----


@pytest.fixture(scope="module")
def edge_truth(model: LlamaModel) -> Truth:
    requests = [tiny.make_request(f"{n}", tiny.random_prompt(n, n), max_tokens=48) for n in range(1, 47)]
    return Truth(model, requests, num_extra=0)


@pytest.mark.parametrize("max_len", [32, 40, 47])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_no_text_outgrows_the_context(num_tokens: int, max_len: int, model: LlamaModel, edge_truth: Truth) -> None:
    for length in (1, 2, 15, 16, 17, max_len - 9, max_len - 3, max_len - 2, max_len - 1):
        request = tiny.make_request("a", tiny.random_prompt(length, length), max_tokens=None)
        settings = {"max_model_len": max_len, "kv_cache_tokens": 48}
        plain = tiny.run(tiny.make_engine(model, **settings), [request])["a"]
        assert (len(plain.tokens), plain.finish) == (max_len - length, "length")
        engine = tiny.make_engine(model, Oracle(edge_truth), num_tokens, **settings)
        result = tiny.run(engine, [request])["a"]
        assert (result.tokens, result.finish) == (plain.tokens, "length")


def test_a_prompt_that_fills_the_context_is_refused(model: LlamaModel) -> None:
    engine = tiny.make_engine(model, max_model_len=32)
    for length in (32, 33, 500):
        with pytest.raises(RequestError, match="32") as caught:
            engine.add(tiny.make_request("a", tiny.random_prompt(0, length)))
        assert caught.value.param == "prompt"
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ((), {}, "prompt"),
        ((1, 64), {}, "prompt"),
        ((-1,), {}, "prompt"),
        ((1,), {"logit_bias": {64: 1.0}}, "logit_bias"),
        ((1,), {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ((1,), {"stop_token_ids": (64,), "min_tokens": 2}, "stop_token_ids"),
        ((1,), {"stop_token_ids": (-1,), "min_tokens": 2}, "stop_token_ids"),
    ],
)
def test_what_can_never_run_is_refused_by_name(
    prompt: tuple[int, ...], params: dict[str, Any], param: str, model: LlamaModel
) -> None:
    engine = tiny.make_engine(model)
    with pytest.raises(RequestError) as caught:
        engine.add(tiny.make_request("a", prompt, **params))
    assert caught.value.param == param
    engine.add(tiny.make_request("a", (1, 2)))
    with pytest.raises(RequestError, match="in use"):
        engine.add(tiny.make_request("a", (1, 2)))


def test_ends_outside_the_vocabulary_are_no_ends(model: LlamaModel, text: list[int]) -> None:
    """A checkpoint's own list of ends may name ids that its output matrix does not have."""
    request = tiny.make_request("a", PROMPT, eos=(tiny.VOCAB, 10**6), min_tokens=3, max_tokens=20)
    assert tiny.run(tiny.make_engine(model), [request])["a"].tokens == text[:20]


def test_a_request_beyond_the_whole_cache_is_an_error_and_leaves_the_engine_usable(model: LlamaModel) -> None:
    engine = tiny.make_engine(model, kv_cache_tokens=32)
    engine.add(tiny.make_request("big", tiny.random_prompt(0, 40)))
    with pytest.raises(CapacityError, match="kv_cache_tokens"):
        engine.step()
    engine.abort("big")
    assert len(tiny.run(engine, [tiny.make_request("small", (1, 2), max_tokens=8)])["small"].tokens) == 8


@pytest.mark.parametrize("limit", [1, 10, 11, 20, 33])
def test_drafting_stops_at_the_drafters_own_limit(limit: int, model: LlamaModel, truth: Truth, text: list[int]) -> None:
    """`max_model_len` of the speculative configuration: beyond it the text goes on without drafts."""
    speculative = {"method": "scripted", "num_speculative_tokens": N, "max_model_len": limit}
    engine = tiny.make_engine(model, Oracle(truth), speculative)
    lengths: list[int] = []

    def watch(running: Engine) -> None:
        lengths.append(running.stats.speculation.num_draft_tokens)

    result = tiny.run(engine, [tiny.make_request("a", PROMPT, max_tokens=40)], each_step=watch)["a"]
    assert result.tokens == text[:40]
    # The last draft stands at most at the limit's last position.
    assert result.stats is not None
    assert result.stats.num_drafted <= max(0, limit - len(PROMPT) - 1)
    assert (result.stats.num_drafted > 0) == (limit > len(PROMPT) + 1)


@pytest.mark.parametrize("positions", [8, 24, 40])
def test_a_draft_model_with_a_shorter_context_stops_in_time(
    positions: int, model: LlamaModel, tmp_path: Path, text: list[int]
) -> None:
    """Longer prompts than the draft model takes, and texts that outgrow it on the way, go on without drafts."""
    folder = tiny.save_tiny(tmp_path, 8, max_position_embeddings=positions)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": N}
    result = tiny.run(tiny.make_engine(model, speculative=config), [tiny.make_request("a", PROMPT, max_tokens=60)])["a"]
    assert result.tokens == text
    assert result.stats is not None
    assert result.stats.num_accepted == result.stats.num_drafted
    assert (result.stats.num_drafted > 0) == (positions > len(PROMPT))
    assert result.stats.drafting_error is None
