import pytest

from vllm_kvpp.vllm_seam import worker as worker_module
from vllm_kvpp.vllm_seam.worker import KVPPWorkerMixin


class FakeSession:
    """Writes down what the worker asks."""

    def __init__(self, log):
        self.log = log

    def plan_budget(self, specs, available_bytes, model_runner):
        self.log.append(f"plan {specs} in {available_bytes} for {model_runner}")
        return 6_000

    def place(self, kv_cache_config):
        self.log.append(f"place {kv_cache_config}")
        return "our placement"

    def attach(self, model_runner):
        self.log.append(f"attach to {model_runner}")

    def report(self):
        return {"counters": {}}


class PlatformWorker:
    """The worker that the platform chose; it writes down what it does."""

    def __init__(self):
        self.log = []
        self.vllm_config = "config"
        self.device = None
        self.model_runner = "runner"

    def init_device(self):
        self.device = "device"
        self.log.append("init device")

    def determine_available_memory(self):
        self.log.append("profile memory")
        return 5_000

    def get_kv_cache_spec(self):
        return "specs"

    def initialize_from_config(self, kv_cache_config):
        self.log.append(f"allocate {kv_cache_config}")


class Worker(KVPPWorkerMixin, PlatformWorker):
    """The two as they run together."""


@pytest.fixture
def worker(monkeypatch):
    worker = Worker()

    def make_session(vllm_config, device):
        worker.log.append(f"session with {vllm_config} on {device}")
        return FakeSession(worker.log)

    monkeypatch.setattr(worker_module, "KVPPSession", make_session)
    worker.init_device()
    return worker


def test_the_group_is_made_behind_the_platforms_own(worker):
    assert worker.log == ["init device", "session with config on device"]


def test_the_profiled_memory_becomes_the_logical_budget(worker):
    assert worker.determine_available_memory() == 6_000
    assert worker.log[-2:] == ["profile memory", "plan specs in 5000 for runner"]


def test_the_platform_allocates_our_placement_and_then_we_attach(worker):
    worker.initialize_from_config("the engine's placement")

    assert worker.log[-3:] == ["place the engine's placement", "allocate our placement", "attach to runner"]


def test_the_report_is_the_sessions(worker):
    assert worker.kvpp_report() == {"counters": {}}


def test_a_worker_that_kvpp_does_not_know_needs_nothing_but_these_methods():
    assert [name for name, value in vars(KVPPWorkerMixin).items() if callable(value)] == [
        "init_device",
        "determine_available_memory",
        "initialize_from_config",
        "kvpp_report",
    ]
