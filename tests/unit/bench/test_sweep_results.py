"""A results file: whole rows only, safe to cut anywhere, refused for other settings, the same as Parquet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench.grid import Choice
from outrider.bench.parquet import is_parquet, read_parquet, write_parquet
from outrider.bench.results import Results, ResultsFile, Stopped, read
from outrider.errors import ConfigError, LoadError
from tests.kit import sweeps

GRID = sweeps.grid(repeats=1)
SPEED = sweeps.speeds({("ngram", 2): 130.0})


def written(path: Path) -> Results:
    """A file with every row of the grid and one choice given up."""
    file = ResultsFile.open(path, sweeps.header(GRID))
    for row in sweeps.rows_of(GRID, SPEED):
        file.add_row(row)
    file.add_stopped(Stopped(setting=GRID.settings[0], choice=Choice("ngram", 4), reason="too slow"))
    return file.results


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kept = written(tmp_path / "r.jsonl")
    assert read(tmp_path / "r.jsonl") == kept
    assert len(kept.rows) == 4 * 5 and all(row.measured.speculation.broken_identities() == [] for row in kept.rows)
    assert [json.loads(line)["kind"] for line in (tmp_path / "r.jsonl").read_text().splitlines()][:2] == [
        "header",
        "row",
    ]


def test_a_file_cut_anywhere_gives_its_whole_rows_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    kept = written(path)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole), 997):
        path.write_bytes(whole[:cut])
        found = read(path)
        num_records = sum(end <= cut for end in ends) - 1
        assert found.rows == kept.rows[:num_records]
        assert found.is_cut == (cut not in ends)
    path.write_bytes(whole[: len(whole) // 2])
    file = ResultsFile.open(path, sweeps.header(GRID))
    file.add_row(kept.rows[-1])
    again = read(path)
    assert not again.is_cut and again.rows[-1] == kept.rows[-1] and len(again.sittings) == 2


@pytest.mark.parametrize("length", [0, 1, 20, 200])
def test_a_header_that_was_cut_is_begun_anew(tmp_path: Path, length: int) -> None:
    path = tmp_path / "r.jsonl"
    written(path)
    path.write_bytes(path.read_bytes()[:length])
    ResultsFile.open(path, sweeps.header(GRID))
    assert read(path).rows == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no header"),
        ("hello", "no header"),
        ('{"kind": "row"}\n', "no header"),
        ("[1]\n", "no header"),
        ('{"kind":"header"}\n', "no header of format 1"),
        ("@\nbroken\n", "line 2: not JSON"),
        ('@\n{"kind": "row"}\n', "line 2"),
        ('@\n{"kind": "song"}\n', "song"),
    ],
)
def test_a_file_that_holds_no_results_is_refused_naming_the_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.jsonl"
    ResultsFile.open(path, sweeps.header(GRID))
    path.write_text(text.replace("@\n", path.read_text()))
    with pytest.raises(LoadError, match=said):
        read(path)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path)
    before, header = path.read_bytes(), sweeps.header(GRID)
    for changed, said in [
        (replace(header, identity="another"), "another target"),
        (sweeps.header(sweeps.grid(repeats=2)), "repeats 1, not 2"),
        (sweeps.header(sweeps.grid(repeats=1, temperatures=[0.5])), "temperatures"),
        (replace(header, engine={"dtype": "bfloat16"}), "engine.dtype"),
        (replace(header, prompts={"math": "other"}), "prompts"),
    ]:
        with pytest.raises(ConfigError, match=said):
            ResultsFile.open(path, changed)
    assert path.read_bytes() == before
    with pytest.raises(LoadError, match="no header"):
        (tmp_path / "mine.txt").write_text("my notes")
        ResultsFile.open(tmp_path / "mine.txt", header)
    assert (tmp_path / "mine.txt").read_text() == "my notes"


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    kept, path = written(tmp_path / "r.jsonl"), tmp_path / "r.parquet"
    write_parquet(path, kept)
    assert is_parquet(path) and read_parquet(path) == kept
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(LoadError, match="no Parquet file"):
        read_parquet(path)
