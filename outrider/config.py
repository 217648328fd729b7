"""Settings as frozen dataclasses, and every check of them. A default is written here once; help and docs read it.

EngineConfig sizes the engine; SpeculativeConfig is vLLM's `--speculative-config` (keys, meanings and errors from
vLLM 0.32, `config/speculative.py`) plus what vLLM lacks, marked "ours". Not here: what a drafter's checkpoint says
(its leaf owns that) and what one request asks for (types.SamplingParams).
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from outrider.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float32"]
RejectionMethod = Literal["coupled", "standard", "block", "synthetic"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
AUTO = "auto"
"""In place of a method's name: the one that a policy names, else the best known (drafting/auto.py)."""


def _describe(text: str, default: Any = None, **kwargs: Any) -> Any:
    if "default_factory" not in kwargs:
        kwargs["default"] = default
    return field(metadata={"help": text}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs one target on one machine. Raises ConfigError naming the setting."""

    dtype: Dtype = _describe("weights and activations; auto is bfloat16 where the machine has it", "auto")
    device: str = _describe("auto, cpu, cuda, cuda:1, …", "auto")
    max_model_len: int | None = _describe("longest prompt plus output; none takes the model's own", None)
    max_num_seqs: int = _describe("most requests in one step", 32)
    max_num_batched_tokens: int = _describe("most rows in one step, prompt chunks and drafts together", 512)
    block_size: int = _describe("tokens in a block of the paged cache", 16)
    kv_cache_tokens: int | None = _describe(
        "tokens that the cache holds; none takes a quarter of free memory, at most 65536", None
    )
    enable_prefix_caching: bool = _describe("requests share the blocks of equal prefixes", True)
    num_threads: int | None = _describe("threads for the model; none takes every core", None)

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, get_args(Dtype))
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_int(name, getattr(self, name), least=1)
        for name in ("max_model_len", "kv_cache_tokens", "num_threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least=1)
        if self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size}, expected a multiple of 16", param="block_size")
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if not isinstance(self.device, str) or not self.device:
            raise ConfigError(f"device is {self.device!r}, expected auto, cpu, cuda or cuda:N", param="device")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "every running request needs at least one row a step",
                param="max_num_batched_tokens",
            )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and verified: vLLM's `--speculative-config`, key by key. Build it with `parse`.

    What is left out of `method`, `num_speculative_tokens` and `model` may be the drafter's or the zoo's to say:
    `drafting.registry.resolve` fills it in before anything drafts, and until then it is "", 0 and None.
    """

    method: str = _describe("the drafting method; none takes the one that model is for", "")
    num_speculative_tokens: int = _describe("N, draft tokens for a request and round; none takes the drafter's", 0)
    model: str | None = _describe("the drafter's folder, file or name; none takes the zoo's for this target", None)
    max_model_len: int | None = _describe("beyond this length a request goes on without drafts", None)
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = _describe(
        "(first, last, N) by number of requests in the step", ()
    )
    rejection_sample_method: RejectionMethod = _describe(
        "coupled is ours and the default; vLLM's is standard", "coupled"
    )
    draft_sample_method: DraftSampleMethod = _describe(
        "whether drafters sample or take their likeliest token", "greedy"
    )
    synthetic_acceptance_rates: tuple[float, ...] = _describe("unconditional, by draft position; synthetic only", ())
    synthetic_acceptance_length: float | None = _describe("the same as a mean acceptance length", None)
    dspark_draft_topk: int | None = _describe("dspark: drafts come from the k likeliest before the correction", None)
    prompt_lookup_max: int = _describe("ngram: longest suffix to look up", 5)
    prompt_lookup_min: int = _describe("ngram: shortest suffix to look up", 5)
    enable_adaptive_verification: bool = _describe("drafts that are not worth their cost are not verified", False)
    guard: bool | None = _describe(
        "drafts are made only where they pay, as far as they pay; none is on in generate and chat, else off", None
    )
    policy: str | None = _describe("method auto: a policy's file; none takes the one that tune kept, if any", None)
    workload: str = _describe("method auto: the policy's class that the requests are of; none is its default", "")

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise ConfigError(f"method is {self.method!r}, expected the name of a drafting method", param="method")
        _check_int("num_speculative_tokens", self.num_speculative_tokens, least=0)
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"model is {self.model!r}, expected a folder, file or name", param="model")
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, least=1)
        _check_choice("rejection_sample_method", self.rejection_sample_method, get_args(RejectionMethod))
        _check_choice("draft_sample_method", self.draft_sample_method, get_args(DraftSampleMethod))
        _check_schedule(self.num_speculative_tokens_per_batch_size)
        _check_bool("enable_adaptive_verification", self.enable_adaptive_verification)
        if self.guard is not None:
            _check_bool("guard", self.guard)
        if self.policy is not None and (not isinstance(self.policy, str) or not self.policy):
            raise ConfigError(f"policy is {self.policy!r}, expected a file's name", param="policy")
        if not isinstance(self.workload, str):
            raise ConfigError(f"workload is {self.workload!r}, expected a name", param="workload")
        if self.dspark_draft_topk is not None:
            _check_int("dspark_draft_topk", self.dspark_draft_topk, least=1)
        _check_int("prompt_lookup_max", self.prompt_lookup_max, least=1)
        _check_int("prompt_lookup_min", self.prompt_lookup_min, least=1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max {self.prompt_lookup_max}",
                param="prompt_lookup_min",
            )
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != "synthetic":
            if rates or length is not None:
                raise ConfigError(
                    "synthetic_acceptance_rates and synthetic_acceptance_length need "
                    'rejection_sample_method "synthetic"',
                    param="rejection_sample_method",
                )
            return
        if bool(rates) == (length is not None):
            raise ConfigError(
                "synthetic needs either synthetic_acceptance_rates or synthetic_acceptance_length, not both",
                param="synthetic_acceptance_rates",
            )
        if rates:
            _check_rates(rates, self.num_speculative_tokens)
        else:
            _check_mean_length(length, self.num_speculative_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether method and N are known."""
        return bool(self.method and self.num_speculative_tokens)

    @property
    def is_adaptive(self) -> bool:
        """Whether proposal lengths follow measured costs and acceptance."""
        return bool(self.guard or self.enable_adaptive_verification)

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Unconditional acceptance rate by draft position, whichever way it was given; empty if not synthetic."""
        if self.synthetic_acceptance_length is None:
            return self.synthetic_acceptance_rates
        extra = self.synthetic_acceptance_length - 1
        return tuple(min(1.0, max(0.0, extra - i)) for i in range(self.num_speculative_tokens))

    def stated(self) -> dict[str, Any]:
        """The settings that are not the defaults."""
        return {
            item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) != item.default
        }

    def as_json(self) -> dict[str, Any]:
        """The settings as plain data that `parse` reads again."""
        return {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) not in (None, (), "", 0) or (value is False and item.default is None)
        }

    def num_tokens_for(self, num_requests: int) -> int:
        """N for a step with that many requests; gaps and the tail of the schedule keep the previous entry's N."""
        assert self.is_complete, "registry.resolve comes first"
        num_tokens = self.num_speculative_tokens
        for first, _, scheduled in self.num_speculative_tokens_per_batch_size:
            if num_requests >= first:
                num_tokens = min(self.num_speculative_tokens, scheduled)
        return num_tokens

    @classmethod
    def parse(cls, source: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Read vLLM's JSON, text or mapping; dashes in keys count as underscores. Raises ConfigError naming the key.

        Without `num_speculative_tokens`, or with `model` and without `method`, the result is not complete yet.
        """
        if isinstance(source, SpeculativeConfig):
            return source
        settings = _read_object(source)
        known = [item.name for item in fields(cls)]
        for key in settings:
            if key in known:
                continue
            if key in VLLM_ONLY_KEYS:
                raise ConfigError(f"{key} is vLLM's, and not supported here: {VLLM_ONLY_KEYS[key]}", param=key)
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
            raise ConfigError(f"speculative config: unknown key {key!r}; {hint}", param=key)
        if settings.get("method") is None and settings.get("policy") is not None:
            settings["method"] = AUTO
        if settings.get("method") is None and settings.get("model") is None:
            raise ConfigError('speculative config: method is missing, e.g. {"method": "ngram"}', param="method")
        if settings.get("method") == "":
            raise ConfigError("method is '', expected the name of a drafting method", param="method")
        if settings.get("num_speculative_tokens") is not None:
            _check_int("num_speculative_tokens", settings["num_speculative_tokens"], least=1)
        # vLLM: both missing means 5 and 5; one given sets the other to it.
        lookups = [settings.get(key) for key in ("prompt_lookup_min", "prompt_lookup_max")]
        if lookups != [None, None]:
            settings["prompt_lookup_min"], settings["prompt_lookup_max"] = (
                lookups[0] if lookups[0] is not None else lookups[1],
                lookups[1] if lookups[1] is not None else lookups[0],
            )
        return cls(**{key: _freeze(value) for key, value in settings.items() if value is not None})


VLLM_ONLY_KEYS: Mapping[str, str] = {
    "tensor_parallel_size": "one machine runs one copy of the drafter",
    "draft_tensor_parallel_size": "one machine runs one copy of the drafter",
    "quantization": "drafters load in the target's dtype",
    "revision": "give the drafter as a folder",
    "code_revision": "remote code is never run",
    "draft_load_config": "drafters load from safetensors or GGUF",
    "moe_backend": "there is one backend a device",
    "attention_backend": "there is one backend a device",
    "kv_cache_dtype": "the cache has the model's dtype",
    "enforce_eager": "there are no graphs to switch off",
    "parallel_drafting": "the method says whether it drafts in parallel",
    "disable_padded_drafter_batch": "batches are packed, never padded",
    "disable_eagle_block_drop": "shared prefixes keep all their blocks",
    "use_local_argmax_reduction": "one machine has one vocabulary shard",
    "use_heterogeneous_vocab": "a draft model needs the target's vocabulary",
    "index_share_for_mtp_iteration": "there is no sparse attention here",
    "suffix_decoding_max_tree_depth": "there is no suffix drafter here",
    "suffix_decoding_max_cached_requests": "there is no suffix drafter here",
    "suffix_decoding_max_spec_factor": "there is no suffix drafter here",
    "suffix_decoding_min_token_prob": "there is no suffix drafter here",
}


def apply_overrides(config: EngineConfig, overrides: Sequence[str]) -> EngineConfig:
    """Apply `--set engine.NAME=VALUE` settings (values read as JSON, else as text). Raises ConfigError."""
    known = {item.name for item in fields(EngineConfig)}
    changes: dict[str, Any] = {}
    for text in overrides:
        key, sep, value = text.partition("=")
        room, _, name = key.strip().partition(".")
        if not sep or room != "engine" or name not in known:
            nearest = difflib.get_close_matches(name or room, known, n=1)
            hint = f"did you mean engine.{nearest[0]}?" if nearest else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"--set {text}: expected engine.NAME=VALUE; {hint}", param=key)
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return replace(config, **changes)


def _read_object(source: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise ConfigError(f"speculative config is not JSON: {error}", param="speculative_config") from error
    if not isinstance(source, Mapping):
        raise ConfigError(
            f"speculative config is a {type(source).__name__}, expected an object", param="speculative_config"
        )
    return {str(key).replace("-", "_"): value for key, value in source.items()}


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _check_int(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}", param=name)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected true or false", param=name)


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(allowed)}", param=name)


def _check_rates(rates: tuple[float, ...], num_tokens: int) -> None:
    name = "synthetic_acceptance_rates"
    if not isinstance(rates, tuple):
        raise ConfigError(f"{name} is {rates!r}, expected a list of numbers", param=name)
    if num_tokens and len(rates) != num_tokens:
        raise ConfigError(
            f"{name} has {len(rates)} entries, expected num_speculative_tokens = {num_tokens}", param=name
        )
    if not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"{name} is {list(rates)}, expected numbers from 0 to 1", param=name)
    if any(later > earlier for earlier, later in zip(rates, rates[1:], strict=False)):
        raise ConfigError(f"{name} is {list(rates)}, expected rates that do not rise", param=name)


def _check_mean_length(length: object, num_tokens: int) -> None:
    """A mean acceptance length, target's token included; `num_tokens` 0 is not known yet and bounds nothing."""
    most = num_tokens + 1 if num_tokens else float("inf")
    if not _is_number(length) or not 1 <= float(length) <= most:  # type: ignore[arg-type]
        raise ConfigError(
            f"synthetic_acceptance_length is {length!r}, expected from 1 to num_speculative_tokens + 1"
            + (f" = {most}" if num_tokens else ""),
            param="synthetic_acceptance_length",
        )


def _check_schedule(schedule: tuple[tuple[int, int, int], ...]) -> None:
    name, last_end = "num_speculative_tokens_per_batch_size", 0
    if not isinstance(schedule, tuple):
        raise ConfigError(f"{name} is {schedule!r}, expected a list of [first, last, N]", param=name)
    for entry in schedule:
        whole = isinstance(entry, tuple) and len(entry) == 3 and all(type(number) is int for number in entry)
        if not whole:
            raise ConfigError(f"{name} has {entry!r}, expected [first, last, N] in whole numbers", param=name)
        first, end, num_tokens = entry
        if first < 1 or end < first or num_tokens < 0:
            raise ConfigError(f"{name} has {list(entry)}, expected 1 <= first <= last and N >= 0", param=name)
        if first <= last_end:
            raise ConfigError(f"{name} has {list(entry)}, which overlaps or precedes the entry before it", param=name)
        if last_end == 0 and first != 1:
            raise ConfigError(f"{name} starts at {first}, expected the first entry to start at 1", param=name)
        last_end = end


def cache_folder() -> Path:
    """Where models and built kernels are kept: OUTRIDER_CACHE, else XDG_CACHE_HOME/outrider, else ~/.cache/outrider."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "outrider"
    return Path.home() / ".cache" / "outrider"
