"""A tiny target that takes chats: random weights, a byte tokenizer with one merge, and a chat template, as a folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.kit.tiny import save_tiny

START, END, NEWLINES = 0, 1, 258
VOCAB = 264
"""A few ids more than the tokenizer has, as padded vocabularies do."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def save_talker(folder: Path, *, template: str | None = TEMPLATE, max_len: int = 512) -> Path:
    """Write the target. A newline pair is one token, so a border between two newlines is none to the tokenizer."""
    save_tiny(folder, vocab=VOCAB, max_position_embeddings=max_len)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|start|>", "<|end|>", *alphabet, "ĊĊ"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|start|>", "<|end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END]}), encoding="utf-8")
    return folder
