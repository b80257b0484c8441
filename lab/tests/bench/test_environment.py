"""Whether the code that was measured is that of its commit."""

from lln_lab import machine
from lln_lab.bench import environment


def test_changes_are_unknown_without_a_checkout_unless_a_commit_is_named(monkeypatch):
    said: dict[str, str] = {}
    monkeypatch.setattr(machine, "output_of", lambda *words: said.get((*words, "")[1], ""))
    assert environment.describe("cpu", "c")["changed"] is None
    # Unless whoever copied them names the commit that they are a clean copy of.
    monkeypatch.setenv("LLN_COMMIT", "4567")
    assert environment.describe("cpu", "c")["changed"] is False
    # Where there is a checkout of that commit, it is asked.
    said |= {"ls-files": "src/lln/__init__.py", "rev-parse": "4567", "status": " M src/lln/a.py"}
    assert environment.describe("cpu", "c")["changed"] is True


def test_changes_are_unknown_without_a_checkout(monkeypatch):
    said = {"ls-files": "src/lln/__init__.py", "rev-parse": "0123", "status": " M src/lln/a.py"}
    monkeypatch.setattr(machine, "output_of", lambda *words: said.get((*words, "")[1], ""))
    assert machine.uncommitted() is True
    said["status"] = ""
    assert machine.uncommitted() is False
    # Files without their repository: nobody knows, which is not the same as no changes.
    said["ls-files"] = ""
    assert machine.uncommitted() is None
