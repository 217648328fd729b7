"""The ring: schedule, propose, forward, verify, commit. The only file that knows the order of the stages.

The engine is synchronous and owned by one thread: add requests, call `step`, read what was committed. It speaks token
ids; text lives above it. Exactness rests on three facts: the scheduler decides lengths only, a drafter only proposes,
and every committed token is chosen in `verify` from the target's own distribution.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafting.base import Drafter, TargetInfo
from outrider.engine.adaptive import AdaptiveLengths
from outrider.engine.calibration import Setup, step_costs
from outrider.engine.costs import StepCosts
from outrider.engine.lengths import FixedLengths, Lengths, Price
from outrider.engine.runner import Runner
from outrider.engine.safe_drafter import SafeDrafter
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Entry, Sequence
from outrider.engine.stats import EngineStats, StepTimes
from outrider.errors import CapacityError, RequestError
from outrider.models.linear import torch_alone
from outrider.sampling import distributions, logprobs
from outrider.types import Proposal, Request, StepOutput, TokenLogprobs, Verdict
from outrider.verify import verify


class Engine:
    """Runs many requests over one target, with or without a drafter. `stats` says what was done and how long.

    `costs`: what steps cost, where proposal lengths adapt and that is known; else it is looked up or measured.
    """

    def __init__(
        self,
        target: TargetInfo,
        config: EngineConfig,
        speculative: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        assert (speculative is None) == (drafter is None)
        if not target.model.shares_prefixes:
            config = replace(config, enable_prefix_caching=False)
            target.pool.on_free.append(target.memory.forget)
        self.target, self.config, self.max_len = target, config, target.max_len
        self.model, self.pool = target.model, target.pool
        self._brings_threads = target.model.brings_threads and target.model.device.type == "cpu"
        self.speculative = speculative
        if drafter is not None:
            target.memory.keep_taps(drafter.taps)
        self.runner = Runner(target.model, target.memory, target.pool.block_size)
        self.safe_drafter: SafeDrafter | None = None
        self.lengths: Lengths = FixedLengths(speculative)
        if speculative is not None and drafter is not None:
            self.safe_drafter = SafeDrafter(drafter, speculative, self.model.config.vocab_size)
            if speculative.is_adaptive:
                costs = costs or step_costs(Setup(target, config, speculative, self.safe_drafter, self.runner))
                self.lengths = AdaptiveLengths(speculative, costs, config.max_num_seqs)
        self.scheduler = Scheduler(config, self.lengths, target.pool, self._end_drafting)
        self.stats = EngineStats()
        self._sequences: dict[str, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs))[::-1]

    @property
    def drafter(self) -> Drafter | None:
        """What proposes, if anything does."""
        return None if self.safe_drafter is None else self.safe_drafter.drafter

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError naming the field when it can never run."""
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self.check(request)
        sequence = Sequence(request, self.max_len, self.model.config.vocab_size)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def check(self, request: Request) -> None:
        """Raise RequestError naming the field if this request can never run here."""
        check_request(request, self.max_len, self.model.config.vocab_size)
        wanted, config = request.drafting.num_speculative_tokens, self.speculative
        if wanted is not None and config is not None and wanted > config.num_speculative_tokens:
            raise RequestError(
                f"num_speculative_tokens is {wanted}, expected at most the engine's {config.num_speculative_tokens}",
                param="num_speculative_tokens",
            )

    def abort(self, request_id: str) -> StepOutput | None:
        """Stop a request between two steps and free all it holds; None if there is no such request."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = "abort"
        self._finish(sequence)
        return StepOutput(request_id, (), "abort")

    def step(self) -> list[StepOutput]:
        """Run one step over every request that is ready; what each of them committed, in no promised order.

        Nothing to do gives nothing. Raises CapacityError when no request fits into the cache.
        """
        if not self._sequences:
            return []
        with torch_alone() if self._brings_threads else contextlib.nullcontext():
            return self._step()

    def _step(self) -> list[StepOutput]:
        began = time.perf_counter()
        entries = self.scheduler.plan()
        if not entries:
            raise CapacityError("no request fits into the cache: raise kv_cache_tokens")
        self._begin_drafting(entries)
        scheduled = time.perf_counter()
        drafts = self._propose(entries)
        drafted = time.perf_counter()
        proposal = self.lengths.keep(entries, drafts)
        kept = time.perf_counter()
        logits = self.runner.forward(entries, proposal.tokens)
        computed = time.perf_counter()
        verdicts = self._verify(entries, proposal, logits)
        verified = time.perf_counter()
        other_s = (scheduled - began) + (kept - drafted) + (verified - computed)
        times = StepTimes(drafted - scheduled, computed - kept, other_s)
        price = self.lengths.observe(entries, verdicts, times)
        self.stats.observe_step(times, sum(entry.num_rows for entry in entries) + sum(map(len, proposal.tokens)))
        outputs = self._commit(_Round(entries, drafts, proposal, verdicts, price), _Logprobs(logits))
        self.stats.other_s += time.perf_counter() - verified
        return outputs

    def _propose(self, entries: Items[Entry]) -> Proposal:
        if self.safe_drafter is None:
            return Proposal(((),) * len(entries))
        return self.safe_drafter.propose(entries, self.lengths.pace)

    def _verify(self, entries: Items[Entry], proposal: Proposal, logits: Tensor) -> list[Verdict | None]:
        """The verdict on each entry that samples, None for the others."""
        drafts = [tokens for entry, tokens in zip(entries, proposal.tokens, strict=True) if entry.samples]
        sampling = [entry for entry in entries if entry.samples]
        groups = [entry.sequence.row_group(tokens) for entry, tokens in zip(sampling, drafts, strict=True)]
        if not groups:
            return [None] * len(entries)
        config = self.speculative
        verdicts = verify(
            config.rejection_sample_method if config else "coupled",
            Proposal(tuple(drafts), proposal.draft_probs),
            distributions(logits, groups),
            groups,
            config.synthetic_rates if config else (),
        )
        found = iter(verdicts)
        return [next(found) if entry.samples else None for entry in entries]

    def _commit(self, done: _Round, scores: _Logprobs) -> list[StepOutput]:
        outputs, gains = [], []
        for index, (entry, verdict) in enumerate(zip(done.entries, done.verdicts, strict=True)):
            sequence = entry.sequence
            sequence.num_computed += entry.num_rows
            if verdict is None:
                sequence.publish_blocks(self.pool)
                continue
            tokens = self._commit_tokens(sequence, verdict, done.drafts.tokens[index], done.proposal.tokens[index])
            if done.price is not None and entry.num_rows == 1:
                gained_s = (len(tokens) - 1) * done.price.plain_s
                sequence.save(gained_s - done.price.extra_s)
                gains.append(gained_s)
            num_rows = len(done.proposal.tokens[index]) + 1
            wanted = scores.take(num_rows, tokens, sequence.request.params.logprobs)
            outputs.append(self._output(sequence, tokens, wanted))
        if done.price is not None:
            self.stats.saved_s += sum(gains) / len(gains) - done.price.extra_s
        return outputs

    def _commit_tokens(
        self, sequence: Sequence, verdict: Verdict, drafted: tuple[int, ...], verified: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Append accepted drafts and the next token, up to the first end; roll the cache back to what stands."""
        committed = []
        for token in (*verified[: verdict.num_accepted], verdict.next_token):
            sequence.commit(token)
            committed.append(token)
            if sequence.finish_reason is not None:
                break
        sequence.num_computed = min(sequence.num_computed + verdict.num_accepted, sequence.num_tokens)
        num_trimmed = len(drafted) - len(verified)
        for counters in (sequence.counters, self.stats.speculation):
            counters.observe_round(len(drafted), verdict.num_accepted, len(committed), num_trimmed)
        sequence.publish_blocks(self.pool)
        return tuple(committed)

    def _output(
        self, sequence: Sequence, tokens: tuple[int, ...], scores: tuple[TokenLogprobs, ...] | None
    ) -> StepOutput:
        now = time.perf_counter()
        sequence.first_token_at = sequence.first_token_at or now
        sequence.last_token_at = now
        if sequence.finish_reason is not None:
            self._finish(sequence)
        return StepOutput(
            sequence.request.request_id,
            tokens,
            sequence.finish_reason,
            sequence.stop_reason,
            scores,
            sequence.request_stats(self.stats.stages) if sequence.finish_reason is not None else None,
        )

    def _begin_drafting(self, entries: Items[Entry]) -> None:
        for entry in entries:
            sequence = entry.sequence
            if sequence.slot < 0:
                sequence.slot = self._free_slots.pop()
                if not sequence.num_output:
                    sequence.stages_before = self.stats.stages
                self.lengths.begin(sequence)
                if self.safe_drafter is not None:
                    self.safe_drafter.begin(sequence)

    def _end_drafting(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            if self.safe_drafter is not None:
                self.safe_drafter.end(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def _finish(self, sequence: Sequence) -> None:
        self._end_drafting(sequence)
        self.scheduler.remove(sequence)
        self.stats.observe_end(sequence.counters, sequence.request.drafting.workload, sequence.num_output)
        del self._sequences[sequence.request.request_id]


@dataclass(frozen=True)
class _Round:
    """A step whose verdicts are in: what was drafted, what of it was verified, and what drafting cost."""

    entries: Items[Entry]
    drafts: Proposal
    proposal: Proposal
    verdicts: Items[Verdict | None]
    price: Price | None


class _Logprobs:
    """Hands out the log-probabilities of committed tokens, group by group in the order of the logits' rows."""

    def __init__(self, logits: Tensor) -> None:
        self._logits, self._row = logits, 0

    def take(self, num_rows: int, tokens: tuple[int, ...], num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
        """The next group's, for as many tokens as it committed; None unless asked for."""
        first, self._row = self._row, self._row + num_rows
        if num_top is None:
            return None
        return tuple(logprobs(self._logits[first : first + len(tokens)], tokens, num_top))


def check_request(request: Request, max_len: int, vocab_size: int) -> None:
    """Raise RequestError naming the field if the engine can never run this request."""
    prompt = request.prompt_ids
    if not prompt:
        raise RequestError("the prompt is empty, expected at least one token", param="prompt")
    if len(prompt) >= max_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the context takes {max_len} with at least one to generate: "
            "shorten it or raise max_model_len",
            param="prompt",
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise RequestError(f"the prompt has an id outside the vocabulary of {vocab_size}", param="prompt")
    for field in ("logit_bias", "stop_token_ids"):
        if not all(0 <= int(token) < vocab_size for token in getattr(request.params, field)):
            raise RequestError(f"{field} has an id outside the vocabulary of {vocab_size}", param=field)
