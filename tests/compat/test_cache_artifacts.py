"""Cache artifacts: what they may write."""

from __future__ import annotations

import pytest
from torch.compiler._cache import CacheArtifactFactory

from fp8graph.backend import stored
from fp8graph.compat import inductor


@pytest.mark.parametrize(("key", "written"), [("12ab", ["12ab.json"]), ("../12ab", []), ("", [])])
def test_only_hashes_become_files(
    key: str, written: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(inductor, "inductor_cache_folder", lambda: folder)
    CacheArtifactFactory.create("fp8graph", key, b"{}").populate_cache()
    assert [file.name for file in folder.rglob("*.json")] == written


def test_a_damaged_artifact_is_traced_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(inductor, "inductor_cache_folder", lambda: folder)
    CacheArtifactFactory.create("fp8graph", "12ab", b"\x80not JSON").populate_cache()
    assert stored.read("12ab") is None
