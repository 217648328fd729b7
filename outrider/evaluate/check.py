"""The losslessness check of one drafting configuration: greedy text, seeded text, and the sampled distribution.

Each section generates with and without speculation over the same weights and hands the texts to evaluate/lossless.py or
evaluate/distribution.py. Plain decoding's texts are made once and kept, so that many configurations can be checked
against them. Not a benchmark: requests share batches and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.config import SpeculativeConfig
from outrider.evaluate.conversation import Item, Progress, encode
from outrider.evaluate.distribution import DistributionVerdict, compare_distributions
from outrider.evaluate.lossless import TextPair, TextVerdict, VerdictName, compare, why_not_comparable, worst
from outrider.llm import LLM, CompletionOutput
from outrider.types import SamplingParams

SectionName = Literal["greedy", "sampled", "distribution"]
SECTIONS: tuple[SectionName, ...] = ("greedy", "sampled", "distribution")
SAMPLED_PROMPTS = (
    "Repeat this twice: red, blue, green, red, blue, green, red, blue, green.",
    "Say hello, then say hello again.",
    "Answer with one word: what colour is the sky?",
)
"""What the distribution is sampled on: short, ending early now and then, and repeating so that every method drafts."""


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """What is generated: limits and filters in `params`, whose temperature is the sampled sections'.

    `num_samples` texts of each of SAMPLED_PROMPTS and side, each of at most `sample_len` tokens; 0 leaves the
    distribution out.
    """

    params: SamplingParams
    num_samples: int = 100
    sample_len: int = 24


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section's verdict, and what was drafted for it."""

    name: SectionName
    result: TextVerdict | DistributionVerdict
    num_drafted: int = 0
    num_accepted: int = 0
    drafting_errors: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data: the verdict's fields and the section's own."""
        own = {"num_drafted": self.num_drafted, "num_accepted": self.num_accepted}
        return self.result.as_json() | own | {"drafting_errors": list(self.drafting_errors)}


@dataclass(frozen=True)
class CheckReport:
    """The sections of one configuration, as many as there was time for."""

    config: SpeculativeConfig
    sections: list[Section]

    @property
    def verdict(self) -> VerdictName:
        """The gravest of the sections'."""
        return worst([section.result.verdict for section in self.sections])

    @property
    def num_drafted(self) -> int:
        """Draft tokens over all sections: with none, nothing was checked."""
        return sum(section.num_drafted for section in self.sections)


class Checker:
    """Checks drafting configurations on one target and set of prompts. `plain` is an LLM without a drafter."""

    def __init__(self, plain: LLM, items: Sequence[Item], plan: CheckPlan, progress: Progress) -> None:
        self.plain, self.items, self.plan, self._progress = plain, items, plan, progress
        self._plain_texts: dict[SectionName, list[CompletionOutput]] = {}

    def sections(self, config: SpeculativeConfig, names: Sequence[SectionName] = SECTIONS) -> Iterator[Section]:
        """The sections' verdicts, each as soon as it is known. Raises what loading the drafter raises."""
        # A guard might draft nothing, and what is not drafted is not checked.
        speculative = self.plain.sibling(replace(config, guard=False))
        for name in names:
            yield self._distribution(speculative) if name == "distribution" else self._texts(speculative, name)

    def _texts(self, speculative: LLM, name: SectionName) -> Section:
        """Text against text; where they differ by design, none is generated."""
        assert speculative.speculative is not None
        params = replace(self.plan.params, temperature=0.0) if name == "greedy" else self.plan.params
        reason = why_not_comparable(speculative.speculative, params)
        if reason:
            return Section(name=name, result=TextVerdict(verdict="not-applicable", reason=reason))
        first = params.seed or 0
        many = [replace(params, seed=first + item.prompt_index) for item in self.items]
        prompts = [item.ids for item in self.items]
        if name not in self._plain_texts:
            self._plain_texts[name] = self._run(self.plain, prompts, many, f"{name}, plain")
        outputs = self._run(speculative, prompts, many, f"{name}, {_title(speculative)}")
        pairs = [
            TextPair(
                prompt_index=item.prompt_index,
                prompt_ids=item.ids,
                params=params,
                plain=tuple(plain.token_ids),
                speculative=tuple(output.token_ids),
            )
            for item, params, plain, output in zip(self.items, many, self._plain_texts[name], outputs, strict=True)
        ]
        return _section(name, compare(self.plain.engine.model, pairs), outputs)

    def _distribution(self, speculative: LLM) -> Section:
        """Samples under seeds that the two sides do not share."""
        assert speculative.speculative is not None
        name: SectionName = "distribution"
        plan, seed = self.plan, self.plan.params.seed or 0
        if speculative.speculative.rejection_sample_method == "synthetic":
            reason = why_not_comparable(speculative.speculative, plan.params)
            return Section(name=name, result=DistributionVerdict(verdict="not-applicable", reason=reason))
        params = replace(plan.params, n=plan.num_samples, max_tokens=plan.sample_len, min_tokens=0)
        prompts = [encode(self.plain, [{"role": "user", "content": text}]) for text in SAMPLED_PROMPTS]
        if name not in self._plain_texts:
            ours = [replace(params, seed=seed + number) for number in range(len(prompts))]
            self._plain_texts[name] = self._run(self.plain, prompts, ours, f"{name}, plain")
        theirs = [replace(params, seed=seed + len(prompts) + number) for number in range(len(prompts))]
        outputs = self._run(speculative, prompts, theirs, f"{name}, {_title(speculative)}")
        sides = (_by_prompt(self._plain_texts[name], len(prompts)), _by_prompt(outputs, len(prompts)))
        return _section(name, compare_distributions(*sides, plan.sample_len), outputs)

    def _run(
        self, llm: LLM, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], what: str
    ) -> list[CompletionOutput]:
        """Every choice of every prompt, prompt by prompt."""
        generation = llm.start(prompts, params)
        choices = [choice for output in generation.outputs for choice in output.outputs]
        num_done = 0
        for delta in generation:
            if delta.finish_reason is not None:
                num_done += 1
                self._progress(what, num_done, len(choices))
        return choices


def _section(name: SectionName, result: TextVerdict | DistributionVerdict, outputs: list[CompletionOutput]) -> Section:
    stats = [output.stats for output in outputs if output.stats is not None]
    return Section(
        name=name,
        result=result,
        num_drafted=sum(item.num_drafted for item in stats),
        num_accepted=sum(item.num_accepted for item in stats),
        drafting_errors=tuple(sorted({item.drafting_error for item in stats if item.drafting_error})),
    )


def _by_prompt(outputs: list[CompletionOutput], num_prompts: int) -> list[list[list[int]]]:
    each = len(outputs) // num_prompts
    return [[output.token_ids for output in outputs[i * each : (i + 1) * each]] for i in range(num_prompts)]


def _title(llm: LLM) -> str:
    assert llm.speculative is not None
    return f"{llm.speculative.method} N={llm.speculative.num_speculative_tokens}"
