"""What the formats have in common: a parsed config that says how each layer is stored, and that can be written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from fp8graph.checkpoints.layer_format import LayerFormat, Suffixes
from fp8graph.errors import CheckpointError


class Quantization(ABC):
    """The quantization config of a checkpoint, in the words of the library that owns the format.

    A subclass is the only statement of its format.
    """

    title: ClassVar[str]  # for people
    method: ClassVar[str]  # ``quant_method`` of config.json
    spellings: ClassVar[tuple[Suffixes, ...]]  # all that its layers may use

    @property
    @abstractmethod
    def ignore(self) -> tuple[str, ...]:
        """The layers that the config leaves in high precision, as it writes them."""

    @property
    def kv_cache(self) -> object | None:
        """What the config says of a quantized key-value cache."""
        return None

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Self:
        """Read a config.

        Raises:
            CheckpointError: a field, a value or a version is not known.
        """

    @classmethod
    @abstractmethod
    def of(cls, layers: Mapping[str, LayerFormat], ignore: Sequence[str]) -> Self:
        """The config for these layers and those that are left alone, by full names.

        Raises:
            CheckpointError: the format has no config that says this.
        """

    @abstractmethod
    def layer_formats(self, layer: str) -> tuple[LayerFormat, ...]:
        """How a linear layer of this name may be stored; empty if it is left in high precision."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""

    def files(self) -> dict[str, dict[str, Any]]:
        """Other JSON files that belong to a checkpoint."""
        return {}


class Fields:
    """The fields of a table in a config. Each is taken once; what is left at the end is not known.

    Args:
        where: names the table in errors.
    """

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, Mapping):
            raise CheckpointError(f"{where}: {table!r:.200} is no table of fields.")
        self._left, self.where = {str(name): value for name, value in table.items()}, where

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` if it is not there, or null."""
        value = self._left.pop(name, default)
        return default if value is None else value

    def one_of(self, name: str, known: Sequence[Any], default: Any = None) -> Any:
        """The value of a field that has few. A known value that is ``default`` may be left out."""
        value = self.take(name, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            raise self.unknown(name, value, f"Known: {', '.join(repr(one) for one in known)}.")
        return value

    def checked(self, name: str, known: Callable[[Any], bool], what: str, default: Any = None) -> Any:
        """The value of a field for which ``known`` holds; ``what`` says so in words."""
        value = self.take(name, default)
        if not known(value):
            raise self.unknown(name, value, f"It must be {what}.")
        return value

    def names(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """A list of names."""
        return tuple(self.checked(name, is_names, "a list of names", default))

    def unused(self, *names: str) -> None:
        """Take fields whose values have no meaning here."""
        for name in names:
            self._left.pop(name, None)

    def empty(self, *names: str) -> None:
        """Take fields that must be empty: what they ask for is not done."""
        for name in names:
            if value := self.take(name):
                raise self.unknown(name, value, "It must be empty.")

    def end(self) -> None:
        """
        Raises:
            CheckpointError: a field was not taken.
        """
        for name, value in self._left.items():
            raise self.unknown(name, value, "fp8graph does not know this field.")

    def unknown(self, name: str, value: object, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name:.200} is {value!r:.200}. {why}")


def is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(is_count(one) for one in value)
