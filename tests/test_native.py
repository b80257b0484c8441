"""Compiled libraries: where they are looked for, and whose are opened."""

import os
from pathlib import Path

import pytest
import torch

import lln
from lln import native
from lln.cpu import compiled_passes
from lln.kernels.launching import compiled_launcher


def run_call():
    """An ordinary call of a process that has looked for no library yet."""
    compiled_passes._found = None
    assert lln.lln_attention(*torch.randn(3, 1, 2, 32, 16)).isfinite().all()


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    monkeypatch.setattr(compiled_passes, "_found", None)
    for name in ("LLN_CPU", "LLN_BUILD_FOLDER", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file at the place of the compiled passes."""
    monkeypatch.setenv("LLN_BUILD_FOLDER", str(tmp_path))
    path = compiled_passes.library()
    path.write_text("somebody's library")
    path.chmod(0o755)
    return path


def without_home():
    raise RuntimeError("Could not determine home directory.")


def without_permission(path):
    raise PermissionError(13, "Permission denied")


def test_a_home_that_cannot_be_found_has_no_library(monkeypatch):
    monkeypatch.setattr(Path, "home", without_home)
    run_call()
    with pytest.raises(lln.BackendUnavailableError, match="home folder cannot be found; set LLN"):
        compiled_passes.build()


def test_a_home_that_cannot_be_searched_has_no_library(monkeypatch):
    monkeypatch.setattr(Path, "exists", without_permission)
    run_call()


@pytest.mark.parametrize("name", ["/" + "x" * 300, "/dev/null/folder"])
def test_an_impossible_build_folder_has_no_library(name, monkeypatch):
    monkeypatch.setenv("LLN_BUILD_FOLDER", name)
    run_call()
    with pytest.raises(lln.BackendUnavailableError, match="LLN_BUILD_FOLDER"):
        compiled_passes.build()


@pytest.mark.parametrize("name", ["LLN_BUILD_FOLDER", "XDG_CACHE_HOME"])
def test_folders_that_depend_on_where_the_program_starts_are_refused(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "here")
    with pytest.raises(lln.BackendUnavailableError, match=f"{name} must be an absolute path"):
        compiled_passes.build()
    run_call()
    assert not list(tmp_path.iterdir())


def test_a_file_of_ones_own_is_trusted(kept, tmp_path):
    assert native.trusted(kept) == kept
    link = tmp_path / "link"
    link.symlink_to(kept)
    assert native.trusted(link) == kept


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_may_write_is_refused(mode, kept, tmp_path):
    kept.chmod(mode)
    with pytest.raises(PermissionError, match="writable for other users"):
        native.trusted(kept)
    kept.chmod(0o755)
    for folder in (tmp_path, tmp_path.parent):
        before = folder.stat().st_mode
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="writable for other users"):
            native.trusted(kept)
        # As /tmp is: others cannot touch what is not theirs.
        folder.chmod(mode | 0o1000)
        assert native.trusted(kept) == kept
        folder.chmod(before)


def test_what_belongs_to_others_is_refused(kept, tmp_path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(kept, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4243)
    with pytest.raises(PermissionError, match="belongs to another user"):
        native.trusted(kept)


def test_a_link_out_of_a_folder_of_ones_own_is_followed_first(kept, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "library.so").write_text("")
    link = tmp_path / "library.so"
    link.symlink_to(outside / "library.so")
    with pytest.raises(PermissionError, match="outside is writable"):
        native.trusted(link)


def test_passes_that_others_may_write_are_not_opened(kept, monkeypatch):
    monkeypatch.setattr(compiled_passes, "open_library", pytest.fail)
    kept.chmod(0o775)
    with pytest.warns(UserWarning, match="is writable for other users"):
        run_call()
    assert "writable for other users" in compiled_passes.why_not()


def test_a_launcher_that_others_may_write_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_BUILD_FOLDER", str(tmp_path))
    monkeypatch.setattr(compiled_launcher, "open_library", pytest.fail)
    compiled_launcher.library().write_text("")
    compiled_launcher.library().chmod(0o775)
    with pytest.warns(UserWarning, match="is writable for other users"):
        assert "PermissionError" in compiled_launcher._load(pytest.fail)


def test_what_is_built_can_be_opened_whatever_the_umask(tmp_path, monkeypatch):
    before = os.umask(0o000)
    try:
        target = tmp_path / "new" / "lln" / "library.so"
        native.put_in_place(target, lambda made: made.write_text(""))
        assert native.trusted(target) == target
    finally:
        os.umask(before)
    tmp_path.chmod(0o777)
    with pytest.raises(lln.BackendUnavailableError, match=r"writable for other users.*of your own"):
        native.put_in_place(target, pytest.fail)
