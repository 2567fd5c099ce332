"""Reading the config of a checkpoint: its fields, each of which must be known, and the regular expressions in it.

A config is a stranger's file. Its expressions are matched in a time that they cannot choose: see
:mod:`fp8graph.recipes.expressions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fp8graph.errors import CheckpointError
from fp8graph.recipes.expressions import Name, Step, TooLong, parsed

_LONGEST: Final = 1_000  # characters of one expression
_STEPS: Final = 10_000  # of one match; what libraries write takes less than a hundred
_ALL_STEPS: Final = 10_000_000  # of one config: eight seconds
_PLAIN: Final = re.compile(r"[\w./-]*")  # "." as libraries write it: any character


class Fields:
    """The fields of a table in a config. Each is taken once; what is left at the end is not known.

    Args:
        where: names the table in errors.
    """

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, Mapping):
            raise CheckpointError(f"{where}: {table!r:.200} is not a table of fields.")
        self._left, self.where = {str(name): value for name, value in table.items()}, where

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a field; ``default`` if it is not there, or null."""
        value = self._left.pop(name, default)
        return default if value is None else value

    def one_of(self, name: str, choices: Sequence[Any], default: Any = None) -> Any:
        """Return the value of a field that has few. A known value that is ``default`` may be left out."""
        value = self.take(name, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in choices):
            raise self.unknown(name, value, f"Known: {', '.join(repr(one) for one in choices)}.")
        return value

    def checked(self, name: str, condition: Callable[[Any], bool], what: str, default: Any = None) -> Any:
        """Return the value of a field for which ``condition`` holds; ``what`` says so in words."""
        value = self.take(name, default)
        if not condition(value):
            raise self.unknown(name, value, f"It must be {what}.")
        return value

    def names(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a list of names."""
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


def is_version_0(value: object) -> bool:
    return isinstance(value, str) and re.match(r"0\.\d+", value) is not None


class Expressions:
    """The expressions of one field of a config, each of which must match the beginning of a name.

    Args:
        texts: the expressions.
        where: names the field in errors.
        then: what must follow each of them.

    Raises:
        CheckpointError: an expression is malformed, too long, or of a form that is not known.
    """

    def __init__(self, texts: Iterable[str], where: str, then: str = "") -> None:
        self._where, self._left = where, _ALL_STEPS
        numbered = list(enumerate(texts))
        for _, text in numbered:
            if len(text) > _LONGEST:
                raise self._refused(text, f"has {len(text)} characters")
        self._others = [(i, text, self._parsed(text, then)) for i, text in numbered if not _PLAIN.fullmatch(text)]
        # names: found by their characters, apart from those that "." stands for
        self._names: dict[tuple[int, ...], dict[str, int]] = {}
        self._then = self._parsed("", then)
        for index, text in reversed(numbered):
            if _PLAIN.fullmatch(text):
                dots = (len(text), *(place for place, character in enumerate(text) if character == "."))
                self._names.setdefault(dots, {})[text] = index

    def first(self, name: str) -> int | None:
        """Return the index of the first expression that matches the beginning of ``name``; None: none does.

        Raises:
            CheckpointError: it takes too long to find out.
        """
        on, last = Name(name, _STEPS), "."
        indices = [index for place, index in self._named(name) if self._then(on, 1 << place)]
        index = min(indices, default=None)
        self._left -= len(self._names)
        for other, text, step in self._others:
            if index is not None and index < other:
                break
            on.steps, last = 0, text
            try:
                matches = step(on, 1)
            except TooLong:
                raise self._refused(text, f"takes too long to match {name!r:.100}") from None
            self._left -= on.steps
            if matches:
                index = other
                break
        if self._left < 0:
            raise self._refused(last, "and the others take too long to match all names")
        return index

    def _named(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the end of the match and the index of every literal expression that matches the name."""
        for (length, *dots), texts in self._names.items():
            characters = [*name[:length]]
            if len(characters) == length:
                for place in dots:
                    characters[place] = "."
                if (index := texts.get("".join(characters))) is not None:
                    yield length, index

    def _parsed(self, text: str, then: str) -> Step:
        try:
            re.compile(text)
            return parsed(f"(?:{text}){then}").step
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise self._refused(text, f"cannot be read ({error})") from None

    def _refused(self, text: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: the expression {text!r:.100} {why}.")
