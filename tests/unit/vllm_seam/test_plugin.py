from importlib.metadata import entry_points

import pytest
from vllm import platforms

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.vllm_seam import symbols
from vllm_kvpp.vllm_seam.plugin import register


@pytest.fixture
def platform(monkeypatch):
    """A platform in place of the current one."""

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config):
            """Nothing to check."""

    monkeypatch.setattr(platforms, "current_platform", Platform())
    return Platform


def test_vllm_finds_the_plugin_among_its_general_plugins():
    (entry,) = (entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvpp")

    assert entry.load() is register


def test_registering_wraps_the_hook_of_the_current_platform(platform):
    before = platform.__dict__["check_and_update_config"]
    register()

    assert platform.__dict__["check_and_update_config"] is not before


def test_registering_twice_wraps_once(platform):
    register()
    once = platform.__dict__["check_and_update_config"]
    register()

    assert platform.__dict__["check_and_update_config"] is once


def test_a_vllm_without_the_hook_is_refused_with_a_remedy_that_helps(platform, monkeypatch):
    gone = symbols.SeamSymbol("vllm.platforms.interface:Platform.gone", because="", removable_when="")
    monkeypatch.setattr(symbols, "PLATFORM_HOOK", gone)
    before = platform.__dict__["check_and_update_config"]

    with pytest.raises(KVPPSeamError, match=r"Platform\.gone is missing(.|\n)*uninstall vllm-kvpp"):
        register()
    assert platform.__dict__["check_and_update_config"] is before
