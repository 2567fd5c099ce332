"""Identical layers of a graph's text, of which one is kept: 126 layers take the room of one.

    add: bf16[8] = aten.add.Tensor(x, y)        # model.layers.0   ->   as it is
    add_1: bf16[8] = aten.add.Tensor(add, z)    # model.layers.1   ->   (left out: it reads as model.layers.0)

A layer is what lies under one number in a module's name. Two layers are identical if their lines read alike in all
stages, once nodes are numbered in the order in which each layer makes them. The nodes of other layers count as alike,
those outside of all layers do not: layers that read two different masks stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fp8graph.records import Origin
from fp8graph.report.tables import any_layer

_LAYER: Final = re.compile(r"(?:[^\s,]*?\.)??\d+(?=\.|$)")  # "model.layers.0" of "model.layers.0.mlp.up"
_NAME: Final = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?![\w=(.])")


@dataclass(frozen=True, kw_only=True)
class Folded:
    """The stages of one graph without the layers that are like others."""

    stages: Mapping[str, Sequence[str]]  # lines
    alike: Mapping[str, Sequence[str]]  # a layer that is kept -> those that read alike


def folded(stages: Mapping[str, str], origins: Mapping[str, Origin]) -> Folded:
    """The lines of each stage; in place of the lines of left out layers, one line says how many there were."""
    split = {stage: text.split("\n") for stage, text in stages.items()}
    layers = {name: layer for name, origin in origins.items() if (layer := layer_of(origin.module))}
    alike = _alike(_readings(split.values(), layers))
    left_out = {layer: kept for kept, others in alike.items() for layer in others}
    return Folded(
        stages={stage: list(_without(lines, layers, left_out)) for stage, lines in split.items()}, alike=alike
    )


def layer_of(module: str) -> str:
    """The name of the layer that a module belongs to; "" if no number is in its name."""
    match = _LAYER.match(module)
    return match[0] if match else ""


def name_of(line: str) -> str:
    """The node that a line of a graph's text makes; "" for a comment, or what the graph returns."""
    name, colon, _ = line.partition(": ")
    return name if colon and name.isidentifier() else ""


def _readings(stages: Iterable[Sequence[str]], layers: Mapping[str, str]) -> dict[str, list[str]]:
    """By layer: its lines in all stages, with nodes in place of names."""
    numbers: dict[str, int] = {}  # of a node, among those of its layer
    counts: dict[str, int] = {}
    known: dict[str, str] = {}  # line -> its reading
    readings: dict[str, list[str]] = {}
    for lines in stages:
        for line in lines:
            name = name_of(line)
            layer = layers.get(name)
            if layer is None:
                continue
            if name not in numbers:
                numbers[name] = counts[layer] = counts.get(layer, -1) + 1
            reading = known.get(line)
            if reading is None:
                reading = known[line] = _reading(line, layer, layers, numbers)
            readings.setdefault(layer, []).append(reading)
        for reading in readings.values():
            reading.append("")
    return readings


def _reading(line: str, layer: str, layers: Mapping[str, str], numbers: Mapping[str, int]) -> str:
    def reading(match: re.Match[str]) -> str:
        name = match[0]
        if layers.get(name) == layer and name in numbers:
            return f"%{numbers[name]}"
        return "%" if name in layers else name

    text, hash_, module = line.partition("  # ")
    return _NAME.sub(reading, text) + hash_ + module.removeprefix(layer)


def _alike(readings: Mapping[str, list[str]]) -> dict[str, list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer, lines in readings.items():
        if not any(" = " in line for line in lines):
            continue  # inputs alone: the second argument is no layer like the first
        groups.setdefault((any_layer(f"{layer}."), *lines), []).append(layer)
    return {first: others for first, *others in groups.values() if others}


def _without(lines: Iterable[str], layers: Mapping[str, str], left_out: Mapping[str, str]) -> Iterator[str]:
    gone: dict[str, set[str]] = {}  # layer that is kept -> those of it that were left out here
    number = 0

    def said() -> Iterator[str]:
        nonlocal number
        if number:
            like = "; ".join(f"{len(those)} layer{'s' * (len(those) > 1)} like {kept}" for kept, those in gone.items())
            yield f"# {number} lines of {like}"
        gone.clear()
        number = 0

    for line in lines:
        layer = layers.get(name_of(line), "")
        if layer in left_out:
            gone.setdefault(left_out[layer], set()).add(layer)
            number += 1
            continue
        yield from said()
        yield _shorter(line, layers, left_out) if line.startswith("return ") else line
    yield from said()


def _shorter(line: str, layers: Mapping[str, str], left_out: Mapping[str, str]) -> str:
    """The line that returns, without the results of layers that were left out."""
    results = line.removeprefix("return ").split(", ")
    kept = [name for name in results if layers.get(name, "") not in left_out]
    gone = len(results) - len(kept)
    return f"return {', '.join(kept)}" + (f"  # and {gone} more, of layers that were left out" if gone else "")
