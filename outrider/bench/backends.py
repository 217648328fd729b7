"""Who answers prompts when a sweep measures: one small protocol, and the engine of this process as its first kind.

A backend is told what to answer, how many requests to keep running and how to draft, and gives back tokens, seconds and
counts. It decides nothing and keeps no results. Not here: what is measured when (sweep.py), and what the numbers say
(cells.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from outrider.bench.conditions import conditions
from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.engine.stats import EngineStats
from outrider.errors import ConfigError, DrafterMismatch, LoadError
from outrider.evaluate.conversation import encode
from outrider.evaluate.lossless import why_not_comparable
from outrider.llm import LLM, Generation
from outrider.metrics import SpeculationCounters
from outrider.models.fingerprint import fingerprint
from outrider.types import DraftParams, SamplingParams

_FIRST_BUCKET_LEN = 64
_OF_LENGTHS = (
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification",
    "guard",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts to answer together: ids and sampling, one each; `concurrency` of them run at any time.

    `config` None is plain decoding; else it is one that `Backend.prepare` gave. `workload`: the class of the requests,
    by which a guard learns.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    concurrency: int
    config: SpeculativeConfig | None
    workload: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a job took. Sums over its prompts; seconds are wall time, reading of prompts included.

    num_decode_tokens, decode_s: output after each request's first token, and the seconds that its reader waited for it.
    ttft_s: from leaving the queue to the first token, request by request. draft_s, verify_s: drafting; the target's
    forwards. by_output_position: (first position, rounds, tokens committed in them) for output positions up to the next
    entry's first; rounds after a request's first token. text_sha256: of all output ids, "" where the settings do not
    promise plain decoding's text.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    num_decode_tokens: int
    decode_s: float
    ttft_s: tuple[float, ...]
    draft_s: float
    verify_s: float
    speculation: SpeculationCounters
    by_output_position: tuple[tuple[int, int, int], ...]
    drafting_errors: tuple[str, ...]
    text_sha256: str

    def as_json(self) -> dict[str, Any]:
        """Plain data without nesting: the counters' fields stand beside the others."""
        values = asdict(self)
        counters: dict[str, Any] = values.pop("speculation")
        return values | counters

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """The same record again. Raises KeyError or TypeError for what is missing or of another shape."""
        counters = SpeculationCounters(**{item.name: values[item.name] for item in fields(SpeculationCounters)})
        own = {item.name: values[item.name] for item in fields(cls) if item.name != "speculation"}
        for name in ("ttft_s", "drafting_errors"):
            own[name] = tuple(own[name])
        own["by_output_position"] = tuple((int(a), int(b), int(c)) for a, b, c in own["by_output_position"])
        return cls(speculation=counters, **own)


class Backend(Protocol):
    """What a sweep asks of whoever serves the target."""

    target: str
    """The target's name, for people."""
    max_len: int
    """The longest prompt plus output."""

    def identity(self) -> str:
        """A text that other weights do not share."""

    def conditions(self) -> dict[str, Any]:
        """Machine, software, model and settings, as plain data."""

    def encode(self, text: str) -> tuple[int, ...]:
        """A user's message as the ids that the model is to go on with."""

    def methods(self) -> list[str]:
        """Drafting methods that this target can be run with without further settings."""

    def prepare(self, configs: Sequence[SpeculativeConfig]) -> list[SpeculativeConfig]:
        """Make ready for these, and give them with everything filled in. Raises for what cannot run."""

    def run(self, job: Job) -> Measured:
        """Answer the job's prompts."""


class EmbeddedBackend:
    """The engine of this process. The target is loaded once; a drafter once, whatever the number of its N."""

    def __init__(self, plain: LLM) -> None:
        self.target, self.max_len = plain.model_name, plain.max_len
        self._plain = plain
        self._drafting: dict[tuple[Any, ...], LLM] = {}
        self._tuned: dict[tuple[SpeculativeConfig | None, int], LLM] = {}

    def identity(self) -> str:
        """The target's fingerprint."""
        return fingerprint(self._plain.engine.model)

    def conditions(self) -> dict[str, Any]:
        """As bench states them."""
        return conditions(self._plain, {}, {"backend": "embedded"})

    def encode(self, text: str) -> tuple[int, ...]:
        """Through the chat template where there is one."""
        return encode(self._plain, [{"role": "user", "content": text}])

    def methods(self) -> list[str]:
        """Those whose drafter is a part of the target, installed for it, or no network at all. Cost: loads each."""
        found = []
        for method in registry.names():
            try:
                self.prepare([SpeculativeConfig(method=method, num_speculative_tokens=1)])
            except (ConfigError, DrafterMismatch, LoadError):
                continue
            found.append(method)
        return found

    def prepare(self, configs: Sequence[SpeculativeConfig]) -> list[SpeculativeConfig]:
        """Build every one's drafter, so that none can fail later, and keep one for all N."""
        complete = [self._plain.complete(config) for config in configs]
        for config in complete:
            made = self._plain.sibling(config)
            self._drafting.setdefault(_all_but_lengths(config), made)
        return complete

    def run(self, job: Job) -> Measured:
        """One generation of all prompts; the engine admits `concurrency` of them and the next as soon as one ends."""
        llm = self._llm(job.config, job.concurrency)
        llm.engine.stats = EngineStats()
        places = _Places()
        began = time.perf_counter()
        generation = llm.start(job.prompts, job.params, DraftParams(workload=job.workload))
        for delta in generation:
            places.observe(delta.request_id, len(delta.token_ids))
        return _measured(job, generation, time.perf_counter() - began, llm, places)

    def _llm(self, config: SpeculativeConfig | None, concurrency: int) -> LLM:
        """The engine for a job; those of one drafter differ in lengths and load only, and are asked in turn."""
        if (found := self._tuned.get((config, concurrency))) is not None:
            return found
        origin = self._plain if config is None else self._drafting[_all_but_lengths(config)]
        self._tuned[config, concurrency] = made = origin.retuned(config, max_num_seqs=concurrency)
        return made


class _Places:
    """Rounds and what they committed, by output position; buckets double in length from the second on."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._sums: dict[int, list[int]] = {}

    def observe(self, request_id: str, num_tokens: int) -> None:
        """Take one round's news of a request; its first token comes of reading the prompt and is no round."""
        if not num_tokens:
            return
        position = self._lengths.get(request_id, 0)
        self._lengths[request_id] = position + num_tokens
        if position:
            sums = self._sums.setdefault(bucket(position), [0, 0])
            sums[0] += 1
            sums[1] += num_tokens

    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """(first position, rounds, tokens) in ascending order."""
        return tuple((first, *sums) for first, sums in sorted(self._sums.items()))  # type: ignore[misc]


def bucket(position: int) -> int:
    """The first position of the bucket that an output position is in: 0, 64, 128, 256, 512, …"""
    first = _FIRST_BUCKET_LEN
    if position < first:
        return 0
    while position >= 2 * first:
        first *= 2
    return first


def _all_but_lengths(config: SpeculativeConfig) -> tuple[Any, ...]:
    """What a drafter is built by: all settings but those of how far it drafts, which are the engine's."""
    return tuple(getattr(config, item.name) for item in fields(config) if item.name not in _OF_LENGTHS)


def _measured(job: Job, generation: Generation, seconds: float, llm: LLM, places: _Places) -> Measured:
    answers = [output.outputs[0] for output in generation.outputs]
    every = [answer.stats for answer in answers if answer.stats is not None]
    return Measured(
        num_prompts=len(answers),
        num_prompt_tokens=sum(map(len, job.prompts)),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        seconds=seconds,
        num_decode_tokens=sum(stats.num_output_tokens - 1 for stats in every),
        decode_s=sum(stats.total_s - stats.first_token_s for stats in every),
        ttft_s=tuple(stats.first_token_s - stats.queued_s for stats in every),
        draft_s=llm.engine.stats.draft_s,
        verify_s=llm.engine.stats.verify_s,
        speculation=llm.engine.stats.speculation,
        by_output_position=places.rows(),
        drafting_errors=tuple(sorted({stats.drafting_error for stats in every if stats.drafting_error})),
        text_sha256=_text_sha256(job, [answer.token_ids for answer in answers]),
    )


def _text_sha256(job: Job, texts: Sequence[Sequence[int]]) -> str:
    if job.config is not None and any(why_not_comparable(job.config, params) for params in job.params):
        return ""
    return hashlib.sha256(repr([list(text) for text in texts]).encode()).hexdigest()
