"""Tiny tokenizers of both kinds, trained on a few lines in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = ["The quick brown fox can't jump 123 times. ", "def f(x):\n    return x + 1\n", "naïve café 日本語 🙂 ∑"] * 3
TEMPLATE = (
    "{% for m in messages %}\n  {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "▁w", "!", "é"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("h", "e"), ("▁", "w")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|start|>"},
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_fallback")
    byte_fallback().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder
