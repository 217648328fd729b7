"""What the command line's tests share: a command run in this process, and the built-in model."""

from __future__ import annotations

import pytest

from outrider.cli.main import main
from outrider.errors import OutriderError
from outrider.models.store import resolve
from tests.kit.command import Ended, Here


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    """Run a command in this process: quick, since torch is there already."""

    def run(*words: str) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        streams = capsys.readouterr()
        return Ended(caught.value.code or 0, streams.out, streams.err)

    return run


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The built-in model's name, once it is in the cache folder."""
    try:
        resolve("smollm2")
    except OutriderError as error:
        pytest.skip(f"the built-in model cannot be had here: {error}")
    return "smollm2"
