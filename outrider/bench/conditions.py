"""The conditions beside a number: machine, software, model, prompts, settings. Read at run time, never assumed."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.llm import LLM
from outrider.native import library


def conditions(llm: LLM, prompts: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that a reader needs to repeat the run, as plain data."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "outrider": outrider.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "device": str(llm.engine.model.device),
        "kernels": "native" if llm.engine.model.device.type == "cpu" and library() is not None else "torch",
        "model": llm.model_name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "max_model_len": llm.max_len,
        "engine": asdict(llm.config),
        "prompts": prompts,
        **settings,
    }


def fingerprint(prompts: list[tuple[str, ...]]) -> str:
    """A sha256 of the prompts' turns, so that two runs can be seen to have read the same."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with a mark if files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
