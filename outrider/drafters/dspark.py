"""DSpark: DFlash's block pass, then a small correction from left to right that lets each draft know the one before it.

The block gives base logits for every draft at once; draft i adds a bias of low rank looked up by draft i-1 (a Markov
head), so only matrices of that rank run one after the other. A confidence head says how likely each draft is to stand,
given those before it; the numbers travel on the proposal for whoever sets budgets. Sources: DeepSeek-AI DeepSpec
`deepspec/modeling/dspark`; vLLM 0.32 `qwen3_dspark.py` and `v1/worker/gpu/spec_decode/dspark`. The gated and rnn heads
are DeepSpec's. Legend: B requests, R draft rows, D width, r Markov rank, V vocabulary, Vd drafted vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.block import split_chains
from outrider.drafting.block_config import NESTED, BlockConfig, read_block_config
from outrider.drafting.block_export import BlockExport
from outrider.drafting.block_loading import load_block
from outrider.drafting.checkpoint import Checkpoint, read_checkpoint
from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.drawing import Drawing
from outrider.drafting.export import ExportTarget, Limit, Written, values
from outrider.drafting.vocabulary import DraftVocabulary
from outrider.errors import ConfigError, DrafterMismatch
from outrider.models.layers import take_rows
from outrider.models.linear import Linear
from outrider.types import Distributions, Proposal

HeadType = Literal["vanilla", "gated", "rnn"]
_MARKOV, _CONFIDENCE = "markov_head.", "confidence_head.proj."


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """What a DSpark checkpoint's config says. `markov_rank` 0: no correction. `draft_topk` None: no cut."""

    block: BlockConfig
    markov_rank: int = 0
    markov_head_type: HeadType = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_topk: int | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, source: str) -> DSparkConfig:
        """From config.json in the DeepSpec, SpecForge or Speculators format. Raises LoadError naming the key."""
        keys = ConfigKeys(raw, source, NESTED)
        causal = keys.optional_flag("is_causal")
        if causal is None:
            causal = keys.optional_flag("causal")
        head = keys.get("markov_head_type") or "vanilla"
        if head not in get_args(HeadType):
            raise keys.error(f"markov_head_type is {head!r}, expected one of {', '.join(get_args(HeadType))}")
        if keys.get("logit_scale") not in (None, 1):
            raise keys.error(f"logit_scale is {keys.get('logit_scale')!r}, expected 1 (nothing else is implemented)")
        rank = keys.count("markov_rank", 0, least=0)
        return cls(
            block=read_block_config(keys, sample_from_anchor=True, causal=causal),
            markov_rank=rank,
            markov_head_type=cast(HeadType, head),
            enable_confidence_head=keys.flag("enable_confidence_head", False),
            confidence_head_with_markov=rank > 0 and keys.flag("confidence_head_with_markov", False),
            draft_topk=None if keys.get("dspark_draft_topk") is None else keys.count("dspark_draft_topk"),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of the tensors that this method adds to the backbone's."""
        width, rank = self.block.model.hidden_size, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {}
        if rank:
            shapes[_MARKOV + "markov_w1.weight"] = (self.block.model.vocab_size, rank)
            shapes[_MARKOV + "markov_w2.weight"] = (self.block.draft_vocab_size, rank)
        if rank and self.markov_head_type == "gated":
            shapes |= {_MARKOV + "gate_proj.weight": (rank, width + rank), _MARKOV + "gate_proj.bias": (rank,)}
        if rank and self.markov_head_type == "rnn":
            joint = _MARKOV + "joint_proj."
            shapes |= {joint + "weight": (3 * rank, 2 * rank + width), joint + "bias": (3 * rank,)}
        if self.enable_confidence_head:
            seen = width + rank * self.confidence_head_with_markov
            shapes |= {_CONFIDENCE + "weight": (1, seen), _CONFIDENCE + "bias": (1,)}
        return shapes


class DSparkDrafter:
    """Drafts blocks and corrects them from left to right; `model` in the configuration names the checkpoint."""

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        if config.model is None:
            raise DrafterMismatch('dspark needs a drafter: add "model" to the speculative config', param="model")
        checkpoint = read_checkpoint(config.model)
        ours = DSparkConfig.read(checkpoint.config, source=checkpoint.source)
        if config.dspark_draft_topk is not None:
            ours = replace(ours, draft_topk=config.dspark_draft_topk)
        if ours.draft_topk is not None and ours.draft_topk > ours.block.draft_vocab_size:
            raise ConfigError(
                f"dspark_draft_topk is {ours.draft_topk}, expected at most the {ours.block.draft_vocab_size} tokens"
                f" that drafter {checkpoint.source} drafts from",
                param="dspark_draft_topk",
            )
        parts = load_block(checkpoint, ours.block, ours.shapes(), target)
        self.taps = ours.block.taps
        self._loop, self._vocabulary = parts.loop, parts.vocabulary
        self._correction = _Correction(ours, parts.tensors) if ours.markov_rank else None
        self._confidence = _Confidence(ours, parts.tensors) if ours.enable_confidence_head else None
        self._rank, self._topk = ours.markov_rank, ours.draft_topk

    def begin(self, slot: int) -> None:
        """Nothing to prepare: what is filled is known by block."""

    def end(self, slot: int) -> None:
        """Nothing to release: the blocks are the target's."""

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """As many drafts as wanted for each request. Cost: one pass, one for new context, N products of low rank."""
        budgets = self._loop.budgets(context)
        if not any(budgets):
            return Proposal(((),) * len(budgets))
        chains = _Chains(context, budgets, self._vocabulary, is_sure=self._confidence is not None)
        states = take_rows(self._loop.states(context, budgets), chains.rows)
        base, memory = self._base_logits(states), torch.zeros(len(budgets), self._rank, device=states.device)
        for step, rows in chains.steps():
            logits = base[rows]
            if self._correction is not None:
                bias, memory = self._correction(chains.previous, states[rows], memory[: len(logits)])
                logits += bias
            chains.choose(logits, step, rows)
        confidence = None
        if self._confidence is not None:
            likely = self._confidence(states, chains.before())[chains.back]
            confidence = split_chains(likely.tolist(), budgets)
        sure = None if confidence is not None else chains.top_probs()
        top_probs = None if sure is None else split_chains(sure, budgets)
        tokens = split_chains(chains.tokens[chains.back].tolist(), budgets)
        return Proposal(tokens, chains.drawn_from(), confidence, top_probs)

    def _base_logits(self, states: Tensor) -> Tensor:
        """Logits [R, Vd] before the correction; -inf for all but the `dspark_draft_topk` best of a row."""
        logits = self._vocabulary.head(states, wide=True)
        if self._topk is None:
            return logits
        best = logits.topk(self._topk, dim=1).indices
        return torch.full_like(logits, float("-inf")).scatter_(1, best, logits.gather(1, best))


class _Correction:
    """The Markov head: from the draft before (a target id) to a bias over the drafted vocabulary."""

    def __init__(self, config: DSparkConfig, tensors: Mapping[str, Tensor]) -> None:
        self.table = tensors[_MARKOV + "markov_w1.weight"].contiguous()
        self._to_bias = Linear(tensors[_MARKOV + "markov_w2.weight"])
        self._gate = _linear(tensors, _MARKOV + "gate_proj.") if config.markov_head_type == "gated" else None
        self._joint = _linear(tensors, _MARKOV + "joint_proj.") if config.markov_head_type == "rnn" else None

    def __call__(self, previous: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Bias [A, Vd] and new memory [A, r] from the drafts before [A], states [A, D] and memory (the rnn head's)."""
        looked_up = take_rows(self.table, previous)
        if self._gate is not None:
            gate = self._gate(torch.cat([states, looked_up], dim=1), wide=True).sigmoid()
            looked_up = (gate * looked_up).to(states.dtype)
        elif self._joint is not None:
            seen = torch.cat([memory.to(states.dtype), looked_up, states], dim=1)
            gate, candidate, output = self._joint(seen, wide=True).chunk(3, dim=1)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            looked_up = output.tanh().to(states.dtype)
        return self._to_bias(looked_up, wide=True), memory


def _linear(tensors: Mapping[str, Tensor], prefix: str) -> Linear:
    return Linear(tensors[prefix + "weight"], tensors[prefix + "bias"])


class _Confidence:
    """The confidence head: how likely each draft is to be accepted, given that those before it are. In float32."""

    def __init__(self, config: DSparkConfig, tensors: Mapping[str, Tensor]) -> None:
        self._weight, self._bias = (tensors[_CONFIDENCE + name].float() for name in ("weight", "bias"))
        self._table = tensors[_MARKOV + "markov_w1.weight"] if config.confidence_head_with_markov else None

    def __call__(self, states: Tensor, before: Tensor) -> Tensor:
        """Probabilities [R] from states [R, D] and the token before each draft [R]."""
        seen = states.float()
        if self._table is not None:
            seen = torch.cat([seen, self._table[before].float()], dim=1)
        return torch.sigmoid(seen @ self._weight[0] + self._bias)


class _Chains:
    """The drafts of one round while they are made. Rows [R] lie step by step, requests with more drafts first.

    So the rows of a step, and the requests that still draft in it, are slices. `rows`: where each row is in the order
    of requests; `back`: the way back from here to there; `previous` [A]: the token before each draft of a step.
    """

    def __init__(
        self, context: DraftContext, budgets: Sequence[int], vocabulary: DraftVocabulary, *, is_sure: bool
    ) -> None:
        counts, device = np.array(budgets), vocabulary.embedding.device
        self._drawing = Drawing(context, vocabulary, is_sure=is_sure)
        self._order = np.argsort(-counts, kind="stable")
        self._active = [int((counts > step).sum()) for step in range(max(budgets))]
        firsts = (np.cumsum(counts) - counts)[self._order]
        rows = np.concatenate([firsts[:count] + step for step, count in enumerate(self._active)])
        self._back = np.argsort(rows)
        self.rows, self.back = (torch.from_numpy(order).to(device) for order in (rows, self._back))
        self.tokens = torch.zeros(len(rows), dtype=torch.int64, device=device)
        anchors = [int(context.histories[index][-1]) for index in self._order[: self._active[0]]]
        self.previous = torch.tensor(anchors, device=device)
        self._before: list[Tensor] = []

    def steps(self) -> Iterator[tuple[int, slice]]:
        """(position, its rows) for each draft position."""
        first = 0
        for step, count in enumerate(self._active):
            self.previous = self.previous[:count]
            yield step, slice(first, first + count)
            first += count

    def choose(self, logits: Tensor, step: int, rows: slice) -> None:
        """Take one draft from each row of logits [A, Vd], the likeliest or a drawn one."""
        self._before.append(self.previous)
        self.previous = self._drawing.choose(logits, step, self._order[: len(logits)].tolist())
        self.tokens[rows] = self.previous

    def before(self) -> Tensor:
        """The token before each draft, [R] target ids: the anchor or an earlier draft."""
        return torch.cat(self._before)

    def top_probs(self) -> list[float] | None:
        """How sure the drafter was of each draft, request by request; None where nobody asks."""
        sure = self._drawing.top_probs(self._back)
        return None if sure is None else sure.tolist()

    def drawn_from(self) -> Distributions | None:
        """What the drafts were drawn from, request by request; None if they were not drawn."""
        return self._drawing.drawn_from(self._back)


class DSparkExporter:
    """One checkpoint, to be written in the Speculators format or DeepSpec's.

    DeepSpec's networks see the whole block and all of the text, predict from the anchor on, draft from the whole
    vocabulary, and store copies of the target's ends. Every Markov head is in both formats; vLLM 0.32 runs vanilla's.
    """

    def __init__(self, checkpoint: Checkpoint, target: ExportTarget) -> None:
        config = DSparkConfig.read(checkpoint.config, source=checkpoint.source)
        extras = {} if config.draft_topk is None else {"dspark_draft_topk": config.draft_topk}
        self._config = config
        self._block = BlockExport(checkpoint, config.block, config.shapes(), extras, target)
        self.meaning = replace(config, block=self._block.meaning)
        self.default_tokens = self._block.default_tokens
        self.formats = {"speculators": self._speculators, "deepspec": self._deepspec}
        names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        self._heads = values(config, names)

    def _speculators(self, num_speculative_tokens: int) -> Written:
        self._block.require("speculators", [])
        written = self._block.speculators("dspark", "DSparkSpeculator", num_speculative_tokens)
        if self._block.causal is not None:
            # For this method vLLM goes by the layers' kinds and not by sliding_window_non_causal.
            written.config["transformer_layer_config"]["is_causal"] = self._block.causal
        return Written(written.config | self._heads, written.tensors)

    def _deepspec(self, _: int) -> Written:
        in_use = 'give it in the speculative config, as "dspark_draft_topk", and take it out of config.json'
        written = self._block.deepspec([Limit("dspark_draft_topk", self._config.draft_topk, None, in_use)])
        return Written(written.config | self._heads, written.tensors)
