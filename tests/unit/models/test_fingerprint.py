"""The fingerprint is the weights': the same in every dtype, another for any other target."""

from __future__ import annotations

import string

import pytest
import torch

from outrider.models.fingerprint import fingerprint
from outrider.models.llama import LlamaModel
from tests.kit import tiny


def model_of(dtype: torch.dtype, seed: int = 0, vocab: int = tiny.VOCAB, **added: float) -> LlamaModel:
    """A target whose weights went through bfloat16; `added` shifts the tensor of that name."""
    config = tiny.tiny_config(vocab)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tiny.tiny_tensors(seed, config).items()}
    for name, shift in added.items():
        tensors[name.replace("__", ".")] += shift
    return LlamaModel(config, {name: tensor.to(dtype) for name, tensor in tensors.items()}, max_len=64)


def test_it_is_the_same_in_both_dtypes() -> None:
    found = fingerprint(model_of(torch.bfloat16))
    assert found == fingerprint(model_of(torch.float32))
    assert len(found) == 64 and set(found) <= set(string.hexdigits.lower())


def test_weights_that_loading_rounds_count_as_rounded() -> None:
    assert fingerprint(tiny.tiny_model(1, torch.float32)) == fingerprint(tiny.tiny_model(1, torch.bfloat16))


@pytest.mark.parametrize("vocab", [64, 4096])
def test_other_weights_have_another(vocab: int) -> None:
    first = fingerprint(model_of(torch.float32, vocab=vocab))
    assert fingerprint(model_of(torch.float32, seed=1, vocab=vocab)) != first
    assert fingerprint(model_of(torch.float32, vocab=vocab, model__embed_tokens__weight=0.5)) != first
    assert fingerprint(model_of(torch.float32, vocab=vocab, model__norm__weight=0.5)) != first
