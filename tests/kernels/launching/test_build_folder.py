"""The compiled launcher: where it is looked for, and whose is opened."""

import os
from pathlib import Path

import pytest

import lln
from lln.cli import launcher_build
from lln.kernels.launching import build_folder, compiled_launcher


def is_found():
    return build_folder.is_there(compiled_launcher.library)


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    for name in ("LLN_BUILD_FOLDER", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file at the place of the launcher."""
    monkeypatch.setenv("LLN_BUILD_FOLDER", str(tmp_path))
    path = compiled_launcher.library()
    path.write_text("somebody's library")
    path.chmod(0o755)
    return path


def without_home():
    raise RuntimeError("Could not determine home directory.")


def without_permission(path):
    raise PermissionError(13, "Permission denied")


def test_a_home_that_cannot_be_found_has_no_library(monkeypatch):
    monkeypatch.setattr(Path, "home", without_home)
    assert not is_found()
    with pytest.raises(lln.BackendUnavailableError, match="home folder cannot be found; set LLN"):
        launcher_build.build()


def test_a_home_that_cannot_be_searched_has_no_library(monkeypatch):
    monkeypatch.setattr(Path, "exists", without_permission)
    assert not is_found()


@pytest.mark.parametrize("name", ["/" + "x" * 300, "/dev/null/folder"])
def test_an_impossible_build_folder_has_no_library(name, monkeypatch):
    monkeypatch.setenv("LLN_BUILD_FOLDER", name)
    assert not is_found()
    with pytest.raises(lln.BackendUnavailableError, match="LLN_BUILD_FOLDER"):
        launcher_build.build()


@pytest.mark.parametrize("name", ["LLN_BUILD_FOLDER", "XDG_CACHE_HOME"])
def test_folders_that_depend_on_where_the_program_starts_are_refused(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "here")
    with pytest.raises(lln.BackendUnavailableError, match=f"{name} must be an absolute path"):
        launcher_build.build()
    assert not is_found()
    assert not list(tmp_path.iterdir())


def test_a_file_of_ones_own_is_trusted(kept, tmp_path):
    assert build_folder.trusted(kept) == kept
    link = tmp_path / "link"
    link.symlink_to(kept)
    assert build_folder.trusted(link) == kept


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_may_write_is_refused(mode, kept, tmp_path):
    kept.chmod(mode)
    with pytest.raises(PermissionError, match="writable for other users"):
        build_folder.trusted(kept)
    kept.chmod(0o755)
    for folder in (tmp_path, tmp_path.parent):
        before = folder.stat().st_mode
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="writable for other users"):
            build_folder.trusted(kept)
        # As /tmp is: others cannot touch what is not theirs.
        folder.chmod(mode | 0o1000)
        assert build_folder.trusted(kept) == kept
        folder.chmod(before)


def test_what_belongs_to_others_is_refused(kept, tmp_path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(kept, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4243)
    with pytest.raises(PermissionError, match="belongs to another user"):
        build_folder.trusted(kept)


def test_a_link_out_of_a_folder_of_ones_own_is_followed_first(kept, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "library.so").write_text("")
    link = tmp_path / "library.so"
    link.symlink_to(outside / "library.so")
    with pytest.raises(PermissionError, match="outside is writable"):
        build_folder.trusted(link)


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
        build_folder.put_in_place(target, lambda made: made.write_text(""))
        assert build_folder.trusted(target) == target
    finally:
        os.umask(before)
    tmp_path.chmod(0o777)
    with pytest.raises(lln.BackendUnavailableError, match=r"writable for other users.*of your own"):
        build_folder.put_in_place(target, pytest.fail)
