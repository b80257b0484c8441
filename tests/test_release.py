"""What `make release` checks with: the runner of a README, and the contents of distributions."""

import tarfile
import zipfile

import pytest
from tests import distribution, readme

SIZES = "\n```python\nsize = 2\n```\n"
MISSING = "\n```python\nimport no_such_package\nmodel = no_such_package.load(size)\n```\n"
LATER = "\n```python\nmodel(size)\n```\n"
LAZY = """
```python
try:
    import no_such_package.part
except ImportError:
    raise RuntimeError("needs no-such-package") from None
```
"""


def test_blocks_share_their_names():
    names = {}
    assert readme.run(
        SIZES + "\n```sh\nrm\n```\n" + "```python\ndouble = 2 * size\n```", names
    ) == (2, {})
    assert names["double"] == 4


def test_blocks_without_their_package_are_skipped_with_those_that_use_their_names():
    missing = "no_such_package"
    assert readme.run(SIZES + MISSING + LATER + SIZES, {}) == (2, {2: missing, 3: missing})
    assert readme.run(LAZY, {}) == (0, {1: missing})


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (LATER, NameError),
        ("```python\nimport torch.no_such_part\n```", ModuleNotFoundError),
        ("```python\nfrom lln import no_such_name\n```", ImportError),
        ("```python\n1 / 0\n```", ZeroDivisionError),
    ],
)
def test_other_errors_are_not_skipped(block, error):
    with pytest.raises(error):
        readme.run(block, {})


@pytest.fixture
def checkout(tmp_path):
    for name in ("src/lln/a.py", "src/lln/page.html", "tests/test_a.py", *distribution.SINGLE):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path


def test_a_wheel_holds_the_package_and_nothing_else(checkout):
    wheel = checkout / "lln.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("lln/a.py", "lln-0.dist-info/METADATA", "tests/test_a.py"):
            archive.writestr(name, "")
    assert distribution.faults_of_wheel(wheel, checkout) == [
        "lln.whl lacks lln/page.html",
        "lln.whl has tests/test_a.py, which is not in src",
    ]


def test_a_source_distribution_holds_what_tests_read(checkout):
    sdist = checkout / "lln.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("src", *distribution.SINGLE[1:]):
            archive.add(checkout / name, f"lln-0/{name}")
    assert distribution.faults_of_sdist(sdist, checkout) == [
        "lln.tar.gz lacks Makefile",
        "lln.tar.gz lacks tests/test_a.py",
    ]
