"""Prompts and chats to ids, as transformers makes them, and what a broken folder or template says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import LoadError, RequestError
from outrider.text.tokenizer import Tokenizer

CHAT = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi 日本語 🙂\n\n12"}]
TEXTS = ["", " ", "The fox", "naïve\n\n  café", "<|start|>x<|end|> <tool call>", "e\u0301 🙂\u200d↔️", "\x00\x7f"]


@pytest.fixture
def folder(byte_level_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(byte_level_folder, tmp_path / "copy"))


def change(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_ids_and_chats_are_those_of_transformers(byte_level_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(byte_level_folder)
    ours = Tokenizer.load(byte_level_folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    for prompt in (True, False):
        assert ours.apply_chat_template(CHAT, prompt) == theirs.apply_chat_template(
            CHAT, add_generation_prompt=prompt, tokenize=False
        )
        theirs_ids = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert ours.encode_chat(CHAT, add_generation_prompt=prompt) == theirs_ids


def test_special_ids_and_sizes_are_known(byte_level_folder: Path, byte_fallback_folder: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder)
    assert tokenizer.special_ids == {0, 1} and (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
    assert tokenizer.vocab_size == tokenizer.encode("<tool call>")[0] + 1
    assert tokenizer.is_byte_level and not Tokenizer.load(byte_fallback_folder).is_byte_level


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(folder).eos_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert Tokenizer.load(folder).eos_ids == (1, 5)


def test_a_prompt_gets_its_begin_token_and_a_chat_does_not(folder: Path) -> None:
    from tokenizers import processors

    tokenizer = Tokenizer.load(folder)
    frame = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer.backend.post_processor = frame
    assert tokenizer.encode("fox")[0] == 0 and tokenizer.encode("fox", add_special_tokens=False)[0] != 0
    assert tokenizer.encode_chat(CHAT).count(0) == 3


def test_truncation_left_in_the_file_is_not_applied(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=50)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    again = Tokenizer.load(folder)
    assert again.decode(again.encode("The quick brown fox")) == "The quick brown fox"


def test_a_template_is_found_in_each_place(folder: Path) -> None:
    change(folder, chat_template=[{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}])
    assert Tokenizer.load(folder).apply_chat_template(CHAT) == "named"
    (folder / "chat_template.jinja").write_text("alone {{ bos_token }}{{ extra }}")
    assert Tokenizer.load(folder).apply_chat_template(CHAT, extra=3) == "alone <|start|>3"


def test_a_model_without_a_template_says_so(folder: Path) -> None:
    change(folder, chat_template=None)
    with pytest.raises(RequestError, match="has no chat template") as caught:
        Tokenizer.load(folder).encode_chat(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", '{"version"', "[]"])
def test_a_broken_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(LoadError, match=name) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_text_that_is_not_unicode_is_refused(byte_level_folder: Path) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        Tokenizer.load(byte_level_folder).encode("half a pair \ud83d")


def test_loading_imports_neither_transformers_nor_torch(byte_level_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from outrider.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1])); print({'torch', 'transformers'} & set(sys.modules))"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program, str(byte_level_folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
