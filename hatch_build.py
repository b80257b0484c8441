"""Compiles the passes of a CPU into the wheel and into an editable installation.

Without a C++ compiler the wheel is pure Python: everything works, and `lln doctor` says how to get
the passes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src", "lln", "cpu")


class CompilePasses(BuildHookInterface[Any]):
    """Adds the library, which needs neither Python's nor PyTorch's headers, to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are gathered.

        Args:
            version: ``"standard"`` or ``"editable"``.
            build_data: Of the wheel, which may be changed.
        """
        # By itself: the package imports torch.
        sys.path.insert(0, str(Path(self.root, _FOLDER)))
        try:
            import building
        finally:
            sys.path.pop(0)
        try:
            library = building.build()
        except building.BuildError as error:
            self.app.display_warning(f"lln is built without compiled passes: {error}.")
            return
        build_data["artifacts"].append((_FOLDER / library.name).as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{building.platform_tag()}"
