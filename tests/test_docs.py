"""What the documents say of names, and where they lead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpdist

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Those of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("name", ["porting.md", "mpi4py.md"])
def test_a_page_for_those_who_come_names_what_there_is(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    used = set(re.findall(r"\bworld\.(\w+)", text))
    assert used
    attributes = {"rank", "size", "name", "ranks"}  # of an instance
    assert [each for each in used - attributes if not hasattr(mpdist.Communicator, each)] == []


def test_porting_names_what_mpdist_torch_has() -> None:
    pytest.importorskip("torch")
    used = set(re.findall(r"\bmpdist\.torch\.(\w+)", (ROOT / "docs" / "porting.md").read_text()))
    assert used
    assert [each for each in used if not hasattr(mpdist.torch, each)] == []
