"""Building the kernels: once a machine, for older processors too, and a plain way on where they cannot be built."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider import native
from outrider.models import linear


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no kernels loaded from it yet."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of one family")
def test_an_older_processor_gets_the_same_law(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 the kernels are slower, not different: near the reference, each row alone."""
    flags = tuple("-march=x86-64-v3" if flag == "-march=native" else flag for flag in native._FLAGS)
    monkeypatch.setattr(native, "_FLAGS", flags)
    if native.library() is None:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        weight, x = torch.randn(100, 64).to(dtype), torch.randn(29, 64).to(dtype)
        layer = linear.Linear(weight)
        whole = layer(x, wide=True)
        assert torch.allclose(whole, x.float() @ weight.float().T, atol=2e-4)
        for rows in (1, 2, 5, 12, 13, 28):
            assert torch.equal(layer(x[:rows].contiguous(), wide=True), whole[:rows])


def test_kernels_are_built_once(fresh: Path) -> None:
    if native.library() is None:
        pytest.skip("no C compiler here")
    built = [(file.name, file.stat().st_mtime_ns) for file in (fresh / "native").iterdir()]
    native.library.cache_clear()
    assert native.library() is not None
    assert [(file.name, file.stat().st_mtime_ns) for file in (fresh / "native").iterdir()] == built
    assert len(built) == 1


def test_without_a_compiler_the_reference_runs_and_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fresh / "no-such-compiler"))
    with pytest.warns(UserWarning, match="C kernels are off"):
        assert native.library() is None
    layer = linear.Linear(torch.eye(4))
    assert torch.equal(layer(torch.ones(2, 4)), torch.ones(2, 4))
    assert not (fresh / "native").exists() or not list((fresh / "native").glob("*.so"))
