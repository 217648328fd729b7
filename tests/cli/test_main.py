"""The command line's manners: quick help, one line for each fault, no heavy imports before a verb runs."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest

from tests.kit.command import ENVIRONMENT, Here, apart

VERBS = ("generate", "chat", "bench", "sweep", "report", "tune", "check", "data", "train", "export", "models")


def one_line(err: str) -> str:
    """The single line of a refused command."""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("outrider: error: "), err
    return lines[0]


def test_help_lists_the_verbs(here: Here) -> None:
    ended = here("--help")
    listed = re.findall(r"^  (\w+) ", ended.out.partition("Commands:")[2], re.MULTILINE)
    assert ended.code == 0 and sorted(listed) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(here: Here, verb: str) -> None:
    ended = here(verb, "--help")
    assert ended.code == 0 and ended.out.startswith(f"Usage: outrider {verb}")


def test_help_takes_little_time() -> None:
    before = _child_seconds()
    assert apart("--help").code == 0
    assert _child_seconds() - before < 0.5


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        f"import sys\nfrom outrider.cli.main import main\ntry:\n    main({words})\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted({'torch', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("words", [[], ["models"]], ids=["outrider", "outrider models"])
def test_without_a_verb_the_help_is_shown(here: Here, words: list[str]) -> None:
    ended = here(*words)
    assert ended.code == 2 and "Usage:" in ended.err + ended.out


REFUSED = {
    "unknown verb": (["fly"], "'fly'"),
    "unknown verb of models": (["models", "fly"], "'fly'"),
    "no model": (["generate"], "'model'"),
    "unknown model": (["generate", "smollm3-of-nobody", "hi"], "smollm3-of-nobody"),
    "unknown option": (["generate", "smollm2", "hi", "--temprature", "1"], "--temperature"),
    "not a number": (["generate", "smollm2", "hi", "--max-tokens", "many"], "--max-tokens"),
    "empty prompt": (["generate", "smollm2", ""], "prompt is empty"),
    "blank prompt": (["generate", "smollm2", "hi", "  \n"], "prompt is empty"),
    "NaN temperature": (["generate", "smollm2", "hi", "--temperature", "nan"], "temperature is nan"),
    "no tokens": (["generate", "smollm2", "hi", "--max-tokens", "0"], "max_tokens is 0"),
    "bad bias": (["generate", "smollm2", "hi", "--logit-bias", "[1]"], "logit_bias"),
    "unknown setting": (["generate", "smollm2", "hi", "--set", "engine.blok_size=32"], "engine.block_size"),
    "setting without value": (["generate", "smollm2", "hi", "--set", "engine.block_size"], "engine.block_size"),
    "bad JSON": (["generate", "smollm2", "hi", "--speculative-config", "{method: ngram}"], "not JSON"),
    "JSON of another kind": (["generate", "smollm2", "hi", "--speculative-config", "[]"], "not a JSON object"),
    "unknown method": (
        ["generate", "smollm2", "hi", "--spec-method", "ngramm", "--spec-tokens", "4"],
        "did you mean ngram?",
    ),
    "unknown key": (
        [
            "generate",
            "smollm2",
            "hi",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_token": 4}',
        ],
        "num_speculative_tokens",
    ),
    "N is 0": (
        ["generate", "smollm2", "hi", "--spec-method", "ngram", "--spec-tokens", "0"],
        "num_speculative_tokens is 0",
    ),
    "N is missing": (["generate", "smollm2", "hi", "--spec-method", "ngram"], "num_speculative_tokens"),
    "given twice": (
        [
            "generate",
            "smollm2",
            "hi",
            "--spec-method",
            "ngram",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 4}',
        ],
        "given twice",
    ),
    "chat with a bad setting": (["chat", "smollm2", "--top-p", "2"], "top_p is 2"),
}


@pytest.mark.parametrize("words, part", REFUSED.values(), ids=REFUSED)
def test_a_users_fault_is_one_line_and_exit_code_2(here: Here, words: list[str], part: str) -> None:
    ended = here(*words)
    assert ended.code == 2 and ended.out == ""
    assert part in one_line(ended.err)


def test_models_list_as_json(here: Here) -> None:
    ended = here("models", "list", "--json")
    records = json.loads(ended.out)
    assert ended.code == 0
    assert "smollm2" in [record["name"] for record in records]
    assert all({"name", "state", "size_bytes", "path"} <= set(record) for record in records)
