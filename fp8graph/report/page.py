"""The report's page: one HTML file with its data, its code and its libraries inside. It needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

_SCRIPTS: Final = ("base", "overview", "tables", "model", "drawing", "details", "kernels", "stages", "charts", "page")
_FOLDER: Final = resources.files("fp8graph.report")


def page(data: Mapping[str, Any]) -> str:
    """The page that shows ``data``, which is from :func:`fp8graph.report.page_data.page_data`."""
    parts = {
        "style": _text("page/page.css"),
        "libraries": "\n".join(_libraries(charts=data["statistics"] is not None)),
        "data": in_script(json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))),
        "script": "\n".join(_text(f"page/{name}.js") for name in _SCRIPTS),
    }
    before, *pieces = _text("page/page.html").split("<!--")
    text = [before]
    for piece in pieces:
        name, _, more = piece.partition("-->")
        text += [parts[name], more]
    return "".join(text)


def in_script(text: str) -> str:
    """JSON that can stand inside a script element: no tag of a layer's name ends it or opens a comment."""
    return text.replace("<", "\\u003c")


def _libraries(*, charts: bool) -> Iterator[str]:
    for name in ("dagre", "echarts") if charts else ("dagre",):
        lines = _text(f"vendor/{name}/{name}.min.js").splitlines()
        source = "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL"))
        notice = _text(f"vendor/{name}/LICENSE" if name == "dagre" else f"vendor/{name}/NOTICE")
        yield f"<script>\n/*! {name}\n{notice.replace('*/', '* /')}\n*/\n{source}\n</script>"


def _text(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and value - value != 0.0:
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
