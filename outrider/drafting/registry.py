"""The one list of drafting methods: a name, where its drafter is, and what it can do without being told.

Everybody else (engine, CLI, contract tests) finds drafters through this list and never by name. A new method is a file
and a line here. `resolve` completes settings that leave something to the drafter; `create` builds it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.config import AUTO, SpeculativeConfig
from outrider.drafting import zoo
from outrider.drafting.base import Drafter, TargetInfo
from outrider.drafting.block_config import NESTED
from outrider.drafting.checkpoint import (
    MODULE_KEYS,
    method_of,
    module_folder,
    own_method,
    read_checkpoint,
    stated_length,
)
from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.known_keys import BLOCK, EAGLE, GEMMA4_DRAFTER, MODULE
from outrider.drafting.profile import read_profile
from outrider.errors import ConfigError, DrafterMismatch
from outrider.models.arch import FAMILIES, read_json
from outrider.models.fingerprint import fingerprint
from outrider.models.gemma_config import GEMMA_FAMILIES
from outrider.models.store import resolve as model_folder
from outrider.models.target import Target
from outrider.models.unknown_keys import target_keys, warn_of_unknown_keys

if TYPE_CHECKING:
    from outrider.drafting.export import ExporterClass
    from outrider.drafting.training import TraineeClass


@dataclass(frozen=True)
class _Method:
    """`drafter`: module and class. `model`: nothing, any causal model, a drafter trained for its target, or a part
    that comes inside the target's own checkpoint.

    `length_keys`: keys of the drafter's config.json of which the first that is there is the default for N. `exporter`:
    module and class of what writes its checkpoints in published formats. `trainee`: of what is trained. `keys`: those
    of the drafter's config.json that are read or refused; none for a model whose loading names them itself.
    """

    drafter: str
    model: Literal["none", "any", "trained", "inside"]
    length_keys: tuple[str, ...] = ()
    exporter: str | None = None
    trainee: str | None = None
    keys: frozenset[str] = frozenset()


_METHODS = {
    "ngram": _Method("outrider.drafters.ngram:NgramDrafter", "none"),
    "draft_model": _Method("outrider.drafters.draft_model:DraftModelDrafter", "any"),
    "mtp": _Method(
        "outrider.drafters.mtp:MtpDrafter",
        "inside",
        MODULE_KEYS,
        trainee="outrider.trainees.mtp:MtpTrainee",
        keys=MODULE,
    ),
    "gemma4_mtp": _Method(
        "outrider.drafters.gemma4_mtp:Gemma4MtpDrafter",
        "trained",
        trainee="outrider.trainees.gemma4_mtp:Gemma4MtpTrainee",
        keys=GEMMA4_DRAFTER,
    ),
    "eagle3": _Method(
        "outrider.drafters.eagle3:Eagle3Drafter",
        "trained",
        exporter="outrider.drafters.eagle3:Eagle3Exporter",
        trainee="outrider.trainees.eagle3:Eagle3Trainee",
        keys=EAGLE,
    ),
    "dflash": _Method(
        "outrider.drafters.dflash:DFlashDrafter",
        "trained",
        exporter="outrider.drafters.dflash:DFlashExporter",
        trainee="outrider.trainees.dflash:DFlashTrainee",
        keys=BLOCK,
    ),
    "dspark": _Method(
        "outrider.drafters.dspark:DSparkDrafter",
        "trained",
        ("block_size", "dspark_block_size"),
        exporter="outrider.drafters.dspark:DSparkExporter",
        trainee="outrider.trainees.dspark:DSparkTrainee",
        keys=BLOCK,
    ),
}
# Settings that are one method's own, which no other may be given.
_OWN_SETTINGS = {"dspark_draft_topk": "dspark"}


def names() -> tuple[str, ...]:
    """Every drafting method that can be configured."""
    return tuple(_METHODS)


def is_auto(config: SpeculativeConfig) -> bool:
    """Whether the method is yet to be chosen, which auto.py does."""
    return config.method == AUTO


def check(config: SpeculativeConfig) -> None:
    """Raise ConfigError for what is wrong whatever the target: a method that does not exist (naming the nearest), a
    setting of another method, an N that nobody but the user can say. A method that is not known yet passes.
    """
    for setting in ("policy", "workload"):
        if getattr(config, setting):
            raise ConfigError(f'{setting} is set, but only method "{AUTO}" has it', param=setting)
    if not config.method:
        return
    config = replace(config, method=own_method(config.method, None))
    if config.method not in _METHODS:
        nearest = difflib.get_close_matches(config.method, names(), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"method is {config.method!r}, expected one of {', '.join(names())}{hint}", param="method")
    for setting, owner in _OWN_SETTINGS.items():
        if getattr(config, setting) is not None and config.method != owner:
            raise ConfigError(f"{setting} is set, but only method {owner} has it, not {config.method}", param=setting)
    if not config.num_speculative_tokens and _METHODS[config.method].model == "none":
        raise _no_length(config.method)


def resolve(config: SpeculativeConfig, target: Target) -> SpeculativeConfig:
    """The same settings with method, drafter and N filled in where they were left out; complete ones are checked only.

    The method is the one that the checkpoint is for; the drafter, the installed zoo's for this target, unless the
    method's is a part of the target's own folder and is there; N, what the drafter's profile, its Speculators config or
    its config.json says, in that order. Raises ConfigError, LoadError, DrafterMismatch, also for settings that do not
    go with the N that was found.
    """
    check(config)
    config = _as_ours(config)
    if not config.method:
        if config.model is None:
            raise ConfigError('speculative config: method is missing, e.g. {"method": "ngram"}', param="method")
        config = replace(config, method=_method_for(config.model))
        check(config)
    if config.model is None and _METHODS[config.method].model == "trained":
        config = replace(config, model=_from_zoo(config.method, target))
    if config.model is None and _METHODS[config.method].model == "inside":
        config = replace(config, model=_inside(config.method, target))
    if not config.num_speculative_tokens:
        config = replace(config, num_speculative_tokens=_length_for(config))
    return config


def create(config: SpeculativeConfig, target: TargetInfo) -> Drafter:
    """Build the configured drafter for this target; `resolve` comes first. Raises ConfigError, LoadError,
    DrafterMismatch.
    """
    check(config)
    config = _as_ours(config)
    assert config.is_complete, "resolve comes first"
    make: Callable[[SpeculativeConfig, TargetInfo], Drafter] = _named(_METHODS[config.method].drafter)
    drafter = make(config, target)
    _name_unknown_keys(config, target.model)
    return drafter


def known_keys(method: str, raw: Mapping[str, Any]) -> frozenset[str]:
    """The keys of a drafter's config.json that are read or refused; empty where its own loading looks after them."""
    found = _METHODS.get(method)
    if found is None or not found.keys:
        return frozenset()
    return found.keys | target_keys(raw) if found.model == "inside" else found.keys


def length_for(method: str, folder: Path) -> int | None:
    """The N that a drafter's folder says for a method, None where it does not."""
    try:
        return _length_for(SpeculativeConfig(method=method, model=str(folder)))
    except ConfigError:
        return None


def exporter(method: str | None) -> ExporterClass:
    """What writes a method's checkpoints in published formats. Raises ConfigError for a method that has none."""
    found = _METHODS[method].exporter if method in _METHODS else None
    if found is None:
        known = ", ".join(name for name, entry in _METHODS.items() if entry.exporter)
        raise ConfigError(
            f"a drafter of method {method or 'unknown'} cannot be exported, expected one of {known}", param="drafter"
        )
    made: ExporterClass = _named(found)
    return made


def trainable() -> tuple[str, ...]:
    """Every method whose drafter can be trained."""
    return tuple(name for name, entry in _METHODS.items() if entry.trainee)


def trainee(method: str) -> TraineeClass:
    """What is trained for a method. Raises ConfigError for one that has nothing to train."""
    found = _METHODS[method].trainee if method in _METHODS else None
    if found is None:
        raise ConfigError(f"method is {method!r}, expected one of {', '.join(trainable())}", param="method")
    made: TraineeClass = _named(found)
    return made


def _named(place: str) -> Any:
    """What `place`, a module and a name in it, stands for."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _name_unknown_keys(config: SpeculativeConfig, target: Target) -> None:
    if config.model is None or (folder := model_folder(config.model)) == target.folder:
        return
    raw = read_json(folder / "config.json")
    effect = "drafts may be worse for it, the text stays the target's"
    warn_of_unknown_keys(raw, known_keys(config.method, raw), source=str(folder), effect=effect)


def _as_ours(config: SpeculativeConfig) -> SpeculativeConfig:
    """The same settings under the name that the method has here."""
    method = own_method(config.method, config.model)
    return config if method == config.method else replace(config, method=method)


def _method_for(model: str) -> str:
    checkpoint = read_checkpoint(model)
    found = method_of(checkpoint)
    if found is None and checkpoint.config.get("model_type") in (*FAMILIES, *GEMMA_FAMILIES):
        return "draft_model"
    if found not in _METHODS:
        what = "nothing in it says which" if found is None else f"it is for {found}"
        raise ConfigError(
            f'method is missing, and {checkpoint.source} is for none of {", ".join(names())} ({what}): add "method"',
            param="method",
        )
    return found


def _inside(method: str, target: Target) -> str:
    """The target's own folder, or an installed module for it."""
    try:
        return module_folder(target)
    except DrafterMismatch:
        if (found := zoo.find(method, fingerprint(target))) is not None:
            return str(found.path)
        raise


def _from_zoo(method: str, target: Target) -> str:
    """The folder of the installed drafter for this target."""
    weights = fingerprint(target)
    if (found := zoo.find(method, weights)) is not None:
        return str(found.path)
    others = ", ".join(zoo.methods_for(weights))
    offer = f"take method {others}, which the installed zoo has for this target, or " if others else ""
    raise DrafterMismatch(
        f"{method} needs a drafter and no installed zoo has one for this target: {offer}"
        f'add "model" to the speculative config, or train one with `outrider train {method}`',
        param="model",
    )


def _length_for(config: SpeculativeConfig) -> int:
    """N as the drafter says it."""
    if config.model is None:
        raise _no_length(config.method)
    folder = model_folder(config.model)
    if (profile := read_profile(folder)) is not None:
        return profile.num_speculative_tokens
    raw = read_json(folder / "config.json")
    if (stated := stated_length(raw, str(folder))) is not None:
        return stated
    return _length_by_keys(config.method, raw, folder)


def _length_by_keys(method: str, raw: dict[str, Any], folder: Path) -> int:
    inner = raw.get("text_config")
    keys = ConfigKeys({**inner, **raw} if isinstance(inner, dict) else raw, str(folder), NESTED)
    for key in _METHODS[method].length_keys:
        if keys.get(key) is not None:
            return keys.count(key)
    raise _no_length(method, f", and {folder} does not say it")


def _no_length(method: str, why: str = "") -> ConfigError:
    return ConfigError(
        f"speculative config: num_speculative_tokens is missing{why}: add it, e.g. "
        f'{{"method": "{method}", "num_speculative_tokens": 4}}',
        param="num_speculative_tokens",
    )
