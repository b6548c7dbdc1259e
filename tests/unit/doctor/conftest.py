import pytest

from vllm_kvpp.doctor import diagnosis as diagnosis_module
from vllm_kvpp.doctor.installation import PLUGIN_TARGET, Installation
from vllm_kvpp.vllm_seam.findings import Findings, Verdict


@pytest.fixture
def make_installation():
    """An environment in which nothing is wrong, with changes."""

    def make(**changes):
        values = {
            "python": "/venv/bin/python",
            "python_version": "3.11.9",
            "has_vllm": True,
            "vllm_versions": {"vllm": "0.32.0"},
            "torch_version": "2.9.0",
            "plugin_target": PLUGIN_TARGET,
            "allowed_plugins": None,
        }
        return Installation(**values | changes)

    return make


@pytest.fixture
def make_findings():
    """A vLLM in which nothing is wrong, with changes."""

    def make(**changes):
        values = {
            "platform": "CudaPlatform",
            "device": "cuda",
            "attention_backend": "FLASHMLA",
            "is_attached": True,
            "num_symbols": 60,
        }
        return Findings(**values | changes)

    return make


@pytest.fixture
def make_verdict():
    def make(outcome="on", **changes):
        values = {
            "model": "some/model",
            "architecture": "DeepseekV3ForCausalLM",
            "group_size": 8,
            "options": {"transfer": "auto", "decode": "auto", "staging_mib": None},
            "attention_backend": "FLASHMLA",
        }
        return Verdict(outcome=outcome, **values | changes)

    return make


@pytest.fixture
def installed(monkeypatch, make_installation):
    """Make this environment look like one in which nothing is wrong, or like another."""

    def install(**changes):
        monkeypatch.setattr(diagnosis_module, "describe_installation", lambda _: make_installation(**changes))

    install()
    return install
