"""The ring: schedule, propose, forward, verify, commit. The only file that knows the order of the stages.

The engine is synchronous and owned by one thread: add requests, call `step`, read what was committed. It speaks token
ids; text lives above it. Exactness rests on three facts: the scheduler decides lengths only, a drafter only proposes,
and every committed token is chosen in `verify` from the target's own distribution.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items
from dataclasses import replace

from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafting.base import DraftContext, Drafter, TargetInfo
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Entry, Sequence
from outrider.engine.stats import EngineStats
from outrider.errors import CapacityError, RequestError, ShapeError
from outrider.sampling import Purpose, concatenate, distributions, logprobs
from outrider.types import Proposal, Request, StepOutput, TokenLogprobs, Verdict
from outrider.verify import verify

_log = logging.getLogger(__name__)


class Engine:
    """Runs many requests over one target, with or without a drafter. `stats` says what was done and how long."""

    def __init__(
        self,
        target: TargetInfo,
        config: EngineConfig,
        speculative: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        assert (speculative is None) == (drafter is None)
        if not target.model.shares_prefixes:
            config = replace(config, enable_prefix_caching=False)
        self.target, self.config, self.max_len = target, config, target.max_len
        self.model, self.pool = target.model, target.pool
        self.speculative, self.drafter = speculative, drafter
        if drafter is not None:
            target.memory.keep_taps(drafter.taps)
        self.runner = Runner(target.model, target.memory, target.pool.block_size)
        self.scheduler = Scheduler(config, speculative, target.pool, self._end_drafting)
        self.stats = EngineStats()
        self._sequences: dict[str, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs))[::-1]

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError naming the field when it can never run."""
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        check_request(request, self.max_len, self.model.config.vocab_size)
        sequence = Sequence(request, self.max_len, self.model.config.vocab_size)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

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
        began = time.perf_counter()
        entries = self.scheduler.plan()
        if not entries:
            raise CapacityError("no request fits into the cache: raise kv_cache_tokens")
        self._begin_drafting(entries)
        scheduled = time.perf_counter()
        proposal = self._propose(entries)
        drafted = time.perf_counter()
        logits = self.runner.forward(entries, proposal.tokens)
        computed = time.perf_counter()
        verdicts = self._verify(entries, proposal, logits)
        outputs = self._commit(entries, verdicts, _Logprobs(logits))
        num_rows = sum(entry.num_rows + len(tokens) for entry, tokens in zip(entries, proposal.tokens, strict=True))
        self.stats.observe_step((began, scheduled, drafted, computed, time.perf_counter()), num_rows)
        return outputs

    def _propose(self, entries: Items[Entry]) -> Proposal:
        """One proposal over all entries; () for those that do not draft."""
        drafting = [index for index, entry in enumerate(entries) if entry.budget > 0]
        tokens: list[tuple[int, ...]] = [()] * len(entries)
        if not drafting:
            return Proposal(tuple(tokens))
        context = self._context([entries[index] for index in drafting])
        part = self._guarded_propose(context, [entries[index].sequence for index in drafting])
        for index, chain in zip(drafting, part.tokens, strict=True):
            tokens[index] = chain
        return Proposal(tuple(tokens), part.draft_probs)

    def _context(self, entries: Items[Entry]) -> DraftContext:
        assert self.speculative is not None
        sequences = [entry.sequence for entry in entries]
        coupled = self.speculative.rejection_sample_method == "coupled"
        return DraftContext(
            slots=tuple(sequence.slot for sequence in sequences),
            histories=tuple(sequence.tokens for sequence in sequences),
            blocks=tuple(sequence.blocks for sequence in sequences),
            budgets=tuple(entry.budget for entry in entries),
            groups=tuple(sequence.row_group(()) for sequence in sequences),
            sample_method=self.speculative.draft_sample_method,
            purpose=Purpose.GUMBEL if coupled else Purpose.DRAFT,
        )

    def _guarded_propose(self, context: DraftContext, sequences: Items[Sequence]) -> Proposal:
        """The drafter's proposal; a request for which it fails goes on as plain decoding, and says so."""
        assert self.drafter is not None
        try:
            proposal = self.drafter.propose(context)
            self._check(proposal, context)
            return proposal
        except Exception as error:
            if len(sequences) == 1:
                _stop_drafting(sequences[0], error)
                return Proposal(((),))
        alone = [self._guarded_propose(context.only(i), sequences[i : i + 1]) for i in range(len(sequences))]
        rows = [part.draft_probs for part in alone if part.draft_probs is not None]
        if not rows:
            return Proposal(tuple(part.tokens[0] for part in alone))
        # One proposal has rows for all its drafts or for none: who gave none beside others goes without drafts.
        tokens = tuple(part.tokens[0] if part.draft_probs is not None else () for part in alone)
        return Proposal(tokens, concatenate(rows))

    def _check(self, proposal: Proposal, context: DraftContext) -> None:
        if len(proposal.tokens) != len(context.budgets):
            raise ShapeError(f"proposal.tokens has {len(proposal.tokens)} requests, expected {len(context.budgets)}")
        vocab_size = self.model.config.vocab_size
        for chain, budget in zip(proposal.tokens, context.budgets, strict=True):
            if len(chain) > budget or not all(0 <= token < vocab_size for token in chain):
                raise ShapeError(f"proposal.tokens has {chain}, expected at most {budget} ids below {vocab_size}")
        rows, num_drafts = proposal.draft_probs, sum(map(len, proposal.tokens))
        if rows is not None and rows.num_rows != num_drafts:
            raise ShapeError(f"proposal.draft_probs has {rows.num_rows} rows, expected {num_drafts}, one a draft token")

    def _verify(
        self, entries: Items[Entry], proposal: Proposal, logits: Tensor
    ) -> list[tuple[tuple[int, ...], Verdict] | None]:
        """Drafts and verdict for each entry that samples, None for the others."""
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
        found = iter(zip(drafts, verdicts, strict=True))
        return [next(found) if entry.samples else None for entry in entries]

    def _commit(
        self, entries: Items[Entry], verdicts: Items[tuple[tuple[int, ...], Verdict] | None], scores: _Logprobs
    ) -> list[StepOutput]:
        outputs = []
        for entry, outcome in zip(entries, verdicts, strict=True):
            sequence = entry.sequence
            sequence.num_computed += entry.num_rows
            if outcome is None:
                sequence.publish_blocks(self.pool)
                continue
            drafts, verdict = outcome
            tokens = self._commit_tokens(sequence, drafts, verdict)
            wanted = scores.take(len(drafts) + 1, tokens, sequence.request.params.logprobs)
            outputs.append(self._output(sequence, tokens, wanted))
        return outputs

    def _commit_tokens(self, sequence: Sequence, drafts: tuple[int, ...], verdict: Verdict) -> tuple[int, ...]:
        """Append accepted drafts and the next token, up to the first end; roll the cache back to what stands."""
        committed = []
        for token in (*drafts[: verdict.num_accepted], verdict.next_token):
            sequence.commit(token)
            committed.append(token)
            if sequence.finish_reason is not None:
                break
        sequence.num_computed = min(sequence.num_computed + verdict.num_accepted, sequence.num_tokens)
        for counters in (sequence.counters, self.stats.speculation):
            counters.observe_round(len(drafts), verdict.num_accepted, len(committed))
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
            sequence.request_stats() if sequence.finish_reason is not None else None,
        )

    def _begin_drafting(self, entries: Items[Entry]) -> None:
        for entry in entries:
            if entry.sequence.slot < 0:
                entry.sequence.slot = self._free_slots.pop()
                if self.drafter is not None:
                    try:
                        self.drafter.begin(entry.sequence.slot)
                    except Exception as error:
                        _stop_drafting(entry.sequence, error)

    def _end_drafting(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            if self.drafter is not None:
                try:
                    self.drafter.end(sequence.slot)
                except Exception as error:
                    _stop_drafting(sequence, error)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def _finish(self, sequence: Sequence) -> None:
        self._end_drafting(sequence)
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]


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


def _stop_drafting(sequence: Sequence, error: Exception) -> None:
    sequence.drafting_error = sequence.drafting_error or f"{type(error).__name__}: {error}"
    _log.warning("request %s goes on without drafts: %s", sequence.request.request_id, error)


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
