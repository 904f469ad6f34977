"""What would stop the presentation is found before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpdist.bench.plot import with_suffix
from mpdist.bench.present import require
from mpdist.errors import Unavailable, UsageError


def test_what_can_be_presented_passes_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("kept\n")
    require(["barrier", "all_reduce"], str(tmp_path / "new.jsonl"), str(tmp_path / "new.png"))
    require(["barrier"], str(tmp_path / "old.jsonl"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.jsonl"]
    assert (tmp_path / "old.jsonl").read_text() == "kept\n"


def test_link_to_a_file_that_is_not_there_yet_is_kept(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("new.jsonl")
    require(["barrier"], str(link), None)
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize(("json", "plot"), [("gone/x.jsonl", None), (None, "gone/x.png"), (".", None)])
def test_file_that_cannot_be_written_is_refused(json: str | None, plot: str | None, tmp_path: Path) -> None:
    paths = [path and str(tmp_path / path) for path in (json, plot)]
    with pytest.raises(UsageError, match=r"can't be written: (No such file|Is a directory)"):
        require(["all_reduce"], *paths)


def test_barrier_alone_is_no_plot(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no size"):
        require(["barrier"], None, str(tmp_path / "x.png"))


def test_unknown_kind_of_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.what: a picture of this kind can't be written, only .*png"):
        require(["all_reduce"], None, str(tmp_path / "x.what"))


def test_picture_without_a_suffix_is_a_png() -> None:
    assert [with_suffix(path) for path in ("a/pic", "pic.svg")] == ["a/pic.png", "pic.svg"]


@pytest.mark.parametrize(("package", "plot"), [("rich.table", None), ("matplotlib.backends.backend_agg", "x.png")])
def test_missing_package_is_named(package: str, plot: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match=r"pip install 'mpdist\[bench\]'"):
        require(["all_reduce"], None, plot)
