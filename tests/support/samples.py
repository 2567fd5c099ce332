"""The samples of a page, ``python`` and ``console``: they run in order, in one namespace, as a reader would run them.

They compile with ``compiler="eager"`` unless they name a compiler: the same graphs, without code generation.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fp8graph.ir.settings import Settings
from fp8graph.recipes import recipe as recipes

ROOT = Path(__file__).parents[2]
# A fence, with the comment before it and, of a sample, what it prints. Readers see no comment. A ``console`` fence is
# one command of fp8graph and what it prints.
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>(?:not run|slow)[^\n]*) -->\n)?"
    r"^```(?:python\n(?P<code>.*?)^```$"
    r"(?:\n+(?:<!-- (?P<loose>not compared[^\n]*) -->\n)?```(?:text|output)\n(?P<output>.*?)^```$)?"
    r"|console\n\$ fp8graph (?P<command>[^\n]*)\n(?P<printed>.*?)^```$)",
    re.MULTILINE | re.DOTALL,
)
CALL = "from fp8graph.cli import main\nmain({})\n"  # what a command runs
REASON = re.compile(r"(not run|slow|not compared): \w.{9,}")


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


SHOWN_BY = (2, 13)  # the torch whose output pages show, and later ones
AS_PAGES_SHOW = pytest.mark.skipif(torch_version() < SHOWN_BY, reason="pages show what torch prints from 2.13 on")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of a page."""

    page: Path
    section: str  # the last heading of the second level before it
    line: int  # of its first line of code, from 1
    code: str
    output: str | None  # what it prints, with "..." for any text; None: the page does not show it
    mark: str  # "not run: why", "slow: why", or ""
    loose: str  # "not compared: why", of an output that another machine may print otherwise, or ""

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    def can_run(self) -> bool:
        """Whether this torch is new enough for what the mark says: "slow: ... (from torch 2.13)"."""
        needs = re.search(r"from torch (\d+)\.(\d+)", self.mark)
        return needs is None or torch_version() >= (int(needs[1]), int(needs[2]))

    def run(self, namespace: dict[str, Any]) -> None:
        """Run it, and compare what it prints. Lines in a traceback are those of the page.

        Pages show what torch from 2.13 prints.
        """
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)
        if self.output is not None and not self.loose and torch_version() >= SHOWN_BY:
            found = printed.getvalue().rstrip()
            assert same_output(self.output, found), f"{self.place} prints\n{found}\nand the page shows\n{self.output}"


def same_output(wanted: str, found: str) -> bool:
    """Whether a program printed what a page shows, with "..." for any text; spaces at the end of lines do not count."""
    wanted, found = ("\n".join(map(str.rstrip, text.rstrip().splitlines())) + "\n" for text in (wanted, found))
    return doctest.OutputChecker().check_output(wanted, found, doctest.ELLIPSIS)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Files go to a folder of their own; registered recipes and process groups go with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "_NAMES", dict(recipes._NAMES))
    monkeypatch.setitem(cast(dict[str, Any], Settings.__init__.__kwdefaults__), "compiler", "eager")
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def name_of(page: Path) -> str:
    """The page's path in the repository: ``docs/report.md``."""
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without code."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def anchors(page: Path) -> Iterator[str]:
    """The anchors of a page's headings, as Git forges make them."""
    seen: Counter[str] = Counter()
    for heading in re.findall(r"(?m)^#+ +(.+?) *$", prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        yield slug if not seen[slug] else f"{slug}-{seen[slug]}"
        seen[slug] += 1


def without_a_reason(pages: list[Path]) -> list[str]:
    """The places of samples that are marked, or whose output is not compared, and do not say why."""
    marks = [
        (sample, mark) for page in pages for sample in samples(page) for mark in (sample.mark, sample.loose) if mark
    ]
    return [sample.place for sample, mark in marks if not REASON.fullmatch(mark)]


def slow_pages(pages: list[Path]) -> list[Path]:
    return [page for page in pages if any(sample.mark.startswith("slow") for sample in samples(page))]


def samples(page: Path) -> Iterator[Sample]:
    """The samples of ``page``, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        headings = re.findall(r"(?m)^## (.+)$", text[: match.start()])
        shown = "code" if match["code"] is not None else "command"
        yield Sample(
            page=page,
            section=headings[-1] if headings else "",
            line=text.count("\n", 0, match.start(shown)) + 1,
            code=match["code"] if shown == "code" else CALL.format(shlex.split(match["command"])),
            output=match["output"] if shown == "code" else match["printed"],
            mark=match["mark"] or "",
            loose=match["loose"] or "",
        )


def run(page: Path, preamble: str = "", *, section: str | None = None, slow: bool = False) -> None:
    """Run the samples of ``page``, or of a section of it after those before the first section, its set-up.

    With ``slow``, those that are marked so, too.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(preamble, f"<preamble of {page.name}>", "exec"), namespace)
    for sample in samples(page):
        if section is not None and sample.section not in ("", section):
            continue
        if not sample.mark or (slow and sample.mark.startswith("slow") and sample.can_run()):
            sample.run(namespace)
