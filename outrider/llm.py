"""The façade: text in, text out, over one engine; the same calls as vLLM's offline API where they mean the same.

`LLM.stream` is the one road: `generate` and `chat` collect what it gives. Single-threaded; several streams may be read
in turns, since every step hands each request's news to its own reader. Not here: HTTP, benchmarks, and anything that
only one drafting method needs.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafting import auto, registry
from outrider.drafting.base import TargetInfo
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, RequestError
from outrider.models.cache import BlockPool
from outrider.models.families import load_model, pick_device, pick_dtype
from outrider.models.memory import TargetMemory
from outrider.models.store import resolve
from outrider.models.target import Target
from outrider.native import set_threads
from outrider.text.detokenizer import Detokenizer
from outrider.text.tokenizer import Tokenizer
from outrider.types import (
    Delta,
    DraftParams,
    FinishReason,
    Request,
    RequestStats,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)

_Setting = TypeVar("_Setting", SamplingParams, DraftParams)
_MOST_TOKENS = 65536
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class CompletionOutput:
    """One choice of one prompt; the fields that vLLM's has, and what the request took."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    stats: RequestStats | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities, if they were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A target, optionally with a drafter, ready to generate.

    `model` is a built-in name, a folder, a GGUF file or a hub name; `speculative_config` is vLLM's JSON as text or
    mapping; further keywords are EngineConfig's fields. `seed` makes unseeded requests repeatable in their order.
    Raises ConfigError, LoadError, DrafterMismatch before any request.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        self.config = _engine_config(settings)
        speculative = _speculative_config(speculative_config)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
            set_threads(self.config.num_threads)
        self.tokenizer = Tokenizer.load(resolve(model))
        device = pick_device(self.config.device)
        self.dtype = pick_dtype(self.config.dtype, device)
        target = load_model(model, dtype=self.dtype, device=device, max_len=self.config.max_model_len)
        self.max_len, pool = _size_cache(self.config, target)
        self.model_name = model
        self._eos_ids = frozenset(target.config.eos_token_ids)
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._ids = itertools.count()
        self._start_engine(target, pool, speculative)

    def sibling(self, speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None) -> LLM:
        """Another LLM over the same weights and tokenizer, with its own cache and with that drafter, or with none.

        For comparing runs: all settings but drafting are this one's. Raises ConfigError, LoadError, DrafterMismatch.
        """
        other, pool = copy.copy(self), self.engine.pool
        fresh = BlockPool(pool.num_blocks, pool.block_size)
        other._start_engine(self.engine.model, fresh, _speculative_config(speculative_config))
        return other

    def retuned(self, speculative_config: SpeculativeConfig | None, *, max_num_seqs: int) -> LLM:
        """The same drafter and cache under another N and another limit of running requests. Cost: next to nothing.

        `speculative_config` is this LLM's own but for N. The two share one cache and one drafter: only one of them may
        have requests at any time. Raises ConfigError.
        """
        other = copy.copy(self)
        other.config, other.speculative = replace(self.config, max_num_seqs=max_num_seqs), speculative_config
        other.engine = Engine(self.engine.target, other.config, speculative_config, self.engine.drafter)
        other._mail = {}
        return other

    def complete(self, speculative_config: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Drafting settings with what they leave to the drafter or the zoo filled in, as `sibling` would have them.

        Raises ConfigError, also for "auto" where nothing is to be drafted, LoadError, DrafterMismatch.
        """
        found = auto.resolve(SpeculativeConfig.parse(speculative_config), self.engine.model)
        if found is None:
            raise ConfigError("the policy is plain decoding here: there is no drafting to run", param="policy")
        return found

    def _start_engine(self, target: Target, pool: BlockPool, speculative: SpeculativeConfig | None) -> None:
        memory = TargetMemory(target, pool.num_blocks * pool.block_size)
        info = TargetInfo(target, pool, memory, self.max_len)
        self.speculative = None if speculative is None else auto.resolve(speculative, target)
        drafter = None if self.speculative is None else registry.create(self.speculative, info)
        self.engine = Engine(info, self.config, self.speculative, drafter)
        self._mail: dict[str, deque[StepOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        drafting: DraftParams | Sequence[DraftParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); all of them run together. One RequestOutput a prompt, in order."""
        return self.start(prompts, params, drafting).wait()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        drafting: DraftParams | Sequence[DraftParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.tokenizer.encode_chat(conversation) for conversation in many], params, drafting)  # type: ignore[arg-type]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, drafting: DraftParams | None = None
    ) -> Iterator[Delta]:
        """Deltas of one prompt's choices as they are committed; leaving the loop early aborts what is unfinished."""
        return iter(self.start([prompt], params, drafting))

    def start(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        drafting: DraftParams | Sequence[DraftParams] | None = None,
    ) -> Generation:
        """Check prompts and give their Generation, to be iterated for Deltas or waited for.

        `params` and `drafting` are everybody's, or one for each prompt.
        """
        many = _as_prompts(prompts)
        wishes = _one_each("drafting", drafting or DraftParams(), len(many))
        drawn = _one_each("params", params or SamplingParams(), len(many))
        requests = [self._requests(*three) for three in zip(many, drawn, wishes, strict=True)]
        for request in itertools.chain.from_iterable(choices for _, choices in requests):
            self.engine.check(request.request)
        return Generation(self.engine, self._mail, requests)

    def _requests(
        self, prompt: Prompt, params: SamplingParams, drafting: DraftParams
    ) -> tuple[RequestOutput, list[_Choice]]:
        text = prompt if isinstance(prompt, str) else None
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        number = next(self._ids)
        choices = []
        for index in range(params.n):
            sink = Detokenizer(self.tokenizer, params)
            request = Request(
                request_id=f"{number}-{index}",
                prompt_ids=ids,
                params=params,
                seed=seed,
                choice_index=index,
                eos_ids=self._eos_ids,
                sink=sink,
                drafting=drafting,
            )
            output = CompletionOutput(index, "", [], None if params.logprobs is None else [], seed=seed)
            choices.append(_Choice(request, output, sink))
        return RequestOutput(str(number), text, list(ids), [choice.output for choice in choices]), choices


@dataclass(frozen=True)
class _Choice:
    """One running choice: its request, its output so far and its detokenizer."""

    request: Request
    output: CompletionOutput
    sink: Detokenizer

    def take(self, step: StepOutput) -> Delta:
        """Add a step's news to the output, and give what a reader sees of it."""
        output = self.output
        text = self.sink.take() if step.finish_reason is None else self.sink.take() + self.sink.finish()
        output.text += text
        output.token_ids += step.token_ids
        if output.logprobs is not None and step.logprobs is not None:
            output.logprobs += step.logprobs
        output.finish_reason, output.stop_reason, output.stats = step.finish_reason, step.stop_reason, step.stats
        ids, scores = step.token_ids, step.logprobs
        return Delta(step.request_id, output.index, text, ids, scores, step.finish_reason, step.stop_reason)


class Generation:
    """Prompts on their way. Iterate it for Deltas as they are committed; `outputs` always holds what there is so far.

    The engine hears of the prompts when the iteration begins. Whoever leaves the loop early, by Ctrl-C too, leaves
    nothing behind in it: unfinished choices are aborted.
    """

    def __init__(
        self,
        engine: Engine,
        mail: dict[str, deque[StepOutput]],
        requests: Sequence[tuple[RequestOutput, list[_Choice]]],
    ) -> None:
        self.outputs = [output for output, _ in requests]
        self._engine, self._mail = engine, mail
        self._waiting = [choice for _, choices in requests for choice in choices]
        self._open: dict[str, _Choice] = {}

    def wait(self) -> list[RequestOutput]:
        """Run to the end and give the outputs."""
        for _ in self:
            pass
        return self.outputs

    def __iter__(self) -> Iterator[Delta]:
        try:
            self._begin()
            while self._open:
                yield from self._delivered()
                if self._open:
                    with _uninterrupted():
                        outputs = self._engine.step()
                    for output in outputs:
                        self._mail[output.request_id].append(output)
        finally:
            for name, choice in self._open.items():
                self._engine.abort(name)
                self._mail.pop(name, None)
                choice.output.finish_reason = choice.output.finish_reason or "abort"
            self._open.clear()

    def _begin(self) -> None:
        for choice in self._waiting:
            self._engine.add(choice.request)
            self._open[choice.request.request_id] = choice
            self._mail[choice.request.request_id] = deque()
        self._waiting = []

    def _delivered(self) -> Iterator[Delta]:
        for name, choice in list(self._open.items()):
            while self._mail[name]:
                yield choice.take(self._mail[name].popleft())
            if choice.output.finish_reason is not None:
                del self._open[name], self._mail[name]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended, so that it never finds the engine in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came and callable(before):
            before(signal.SIGINT, None)


def _engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    known = [item.name for item in fields(EngineConfig)]
    for key in settings:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigError(f"LLM: unknown setting {key!r}; {hint}", param=key)
    return EngineConfig(**settings)


def _speculative_config(source: str | Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
    """Drafting settings, checked before anything is loaded; None for none."""
    if source is None:
        return None
    config = SpeculativeConfig.parse(source)
    auto.check(config)
    return config


def _size_cache(config: EngineConfig, target: Target) -> tuple[int, BlockPool]:
    """The longest sequence, and a pool that holds at least one of that length. Raises ConfigError."""
    longest = target.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}, the model takes {longest}", param="max_model_len")
    max_len = config.max_model_len or longest
    tokens = config.kv_cache_tokens
    if tokens is None:
        share = _free_bytes(target.device) // 4 // target.bytes_per_token()
        tokens = max(config.block_size, min(share, max(_MOST_TOKENS, max_len)))
    num_blocks = tokens // config.block_size
    if config.max_model_len is not None and num_blocks * config.block_size < config.max_model_len:
        raise ConfigError(
            f"the cache holds {num_blocks * config.block_size} tokens, max_model_len is {config.max_model_len}: "
            "raise kv_cache_tokens or lower max_model_len",
            param="kv_cache_tokens",
        )
    return min(max_len, num_blocks * config.block_size), BlockPool(num_blocks, config.block_size)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(name: str, given: _Setting | Sequence[_Setting], count: int) -> list[_Setting]:
    """A setting for each prompt: everybody's, or as many as there are prompts. Raises RequestError."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name} has {len(given)} entries for {count} prompts, expected one each", param=name)
    return list(given)
