"""A sweep's prompts as token ids, and prompts made longer: text of other prompts goes before the question.

What is put there is real text, so acceptance and cost at a length can be measured; nothing is asked about it, so it is
no test of reading. Not here: the prompt sets (evaluate/workloads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

from outrider.bench.grid import Grid
from outrider.errors import ConfigError
from outrider.evaluate.workloads import MIXED, load

Texts = dict[str, list[str]]
Encode = Callable[[str], tuple[int, ...]]
Prompts = dict[tuple[str, int], list[tuple[int, ...]]]
"""Ids of each workload's prompts at each context length."""
_STEP = 97  # words by which the text before one prompt starts later than that before the prompt before it


def read_texts(workloads: Sequence[str], num_prompts: int, folder: Path | None, *, fresh: bool = False) -> Texts:
    """Each workload's first prompts, or `fresh` as many after these, of a shorter set the last ones.

    Raises ConfigError for too few of them, LoadError for a set that is not there.
    """
    texts = {}
    for workload in workloads:
        read = load(workload, num_prompts=2 * num_prompts if fresh else num_prompts, folder=folder)
        found = [prompt.turns[0] for prompt in read[-num_prompts:]]
        if len(found) < num_prompts:
            raise ConfigError(f"{workload} has {len(found)} prompts, num_prompts is {num_prompts}", param="num_prompts")
        texts[workload] = found
    return texts


def encode_prompts(grid: Grid, texts: Texts, encode: Encode, max_len: int) -> Prompts:
    """Every prompt at every context length. Raises ConfigError for those that do not fit with their output."""
    filler = [word for prompt in load(MIXED) for word in prompt.turns[0].split(" ")]
    prompts: Prompts = {}
    for workload, plain in texts.items():
        for length in grid.context_lens:
            ids = [encode(lengthened(text, filler, index, length, encode)) for index, text in enumerate(plain)]
            _check_fit(workload, length, ids, grid.max_tokens, max_len)
            prompts[workload, length] = ids
    return prompts


def lengthened(text: str, filler: Sequence[str], index: int, context_len: int, encode: Encode) -> str:
    """The prompt after as many words of `filler` as make at most `context_len` ids of it; as it is where none fit."""
    words = list(islice(cycle(filler), index * _STEP, index * _STEP + context_len))

    def after(count: int) -> str:
        return f"{' '.join(words[:count])}\n\n{text}" if count else text

    fits, too_many = 0, len(words) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(encode(after(middle))) <= context_len:
            fits = middle
        else:
            too_many = middle
    return after(fits)


def _check_fit(workload: str, context_len: int, ids: Sequence[Sequence[int]], max_tokens: int, max_len: int) -> None:
    longest = max(map(len, ids))
    if longest + max_tokens > max_len:
        raise ConfigError(
            f"{workload} at context length {context_len} has a prompt of {longest} tokens, which with max_tokens "
            f"{max_tokens} is beyond the model's {max_len}: lower one of them",
            param="context_lens" if context_len else "max_tokens",
        )
