from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest

from vllm_kvpp.doctor import installation
from vllm_kvpp.doctor.installation import PLUGIN_GROUP, PLUGIN_TARGET, describe_installation


@pytest.fixture
def packages(monkeypatch):
    """The installed packages and plugins, which a test may replace."""
    versions, plugins = {"vllm": "0.32.0", "torch": "2.9.0"}, [EntryPoint("kvpp", PLUGIN_TARGET, PLUGIN_GROUP)]

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(installation, "version", version)
    monkeypatch.setattr(installation, "entry_points", lambda group: plugins if group == PLUGIN_GROUP else [])
    monkeypatch.setattr(installation, "find_spec", lambda name: object() if name in versions else None)
    return versions, plugins


def test_versions_and_the_plugin_are_found(packages):
    found = describe_installation({})

    assert (found.has_vllm, found.vllm_versions, found.torch_version) == (True, {"vllm": "0.32.0"}, "2.9.0")
    assert found.plugin_target == PLUGIN_TARGET
    assert found.is_plugin_allowed


def test_what_is_not_installed_is_none(packages):
    packages[0].clear()
    packages[1].clear()
    found = describe_installation({})

    assert (found.has_vllm, found.vllm_versions, found.torch_version, found.plugin_target) == (False, {}, None, None)


def test_another_plugin_is_not_taken_for_ours(packages):
    packages[1][:] = [EntryPoint("other", "a:b", PLUGIN_GROUP)]

    assert describe_installation({}).plugin_target is None


@pytest.mark.parametrize(("value", "expected"), [("kvpp", True), ("a,kvpp", True), ("a", False), ("", False)])
def test_the_variable_that_chooses_plugins_counts(value, expected, packages):
    assert describe_installation({"VLLM_PLUGINS": value}).is_plugin_allowed is expected


def test_the_plugin_is_registered_in_this_environment():
    assert describe_installation({}).plugin_target == PLUGIN_TARGET
