"""Every part of a page that a program writes is the one of its results."""

import re
from itertools import chain
from pathlib import Path

import pytest

from lln.errors import InvalidInputError
from lln_lab.documents import benchmark_sections
from lln_lab.documents.__main__ import SOURCES
from lln_lab.markdown import TABLES, Section, fill

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    Path("README.md"),
    Path("DESIGN.md"),
    TABLES,
    *(page.relative_to(ROOT) for page in ROOT.glob("docs/**/*.md")),
]


def test_every_section_is_what_its_program_writes(monkeypatch):
    monkeypatch.chdir(ROOT)
    marks = {
        (page, name)
        for page in PAGES
        for name in re.findall("<!-- ([^ ]+): begin -->", page.read_text("utf-8"))
    }
    for page, name, text in chain.from_iterable(source.sections() for source in SOURCES):
        assert (page, name) in marks, f"{page} has no place for {name}, or two programs write it"
        marks.remove((page, name))
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        inside = page.read_text("utf-8").split(begin)[1].split(end)[0]
        stale = f"{name} in {page} is stale: run python -m lln_lab.documents"
        assert inside.strip("\n") == text.strip("\n"), stale
        assert text.strip(), stale
    assert not marks, "no program writes these"


def test_sections_keep_to_their_lines(tmp_path):
    page, same = tmp_path / "page.md", tmp_path / "same.md"
    page.write_text("a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb\n", "utf-8")
    same.write_text(
        "a <!-- n: begin -->1<!-- n: end --> b <!-- m: begin --><!-- m: end -->", "utf-8"
    )
    for _ in range(2):
        fill([Section(page, "one", "new"), Section(same, "n", "2"), Section(same, "m", "3")])
        assert page.read_text("utf-8") == "a\n<!-- one: begin -->\nnew\n<!-- one: end -->\nb\n"
    words = "a <!-- n: begin -->2<!-- n: end --> b <!-- m: begin -->3<!-- m: end -->"
    assert same.read_text("utf-8") == words
    with pytest.raises(InvalidInputError, match=r"needs <!-- other: begin --> once, has it 0"):
        fill([Section(page, "one", "newer"), Section(page, "other", "x")])
    assert "newer" not in page.read_text("utf-8")


def test_results_that_are_missing_leave_the_command_that_makes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_sections, "RESULTS", tmp_path)
    sources = benchmark_sections.of_gpu, benchmark_sections.of_cpus, benchmark_sections.of_peers
    found = {name: text for write in sources for _, name, text in write()}
    command = "`lln bench --device cuda --out lab/results/benchmarks/cuda.json`"
    assert found["gpu-speed"] == f"Not measured yet: {command}."
    assert found["peers-cpu"].startswith("Not measured yet: `lln bench peers --device cpu")
