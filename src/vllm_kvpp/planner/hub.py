"""`config.json` of a model on a hub, with huggingface_hub: it is loaded here only, and only when a hub is asked."""

import re
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

CONFIG = "config.json"
# Until the hub answers at all, and until the file has to be here. The second also ends what no timeout of a request
# does: retries, name servers that do not answer, a file that trickles.
ANSWER_SECONDS = 4.0
DEADLINE_SECONDS = 7.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class HubError(Exception):
    """There is no configuration from the hub; the message says what was tried, as the end of a sentence."""


@dataclass(frozen=True)
class FetchedConfig:
    """Where the file lies, and how it came there."""

    path: Path
    note: str


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form of a hub's `owner/name`."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".json")


def fetch_config(model: str) -> FetchedConfig:
    """Fetch `config.json`, and nothing else, within `DEADLINE_SECONDS`.

    `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN` count as everywhere. Where the hub gives nothing, a copy
    that is in its cache will do, and is named as one.

    Raises:
        HubError: there is neither.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise HubError("huggingface_hub is not installed (pip install huggingface-hub)") from error
    _print_nothing()
    fetch = _Fetch(model)
    fetch.start()
    fetch.join(DEADLINE_SECONDS)
    if fetch.path is not None:
        return FetchedConfig(fetch.path, f"{CONFIG} of {model} is from {constants.ENDPOINT}.")
    reason = _explain(fetch.error, constants.ENDPOINT)
    cached = huggingface_hub.try_to_load_from_cache(model, CONFIG)
    if isinstance(cached, str):
        return FetchedConfig(Path(cached), f"{CONFIG} of {model} is the copy in the cache, as {reason}.")
    raise HubError(reason) from fetch.error


class _Fetch(Thread):
    """One attempt, on a thread that does not keep the process from ending."""

    def __init__(self, model: str) -> None:
        super().__init__(daemon=True)
        self._model = model
        self.path: Path | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        try:
            # Fails at the first refusal, where the download would go on trying for minutes.
            get_hf_file_metadata(hf_hub_url(self._model, CONFIG), timeout=ANSWER_SECONDS)
            self.path = Path(hf_hub_download(self._model, CONFIG, etag_timeout=ANSWER_SECONDS))
        except Exception as error:
            self.error = error


def _print_nothing() -> None:
    """No progress bars, and no warnings beside the one line of an error."""
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()


def _explain(error: Exception | None, endpoint: str) -> str:
    if error is None:
        return f"{endpoint} sent no {CONFIG} within {DEADLINE_SECONDS:g} s"
    from huggingface_hub import errors

    # The first that fits: some are kinds of others.
    known: tuple[tuple[type[Any], str], ...] = (
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set, so no hub was asked"),
        (errors.GatedRepoError, f"{endpoint} gives it only to accounts that accepted its terms; set HF_TOKEN"),
        (errors.RepositoryNotFoundError, f"{endpoint} has no such model, or only for its owner; set HF_TOKEN"),
        (errors.LocalEntryNotFoundError, f"{endpoint} cannot be read as a hub ({_first_line(error)})"),
        (errors.EntryNotFoundError, f"{endpoint} has the model, but no {CONFIG} of it"),
    )
    for kind, reason in known:
        if isinstance(error, kind):
            return reason
    if isinstance(error, errors.HfHubHTTPError):
        return f"{endpoint} answered with status {error.response.status_code}"
    return f"{endpoint} cannot be reached ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
