"""Reading the config of a checkpoint: its fields, each of which must be known, and the regular expressions in it.

A config is a stranger's file, and Python's ``re`` tries one way to match after the other: "(a+)+!" takes for ever on
forty letters. Here all ways are followed at once, as the set of places in the name to which they lead, so that an
expression cannot choose how long it takes. A set is the bits of one number, so that a step costs the same from many
places. The only question is whether there is a match.

Expressions that libraries write consist of characters and their classes, groups, ``|``, ``* + ? {m,n}``, ``^ $ \\b``
and lookaround. Anything else is refused.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fp8graph.errors import CheckpointError

_LONGEST: Final = 1_000  # characters of one expression
_STEPS: Final = 10_000  # of one match; what libraries write takes less than a hundred
_ALL_STEPS: Final = 10_000_000  # of one config: eight seconds
_DEEPEST: Final = 20  # groups in groups
_PLAIN: Final = re.compile(r"[\w./-]*")  # "." as libraries write it: any character
_TOKEN: Final = re.compile(
    r"""(?P<open>\((?:\?(?::|=|!|<=|<!))?)
    |(?P<close>\))
    |(?P<either>\|)
    |(?P<repeat>[*+?]|\{\d{1,3}(?:,\d{0,3})?\})
    |(?P<edge>[\^$]|\\[bBAZ])
    |(?P<one>\[\^?\]?(?:\\.|[^\\\]])*\]|\\[dDwWsS]|\\[^0-9A-Za-z]|[^\\()|*+?\[{^$])""",
    re.VERBOSE | re.DOTALL,
)


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


def is_version_0(value: object) -> bool:
    return isinstance(value, str) and re.match(r"0\.\d+", value) is not None


class _Name:
    """One name, and how many steps were made on it. A place lies before a character, or at the end: bit 0 to length."""

    def __init__(self, text: str) -> None:
        self.text, self.steps = text, 0
        self.places = (2 << len(text)) - 1
        self.of: dict[str, int] = {}  # by character: the places before it
        for index, character in enumerate(text):
            self.of[character] = self.of.get(character, 0) | 1 << index

    def spend(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise _TooLong


Step = Callable[[_Name, int], int]  # the places to which a part of an expression leads from these places


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
        """The index of the first expression that matches the beginning of ``name``; None: none does.

        Raises:
            CheckpointError: it takes too long to find out.
        """
        on, last = _Name(name), "."
        found = [index for place, index in self._named(name) if self._then(on, 1 << place)]
        index = min(found, default=None)
        self._left -= len(self._names)
        for other, text, step in self._others:
            if index is not None and index < other:
                break
            on.steps, last = 0, text
            try:
                matches = step(on, 1)
            except _TooLong:
                raise self._refused(text, f"takes too long to match {name!r:.100}") from None
            self._left -= on.steps
            if matches:
                index = other
                break
        if self._left < 0:
            raise self._refused(last, "and the others take too long to match all names")
        return index

    def _named(self, name: str) -> Iterator[tuple[int, int]]:
        """The expressions without repetitions and choices that match, and where each match ends."""
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
            return _Parser(f"(?:{text}){then}").parsed()
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise self._refused(text, f"cannot be read ({error})") from None

    def _refused(self, text: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: the expression {text!r:.100} {why}.")


class _TooLong(Exception):
    pass


class _Parser:
    """A recursive descent over the tokens of an expression. Raises ValueError."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def parsed(self) -> Step:
        step = self._either()
        if self._at < len(self._text):
            raise ValueError(f"at {self._text[self._at :]!r:.40}")
        return step

    def _next(self, *kinds: str) -> str | None:
        """The next token, if it is of one of these kinds."""
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup not in kinds:
            return None
        self._at = found.end()
        return found[0]

    def _either(self) -> Step:
        steps = [self._sequence()]
        while self._next("either"):
            steps.append(self._sequence())
        return steps[0] if len(steps) == 1 else _either(steps)

    def _sequence(self) -> Step:
        steps: list[Step] = []
        while (step := self._part()) is not None:
            steps.append(step)
        return _sequence(steps)

    def _part(self) -> Step | None:
        if (opened := self._next("open")) is not None:
            self._depth += 1
            inner, kind = self._either() if self._depth <= _DEEPEST else None, opened[1:].lstrip("?:")
            if inner is None or self._next("close") is None:
                raise ValueError(f"at {self._text[self._at :]!r:.40}")
            self._depth -= 1
            once = _looked(inner, kind) if kind else inner
            often = _closed(once)
        elif (edge := self._next("edge")) is not None:
            once = _edge(edge)
            often = _closed(once)
        elif (token := self._next("one")) is not None:
            one = _One(token)
            once, often = one.once, one.often
        else:
            return None
        if (repeat := self._next("repeat")) is None:
            return once
        if (more := self._next("repeat")) not in (None, "?"):  # "*?" finds what "*" finds
            raise ValueError(f"{more!r} after {repeat!r}")
        return _repeated(once, repeat, often)


class _One:
    """One character. ``re`` says which."""

    def __init__(self, token: str) -> None:
        literal = token != "." if len(token) == 1 else token[0] == "\\" and token[1] not in "dDwWsS"
        self._literal = token[-1] if literal else None
        self._token, self._known = re.compile(token), dict[str, bool]()

    def places(self, name: _Name) -> int:
        """The places before such a character."""
        if self._literal is not None:
            return name.of.get(self._literal, 0)
        found = 0
        for character, places in name.of.items():
            if character not in self._known:
                self._known[character] = self._token.fullmatch(character) is not None
            if self._known[character]:
                found |= places
        return found

    def once(self, name: _Name, places: int) -> int:
        name.spend()
        return (places & self.places(name)) << 1

    def often(self, name: _Name, places: int) -> int:
        """Any number of them in one step: what is added to a run of ones carries to its end."""
        name.spend()
        here = self.places(name)
        return (((places & here) + here) ^ here) | places


def _sequence(steps: Sequence[Step]) -> Step:
    def step(name: _Name, places: int) -> int:
        for one in steps:
            if not places:
                break
            places = one(name, places)
        return places

    return step


def _either(steps: Sequence[Step]) -> Step:
    def step(name: _Name, places: int) -> int:
        return functools.reduce(operator.or_, (one(name, places) for one in steps))

    return step


def _repeated(once: Step, repeat: str, often: Step) -> Step:
    """``once`` as often as ``repeat`` says; ``often``: any number of it."""
    if repeat == "*":
        return often
    if repeat == "+":
        return _sequence([once, often])
    maybe = _either([once, lambda _, places: places])
    if repeat == "?":
        return maybe
    least, comma, most = repeat[1:-1].partition(",")
    if not comma:
        return _sequence([once] * int(least))
    return _sequence([*[once] * int(least), *([maybe] * (int(most) - int(least)) if most else [often])])


def _closed(once: Step) -> Step:
    """Any number of steps: on from each new place, until there is none."""

    def step(name: _Name, places: int) -> int:
        new = found = places
        while new:
            name.spend()
            new = once(name, new) & ~found
            found |= new
        return found

    return step


def _looked(inner: Step, kind: str) -> Step:
    """Lookaround: "=" and "!" ahead, "<=" and "<!" behind."""

    def step(name: _Name, places: int) -> int:
        if kind[0] == "<":
            found = inner(name, name.places)  # the ends of all matches, wherever they begin
        else:
            starts = [place for place in range(len(name.text) + 1) if places >> place & 1]
            found = sum(1 << place for place in starts if inner(name, 1 << place))
        return places & (found if kind[-1] == "=" else ~found)

    return step


def _edge(token: str) -> Step:
    edge = re.compile(token)

    def step(name: _Name, places: int) -> int:
        name.spend()
        starts = range(len(name.text) + 1)
        return sum(1 << place for place in starts if places >> place & 1 and edge.match(name.text, place))

    return step
