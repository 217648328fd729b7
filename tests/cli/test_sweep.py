"""`outrider sweep`: a whole sweep of a tiny target, resumed and refused, and one line for what cannot be measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.bench.grid import Grid
from outrider.bench.parquet import read_parquet
from outrider.bench.results import read
from outrider.bench.sweep import missing
from outrider.drafting.policy import read_policy
from tests.kit import talker, threads
from tests.kit.command import Here

TIGHT = ("--set", "engine.kv_cache_tokens=2048", "--set", "engine.num_threads=1")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that takes chats, and prompts for it."""
    folder = tmp_path_factory.mktemp("sweep")
    talker.save_talker(folder / "target")
    for name, text in (("a", "say it {0} {0} {0} {0}"), ("b", "what is {0}?")):
        turns = [json.dumps({"prompt": text.format(number)}) for number in range(2)]
        (folder / f"{name}.jsonl").write_text("\n".join(turns))
    return folder


def words(files: Path, out: Path, **changes: str) -> list[str]:
    given = {
        "methods": "ngram",
        "tokens": "1,3",
        "workloads": f"{files / 'a.jsonl'},{files / 'b.jsonl'}",
        "concurrency": "1,2",
        "temperatures": "0,0.8",
        "num_prompts": "2",
        "max_tokens": "10",
        "repeats": "1",
        "stop_below": "0",
    }
    flags = [word for name, value in (given | changes).items() for word in (f"--{name.replace('_', '-')}", value)]
    return ["sweep", str(files / "target"), "--out", str(out), *flags, *TIGHT]


def test_a_sweep_from_end_to_end_with_a_drafter_that_shares_its_target(here: Here, files: Path, tmp_path: Path) -> None:
    out, found = tmp_path / "r.jsonl", tmp_path / "r.json"
    itself = json.dumps({"method": "draft_model", "model": str(files / "target"), "num_speculative_tokens": 2})
    policy = tmp_path / "policy.json"
    ended = here(*words(files, out), "--also", itself, "--json", str(found), "--policy", str(policy))
    assert ended.code == 0, ended.err
    assert set(read_policy(policy).classes) == {"a", "b"}
    results, summary = read(out), json.loads(found.read_text())
    assert missing(Grid(**results.header.grid), results) == []
    # 2 workloads, 2 temperatures, two groups at 1 and one at 2, plain and three choices
    assert len([row for row in results.rows if not row.is_anchor]) == 2 * 2 * 3 * 4
    cells = [cell for cell in summary["cells"] if cell["num_speculative_tokens"]]
    assert len(cells) == 2 * 2 * 2 * 3
    assert all(cell["num_same_text"] == cell["num_compared_texts"] > 0 for cell in cells), "same seed, same text"
    itself_cells = [cell for cell in cells if cell["method"] == "draft_model" and cell["place"]["temperature"] == 0]
    assert all(cell["acceptance_rate"] == 1 for cell in itself_cells)
    for row in results.rows:
        counted = row.measured.speculation
        assert counted.broken_identities() == [] and counted.num_committed == row.measured.num_tokens
        after_first = sum(tokens for _, _, tokens in row.measured.by_output_position)
        assert after_first == row.measured.num_tokens - row.measured.num_prompts
    assert "2 at a time" in ended.out and "outrider report" in ended.err
    rows = len(results.rows)
    assert here(*words(files, out), "--also", itself).code == 0
    assert len(read(out).rows) == rows, "nothing was left to measure"


def test_parquet_is_written_when_all_is_measured(here: Here, files: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    out, only = tmp_path / "r.parquet", {"workloads": str(files / "a.jsonl"), "concurrency": "1", "temperatures": "0"}
    assert here(*words(files, out, **only)).code == 0
    assert len(read_parquet(out).rows) == 2 + 2 * 3 and sorted(path.name for path in tmp_path.iterdir()) == [out.name]
    assert here(*words(files, out, **only)).code == 0
    ended = here(*words(files, out, **only, seed="1"))
    assert ended.code == 2 and "seed" in ended.err


def test_another_model_or_other_settings_are_refused_on_resume(here: Here, files: Path, tmp_path: Path) -> None:
    out, only = tmp_path / "r.jsonl", {"workloads": str(files / "a.jsonl"), "concurrency": "1", "temperatures": "0"}
    assert here(*words(files, out, **only)).code == 0
    ended = here(*words(files, out, **(only | {"repeats": "2"})))
    assert ended.code == 2 and "repeats 1, not 2" in ended.err and ended.err.count("\n") == 1
    other = tmp_path / "other"
    talker.save_talker(other)
    from tests.kit.tiny import save_tiny

    save_tiny(other, 7, vocab=talker.VOCAB)
    ended = here(*[str(other) if word == str(files / "target") else word for word in words(files, out, **only)])
    assert ended.code == 2 and "another target" in ended.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--methods", "ngrm"), "did you mean ngram"),
        (("--methods", "ngram", "--tokens", "0"), "num_speculative_tokens has 0"),
        (("--methods", "ngram", "--tokens", "one"), "tokens is 'one'"),
        (("--methods", "ngram", "--workloads", "maths"), "did you mean math"),
        (("--workloads", ","), "workloads is empty"),
        (("--methods", "ngram", "--concurrency", ""), "concurrency is empty"),
        (("--methods", "ngram", "--temperatures", "-1"), "temperature is -1"),
        (("--methods", "ngram", "--num-prompts", "100"), "num_prompts"),
        (("--also", "{"), "not JSON"),
        (("--also", '{"method": "ngram", "gamma": 2}'), "gamma"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    here: Here, tmp_path: Path, given: tuple[str, ...], said: str
) -> None:
    ended = here("sweep", "smollm2", "--out", str(tmp_path / "r.jsonl"), *given)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
