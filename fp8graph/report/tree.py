"""A report as the tree of a model's layers: native FP8 is green, emulated yellow, high precision dim.

    LlamaForCausalLM
    ├── model.layers.* (2)
    │   ├── self_attn
    │   │   ├── q_proj  32 x 64 x 64  tensorwise
    ...
    └── lm_head  32 x 256 x 64  high precision [1]
    [1] output head: the loss reads its output

The shape is fprop's m x n x k. ``--table`` has a row per GEMM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from fp8graph.records import NATIVE_BY, GemmRecord, OtherRecord
from fp8graph.report import Report
from fp8graph.report.tables import any_layer, these_layers

_STYLES: Final = {"native": "green", "emulated": "yellow"}


@dataclass(kw_only=True)
class Node:
    """One part of the names of modules, with the sites that are there."""

    parts: dict[str, Node] = field(default_factory=dict[str, "Node"])
    sites: list[Text] = field(default_factory=list[Text])  # the text of each site of this module
    count: int = 0  # layers of one parent that go by this name: one for each number in place of its *


class Notes:
    """Reasons, each printed once, below the tree."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        """Return the text that stands in the tree for ``reason``."""
        return f" [{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        """Return the reasons, by their marks."""
        return [f"[{number}] {reason}" for reason, number in self.numbers.items()]


def print_tree(report: Report, title: str) -> None:
    """Print ``report``: the summary, the tree, its reasons, and the notes."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a file, or another program: lines as long as they are
        console.width = 1000
    notes = Notes()
    console.print(Text(report.summary(), style="bold"))
    console.print(tree(report, title, notes))
    for line in (*notes.lines(), *report.notes()):
        console.print(Text(line))


def tree(report: Report, title: str, notes: Notes) -> Tree:
    """Layers that differ only in their numbers are one branch, with how many they are."""
    root = Node()
    for site, modules in _sites(report.gemms):
        decisions = [(one.gemm, one.recipe or "-", one.execution, one.reason) for one in modules[0]]
        size = f"{modules[0][0].m} x {modules[0][0].n} x {modules[0][0].k}"
        _node(root, site, [module[0].fqn for module in modules]).sites.append(_phrases(size, decisions, notes))
    others: dict[tuple[type[OtherRecord], str], list[OtherRecord]] = {}
    for record in report.others:
        others.setdefault((type(record), any_layer(record.name)), []).append(record)
    for (_, site), records in others.items():
        decisions = [(one.direction, one.recipe or "-", one.execution, one.reason) for one in records]
        names = [record.fqn for record in records]
        _node(root, site, names).sites.append(_phrases(records[0].title, decisions, notes))
    top = Tree(Text(title, style="bold"))
    _grow(top, root)
    return top


def _sites(gemms: Iterable[GemmRecord]) -> list[tuple[str, list[list[GemmRecord]]]]:
    """By name, with ``*`` for numbers: the GEMMs of each module. Modules that differ in more are named one by one."""
    modules: dict[str, list[GemmRecord]] = {}
    for gemm in gemms:
        modules.setdefault(gemm.name, []).append(gemm)
    kinds_of: dict[str, dict[Any, list[list[GemmRecord]]]] = {}
    for name, rows in modules.items():
        kind = tuple((g.op, g.gemm, g.m, g.n, g.k, g.recipe, g.execution, g.reason) for g in rows)
        kinds_of.setdefault(any_layer(name) or "(root)", {}).setdefault(kind, []).append(rows)
    return [
        (site if len(kinds) == 1 else these_layers(site, [rows[0].name for rows in same]), same)
        for site, kinds in kinds_of.items()
        for same in kinds.values()
    ]


def _node(root: Node, site: str, names: Iterable[str]) -> Node:
    """Return the node of ``site``; ``names`` are those of all modules that it stands for."""
    node = root
    split = [name.split(".") for name in names]
    for depth, part in enumerate(site.split(".")):
        node = node.parts.setdefault(part, Node())
        node.count = max(node.count, len({"".join(name[depth : depth + 1]) for name in split}))
    return node


def _grow(branch: Tree, node: Node) -> None:
    width = max(map(len, node.parts), default=0)
    for name, part in node.parts.items():
        label, below = name, part
        while len(below.parts) == 1 and not below.sites and "*" not in label:  # model.layers.* is one branch
            ((step, below),) = below.parts.items()
            label = f"{label}.{step}"
        text = Text(label)
        if "*" in label and below.count > 1:
            text.append(f" ({below.count})", style="bold")
        if len(below.sites) == 1:
            text = Text.assemble(text, " " * max(2, width + 2 - len(text)), below.sites[0])
        grown = branch.add(text)
        for site in below.sites if len(below.sites) > 1 else ():
            grown.add(site)
        _grow(grown, below)


def _phrases(what: str, decisions: Iterable[tuple[str, str, str, str]], notes: Notes) -> Text:
    """``what`` and its decisions, in one phrase if they are equal for all GEMMs (or directions)."""
    phrases: dict[tuple[str, str], list[str]] = {}  # the words and their style -> the GEMMs or directions
    for which, recipe, execution, reason in decisions:
        words = {"native": recipe, "emulated": f"{recipe}, emulated"}.get(execution, execution)
        evidence = [part for part in reason.split("; ") if part.startswith(NATIVE_BY)]
        words += notes.mark(reason) if execution != "native" else "".join(map(notes.mark, evidence))
        these = phrases.setdefault((words, _STYLES.get(execution, "dim")), [])
        these += [which] if which not in these else []
    text = Text.assemble((what, "dim"))
    for (words, style), these in phrases.items():
        text.append(f"  {', '.join(these)} " if len(phrases) > 1 else "  ")
        text.append(words, style=style)
    return text
