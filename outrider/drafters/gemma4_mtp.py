"""Gemma 4's MTP drafter: draft layers that have queries only, over the keys and values that the target has cached.

A step reads the embedding of the newest token beside the target's last state, normed, of the row before it; each draft
layer attends to the target's cache of one layer; the output scores the next draft, and, projected back to the target's
width, stands in for the target's state in the next step. Nothing is kept from round to round, so there is nothing to
catch up after a preemption, a shared prefix or a step without drafts. All steps of a round stand at one place: position
P, that of the last row whose keys the target has computed for good, and they see rows 0 to P.

Keys lie in the cache as the target has rotated them: the rotary settings in the drafter's config must be those of the
target layer that is read, for another target than Gemma too. Not here: the formats' settings
(`drafting/gemma4_config.py`). Sources: vLLM 0.32 `gemma4_mtp.py`, `spec_decode/gemma4`; transformers, whose own loop
stands at P + 1, is not followed in that. Legend: R rows, one a request; D draft width, Dt the target's, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting.autoregressive import Chains, keep_rows
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.checkpoint import Checkpoint, MadeFor, check_tensors, placed, read_checkpoint
from outrider.drafting.gemma4_config import CENTROIDS, ORDERING, Gemma4MtpConfig
from outrider.drafting.vocabulary import EMBEDDING, HEAD, DraftVocabulary, draft_vocabulary
from outrider.errors import DrafterMismatch, LoadError
from outrider.models.arch import read_json
from outrider.models.attention import Batch, LayerCache
from outrider.models.gemma import DecoderLayer, layer_tables, soft_capped
from outrider.models.layers import RMSNorm, take_rows
from outrider.models.linear import Linear
from outrider.types import Proposal


class Gemma4MtpDrafter:
    """Drafts token by token over the target's cache; `model` in the configuration names the checkpoint."""

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        if config.model is None:
            raise DrafterMismatch('gemma4_mtp needs a drafter: add "model" to the speculative config', param="model")
        checkpoint = read_checkpoint(config.model)
        ours = Gemma4MtpConfig.read(checkpoint.config, source=checkpoint.source)
        self.taps: tuple[int, ...] = (target.model.config.num_layers,)
        tensors = _checked(checkpoint, ours, self.taps, target)
        cache = [target.memory.cache[layer] for layer in _kv_layers(checkpoint, ours, target)]
        head = tensors[EMBEDDING if EMBEDDING in tensors else HEAD]
        self._vocabulary = draft_vocabulary(
            {**tensors, EMBEDDING: target.model.embedding, HEAD: head},
            target,
            width=ours.model.hidden_size,
            draft_vocab_size=ours.draft_vocab_size,
            source=checkpoint.source,
        )
        self._network = _Network(ours, tensors, cache, target)
        self._head: _DenseHead | _CentroidHead
        if ours.num_centroids:
            self._head = _CentroidHead(checkpoint, ours, tensors)
        else:
            self._head = _DenseHead(checkpoint, ours, self._vocabulary)
        self._target = target

    def begin(self, slot: int) -> None:
        """Nothing to prepare: nothing is kept."""

    def end(self, slot: int) -> None:
        """Nothing to release: the blocks are the target's."""

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """A chain for each request. Cost: one row a request for each draft, whatever the drafter did before.

        A text of a single token has no row to draft from and gets none.
        """
        budgets = np.array([self._budget(*pair) for pair in zip(context.budgets, context.histories, strict=True)])
        chains = Chains(context, budgets, self._vocabulary)
        active = np.flatnonzero(budgets)
        if not len(active):
            return chains.proposal()
        batch = self._last_rows(context, active.tolist())
        hidden = self._target.model.norm(take_rows(self._target.memory.taps[self.taps[0]], batch.slots.long()))
        tokens = batch.ids
        for step in range(int(budgets.max())):
            stays = np.flatnonzero(budgets[active] > step)
            if len(stays) < len(active):
                rows, active = torch.from_numpy(stays).to(tokens.device), active[stays]
                batch, hidden, tokens = keep_rows(batch, rows), take_rows(hidden, rows), tokens[rows]
            states, hidden = self._network(tokens, hidden, batch)
            tokens = chains.choose(self._head(states), step, active)
        return chains.proposal()

    def _budget(self, budget: int, history: npt.NDArray[np.int64]) -> int:
        return min(budget, max(0, self._target.max_len - len(history))) if len(history) > 1 else 0

    def _last_rows(self, context: DraftContext, active: Sequence[int]) -> Batch:
        """A row for each request: its newest token, at the place of the last row that the target has computed."""
        ids = np.array([context.histories[index][-1] for index in active])
        spans = [(len(context.histories[index]) - 2, 1) for index in active]
        blocks = [context.blocks[index] for index in active]
        size, device = self._target.pool.block_size, self._target.model.device
        return Batch.pack(ids, spans, blocks, np.arange(len(ids)), size, device)


def _checked(
    checkpoint: Checkpoint, ours: Gemma4MtpConfig, taps: tuple[int, ...], target: TargetInfo
) -> dict[str, Tensor]:
    """The tensors in place. Raises DrafterMismatch for a checkpoint that is damaged or another target's."""
    made_for = MadeFor(ours.model.vocab_size, ours.target_width, None, taps, ours.draft_vocab_size)
    made_for.check(checkpoint, target.model.config)
    check_tensors(checkpoint, ours.shapes(), ours.optional_shapes())
    return placed(checkpoint, target.model.embedding)


def _kv_layers(checkpoint: Checkpoint, ours: Gemma4MtpConfig, target: TargetInfo) -> list[int]:
    """The target layer that each draft layer reads. Raises DrafterMismatch where there is none or it does not fit."""
    found, cache = [], target.memory.cache
    for index, layer in enumerate(ours.model.layers):
        chosen = target.model.last_layer_of(layer.kind) if ours.kv_layers is None else ours.kv_layers[index]
        if chosen is None:
            raise checkpoint.mismatch(f"reads a {layer.kind} layer, and the target has none: wrong target")
        if chosen >= len(cache):
            raise checkpoint.mismatch(f"reads keys of layer {chosen}, the target has {len(cache)}: wrong target")
        theirs = tuple(cache[chosen].values.shape[1:])
        if theirs != (layer.num_kv_heads, layer.head_dim):
            raise checkpoint.mismatch(
                f"reads {layer.num_kv_heads} key heads of {layer.head_dim} in layer {index}, the target's layer"
                f" {chosen} has {theirs[0]} of {theirs[1]}: use the drafter of this target"
            )
        found.append(chosen)
    return found


class _Network:
    """The draft network's weights, and one step of it over the target's cache."""

    def __init__(
        self, ours: Gemma4MtpConfig, tensors: Mapping[str, Tensor], cache: Sequence[LayerCache], target: TargetInfo
    ) -> None:
        model, self._cache, self._embedding = ours.model, cache, target.model.embedding
        # The published models round the embedding's scale to their type.
        self._scale = float(torch.tensor(ours.target_width**0.5).to(self._embedding.dtype))
        tables = {layer.kind: layer_tables(layer, target.max_len, target.model.device) for layer in model.layers}
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        self._layers = [
            DecoderLayer(model, index, named, tables[layer.kind]) for index, layer in enumerate(model.layers)
        ]
        self._norm = RMSNorm(tensors["norm.weight"], model.rms_norm_eps)
        self._enter, self._leave = (Linear(tensors[f"{name}_projection.weight"]) for name in ("pre", "post"))

    def __call__(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """From ids [R] and what stands for the target's states [R, Dt] to (states [R, D], the next step's [R, Dt])."""
        embedded = take_rows(self._embedding, ids) * self._scale
        residual = self._enter(torch.cat([embedded, hidden], dim=1))
        for layer, cache in zip(self._layers, self._cache, strict=True):
            layer.attention(residual, batch, batch.starts(layer.shape.window), cache)
            layer.feed_forward(residual, None)
        states = self._norm(residual)
        return states, self._leave(states)


class _DenseHead:
    """Scores every token that can be drafted, but for those that the drafter's generation config suppresses."""

    def __init__(self, checkpoint: Checkpoint, ours: Gemma4MtpConfig, vocabulary: DraftVocabulary) -> None:
        self._product, self._cap = vocabulary.head, ours.model.final_soft_cap
        target_ids = vocabulary.to_target(torch.arange(ours.draft_vocab_size, device=vocabulary.embedding.device))
        wanted = torch.tensor(_suppressed(checkpoint), dtype=torch.int64, device=target_ids.device)
        self._suppressed = torch.isin(target_ids, wanted).nonzero()[:, 0]

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [R, Vd] float32 of states [R, D]."""
        logits = soft_capped(self._product(states, wide=True), self._cap)
        if len(self._suppressed):
            logits[:, self._suppressed] = float("-inf")
        return logits


class _CentroidHead:
    """Scores groups of tokens by their centroids and then only the tokens of the best groups, without cap.

    Tokens of other groups are never drafted (vLLM 0.32 `gemma4_mtp.py`: their logit is the lowest finite number).
    """

    def __init__(self, checkpoint: Checkpoint, ours: Gemma4MtpConfig, tensors: Mapping[str, Tensor]) -> None:
        ordering = tensors[ORDERING]
        if not torch.equal(ordering.sort().values, torch.arange(len(ordering), device=ordering.device)):
            raise checkpoint.mismatch(f"has {ORDERING} that does not name each of {len(ordering)} tokens once")
        self._groups, self._top = ordering.view(ours.num_centroids, -1), ours.top_centroids
        self._centroids, self._table = Linear(tensors[CENTROIDS]), tensors[EMBEDDING]

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [R, V] float32 of states [R, D]. Cost: a copy of the rows that are scored, for each state."""
        best = self._centroids(states, wide=True).topk(self._top, dim=-1).indices
        ids = self._groups[best].flatten(1)
        scored = self._table[ids].float() @ states.float()[:, :, None]
        logits = torch.full((len(states), len(self._table)), float("-inf"), device=states.device)
        return logits.scatter_(1, ids, scored[:, :, 0])


def _suppressed(checkpoint: Checkpoint) -> list[int]:
    """The token ids that the drafter's generation config says are never drafted. Raises LoadError."""
    path = Path(checkpoint.source) / "generation_config.json"
    given = read_json(path).get("suppress_tokens") if path.is_file() else None
    if given is None:
        return []
    if not isinstance(given, list) or not all(type(entry) is int for entry in given):
        raise LoadError(f"{path}: suppress_tokens is {given!r}, expected a list of token ids")
    return given
