"""Any causal language model that transformers knows, as a target: slower than our own families, and exact.

transformers runs the layers; attention is ours (models/hf_attention.py), states of recurrent layers are kept by
models/recurrent.py, and the output matrix is our Linear, so that logits are float32. How the model keeps keys is
learnt by a look at two tokens, not read from its config. Not here: reading files (models/hf_loading.py). Legend: T
packed rows, R rows whose logits are wanted, D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import LoadError
from outrider.models.arch import TargetConfig, read_files
from outrider.models.attention import Batch, LayerCache
from outrider.models.headers import read_headers
from outrider.models.hf_attention import Paging, Site, SiteShape, page_indexer
from outrider.models.hf_loading import build_hf, build_layer, quiet, read_hf, target_config
from outrider.models.layers import RMSNorm
from outrider.models.linear import Linear
from outrider.models.loading import load_tensors
from outrider.models.quantisation import refuse_quantised
from outrider.models.recurrent import StateCache, page_layer
from outrider.models.target import AttentionKind, Forward


class HfModel:
    """A Target that transformers runs; models/target.py says what its parts are. One forward at a time."""

    def __init__(self, config: TargetConfig, model: Any, *, folder: Path | None = None) -> None:
        self.config, self.folder = config, folder
        self._model, self._paging = model, Paging()
        self.embedding: Tensor = model.get_input_embeddings().weight
        self._head = _Head(model, self._paging)
        self.lm_head = self._head.linear
        look = _Look(model, self._paging, config)
        self._layers, self._shapes = look.layers, look.shapes
        self.norm = rms_norm_of(look.norm)
        self._norm_offset = round(float((self.norm.weight - look.norm.weight.float()).mean()))
        self._tapped: dict[int, Tensor | None] = {}
        for index, layer in enumerate([*self._layers, look.norm]):
            layer.register_forward_pre_hook(self._tap(index), with_kwargs=True)

    brings_threads = False

    @property
    def shares_prefixes(self) -> bool:
        """Not where a layer keeps a state."""
        return all(shape is not None for shape in self._shapes)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots; layers that share them have one entry, recurrent ones states."""
        cache: list[LayerCache] = []
        for index, shape in enumerate(self._shapes):
            if shape is None:
                cache.append(StateCache(self.embedding))
            else:
                own = shape.source == index
                cache.append(shape.new_cache(num_slots, self.embedding) if own else cache[shape.source])
        return cache

    def bytes_per_token(self) -> int:
        """Cache memory of one token over all layers; states of recurrent layers are a request's, not a token's."""
        own = [shape for index, shape in enumerate(self._shapes) if shape is not None and shape.source == index]
        return max(1, sum(shape.elements for shape in own)) * self.embedding.element_size()

    def last_layer_of(self, kind: AttentionKind) -> int | None:
        """The last layer of that kind with keys of its own."""
        sliding = kind == "sliding_attention"
        of_kind = [shape.source for shape in self._shapes if shape and (shape.window is not None) == sliding]
        return max(of_kind, default=None)

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: Sequence[LayerCache], taps: Sequence[int] = ()) -> Forward:
        """Run all rows; `taps` names residual streams by the number of layers that have run (0: the embedding)."""
        self._paging.start(batch, cache)
        self._tapped = dict.fromkeys(sorted(taps))
        given = {"input_ids": batch.ids[None], "position_ids": batch.positions.long()[None]}
        logits = self._model(**given, use_cache=False).logits[0]
        return Forward(logits, tuple(tap for tap in self._tapped.values() if tap is not None))

    def norm_like(self, weight: Tensor) -> RMSNorm:
        """A norm with another stored weight, by this family's rules."""
        return RMSNorm(weight.to(self.embedding), self.norm.eps, offset=self._norm_offset)

    def extra_layer(self, tensors: Mapping[str, Tensor], source: str) -> ExtraLayer:
        """One more decoder layer of the kind of the last one with keys of its own; see `build_layer` for `tensors`."""
        own = [index for index, shape in enumerate(self._shapes) if shape is not None and shape.source == index]
        shape = self._shapes[own[-1]]
        assert shape is not None
        with quiet():
            return ExtraLayer(self._model, build_layer(self._model, self._layers[own[-1]], tensors, source), shape)

    def _tap(self, index: int) -> Any:
        def hook(module: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
            if index in self._tapped:
                hidden = given[0] if given else options["hidden_states"]
                self._tapped[index] = hidden[0].clone(memory_format=torch.contiguous_format)

        return hook


class ExtraLayer:
    """A decoder layer beside a model's own, with a cache of its own.

    Positions, and with them the rotary turns, are the batch's; a row's key lies in the row's slot, as many slots after
    its position as all rows of the batch.
    """

    def __init__(self, model: Any, layer: Any, shape: SiteShape) -> None:
        self._like, self._shape, self._paging = model.get_input_embeddings().weight, replace(shape, source=0), Paging()
        for site in place_sites(layer, self._paging, 0).values():
            site.shape = self._shape
        # The model's own way through its layers, with this one for all of them and no norm after it.
        self._run = copy.copy(model.base_model)
        self._run._modules = model.base_model._modules | {"layers": nn.ModuleList([layer]), "norm": nn.Identity()}

    def new_cache(self, num_slots: int) -> LayerCache:
        """Empty keys and values for that many slots."""
        return self._shape.new_cache(num_slots, self._like)

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Residual streams [T, D] before the layer -> after it."""
        self._paging.start(batch, [cache], first_slot=int(batch.ends[0] - 1 - batch.positions[0]))
        given = {"inputs_embeds": hidden[None], "position_ids": batch.positions.long()[None]}
        after: Tensor = self._run(**given, use_cache=False).last_hidden_state[0]
        return after


class _Head(nn.Module):
    """Stands in for the output matrix: picks the rows that are wanted, and gives unrounded float32."""

    def __init__(self, model: Any, paging: Paging) -> None:
        super().__init__()
        theirs = model.get_output_embeddings()
        self.linear = Linear(theirs.weight.detach(), getattr(theirs, "bias", None))
        self._paging = paging
        path = next(name for name, module in model.named_modules() if module is theirs)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, self)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [1, T, D] -> [1, R, V]."""
        rows = hidden[0] if self._paging.batch is None else hidden[0][self._paging.batch.logit_rows]
        return self.linear(rows.contiguous(), wide=True)[None]


class _Look:
    """A pass over two tokens, one by one, in which the model shows its layers, what they keep, and its last norm."""

    def __init__(self, model: Any, paging: Paging, config: TargetConfig) -> None:
        self.layers = _decoder_layers(model, config)
        sites, stack = place_sites(model, paging), list[Any]()
        recurrent: dict[int, Any] = {}
        fresh, ran = _new_cache(model), []
        hooks = [module.register_forward_hook(lambda m, *_: ran.append(m)) for module in _norms(model, self.layers)]
        for module in sites:
            hooks.append(module.register_forward_pre_hook(lambda m, _: stack.append(m)))
            hooks.append(module.register_forward_hook(lambda *_: stack.pop() and None))
        with torch.inference_mode():
            token = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
            _spy(spied := _new_cache(model), lambda: recurrent.setdefault(stack[-1].layer_idx, stack[-1]))
            for place in (token, token + 1):
                model(input_ids=token, position_ids=place, cache=spied, use_cache=True)
        for hook in hooks:
            hook.remove()
        paging.looked.clear()
        if not ran:
            raise LoadError(f"{config.model_type} has no norm before its output matrix that is known here")
        self.norm = ran[-1]
        self.shapes = _shapes(sites, recurrent, config)
        for layer, module in recurrent.items():
            page_layer(module, paging, layer, fresh)


def _decoder_layers(model: Any, config: TargetConfig) -> list[Any]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = next((layers for layers in lists if len(layers) == config.num_layers), None)
    if found is None:
        raise LoadError(f"{config.model_type} has no list of {config.num_layers} layers, which is not implemented")
    return list(found)


def place_sites(part: Any, paging: Paging, entry: int | None = None) -> dict[Any, Site]:
    """A site for every module that knows its layer's number, which is its cache's entry too unless one is given."""
    sites = {}
    for module in part.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            at = module.layer_idx if entry is None else entry
            module.outrider_site = sites[module] = Site(paging, at)
            if getattr(module, "indexer", None) is not None:
                page_indexer(module.indexer, paging, at)
    return sites


def _norms(model: Any, layers: list[Any]) -> list[Any]:
    """Modules outside the layers that may be the last norm: one weight a channel."""
    inside = {module for layer in layers for module in layer.modules()}
    width = (model.get_input_embeddings().weight.shape[1],)
    return [m for m in model.modules() if m not in inside and getattr(m, "weight", torch.empty(0)).shape == width]


def _new_cache(model: Any) -> Any:
    return importlib.import_module("transformers").DynamicCache(config=model.config)


def _spy(cache: Any, tell: Any) -> None:
    """Let a cache tell when a state is asked for."""
    for name in ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"):
        theirs = getattr(cache, name)
        setattr(cache, name, lambda *given, _theirs=theirs, **options: (tell(), _theirs(*given, **options))[1])


def _shapes(sites: Mapping[Any, Site], recurrent: Mapping[int, Any], config: TargetConfig) -> list[SiteShape | None]:
    """What each layer keeps; None for a state."""
    kept = {site.layer: site.shape for site in sites.values() if site.shape is not None}
    for layer in range(config.num_layers):
        if (layer in kept) == (layer in recurrent):
            what = "both keys and a state" if layer in kept else "nothing that is known here"
            raise LoadError(f"{config.model_type} keeps {what} in layer {layer}, which is not implemented")
    return [kept.get(layer) for layer in range(config.num_layers)]


class _OtherNorm(RMSNorm):
    """A last norm that is no RMS norm, run as it is; `weight` is its scale."""

    def __init__(self, module: Any) -> None:
        self._module, self.weight, self.eps = module, module.weight.detach().float(), 0.0

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `residual` in place (both [T, D]), then give the normed sum [T, D]."""
        if delta is not None:
            residual += delta
        normed: Tensor = self._module(residual)
        return normed


@torch.inference_mode()
def rms_norm_of(module: Any) -> RMSNorm:
    """A transformers norm as ours. Its weight is measured: families disagree on what they store of it."""
    stored: Tensor = module.weight.detach()
    ones = torch.ones(2, len(stored), device=stored.device, dtype=stored.dtype)
    large = module(ones[:1] * 1024).float()[0]
    plain = (stored.float() - large).abs().max() <= (stored.float() + 1 - large).abs().max()
    weight = stored.float() if plain else stored.float() + 1
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    if eps is None:
        return _OtherNorm(module)
    ours = RMSNorm(stored, float(eps), offset=0.0 if plain else 1.0)
    some = torch.linspace(-2, 3, len(stored), device=stored.device, dtype=stored.dtype)[None]
    bound = 1e-4 if stored.dtype == torch.float32 else 0.1
    same = (ours(some.clone()) - module(some)).abs().max() <= bound * weight.abs().max()
    return ours if same else _OtherNorm(module)


def load_hf(folder: Path, *, dtype: torch.dtype, device: torch.device) -> HfModel:
    """Load a checkpoint folder of any such family. Raises LoadError in one line."""
    raw, generation = read_files(folder)
    source = str(folder / "config.json")
    refuse_quantised(folder, raw, ((name, stored.dtype) for name, stored in read_headers(folder).items()))
    text = read_hf(raw, source)
    config = target_config(text, raw, generation, source)
    with quiet():
        model = build_hf(text, load_tensors(folder), dtype, device, str(folder))
        try:
            return HfModel(config, model, folder=folder)
        except LoadError as error:
            raise LoadError(f"{folder}: {error}") from error
