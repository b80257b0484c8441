"""The library of the passes: how it is made and opened, and what is said where there is none."""

import platform
import shutil
import subprocess

import pytest
import torch
from tests.cpu.test_compiled_passes import GIVEN, attention, check, sides_of
from typer.testing import CliRunner

import lln
from lln.cli.app import app
from lln.cpu import building, library


@pytest.fixture
def unasked(monkeypatch, tmp_path):
    """A process that has looked for no library yet, in an installation without one."""
    monkeypatch.delenv("LLN_CPU", raising=False)
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.setattr(building, "LIBRARY", tmp_path / "a" / "b" / "c" / "d" / "_passes.so")
    building.LIBRARY.parent.mkdir(parents=True)
    return building.LIBRARY


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """One that always fails."""
    path = tmp_path / "compiler"
    path.write_text("#!/bin/sh\necho 'passes.cpp: error: too modern' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_doctor_says_what_is_used(path_of_library, functions, unasked, monkeypatch):
    monkeypatch.setattr(building, "LIBRARY", path_of_library)
    done = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"cpu passes   compiled, {functions.instructions};" in done.output
    assert "impl 'cpu'" in done.output


@pytest.mark.parametrize("is_checkout", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_what_is_missing_is_one_sentence(is_checkout, compiles, unasked, compiler, monkeypatch):
    if is_checkout:
        (unasked.parents[3] / "hatch_build.py").write_text("")
    if not compiles:
        monkeypatch.setenv("CXX", "no-such-compiler")
    done = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert done.exit_code == 0
    (line,) = (line for line in done.output.splitlines() if line.startswith("cpu passes"))
    command = "-e ." if is_checkout else "--force-reinstall --no-deps --no-binary lln lln"
    first = "" if compiles else "install a C++ compiler (Debian and Ubuntu: apt install g++), then "
    assert line == (
        "cpu passes   PyTorch's operations; lln was installed without them; "
        f"{first}`pip install {command}` compiles them"
    )
    assert attention(sides_of()).isfinite().all()


def test_a_broken_library_warns_once_and_torch_computes(unasked):
    unasked.write_text("not a library")
    with pytest.warns(UserWarning, match="lln computes with PyTorch's operations"):
        assert attention(sides_of()).isfinite().all()
    assert attention(sides_of()).isfinite().all()
    assert "cannot be used" in library.why_not()


def test_a_library_of_other_sources_is_not_used(path_of_library, unasked, monkeypatch, tmp_path):
    """As in a checkout whose C++ has been edited since it was installed."""
    sources = shutil.copytree(building.SOURCES, tmp_path / "cpp")
    monkeypatch.setattr(building, "LIBRARY", path_of_library)
    monkeypatch.setattr(building, "SOURCES", sources)
    assert library.why_not() is None
    with (sources / "tiles.h").open("a") as file:
        file.write("// A line more.\n")
    monkeypatch.setattr(library, "_found", None)
    with pytest.warns(UserWarning, match=r"sources have changed.*`pip install.*` compiles them"):
        assert attention(sides_of()).isfinite().all()


def test_it_can_be_switched_off(unasked, monkeypatch):
    monkeypatch.setenv("LLN_CPU", "torch")
    assert library.load() is None
    assert "LLN_CPU=torch" in library.why_not()


def test_other_systems_have_no_library(unasked, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "for Linux on x86-64 and ARM, not for Darwin on" in library.why_not()
    with pytest.raises(building.BuildError, match="not for Darwin"):
        building.build(unasked)


def test_without_torchs_threads_the_library_is_not_opened(monkeypatch, tmp_path):
    nothing = tmp_path / "maps"
    nothing.write_text("")
    monkeypatch.setattr(library, "_LOADED", nothing)
    with pytest.raises(OSError, match="no OpenMP library"):
        library.open_library(tmp_path / "none.so")


def test_a_compiler_that_is_missing_or_fails_says_why_and_leaves_all_as_it_was(
    unasked, compiler, monkeypatch
):
    unasked.write_text("an older one")
    with pytest.raises(building.BuildError, match=r"compiler fails: .*too modern; g\+\+ 10 can"):
        building.build(unasked)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(building.BuildError, match=r"no C\+\+ compiler found; install"):
        building.build(unasked)
    assert [path.name for path in unasked.parent.iterdir()] == [unasked.name]
    assert unasked.read_text() == "an older one"


def test_nothing_is_compiled_twice(path_of_library, compiler):
    before = path_of_library.stat().st_mtime_ns
    assert building.build(path_of_library) == path_of_library
    assert path_of_library.stat().st_mtime_ns == before


@pytest.mark.parametrize("block_size", [0, 16])
def test_every_instruction_set(block_size, path_of_library, functions, monkeypatch):
    """Those that this processor knows; within the same budgets."""
    sets = list(building.instruction_sets())
    found = []
    for name in sets[: sets.index(functions.instructions) + 1]:
        monkeypatch.setattr(library, "_found", library.open_library(path_of_library, name))
        sides = sides_of(150, width=48, values=80)
        check(sides, block_size=block_size, alpha=None, beta=None)
        check(sides, is_causal=True)
        keys = {"block_size": 16, "keys": 9, "offset": -1.0, **GIVEN}
        exact = lln.lln_keys_attention(*sides, **keys)
        expected = lln.lln_keys_attention(*(side.double() for side in sides), **keys)
        torch.testing.assert_close(exact.double(), expected, atol=1e-6, rtol=1e-5)
        made = [torch.autograd.grad(out.sum(), sides) for out in (exact, expected)]
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
        found.append(attention(sides, block_size))
    assert sum(map(torch.equal, found[1:], found)) == 0


def test_wheels_say_where_their_library_can_be_opened(tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(b"\0exp@GLIBC_2.29\0GLIBC_2.4\0GLIBC_2.17\0")
    assert building.platform_tag(path) == f"manylinux_2_29_{platform.machine()}"
    path.write_bytes(b"\0")
    assert building.platform_tag(path) == f"linux_{platform.machine()}"


@pytest.mark.slow
def test_instruction_sets_share_no_function(tmp_path):
    """Of a function that two objects have, the linker keeps one: the other's processors stop."""
    if building.find_compiler() is None or shutil.which("nm") is None:
        pytest.skip("needs a C++ compiler and nm")
    for name, own in building.instruction_sets().items():
        words = [building.find_compiler(), *building._OPTIONS, *own, f"-DLLN_SET={name}", "-c"]
        made = tmp_path / f"{name}.o"
        subprocess.run([*words, building.SOURCES / "passes.cpp", "-o", made], check=True)
        lines = subprocess.run(["nm", made], capture_output=True, text=True, check=True).stdout
        kinds = [line.split()[-2:] for line in lines.splitlines()]
        assert not [symbol for kind, symbol in kinds if kind in "uWw"]
        shared = [symbol for kind, symbol in kinds if kind in "TDB" and name not in symbol]
        assert not shared
