"""Prompt sets: every named set loads, every line form is read, and every bad line is refused by file and number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import ConfigError, LoadError
from outrider.evaluate import workloads
from outrider.evaluate.workloads import OWN, PUBLIC, Prompt, load


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", OWN)
def test_own_sets_hold_at_least_twenty_different_prompts(name: str) -> None:
    prompts = load(name, turns="all")
    assert len({prompt.turns for prompt in prompts}) == len(prompts) >= 20


def test_math_prompts_all_have_a_numeric_answer() -> None:
    for prompt in load("math"):
        assert prompt.answer is not None
        float(prompt.answer)


def test_some_chat_prompts_have_a_second_turn() -> None:
    assert any(len(prompt.turns) == 2 for prompt in load("chat", turns="all"))


def test_summary_passages_are_of_even_length() -> None:
    lengths = [len(prompt.turns[0].rpartition("\n\n")[0].split()) for prompt in load("summary")]
    assert min(lengths) >= 120 and max(lengths) <= 180


def test_mixed_takes_the_sets_in_turns_and_leaves_none_out() -> None:
    mixed = load("mixed")
    assert mixed[: len(OWN)] == [load(name)[0] for name in OWN]
    assert mixed[len(OWN) : 2 * len(OWN)] == [load(name)[1] for name in OWN]
    assert len(mixed) == sum(len(load(name)) for name in OWN)


def test_names_are_what_load_takes(tmp_path: Path) -> None:
    for name in PUBLIC:
        write(tmp_path / f"{name}.jsonl", {"turns": ["one"]})
    for name in workloads.names():
        assert load(name, num_prompts=1, folder=tmp_path)


def test_first_turn_or_all_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "two.jsonl", {"turns": ["one", "two"], "answer": "a"})
    assert load(str(path)) == [Prompt(("one",), "a")]
    assert load(str(path), turns="all") == [Prompt(("one", "two"), "a")]


def test_num_prompts_cuts_and_zero_is_refused() -> None:
    assert load("code", num_prompts=3) == load("code")[:3]
    with pytest.raises(ConfigError, match="num_prompts is 0"):
        load("code", num_prompts=0)


def test_unknown_turns_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'last'"):
        load("code", turns="last")  # type: ignore[arg-type]


def test_three_line_forms_and_blank_lines(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "two"},
    ]
    path = write(tmp_path / "forms.jsonl", {"turns": ["a"]}, "", "   ", {"prompt": "b"}, {"messages": messages})
    assert load(str(path), turns="all") == [Prompt(("a",)), Prompt(("b",)), Prompt(("one", "two"))]


def test_a_file_written_on_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert load(str(path)) == [Prompt(("a",)), Prompt(("b",))]


def test_an_odd_line_separator_inside_text_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert load(str(path)) == [Prompt(("a\u2028b",))]


def test_a_number_as_answer_is_taken_as_text(tmp_path: Path) -> None:
    path = write(tmp_path / "number.jsonl", {"prompt": "a", "answer": 7})
    assert load(str(path))[0].answer == "7"


BAD = {
    "empty object": ("{}", "neither turns, prompt nor messages"),
    "not JSON": ("{'prompt': 'a'}", "not JSON"),
    "not an object": ('["a"]', "got a list"),
    "a bare string": ('"a"', "got a str"),
    "no turns": ('{"turns": []}', "no user turn"),
    "turns is text": ('{"turns": "a"}', "turns is a str"),
    "turn is a number": ('{"turns": ["a", 3]}', "a turn is 3"),
    "blank turn": ('{"turns": ["  "]}', "expected text"),
    "prompt is a list": ('{"prompt": ["a"]}', "expected text"),
    "prompt is null": ('{"prompt": null}', "expected text"),
    "message without role": ('{"messages": [{"content": "a"}]}', "expected an object with role"),
    "message is text": ('{"messages": ["a"]}', "expected an object with role"),
    "user without content": ('{"messages": [{"role": "user"}]}', "a turn is None"),
    "no user": ('{"messages": [{"role": "system", "content": "a"}]}', "no user turn"),
    "answer is a list": ('{"prompt": "a", "answer": [1]}', "answer is a list"),
}


@pytest.mark.parametrize("line, why", BAD.values(), ids=BAD)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(LoadError) as caught:
        load(str(path), num_prompts=1)
    message = str(caught.value)
    assert f"{path}, line 3: " in message and why in message and "\n" not in message


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"empty\.jsonl: no prompts"):
        load(str(write(tmp_path / "empty.jsonl", "", "  ")))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match=r"binary\.jsonl: cannot be read"):
        load(str(path))


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(LoadError, match="did you mean math"):
        load("mahth")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_missing_public_set_says_where_it_goes_and_how_a_line_looks(name: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(name, folder=tmp_path)
    for part in (str(tmp_path / f"{name}.jsonl"), "OUTRIDER_DATA", '{"turns"', "not downloaded"):
        assert part in str(caught.value)


def test_the_folder_is_argument_then_variable_then_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    for name in ("data", "variable", "argument"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "gsm8k.jsonl", {"prompt": f"from {name}"})
    assert load("gsm8k")[0].turns == ("from data",)
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path / "variable"))
    assert load("gsm8k")[0].turns == ("from variable",)
    assert load("gsm8k", folder=tmp_path / "argument")[0].turns == ("from argument",)
