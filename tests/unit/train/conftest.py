"""What the tests of training share: a tiny target that takes chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.text.tokenizer import Tokenizer
from outrider.train.conversations import Chat
from tests.kit.talker import save_talker


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="session")
def chat(talker: Path) -> Chat:
    return Chat(Tokenizer.load(talker))
