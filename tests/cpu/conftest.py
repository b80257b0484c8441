"""The compiled passes, built once, and a record of what they are asked for."""

import pytest

from lln.cpu import compiled_passes
from lln.eager import workers
from lln.native import find_compiler

NAMES = ("forward", "backward", "match", "forward_causal", "backward_causal")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if find_compiler() is None:
        pytest.skip("the passes are compiled by a C++ compiler, and there is none here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLN_BUILD_FOLDER", str(tmp_path_factory.mktemp("cpu")))
        try:
            compiled_passes._openmp()
        except OSError as error:
            pytest.skip(f"the passes run on PyTorch's threads, but {error}")
        return compiled_passes.open_library(compiled_passes.build())


@pytest.fixture(scope="session")
def without_memory(library, tmp_path_factory):
    """The same where the system has no memory left; compiled quickly."""
    folder = tmp_path_factory.mktemp("cpu-without-memory")
    header = folder / "nothing.h"
    header.write_text(
        "#include <cstdlib>\n"
        "namespace std { inline void* nothing(size_t, size_t) { return nullptr; } }\n"
        "#define aligned_alloc nothing\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLN_BUILD_FOLDER", str(folder))
        options = (*compiled_passes._COMPILE, "-O0", "-include", str(header))
        patch.setattr(compiled_passes, "_COMPILE", options)
        return compiled_passes.open_library(compiled_passes.build())


@pytest.fixture
def taken(library, monkeypatch):
    """The compiled passes in use; what they are asked for."""
    monkeypatch.setattr(compiled_passes, "_found", library)
    # As on a busy machine: these passes are not cut into pieces even there.
    monkeypatch.setattr(workers, "_is_crowded", lambda threads: True)
    monkeypatch.setattr(workers, "_FEWEST", 0)
    calls = []

    def count(name):
        own = getattr(compiled_passes, name)

        def counted(*given, **options):
            calls.append(name)
            return own(*given, **options)

        monkeypatch.setattr(compiled_passes, name, counted)

    for name in NAMES:
        count(name)
    return calls
