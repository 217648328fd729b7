"""Frozen records that cross a border between rooms of Outrider. No behaviour beyond checking their own fields.

One request's journey through them: Request -> Proposal -> Verdict -> StepOutput -> Delta. Stages never call the next
stage; they hand it one of these. Nothing here imports torch at run time except for annotations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from outrider.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

PAD = -1
"""Fills the unused tail of a padded row of token ids; never a token, never drawn, never accepted."""

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn and when it ends; field names, meanings and defaults as vLLM's.

    Temperature 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch the filter off. Penalties count tokens of
    the output (repetition: prompt and output). `logit_bias` adds to logits before everything else. `max_tokens` None
    means as far as the context goes. `logprobs` k reports the k likeliest tokens and the drawn one, of the model's raw
    distribution. Raises RequestError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name, low, high in _FLOAT_RANGES:
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}", param=name)
        for name, least in _INT_LEAST:
            value = getattr(self, name)
            if value is None and name in ("seed", "max_tokens", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RequestError(f"{name} is {value!r}, expected an integer of at least {least}", param=name)
        if self.top_p == 0:
            raise RequestError(
                "top_p is 0, expected above 0 and at most 1 (use temperature 0 for greedy)", param="top_p"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError("stop has an empty or non-text entry, expected non-empty strings", param="stop")
        if any(isinstance(token, bool) or not isinstance(token, int) for token in self.stop_token_ids):
            raise RequestError("stop_token_ids has an entry that is no token id", param="stop_token_ids")

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the next distribution."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


_FLOAT_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.001, 100.0),  # less would push logits out of float32's range
)
_MOST_BIAS = 1e6  # beyond this, float32 logits would lose all else
_INT_LEAST = (("n", 1), ("top_k", -1), ("seed", -(2**63)), ("max_tokens", 1), ("min_tokens", 0), ("logprobs", 0))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _listed(name: str, value: object) -> tuple[Any, ...]:
    """A sequence as a tuple; None counts as empty, as in vLLM."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError(f"{name} is {value!r}, expected a list", param=name)
    return tuple(value)


def _biases(value: object) -> dict[int, float]:
    """Biases by token id; JSON spells ids as text, and None counts as empty."""
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias is {value!r}, expected an object of token ids and numbers", param="logit_bias")
    biases = {}
    for token, bias in given.items():
        if isinstance(token, bool) or not (isinstance(token, int) or (isinstance(token, str) and token.isdecimal())):
            raise RequestError(f"logit_bias has {token!r}, expected token ids", param="logit_bias")
        if not _is_number(bias) or abs(bias) > _MOST_BIAS:
            raise RequestError(
                f"logit_bias of {token} is {bias!r}, expected a number from -{_MOST_BIAS:g} to {_MOST_BIAS:g}",
                param="logit_bias",
            )
        biases[int(token)] = float(bias)
    return biases


class TextSink(Protocol):
    """Turns one sequence's committed ids into text and watches for stop strings; implemented in `text`."""

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Take the next committed id; give the stop string that it completes, if any and if asked to check."""


@dataclass(frozen=True, kw_only=True)
class DraftParams:
    """How drafts are made for one request, within what the engine was configured for; its text does not depend on it.

    `off`: none. `num_speculative_tokens`: at most so many a round, none takes the engine's. `workload`: the class that
    the request is learned from and judged with; requests of one class should be alike. Raises RequestError.
    """

    off: bool = False
    num_speculative_tokens: int | None = None
    workload: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.off, bool):
            raise RequestError(f"off is {self.off!r}, expected true or false", param="off")
        if not isinstance(self.workload, str):
            raise RequestError(f"workload is {self.workload!r}, expected a name", param="workload")
        most, name = self.num_speculative_tokens, "num_speculative_tokens"
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise RequestError(f"{name} is {most!r}, expected an integer of at least 1", param=name)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate: a prompt's ids and how to continue them. `n` > 1 arrives as n requests.

    `seed` is always set here (drawn by the façade where the user gave none), so every run can be repeated.
    `eos_ids` end the sequence unless `params.ignore_eos`; `params.stop_token_ids` always do.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    choice_index: int = 0
    eos_ids: frozenset[int] = frozenset()
    sink: TextSink | None = None
    drafting: DraftParams = DraftParams()


@dataclass(frozen=True)
class Distributions:
    """Sparse rows of probability: row r draws `ids[starts[r]:starts[r+1]]` with those `probs`.

    Shapes: ids [nnz] int64, probs [nnz] float32, starts [R+1] int64. Each row sums to 1 within 1e-4, has at least
    one entry, and lists no id twice. A greedy row has exactly one entry.
    """

    ids: Tensor
    probs: Tensor
    starts: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.starts) - 1

    def row(self, index: int) -> Distributions:
        """One row of its own."""
        first, end = self.starts[index : index + 2].tolist()
        return Distributions(self.ids[first:end], self.probs[first:end], self.starts[index : index + 2] - first)


@dataclass(frozen=True)
class Proposal:
    """The draft tokens of one round, one chain a request, in the order of the requests asked for.

    `tokens[b]` holds the drafts of request b: zero up to its budget of them, as target ids. `draft_probs` has one row
    a draft token, request by request, the distribution that it was really drawn from; None says that every draft was
    chosen without chance (one-hot). `confidence[b]`, from drafters that have an opinion, says for each draft how likely
    it is to be accepted, given that those before it are; `top_probs[b]`, from those that have none, what the drafter
    gave to its likeliest token there. Both may know tokens before a draft, never the draft itself.
    """

    tokens: tuple[tuple[int, ...], ...]
    draft_probs: Distributions | None = None
    confidence: tuple[tuple[float, ...], ...] | None = None
    top_probs: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """What the target says of one request's proposal: how many drafts stand, and the token after them."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the drawn token's, its rank (1 is the likeliest), and the top ones by id."""

    token_id: int
    logprob: float
    rank: int
    top: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """What a finished request took: tokens, seconds since it was added (`queued_s` of them in line), and drafting.

    num_drafts, num_drafted, num_accepted, accepted_histogram: as vLLM counts. num_rejected, num_untested: drafts
    verified in vain. num_trimmed: drafted but not verified. num_discarded: tokens that an end cut off.
    verified_histogram: rounds by drafts verified, from 0 on. draft_s, verify_s, other_s: of the steps that it ran in.
    saved_s: how much sooner it ended than without drafts, by measured costs; below 0, how much later; None unmeasured.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float
    total_s: float
    num_drafts: int
    num_drafted: int
    num_accepted: int
    accepted_histogram: tuple[int, ...]
    num_rejected: int = 0
    num_untested: int = 0
    num_trimmed: int = 0
    num_discarded: int = 0
    verified_histogram: tuple[int, ...] = ()
    queued_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    saved_s: float | None = None
    workload: str = ""
    drafting_error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one engine step committed for one request; `token_ids` may be several, or none while a prompt is read."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True)
class Delta:
    """What a reader of a stream sees next of one choice: new text and ids, and at the end why it ended."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
