"""Check what a wheel and a source distribution contain: ``python tests/distribution.py dist``."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests read all of these.
SOURCE = ("src", "tests", "examples", "benchmarks", "experiments", "docs")
SINGLE = ("Makefile", "constraints.txt", "requirements-oldest.txt", "pyproject.toml", "README.md")
SINGLE += ("hatch_build.py",)
# Made by the compiler: in a wheel for one platform, never in the source.
LIBRARY = "src/lln/cpu/_passes.so"


def files_of(folder, root):
    """Files under a folder of the checkout, without what builds, Python and editors leave there."""
    found = {
        path.relative_to(root).as_posix()
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != ".DS_Store"
    }
    return found - {LIBRARY}


def faults_of_wheel(wheel, root=ROOT):
    """The wheel holds src, whole, and nothing else but the library of its platform."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/") for name in files_of("src", root)}
    if not wheel.name.endswith("-any.whl"):
        expected.add(LIBRARY.removeprefix("src/"))
    return [f"{wheel.name} lacks {name}" for name in sorted(expected - inside)] + [
        f"{wheel.name} has {name}, which is not in src" for name in sorted(inside - expected)
    ]


def faults_of_sdist(sdist, root=ROOT):
    """The source distribution holds what the tests and the Makefile read."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    expected = set(SINGLE).union(*(files_of(folder, root) for folder in SOURCE))
    faults = [f"{sdist.name} lacks {name}" for name in sorted(expected - inside)]
    return [*faults, f"{sdist.name} has {LIBRARY}"] if LIBRARY in inside else faults


def faults_of_version(wheel, tags):
    """What is built from a commit with a tag has the version of the tag: v0.1.0 is 0.1.0."""
    version = wheel.name.split("-")[1]
    versions = [tag.removeprefix("v") for tag in tags if tag.startswith("v")]
    if versions and version not in versions:
        return [f"{wheel.name} is built from {tags[0]}; lln.__version__ must be {versions[0]}"]
    return []


def own_tags(root=ROOT):
    """Tags of the commit that is checked out."""
    words = ["git", "-C", str(root), "tag", "--points-at", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()


def main():
    (wheel,), (sdist,) = (list(Path(sys.argv[1]).glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    faults = faults_of_wheel(wheel) + faults_of_sdist(sdist)
    faults += faults_of_version(wheel, own_tags())
    print("\n".join(faults) or f"{wheel.name} and {sdist.name} are complete")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
