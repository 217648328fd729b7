"""Attention of a transformers model over our paged cache: what its attention modules call in place of their own kernel.

Rows of many requests come packed as one text of batch 1, and no mask of transformers' may see them: each row reads the
keys of its own request through the batch's block tables. A `Site` stands behind each attention module. The first pass
of a model, over one token, is a look: every site notes what its module hands it, and so what the cache must hold.
Plain heads go to `attention.attend`; soft caps, sinks, values of another width and chosen blocks of keys to the slow
reference here. What a module asks for beyond that is refused, never passed over. Source of the conventions:
transformers 5.24, `masking_utils.py` and the eager attention of each family. Legend: T packed rows, H query heads, G
key/value heads, E key width, Ev value width, S keys of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.errors import LoadError
from outrider.models.attention import Batch, Heads, LayerCache, attend

NAME = "outrider_paged"
"""What our attention is called in transformers' table; it has no masks there, so none are made."""

_HONOURED = {"sliding_window", "softcap", "s_aux", "block_indices"}
_MEANINGLESS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_router_logits"}
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class SiteShape:
    """What one layer keeps of a token: G key heads of width E, values of width Ev, index keys beside them if any.

    `window`: tokens that it sees, None for all. `source`: the layer whose keys it reads, itself as a rule.
    """

    kv_heads: int
    key_width: int
    value_width: int
    window: int | None
    source: int
    index_width: int = 0

    def new_cache(self, num_slots: int, like: Tensor) -> PagedCache:
        """Empty keys and values for that many slots."""
        return PagedCache(num_slots, self, like)

    @property
    def elements(self) -> int:
        """Numbers that are kept of one token."""
        return self.kv_heads * (self.key_width + self.value_width) + self.index_width


class PagedCache(LayerCache):
    """A LayerCache whose values may have another width than its keys; `index_keys` [S, Ei] of a sparse layer."""

    def __init__(self, num_slots: int, shape: SiteShape, like: Tensor) -> None:
        super().__init__(num_slots, shape.kv_heads, shape.key_width, like)
        if shape.value_width != shape.key_width:
            self.values = like.new_empty(num_slots, shape.kv_heads, shape.value_width)
        self.index_keys = like.new_empty(num_slots, shape.index_width)

    @property
    def num_bytes(self) -> int:
        """Memory that the layer's keys and values take."""
        return super().num_bytes + self.index_keys.nbytes


@dataclass(frozen=True)
class Span:
    """One request's rows of a batch: rows `begin` to `end` - 1, the first at that position, its table's first block.

    `cuts`: row numbers after which the request may go on next time, ascending; the last is `end`.
    """

    begin: int
    end: int
    position: int
    block: int
    row: int
    cuts: tuple[int, ...]


def spans_of(batch: Batch) -> list[Span]:
    """The requests of a batch, in its order."""
    owners, positions = batch.row_sequence.tolist(), batch.positions.tolist()
    wanted = {row + 1 for row in batch.logit_rows.tolist()}
    edges = [row for row in range(len(owners)) if not row or owners[row] != owners[row - 1]]
    spans = []
    for begin, end in zip(edges, [*edges[1:], len(owners)], strict=True):
        cuts = tuple(sorted({cut for cut in wanted if begin < cut <= end} | {end}))
        block = int(batch.tables[owners[begin], 0])
        spans.append(Span(begin, end, positions[begin], block, owners[begin], cuts))
    return spans


@dataclass
class Paging:
    """The forward that is running: its batch, its cache, and the first slot of a request that holds a key."""

    batch: Batch | None = None
    cache: Sequence[LayerCache] = ()
    first_slot: int = 0
    spans: list[Span] = field(default_factory=list)
    looked: list[tuple[int, Tensor]] = field(default_factory=list)

    def start(self, batch: Batch, cache: Sequence[LayerCache], *, first_slot: int = 0) -> None:
        """Point at a batch and a cache."""
        self.batch, self.cache, self.first_slot = batch, cache, first_slot
        self.spans = spans_of(batch)

    def slots(self, span: Span, end: int) -> Tensor:
        """The slots of a request's keys up to its slot number `end`, in order."""
        assert self.batch is not None
        places = torch.arange(self.first_slot, end, device=self.batch.tables.device)
        blocks = self.batch.tables[span.row][places // self.batch.block_size].long()
        return blocks * self.batch.block_size + places % self.batch.block_size


class Site:
    """Where an attention module keeps its keys, and how it reads them; `shape` is known once it has looked."""

    def __init__(self, paging: Paging, layer: int) -> None:
        self.paging, self.layer = paging, layer
        self.shape: SiteShape | None = None

    def __call__(
        self, module: Any, states: tuple[Tensor, Tensor, Tensor], scaling: float, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of queries, keys and values [1, heads, T, width] of the batch's rows: [1, T, H, Ev]."""
        queries, keys, values = (part[0].transpose(0, 1) for part in states)
        if self.paging.batch is None:
            self._look(module, states[1], values.shape[2], options)
            return values.new_zeros(1, len(queries), queries.shape[1], values.shape[2])
        assert self.shape is not None
        entry = self.paging.cache[self.layer]
        if self.shape.source == self.layer:
            entry.scatter(self.paging.batch.slots.long(), keys, values)
        starts = self.paging.batch.starts(options.get("sliding_window")).clamp_(min=self.paging.first_slot)
        plain = all(options.get(name) is None for name in ("softcap", "s_aux", "block_indices"))
        if plain and self.shape.key_width == self.shape.value_width:
            return self._attend(queries, scaling, starts, entry)[None]
        asked = Asked(scaling, options.get("softcap"), options.get("s_aux"), chosen_keys(module, options))
        return reference_attention(queries, self.paging, starts, asked, entry)[None]

    def _attend(self, queries: Tensor, scaling: float, starts: Tensor, entry: LayerCache) -> Tensor:
        assert self.shape is not None and self.paging.batch is not None
        rows, num_heads, width = queries.shape
        none = queries.new_empty(0)
        heads = Heads(num_heads, self.shape.kv_heads, width, none, none, scaling)
        flat = queries.reshape(rows, num_heads * width)
        return attend(flat, self.paging.batch, starts, heads, entry).view(rows, num_heads, width)

    def _look(self, module: Any, keys: Tensor, value_width: int, options: Mapping[str, Any]) -> None:
        """Note what the cache must hold for this module; keys [1, G, 1, E] that an earlier one had too are shared."""
        seen = self.paging.looked
        source = next((layer for layer, other in seen if other.data_ptr() == keys.data_ptr()), self.layer)
        if source == self.layer:
            seen.append((self.layer, keys))
        index_width = 0 if options.get("block_indices") is None else int(module.indexer.head_dim)
        window = options.get("sliding_window")
        self.shape = SiteShape(keys.shape[1], keys.shape[3], value_width, window, source, index_width)


def attention(module: Any, *given: Any, **options: Any) -> tuple[Tensor, None]:
    """What transformers calls: queries, keys, values and a mask, by place or by name, then a scaling and options.

    Raises LoadError for something that it asks for and that nothing here honours.
    """
    options |= dict(zip(("query", "key", "value", "attention_mask"), given, strict=False))
    states = (options.pop("query"), options.pop("key"), options.pop("value"))
    scaling = options.pop("scaling", None)
    asked = {name for name, value in options.items() if value is not None} - _MEANINGLESS
    if asked - _HONOURED or scaling is None or not getattr(module, "is_causal", True):
        what = ", ".join(sorted(asked - _HONOURED)) or ("no scaling" if scaling is None else "tokens to come")
        raise LoadError(f"{type(module).__name__} wants attention with {what}, which is not implemented")
    site: Site = module.outrider_site
    return site(module, states, scaling, options), None


@dataclass(frozen=True)
class Asked:
    """What a module asks of its attention beyond plain heads; `sinks` [H], `chosen` gives keys that rows may see."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    chosen: ChosenKeys | None = None


@dataclass(frozen=True)
class ChosenKeys:
    """For every row and index head the numbers of the blocks of keys that it may see, [Hi, T, n], filled up with -1."""

    blocks: Tensor
    block_size: int

    def mask(self, rows: slice, num_keys: int) -> Tensor:
        """Which keys these rows may see, [rows, Hi, S]."""
        blocks = self.blocks[:, rows].transpose(0, 1)
        count = -(-num_keys // self.block_size)
        kept = torch.zeros(*blocks.shape[:2], count + 1, dtype=torch.bool, device=blocks.device)
        kept.scatter_(2, blocks.masked_fill(blocks < 0, count), True)
        return kept[..., :count].repeat_interleave(self.block_size, dim=2)[..., :num_keys]


def chosen_keys(module: Any, options: Mapping[str, Any]) -> ChosenKeys | None:
    """What a sparse module's index branch has chosen; None for one that sees all keys."""
    blocks = options.get("block_indices")
    return None if blocks is None else ChosenKeys(blocks[0], int(module.indexer.block_size))


def reference_attention(queries: Tensor, paging: Paging, starts: Tensor, asked: Asked, entry: LayerCache) -> Tensor:
    """Attention of rows [T, H, E] over their requests' keys in float32, request by request: [T, H, Ev]."""
    assert paging.batch is not None
    out = queries.new_empty(*queries.shape[:2], entry.values.shape[2])
    for span in paging.spans:
        last = int(paging.batch.ends[span.end - 1])
        keys, values = (part.float() for part in entry.gather(paging.slots(span, last)))
        # A hidden slot may hold anything, NaN too: its value must not reach the sum as 0 x NaN.
        values = values.nan_to_num(0.0, 0.0, 0.0)
        places = torch.arange(paging.first_slot, last, device=queries.device)
        for begin in range(span.begin, span.end, _ROWS_AT_ONCE):
            rows = slice(begin, min(begin + _ROWS_AT_ONCE, span.end))
            seen = (places >= starts[rows, None]) & (places < paging.batch.ends[rows, None])
            out[rows] = _attend_rows(queries[rows].float(), keys, values, asked, _seen(seen, rows, asked)).to(out.dtype)
    return out


def _seen(seen: Tensor, rows: slice, asked: Asked) -> Tensor:
    """[rows, 1 or Hi, S]."""
    seen = seen[:, None]
    return seen if asked.chosen is None else seen & asked.chosen.mask(rows, seen.shape[2])


def _attend_rows(queries: Tensor, keys: Tensor, values: Tensor, asked: Asked, seen: Tensor) -> Tensor:
    rows, num_heads, _ = queries.shape
    groups = keys.shape[1]
    grouped = queries.view(rows, groups, num_heads // groups, -1)
    scores = torch.einsum("tgqe,sge->tgqs", grouped, keys).flatten(1, 2) * asked.scaling
    if asked.softcap is not None:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    scores = scores.masked_fill(~seen.repeat_interleave(num_heads // seen.shape[1], dim=1), float("-inf"))
    if asked.sinks is not None:
        scores = torch.cat([scores, asked.sinks.float()[None, :, None].expand(rows, -1, -1)], dim=2)
    weights = scores.softmax(dim=-1)[..., : len(keys)].view(rows, groups, num_heads // groups, -1)
    return torch.einsum("tgqs,sge->tgqe", weights, values).reshape(rows, num_heads, -1)


def page_indexer(indexer: Any, paging: Paging, entry: int) -> None:
    """Let a sparse layer's index branch, which knows one text only, run request by request over an entry of a cache."""
    whole = indexer.forward

    def forward(hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor) -> Tensor:
        if paging.batch is None:
            return whole(hidden, position_embeddings, cache, position_ids)  # type: ignore[no-any-return]
        parts = []
        for span in paging.spans:
            rows = slice(span.begin, span.end)
            turns = (position_embeddings[0][:, rows], position_embeddings[1][:, rows])
            parts.append(
                whole(
                    hidden[:, rows], turns, _IndexKeys(paging, span, (indexer.layer_idx, entry)), position_ids[:, rows]
                )
            )
        widest = max(part.shape[3] for part in parts)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, widest - part.shape[3]), value=-1) for part in parts], dim=2)

    indexer.forward = forward


class _IndexKeys:
    """One request's index keys, in the shape of the cache that an index branch expects."""

    def __init__(self, paging: Paging, span: Span, places: tuple[int, int]) -> None:
        self._paging, self._span = paging, span
        layer, self._entry = places
        self.layers = {layer: self}

    def update_index(self, keys: Tensor) -> Tensor:
        """Store the rows' keys [1, 1, n, Ei] and give the request's all, [1, 1, S, Ei]."""
        paging, span = self._paging, self._span
        assert paging.batch is not None
        entry = paging.cache[self._entry]
        assert isinstance(entry, PagedCache)
        entry.index_keys[paging.batch.slots[span.begin : span.end].long()] = keys[0, 0]
        return entry.index_keys[paging.slots(span, int(paging.batch.ends[span.end - 1]))][None, None]
