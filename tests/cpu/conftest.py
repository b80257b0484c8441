"""The compiled passes, and a record of what they are asked for."""

import pytest

from lln.cpu import building, compiled_passes
from lln.cpu import library as opening
from lln.functional import prepared_calls

NAMES = ("forward", "backward", "match", "forward_causal", "backward_causal")
NAMES += ("forward_keys", "backward_keys", "choose", "forward_pages")


@pytest.fixture(scope="session")
def without_memory(functions, tmp_path_factory):
    """The same where the system has no memory left; compiled quickly."""
    folder = tmp_path_factory.mktemp("cpu-without-memory")
    header = folder / "nothing.h"
    header.write_text(
        "#include <cstdlib>\n"
        "namespace std { inline void* nothing(size_t, size_t) { return nullptr; } }\n"
        "#define aligned_alloc nothing\n"
    )
    path = building.build(folder / "passes.so", ("-O0", "-include", str(header)))
    return opening.open_library(path)


@pytest.fixture
def by_torch(monkeypatch):
    """Computes a call as where there are no compiled passes."""

    def run(call):
        with monkeypatch.context() as without:
            without.setattr(opening, "_found", "switched off by this test")
            prepared_calls.clear()
            found = call()
        prepared_calls.clear()
        return found

    return run


@pytest.fixture
def taken(compiled, monkeypatch):
    """The compiled passes in use; what they are asked for."""
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
