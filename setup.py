"""The list of packages, and the text that a package index shows: README.md, whose relative links lead nowhere there.

All else: pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\[\]]+)\]\((?!https?:|#|mailto:)([^()\s]+)\)")
# Packages that lie beside fp8graph/. In a checkout it has links to them, in a source distribution none.
ELSEWHERE = {f"fp8graph.{folder}": folder for folder in ("passes", "models")}
NOTE = "The files that this text names are in the repository, and in the source distribution."


def packages() -> list[str]:
    """The names of all packages: every folder with an ``__init__.py``."""
    links = (pattern for name in ELSEWHERE for pattern in (name, f"{name}.*"))
    found = find_packages(str(ROOT), include=["fp8graph", "fp8graph.*"], exclude=[*links])
    beside = find_packages(
        str(ROOT), include=[pattern for each in ELSEWHERE.values() for pattern in (each, f"{each}.*")]
    )
    return sorted([*found, *(f"fp8graph.{name}" for name in beside)])


def long_description(readme: str, source: str | None) -> str:
    """``readme`` for a page that is not beside the files that it links to.

    Args:
        readme: Markdown.
        source: the address under which a Git forge shows the files of this version, without a slash at the end. Links
            then lead there. None, if there is none: links become their text, pictures go, and a note says where the
            files are.
    """

    def elsewhere(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if source is not None:
            return f"{picture}[{text}]({source}/{path}{'?raw=true' if picture else ''})"
        return "" if picture else text

    text = LINK.sub(elsewhere, re.sub(r"(?m)^<!--.*?-->\n", "", readme))
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text if source is not None else f"{text.rstrip()}\n\n{NOTE}\n"


def source_address() -> str | None:
    """Where a forge shows the files: made of ``Repository`` in ``[project.urls]``, once there is one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    found = re.search(r'__version__\b.*= "(.+)"', (ROOT / "fp8graph" / "version.py").read_text(encoding="utf-8"))
    return None if repository is None or found is None else f"{repository.rstrip('/')}/blob/v{found[1]}"


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        packages=packages(),
        package_dir=ELSEWHERE,
        long_description=long_description(readme, source_address()),
        long_description_content_type="text/markdown",
    )
