"""A tiny target with random weights, an engine over it, and the shortest road from requests to their tokens.

The target is a real Llama of two layers that the C kernels take, small enough for hundreds of runs a second. Its logits
are spread so that near-ties do not decide a test. The caches start out full of NaN: whoever reads a slot before it is
written shows at once. `run` holds every engine against its books (tests/kit/books.py) before it gives results.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.base import Drafter, TargetInfo
from outrider.engine.costs import StepCosts
from outrider.engine.engine import Engine
from outrider.models.arch import ModelConfig, expected_shapes
from outrider.models.cache import BlockPool
from outrider.models.llama import LlamaModel
from outrider.models.memory import TargetMemory
from outrider.types import FinishReason, Request, RequestStats, SamplingParams, TextSink, TokenLogprobs
from tests.kit import books

VOCAB = 64
WIDTH = 64
PERIOD = 5
"""Length of the cycles that a cyclic target walks in."""


def tiny_config(vocab: int = VOCAB, **changes: Any) -> ModelConfig:
    """Two layers, two query heads over one key/value head of 32."""
    shape = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**(shape | changes))


def tiny_tensors(seed: int, config: ModelConfig, *, cyclic: bool = False) -> dict[str, Tensor]:
    """Random float32 weights. `cyclic`: most tokens are followed by the next one of their group of PERIOD."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if "norm" in name:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            std = 1.0 if "embed" in name else 0.6 if "lm_head" in name else shape[-1] ** -0.5
            tensors[name] = std * torch.randn(shape, generator=generator)
    if cyclic:
        tensors["model.embed_tokens.weight"] *= 3
        tensors["lm_head.weight"][followers(config.vocab_size)] += 0.12 * tensors["model.embed_tokens.weight"]
    return tensors


def followers(vocab: int) -> Tensor:
    """For each token the one that follows it in a cyclic target, [V] int64."""
    ids = torch.arange(vocab)
    after = ids - ids % PERIOD + (ids % PERIOD + 1) % PERIOD
    after[vocab // PERIOD * PERIOD :] = 0
    return after


def tiny_model(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab: int = VOCAB,
    *,
    cyclic: bool = False,
    **changes: Any,
) -> LlamaModel:
    """A target with those weights; `changes` are fields of its ModelConfig."""
    config = tiny_config(vocab, **changes)
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(seed, config, cyclic=cyclic).items()}
    return LlamaModel(config, tensors, max_len=config.max_position_embeddings)


def save_tiny(folder: Path, seed: int = 0, *, cyclic: bool = False, **changes: Any) -> Path:
    """The same target as a checkpoint folder in the Hugging Face layout."""
    config = tiny_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tiny_tensors(seed, config, cyclic=cyclic), folder / "model.safetensors")
    return folder


def make_engine(
    model: LlamaModel,
    drafter: Drafter | None = None,
    speculative: SpeculativeConfig | Mapping[str, Any] | int | None = None,
    costs: StepCosts | None = None,
    **settings: Any,
) -> Engine:
    """An engine over a small cache full of NaN.

    `speculative` is a configuration, or N for a scripted drafter; without a `drafter` the registry makes it. `costs`:
    what steps are said to cost where lengths adapt; else that is measured.
    """
    config = EngineConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_tokens": 2048} | settings))
    pool = BlockPool((config.kv_cache_tokens or 0) // config.block_size, config.block_size)
    if isinstance(speculative, int) or (speculative is None and drafter is not None):
        speculative = SpeculativeConfig(method="scripted", num_speculative_tokens=speculative or 4)
    memory = TargetMemory(model, pool.num_blocks * pool.block_size)
    for layer in memory.cache:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    target = TargetInfo(model, pool, memory, config.max_model_len or model.config.max_position_embeddings)
    parsed = None if speculative is None else SpeculativeConfig.parse(speculative)
    if parsed is not None and drafter is None:
        drafter = registry.create(parsed, target)
    return Engine(target, config, parsed, drafter, costs)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    choice: int = 0,
    eos: Sequence[int] = (),
    sink: TextSink | None = None,
    **params: Any,
) -> Request:
    """A greedy request for 24 tokens unless `params` say otherwise."""
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | params)),
        seed=seed,
        choice_index=choice,
        eos_ids=frozenset(eos),
        sink=sink,
    )


@dataclass
class Result:
    """All that an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: RequestStats | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_outputs: int = 0


def run(
    engine: Engine,
    requests: Sequence[Request],
    *,
    each_step: Callable[[Engine], None] | None = None,
    max_steps: int = 5000,
) -> dict[str, Result]:
    """Run requests to their end, all at once; results by id. `each_step` is called after every step."""
    results = {request.request_id: Result() for request in requests}
    before = copy.deepcopy(engine.stats.speculation)
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            result = results[output.request_id]
            assert result.finish is None, "news of a request after its end"
            result.tokens += output.token_ids
            result.logprobs += output.logprobs or ()
            result.finish, result.stop_reason, result.stats = output.finish_reason, output.stop_reason, output.stats
            result.num_outputs += 1
        books.check_between_steps(engine)
        if each_step is not None:
            each_step(engine)
    assert not engine.has_work, f"not finished after {max_steps} steps"
    books.check_at_rest(engine)
    for request in requests:
        books.check_result(request, results[request.request_id], engine.max_len)
    books.check_sums(before, engine.stats.speculation, [result.stats for result in results.values() if result.stats])
    return results


def tokens_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Run requests and give their tokens by id."""
    return {name: result.tokens for name, result in run(engine, requests).items()}


def random_prompt(seed: int, length: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """Ids drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab, (length,), generator=generator).tolist())
