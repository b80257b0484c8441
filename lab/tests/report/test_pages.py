"""Pages: templates that escape, files that keep up."""

import pytest

from lln_lab.inspection.page import render_page
from lln_lab.inspection.study import StudiedLayer, Study
from lln_lab.report import page_file
from lln_lab.report.page_file import PageFile
from lln_lab.report.rendering import _environment


def test_text_from_outside_is_escaped():
    study = Study("<script>m</script>", "A & B", 'a "text"', 8, 1)
    study.layers = [StudiedLayer("<b>name", "softmax", 2, 4, 8, 8, False, problem="x < y")]
    page = render_page(study, [])
    assert "<script" not in page
    assert "<title>&lt;script&gt;m&lt;/script&gt;</title>" in page
    assert "A &amp; B" in page
    assert "&lt;b&gt;name" in page
    assert "x &lt; y" in page


def test_a_name_that_is_missing_in_a_template_is_an_error():
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        _environment().from_string("{{ nothing }}").render()


def test_drawing_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    now, drawn = [0.0], []
    monkeypatch.setattr(page_file.time, "perf_counter", lambda: now[0])

    def page():
        now[0] += 2.0
        drawn.append(now[0])
        return "page"

    file = PageFile(tmp_path / "page.html", page, lambda: "{}")
    file.write_if_due()
    assert not drawn, "nothing is known yet"
    for _ in range(200):
        now[0] += 1.0
        file.write_if_due()
    assert 2 <= len(drawn) <= 6
    before = len(drawn)
    file.write()
    assert len(drawn) == before + 1
    assert (tmp_path / "page.json").read_text() == "{}"
