"""Matching regular expressions of strangers, in a time that they cannot choose.

Python's ``re`` tries one way to match after the other: "(a+)+!" takes for ever on forty letters. Here all ways are
followed at once, as the set of places in the name to which they lead. A set is the bits of one number, so that a step
costs the same from many places. The only question is whether there is a match.

The parser counts, too: how many steps that takes on a name, at most, and how many ``re`` tries, at most. Rules whose
tries are few are matched by ``re``, which is fast, and all others here. A file's expression that neither bounds is
refused when the file is read.

Expressions consist of characters and their classes, groups, ``|``, ``* + ? {m,n}``, ``^ $ \\b`` and lookaround.
Anything else cannot be read.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

LONGEST_NAME: Final = 256  # characters of a name for which steps and tries are counted
_MOST_STEPS: Final = 100_000  # of one match: a tenth of a second
_MOST_TRIES: Final = 200_000  # of ``re``, for one match: a hundredth of a second
_TRIES_PER_STEP: Final = 20
_MANY: Final = 10**12  # from here on all counts are this one
_DEEPEST: Final = 20  # groups in groups
_FLAGS: Final = re.compile(r"\A(?:\(\?[aimsux]+\))+")  # at the beginning: they are in the expression's ``flags``, too
_BLANK: Final = re.compile(r"(?:\s|#[^\n]*)*")  # between the tokens of an expression with the flag "x"
_TOKEN: Final = re.compile(
    r"""(?P<open>\((?:\?(?::|=|!|<=|<!|P<[A-Za-z_]\w*>))?)
    |(?P<close>\))
    |(?P<either>\|)
    |(?P<repeat>[*+?]|\{\d{1,3}(?:,\d{0,3})?\})
    |(?P<edge>[\^$]|\\[bBAZ])
    |(?P<one>\[\^?\]?(?:\\.|[^\\\]])*\]|\\[dDwWsS]|\\[^0-9A-Za-z]|[^\\()|*+?\[{^$])""",
    re.VERBOSE | re.DOTALL,
)


class Name:
    """One name, and how many steps were made on it. A place lies before a character, or at the end: bit 0 to length.

    Args:
        text: the name.
        most: so many steps are made, and no more.
    """

    def __init__(self, text: str, most: int) -> None:
        self.text, self.steps, self._most = text, 0, most
        self.places = (2 << len(text)) - 1
        self.of: dict[str, int] = {}  # by character: the places before it
        for index, character in enumerate(text):
            self.of[character] = self.of.get(character, 0) | 1 << index

    def spend(self) -> None:
        self.steps += 1
        if self.steps > self._most:
            raise TooLong


Step = Callable[[Name, int], int]  # the places to which a part of an expression leads from these places


class TooLong(Exception):
    """More steps are needed than may be made."""


class Part(NamedTuple):
    """A part of an expression, and its cost on a name of ``LONGEST_NAME`` characters, at most.

    ``steps``: those of ``step``. ``tries``: how many characters ``re`` looks at from one place on, in all ways; and
    ``ways``: how many ways lead on.
    """

    step: Step
    steps: int
    tries: int
    ways: int


@functools.lru_cache(1 << 15)
def _matcher(expression: re.Pattern[str]) -> tuple[Part | None, str]:
    """``expression`` as it is matched without ``re``, or None and the reason why it cannot be."""
    letters = (("i", re.I), ("s", re.S), ("m", re.M), ("x", re.X), ("a", re.A))
    flags = "".join(letter for letter, flag in letters if expression.flags & flag)
    try:
        return parsed(_FLAGS.sub("", expression.pattern, count=1), flags), ""
    except ValueError as error:
        return None, f"cannot be read ({error})"


def _is_fast(part: Part) -> bool:
    """Return whether ``re`` matches it, since it tries few ways."""
    return part.tries + part.ways <= _MOST_TRIES


def cost(expression: re.Pattern[str]) -> int:
    """Return the steps of a match with a name of ``LONGEST_NAME`` characters, at most.

    Raises:
        ValueError: they cannot be bounded, or are too many. The message says why, as what the expression does.
    """
    part, why = _matcher(expression)
    if part is None:
        raise ValueError(why)
    if _is_fast(part):
        return 1 + part.tries // _TRIES_PER_STEP
    if part.steps > _MOST_STEPS:
        many = f"{part.steps:.0e}" if part.steps < _MANY else "no bounded number of"
        raise ValueError(f"takes {many} steps to match {LONGEST_NAME} characters, and {_MOST_STEPS} are made")
    return part.steps


def matches(expression: re.Pattern[str], name: str) -> bool:
    """Return whether ``expression`` matches the whole ``name``: as ``fullmatch`` says, and in bounded time if ``cost``
    is.

    Raises:
        ValueError: more steps are needed than may be made. It can be a longer name only.
    """
    part, _ = _matcher(expression)
    if part is None or (_is_fast(part) and len(name) <= LONGEST_NAME) or part.steps > _MOST_STEPS:
        return expression.fullmatch(name) is not None  # of the last, ``cost`` is not bounded
    try:
        return bool(part.step(Name(name, _MOST_STEPS), 1) >> len(name) & 1)
    except TooLong:
        raise ValueError(f"takes too long to match {name!r:.100}, a name of {len(name)} characters") from None


def parsed(text: str, flags: str = "") -> Part:
    """Read an expression.

    ``flags``: letters of "imsxa", as ``re`` has them.

    Raises:
        ValueError: it is malformed, or of a form that is not known.
    """
    return _ExpressionParser(text, flags).parsed()


class _ExpressionParser:
    """A recursive descent over the tokens of an expression. Raises ValueError."""

    def __init__(self, text: str, flags: str) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._verbose = "x" in flags
        self._ahead = self._look()
        self._flags = functools.reduce(operator.or_, (getattr(re, one.upper()) for one in flags if one != "x"), 0)

    def parsed(self) -> Part:
        part = self._either()
        if self._at < len(self._text):
            raise ValueError(f"at {self._text[self._at :]!r:.40}")
        return part

    def _next(self, *kinds: str) -> str | None:
        """Return the next token, if it is of one of these kinds."""
        token = self._ahead
        if token is None or token.lastgroup not in kinds:
            return None
        self._at = token.end()
        self._ahead = self._look()
        return token[0]

    def _look(self) -> re.Match[str] | None:
        if self._verbose:
            self._at = cast(re.Match[str], _BLANK.match(self._text, self._at)).end()
        return _TOKEN.match(self._text, self._at)

    def _either(self) -> Part:
        parts = [self._sequence()]
        while self._next("either"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _either(parts)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while (part := self._part()) is not None:
            parts.append(part)
        return _sequence(parts)

    def _part(self) -> Part | None:
        if (opened := self._next("open")) is not None:
            self._depth += 1
            kind = "" if opened.startswith("(?P") else opened[1:].lstrip("?:")
            inner = self._either() if self._depth <= _DEEPEST else None
            if inner is None or self._next("close") is None:
                raise ValueError(f"at {self._text[self._at :]!r:.40}")
            self._depth -= 1
            once = _looked(inner, kind) if kind else inner
            often = _closed(once)
        elif (edge := self._next("edge")) is not None:
            once = _edge(edge, self._flags)
            often = _closed(once)
        elif (token := self._next("one")) is not None:
            one = _one(token, self._flags)
            once = Part(one.once, steps=1, tries=1, ways=1)
            often = Part(one.often, steps=1, tries=LONGEST_NAME + 1, ways=LONGEST_NAME + 1)
        else:
            return None
        if (repeat := self._next("repeat")) is None:
            return once
        if (more := self._next("repeat")) not in (None, "?"):  # "*?" finds what "*" finds
            raise ValueError(f"{more!r} after {repeat!r}")
        return _repeated(once, repeat, often)


@functools.lru_cache(1 << 10)
def _one(token: str, flags: int) -> _One:
    return _One(token, flags)


class _One:
    """One character. ``re`` says which."""

    def __init__(self, token: str, flags: int) -> None:
        literal = token != "." if len(token) == 1 else token[0] == "\\" and token[1] not in "dDwWsS"
        self._literal = token[-1] if literal and not flags & re.IGNORECASE else None
        self._token, self._matches = re.compile(token, flags), dict[str, bool]()

    def places(self, name: Name) -> int:
        """Return the places before such a character."""
        if self._literal is not None:
            return name.of.get(self._literal, 0)
        union = 0
        for character, places in name.of.items():
            if character not in self._matches:
                self._matches[character] = self._token.fullmatch(character) is not None
            if self._matches[character]:
                union |= places
        return union

    def once(self, name: Name, places: int) -> int:
        name.spend()
        return (places & self.places(name)) << 1

    def often(self, name: Name, places: int) -> int:
        """Any number of them in one step: what is added to a run of ones carries to its end."""
        name.spend()
        here = self.places(name)
        return (((places & here) + here) ^ here) | places


def _sequence(parts: Sequence[Part]) -> Part:
    steps = [part.step for part in parts]

    def step(name: Name, places: int) -> int:
        name.spend()  # parts may be empty, and many
        for one in steps:
            if not places:
                break
            places = one(name, places)
        return places

    tries, ways = 1, 1
    for part in parts:  # each way on tries all of the next part
        tries, ways = min(tries + ways * part.tries, _MANY), min(ways * part.ways, _MANY)
    return Part(step, min(1 + sum(part.steps for part in parts), _MANY), tries, ways)


def _either(parts: Sequence[Part]) -> Part:
    steps = [part.step for part in parts]

    def step(name: Name, places: int) -> int:
        name.spend()
        return functools.reduce(operator.or_, (one(name, places) for one in steps))

    counts = (
        min(1 + sum(counted), _MANY) for counted in zip(*((p.steps, p.tries, p.ways) for p in parts), strict=True)
    )
    return Part(step, *counts)


def _stay(_name: Name, places: int) -> int:
    return places


_NOTHING: Final = Part(_stay, steps=0, tries=0, ways=1)


def _repeated(once: Part, repeat: str, often: Part) -> Part:
    """``once`` as often as ``repeat`` says; ``often``: any number of it."""
    if repeat == "*":
        return often
    if repeat == "+":
        return _sequence([once, often])
    maybe = _either([once, _NOTHING])
    if repeat == "?":
        return maybe
    least, comma, most = repeat[1:-1].partition(",")
    if not comma:
        return _sequence([once] * int(least))
    return _sequence([*[once] * int(least), *([maybe] * (int(most) - int(least)) if most else [often])])


def _closed(once: Part) -> Part:
    """Any number of steps: on from each new place, until there is none."""

    def step(name: Name, places: int) -> int:
        new = so_far = places
        while new:
            name.spend()
            new = once.step(name, new) & ~so_far
            so_far |= new
        return so_far

    often = LONGEST_NAME + 1
    steps = min((often + 1) * (1 + once.steps), _MANY)
    if once.ways > 1:  # as many to the power of the length
        return Part(step, steps, _MANY, _MANY)
    return Part(step, steps, min(1 + often * once.tries, _MANY), often)


def _looked(inner: Part, kind: str) -> Part:
    """Lookaround: "=" and "!" ahead, "<=" and "<!" behind."""

    def step(name: Name, places: int) -> int:
        if kind[0] == "<":
            hits = inner.step(name, name.places)  # the ends of all matches, wherever they begin
        else:
            starts = [place for place in range(len(name.text) + 1) if places >> place & 1]
            hits = sum(1 << place for place in starts if inner.step(name, 1 << place))
        return places & (hits if kind[-1] == "=" else ~hits)

    starts = 1 if kind[0] == "<" else LONGEST_NAME + 1
    return Part(step, min(1 + starts * inner.steps, _MANY), inner.tries, 1)


def _edge(token: str, flags: int) -> Part:
    edge = re.compile(token, flags)

    def step(name: Name, places: int) -> int:
        name.spend()
        starts = range(len(name.text) + 1)
        return sum(1 << place for place in starts if places >> place & 1 and edge.match(name.text, place))

    return Part(step, 1, 1, 1)
