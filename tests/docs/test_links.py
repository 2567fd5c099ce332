"""Every link of the pages leads somewhere: to a file, to a heading of it, or out, in a form that a browser takes.

The site's build checks what is in the site. This needs no Sphinx, and sees README.md, too. Nothing is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from samples import ROOT, anchors, name_of, prose

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "examples" / "README.md",
        ROOT / "notebooks" / "README.md",
        ROOT / "benchmarks" / "results" / "README.md",
    ]
)
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)?)\)")


def broken(page: Path) -> Iterator[str]:
    """The faults in the links of ``page``."""
    for link in LINK.findall(prose(page)):
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
                yield f"{link}: an address begins with https:// and a host"
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            yield f"{link}: no such file"
        elif target.is_dir() and page != ROOT / "README.md":
            yield f"{link}: a folder, which the site does not show; name its README.md"
        elif parts.fragment and (target.suffix != ".md" or parts.fragment not in anchors(target)):
            yield f"{link}: no such heading"


def test_links() -> None:
    assert [(name_of(page), link) for page in PAGES for link in broken(page)] == []


def test_broken_links_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "report.md"
    text = "# A `heading`, twice\n# A heading, twice\n"
    text += "[a](#what) [b](no.md) [c](http://x.org) `[d](y)` [e](#a-heading-twice)"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert list(anchors(page)) == ["a-heading-twice", "a-heading-twice-1"]
    assert [line.split(": ")[0] for line in broken(page)] == ["#what", "no.md", "http://x.org"]
