"""Check what a wheel and a source distribution contain: ``python tests/distribution.py dist``."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests read all of these.
SOURCE = ("src", "tests", "examples", "benchmarks", "experiments", "docs")
SINGLE = ("Makefile", "constraints.txt", "requirements-oldest.txt", "pyproject.toml", "README.md")


def files_of(folder, root):
    """Files under a folder of the checkout, without what Python and editors leave there."""
    return {
        path.relative_to(root).as_posix()
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != ".DS_Store"
    }


def faults_of_wheel(wheel, root=ROOT):
    """The wheel holds src, whole, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/") for name in files_of("src", root)}
    return [f"{wheel.name} lacks {name}" for name in sorted(expected - inside)] + [
        f"{wheel.name} has {name}, which is not in src" for name in sorted(inside - expected)
    ]


def faults_of_sdist(sdist, root=ROOT):
    """The source distribution holds what the tests and the Makefile read."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    expected = set(SINGLE).union(*(files_of(folder, root) for folder in SOURCE))
    return [f"{sdist.name} lacks {name}" for name in sorted(expected - inside)]


def main():
    (wheel,), (sdist,) = (list(Path(sys.argv[1]).glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    faults = faults_of_wheel(wheel) + faults_of_sdist(sdist)
    print("\n".join(faults) or f"{wheel.name} and {sdist.name} are complete")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
