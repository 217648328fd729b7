"""What is in a corpus, in numbers: how much, how long, of which kinds, and whether it can be trusted.

Two dangers are looked for: the same prompt many times, and evaluation prompts among the training ones. Coverage says
what share of the response tokens the most frequent ids make up, which is what a draft vocabulary of that size can say
at most. Not here: reading the corpus (corpus.py), and tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.evaluate import workloads
from outrider.train.corpus import Corpus, Sample

VOCABULARIES = tuple(1024 * 2**power for power in range(6))
"""Sizes of draft vocabularies that coverage is given for: 1k to 32k."""
QUANTILES = (0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Description:
    """The numbers of one corpus; counts are of conversations unless the name says tokens.

    Quantiles are those of QUANTILES, in tokens a conversation; `coverage` is by vocabulary size, in shares of
    response tokens; `evaluation_prompts` has how many turns of each bundled set are in the corpus.
    """

    num_conversations: int
    refused: dict[str, int]
    num_prompt_tokens: int
    num_response_tokens: int
    prompt_len: tuple[float, ...]
    response_len: tuple[float, ...]
    kinds: dict[str, int]
    num_response_ids: int
    coverage: dict[int, float]
    num_repeated_prompts: int
    evaluation_prompts: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"quantiles": list(QUANTILES)}


def describe(corpus: Corpus, decode: Callable[[Sequence[int]], str]) -> Description:
    """Count it all. `decode` gives the text of ids, for finding evaluation prompts. Cost: seconds for a million tokens.

    A prompt is an evaluation prompt if its text has one of the bundled ones in it, spaces aside, whatever stands
    around it.
    """
    samples = corpus.samples
    num_responses = np.array([int(sample.is_response.sum()) for sample in samples])
    lengths = np.array([len(sample.ids) for sample in samples])
    counts = np.bincount(np.concatenate([sample.ids[sample.is_response] for sample in samples]))
    return Description(
        num_conversations=len(samples),
        refused=dict(corpus.refused.most_common()),
        num_prompt_tokens=int((lengths - num_responses).sum()),
        num_response_tokens=int(num_responses.sum()),
        prompt_len=_quantiles(lengths - num_responses),
        response_len=_quantiles(num_responses),
        kinds=dict(Counter(sample.kind for sample in samples).most_common()),
        num_response_ids=int((counts > 0).sum()),
        coverage=_coverage(counts),
        num_repeated_prompts=len(samples) - len({sample.prompt_key for sample in samples}),
        evaluation_prompts=_evaluation_prompts(_prompt_text(sample, decode) for sample in samples),
    )


def _quantiles(values: npt.NDArray[np.int64]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, QUANTILES))


def _coverage(counts: npt.NDArray[np.int64]) -> dict[int, float]:
    sums = np.cumsum(np.sort(counts)[::-1])
    return {size: float(sums[min(size, len(sums)) - 1] / sums[-1]) for size in VOCABULARIES}


def _prompt_text(sample: Sample, decode: Callable[[Sequence[int]], str]) -> str:
    return _plain(decode(sample.ids[~sample.is_response].tolist()))


def _evaluation_prompts(texts: Iterable[str]) -> dict[str, int]:
    """How many turns of each bundled set are found in these texts."""
    wanted = {
        (name, _plain(turn))
        for name in workloads.OWN
        for prompt in workloads.load(name, turns="all")
        for turn in prompt.turns
    }
    found: Counter[str] = Counter(dict.fromkeys(workloads.OWN, 0))
    for text in texts:
        for item in [item for item in wanted if item[1] in text]:
            wanted.discard(item)
            found[item[0]] += 1
    return dict(found)


def _plain(text: str) -> str:
    return " ".join(text.split())
