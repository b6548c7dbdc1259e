"""Where a model's configuration comes from: a folder, a file, a name of the catalogue, or a hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.hub import HubError, fetch_config, is_hub_id

LARGEST_CONFIG_BYTES = 8 * 1024 * 1024
# A slash of a hub name, in the name of a file.
SLASH = "--"
CATALOGUE = "models"


@dataclass(frozen=True)
class ConfigFile:
    """A configuration as its file has it.

    `source` says where a catalogue entry was copied from. With `has_defaults_only` its values are those of the model
    class, and no checkpoint's. `notes` are remarks for whoever reads the plan.
    """

    name: str
    values: Mapping[str, Any]
    source: str | None = None
    has_defaults_only: bool = False
    notes: tuple[str, ...] = ()


def read_config(model: str) -> ConfigFile:
    """Find and read the configuration of `model`; a hub is asked last.

    Raises:
        PlannerError: there is none, or it is no JSON object of a sensible size.
    """
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise PlannerError(f"MODEL is the folder {model}, which has no config.json; name a model's folder.")
        is_file = path.is_file()
    except OSError as error:
        raise PlannerError(f"MODEL is {model[:80]!r}, which cannot be read ({error.strerror}); give a path.") from error
    if is_file:
        return ConfigFile(model, _parse(path, model))
    return _read_from_catalogue(model) or _read_from_hub(model)


def list_catalogue() -> tuple[str, ...]:
    """The names of the bundled models, sorted."""
    names = (entry.name for entry in _catalogue().iterdir() if entry.name.endswith(".json"))
    return tuple(sorted(name.removesuffix(".json").replace(SLASH, "/", 1) for name in names))


def _read_from_catalogue(model: str) -> ConfigFile | None:
    # The part behind the slash will do, in any case.
    wanted = model.lower()
    found = [name for name in list_catalogue() if wanted in (name.lower(), name.rpartition("/")[2].lower())]
    if not found:
        return None
    values = _parse(_catalogue() / f"{found[0].replace('/', SLASH)}.json", found[0])
    return ConfigFile(found[0], values, values.get("_source"), bool(values.get("_defaults_only")))


def _read_from_hub(model: str) -> ConfigFile:
    try:
        fetched = fetch_config(model) if is_hub_id(model) else None
    except HubError as error:
        raise _find_nothing(model, f". As a hub id: {error}") from error
    if fetched is None:
        raise _find_nothing(model, "")
    return ConfigFile(model, _parse(fetched.path, model), notes=(fetched.note,))


def _find_nothing(model: str, tried: str) -> PlannerError:
    return PlannerError(
        f"MODEL is {model[:80]!r}, which is neither a folder, a config.json nor in the catalogue{tried}; give a path, "
        f"or one of: {', '.join(list_catalogue())}."
    )


def _catalogue() -> Traversable:
    return files(__package__) / CATALOGUE


def _parse(path: Path | Traversable, model: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_CONFIG_BYTES + 1)
        if len(content) > LARGEST_CONFIG_BYTES:
            raise PlannerError(
                f"MODEL is {model}, whose configuration is larger than {LARGEST_CONFIG_BYTES // 1024**2} MiB; name a "
                "model's config.json."
            )
        values = json.loads(content)
    except OSError as error:
        raise PlannerError(f"MODEL is {model}, which cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        raise PlannerError(f"MODEL is {model}, which is not valid JSON ({problem}); name a config.json.") from error
    if not isinstance(values, dict):
        raise PlannerError(f"MODEL is {model}, which is JSON but no object; name a model's config.json.")
    return values
