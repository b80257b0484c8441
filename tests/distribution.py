"""Check what wheels and source distributions contain: ``python tests/distribution.py dist``."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests read all of these.
SOURCE = ("src", "tests", "examples", "lab", "docs")
SINGLE = ("Makefile", "constraints.txt", "requirements-oldest.txt", "pyproject.toml", "README.md")
SINGLE += ("hatch_build.py",)
# What the wheel of the laboratory is built from.
OF_THE_LABORATORY = ("lab/src", "lab/LICENSE", "lab/README.md", "lab/pyproject.toml")
# Made by the compiler: in a wheel for one platform, never in the source.
LIBRARY = "src/lln/cpu/_passes.so"


def is_of_the_laboratory(distribution):
    return distribution.name.startswith("lln_lab-")


def files_of(folder, root):
    """Files under a folder of the checkout, without what builds, Python and editors leave there."""
    found = {
        path.relative_to(root).as_posix()
        for path in (root / folder, *(root / folder).rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and path.name != ".DS_Store"
    }
    return found - {LIBRARY}


def faults_of_wheel(wheel, root=ROOT):
    """The wheel holds its src, whole, and nothing else but the library of its platform."""
    source = "lab/src" if is_of_the_laboratory(wheel) else "src"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix(f"{source}/") for name in files_of(source, root)}
    if not wheel.name.endswith("-any.whl"):
        expected.add(LIBRARY.removeprefix("src/"))
    return [f"{wheel.name} lacks {name}" for name in sorted(expected - inside)] + [
        f"{wheel.name} has {name}, which is not in {source}" for name in sorted(inside - expected)
    ]


def faults_of_sdist(sdist, root=ROOT):
    """The source distribution holds what the tests and the Makefile read, or the laboratory."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if is_of_the_laboratory(sdist):
        names = set().union(*(files_of(name, root) for name in OF_THE_LABORATORY))
        expected = {name.removeprefix("lab/") for name in names}
    else:
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
    folder = Path(sys.argv[1])
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    names = {path.name.split("-")[0] for path in (*wheels, *sdists)}
    faults = [fault for wheel in wheels for fault in faults_of_wheel(wheel)]
    faults += [fault for wheel in wheels for fault in faults_of_version(wheel, own_tags())]
    faults += [fault for sdist in sdists for fault in faults_of_sdist(sdist)]
    if (len(wheels), len(sdists), names) != (2, 2, {"lln", "lln_lab"}):
        faults.append(f"{folder} must have a wheel and a source distribution of lln and of lln_lab")
    print("\n".join(faults) or f"{', '.join(p.name for p in (*wheels, *sdists))} are complete")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
