"""With DUO_BUILD_C=1 in the environment a wheel carries the modules of compile.py as C, too. It then fits one Python and one
platform; without, it fits all."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from compile import NEEDS, compile_into

WANTED = os.environ.get("DUO_BUILD_C", "") not in {"", "0"}


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return list(NEEDS) if WANTED else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not WANTED or version != "standard":  # an editable one is for those who change the sources
            return
        self._folder = tempfile.TemporaryDirectory()
        made = compile_into(Path(self._folder.name))
        build_data["force_include"] |= {str(Path(self._folder.name) / file): str(file) for file in made}
        build_data["pure_python"], build_data["infer_tag"] = False, True
