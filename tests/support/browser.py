"""A real browser without a window, for the report's page."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --log-level=1 --virtual-time-budget=20000"
).split()


class Page(HTMLParser):
    """A page as the browser has it: elements as (tag, attributes, text), in order."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = tag, {name: value or "" for name, value in attrs}, list[str]()
        self.elements.append(element)
        self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def texts(self, tag: str, name: str = "") -> list[str]:
        """The text of each element with this tag, and this class if one is given."""
        return [
            "".join(texts)
            for own, attributes, texts in self.elements
            if own == tag and (not name or name in attributes.get("class", "").split())
        ]

    def ready(self) -> float:
        """Milliseconds until the page had drawn everything."""
        (body,) = [attributes for tag, attributes, _ in self.elements if tag == "body" and "data-ready" in attributes]
        return float(body["data-ready"])


def opened(path: Path, fragment: str = "") -> Page:
    """The page in a browser, once it is drawn. Fails if it reported an error; skips where there is no browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium here")
    profile = path.parent / f"profile-{len(list(path.parent.iterdir()))}"
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", path.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr  # an error on the page
    return Page(done.stdout)
