"""Typed reads of a drafter's config.json, whichever of the published layouts it has, and of what describes its layers.

Flat files keep every key at the top, with a table of the method's own beside them; the Speculators format keeps the
layers' keys in `transformer_layer_config`. What the keys mean is the method's business. Sources: vLLM 0.32
`transformers_utils/configs/speculators`, and the published files themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import LoadError
from outrider.models.arch import ModelConfig, parse_config

_INNER = "transformer_layer_config"
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")


@dataclass(frozen=True)
class ConfigKeys:
    """Typed reads over a checkpoint's config: a key counts where it is first found, nested table, top, inner table.

    `nested` names the method's own table.
    """

    raw: Mapping[str, Any]
    source: str
    nested: str

    @property
    def is_speculators(self) -> bool:
        """Whether the file is in the Speculators format."""
        return isinstance(self.raw.get(_INNER), Mapping)

    @property
    def layer_keys(self) -> Mapping[str, Any]:
        """The table that describes the draft layers."""
        inner = self.raw.get(_INNER)
        return inner if isinstance(inner, Mapping) else self.raw

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names of the classes that the file was written for."""
        names = self.raw.get("architectures")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def get(self, key: str) -> Any:
        """The key's value, None where it is absent or null everywhere."""
        for table in (self.raw.get(self.nested), self.raw, self.layer_keys):
            if isinstance(table, Mapping) and table.get(key) is not None:
                return table[key]
        return None

    def flag(self, key: str, default: bool) -> bool:
        """A true or false. Raises LoadError naming the key."""
        value = self.get(key)
        if value not in (None, True, False):
            raise self.error(f"{key} is {value!r}, expected true or false")
        return default if value is None else bool(value)

    def optional_flag(self, key: str) -> bool | None:
        """The same, None where the key is absent."""
        return None if self.get(key) is None else self.flag(key, False)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number. Raises LoadError naming the key."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} is {value!r}, expected a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0. Raises LoadError naming the key."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"{key} is {value!r}, expected a number above 0")
        return float(value)

    def expect_kind(self, kind: str) -> None:
        """Refuse a Speculators file of another kind. Raises LoadError."""
        given = self.raw.get("speculators_model_type", kind)
        if given != kind:
            raise self.error(f"speculators_model_type is {given!r}, expected {kind!r} (parallel drafting is not there)")

    def error(self, what: str) -> LoadError:
        """The error for this file."""
        return LoadError(f"{self.source}: config.json: {what}")


def layer_config(keys: ConfigKeys, family: object, families: Sequence[str]) -> ModelConfig:
    """The draft layers' shape, of a family among `families`, without their windows. Raises LoadError naming the key."""
    if family not in families:
        raise keys.error(f"the draft layers are of model_type {family!r}, expected {' or '.join(families)}")
    # Windows differ from layer to layer here, which the target's own reader refuses; sliding_layers reads them.
    table = {key: value for key, value in keys.layer_keys.items() if key not in _WINDOW_KEYS}
    return parse_config(table | {"model_type": family}, {}, source=keys.source)


def sliding_layers(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Which of the draft layers have a sliding window. Raises LoadError naming the key."""
    kinds = keys.get("layer_types")
    if kinds is None:
        # Files older than layer_types slide from max_window_layers on, if at all.
        slides = keys.flag("use_sliding_window", False) and keys.get("sliding_window") is not None
        first = keys.count("max_window_layers", 28, least=0) if slides else num_layers
        return [index >= first for index in range(num_layers)]
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise keys.error(f"layer_types is {kinds!r}, expected {num_layers} entries of {', '.join(known)}")
    return [known[kind] for kind in kinds]
