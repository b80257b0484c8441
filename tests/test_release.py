"""What `make release` checks with: the runner of a README, and the contents of distributions."""

import tarfile
import zipfile

import pytest
from tests import distribution, readme

import lln

ROOT = distribution.ROOT
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
    wheel = checkout / "lln-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("lln/a.py", "lln-0.dist-info/METADATA", "tests/test_a.py"):
            archive.writestr(name, "")
    assert distribution.faults_of_wheel(wheel, checkout) == [
        f"{wheel.name} lacks lln/page.html",
        f"{wheel.name} has tests/test_a.py, which is not in src",
    ]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_wheel_for_one_platform_holds_its_library(is_there, checkout):
    library = checkout / distribution.LIBRARY
    library.parent.mkdir()
    library.write_text("of this checkout")
    wheel = checkout / "lln-0-py3-none-manylinux_2_29_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("a.py", "page.html", *(["cpu/_passes.so"] if is_there else [])):
            archive.writestr(f"lln/{name}", "")
    faults = [] if is_there else [f"{wheel.name} lacks lln/cpu/_passes.so"]
    assert distribution.faults_of_wheel(wheel, checkout) == faults


@pytest.mark.parametrize(
    ("tags", "fault"),
    [([], None), (["v0.1.0"], None), (["nightly"], None), (["v0.2.0"], "must be 0.2.0")],
)
def test_a_tagged_commit_has_the_version_of_its_tag(tags, fault, tmp_path):
    faults = distribution.faults_of_version(tmp_path / "lln-0.1.0-py3-none-any.whl", tags)
    assert [fault in one for one in faults] == ([] if fault is None else [True])


def test_the_laboratory_is_checked_against_its_own_folder(checkout):
    (checkout / "lab/src/lln_lab").mkdir(parents=True)
    for name in ("src/lln_lab/a.py", "LICENSE", "README.md", "pyproject.toml", "results.json"):
        (checkout / "lab" / name).write_text("")
    wheel = checkout / "lln_lab-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lln/a.py", "")
    assert distribution.faults_of_wheel(wheel, checkout) == [
        f"{wheel.name} lacks lln_lab/a.py",
        f"{wheel.name} has lln/a.py, which is not in lab/src",
    ]
    sdist = checkout / "lln_lab-0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            archive.add(checkout / "lab" / name, f"lln_lab-0/{name}")
    assert distribution.faults_of_sdist(sdist, checkout) == [f"{sdist.name} lacks src/lln_lab/a.py"]


def test_a_source_distribution_holds_what_tests_read(checkout):
    sdist = checkout / "lln.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        (checkout / distribution.LIBRARY).parent.mkdir()
        (checkout / distribution.LIBRARY).write_text("of this checkout")
        for name in ("src", *distribution.SINGLE[1:]):
            archive.add(checkout / name, f"lln-0/{name}")
    assert distribution.faults_of_sdist(sdist, checkout) == [
        "lln.tar.gz lacks Makefile",
        "lln.tar.gz lacks tests/test_a.py",
        f"lln.tar.gz has {distribution.LIBRARY}",
    ]


def test_both_distributions_have_one_version():
    core, lab = ((ROOT / place / "pyproject.toml").read_text("utf-8") for place in ("", "lab"))
    assert f'lab = ["lln-lab=={lln.__version__}"]' in core
    assert f'version = "{lln.__version__}"' in lab
    assert f'"lln[instruments]=={lln.__version__}"' in lab
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "lab/LICENSE").read_bytes()
