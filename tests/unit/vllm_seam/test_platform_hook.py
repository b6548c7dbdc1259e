from types import SimpleNamespace

import pytest

from vllm_kvpp.deployment import Deployment
from vllm_kvpp.errors import KVPPConfigError, KVPPSeamError
from vllm_kvpp.vllm_seam import deployment, symbols
from vllm_kvpp.vllm_seam.log import logger
from vllm_kvpp.vllm_seam.platform_hook import enable_if_asked, wrap_platform_hook
from vllm_kvpp.vllm_seam.worker_class import name_kvpp_worker

PLATFORM_WORKER = "some_platform.worker.Worker"
ON = {"enable_kvpp": True}


def make_config(additional_config=ON, *, worker_cls="auto", model_config="a model"):
    return SimpleNamespace(
        additional_config=additional_config,
        model_config=model_config,
        parallel_config=SimpleNamespace(worker_cls=worker_cls),
    )


def make_platform():
    """A platform that, like every platform, chooses the worker in its hook."""

    class Platform:
        hook_calls = 0

        @classmethod
        def check_and_update_config(cls, vllm_config):
            """Choose the worker."""
            cls.hook_calls += 1
            if vllm_config.parallel_config.worker_cls == "auto":
                vllm_config.parallel_config.worker_cls = PLATFORM_WORKER

    return Platform


@pytest.fixture(autouse=True)
def messages(monkeypatch):
    """What the log says, in place of vLLM's log."""
    messages = []
    for level in ("info_once", "warning_once"):
        monkeypatch.setattr(logger, level, lambda message, *args: messages.append(message % args))
    return messages


@pytest.fixture
def described(monkeypatch):
    """Make every configuration that of `described`, which a test may replace."""
    holder = SimpleNamespace(deployment=Deployment(tensor_parallel_size=8))
    monkeypatch.setattr(deployment, "describe_deployment", lambda vllm_config: holder.deployment)
    return holder


def refuse_to_look(*args):
    raise AssertionError("KVPP looked although it is off")


@pytest.fixture
def nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(symbols, "check_seam", refuse_to_look)
    monkeypatch.setattr(deployment, "describe_deployment", refuse_to_look)


def test_our_worker_stands_over_the_one_that_the_platform_chose(described):
    platform, config = make_platform(), make_config()
    wrap_platform_hook(platform)
    platform.check_and_update_config(config)

    assert config.parallel_config.worker_cls == name_kvpp_worker(PLATFORM_WORKER)


def test_the_platforms_hook_runs_once_also_when_wrapped_twice(described):
    platform = make_platform()
    wrap_platform_hook(platform)
    wrap_platform_hook(platform)
    platform.check_and_update_config(make_config())

    assert platform.hook_calls == 1


def test_wrapping_twice_has_no_effect():
    platform = make_platform()
    wrap_platform_hook(platform)
    once = platform.__dict__["check_and_update_config"]
    wrap_platform_hook(platform)

    assert platform.__dict__["check_and_update_config"] is once


def test_a_platform_that_inherits_a_wrapped_hook_is_not_wrapped_again():
    platform = make_platform()
    wrap_platform_hook(platform)
    derived = type("Derived", (platform,), {})
    wrap_platform_hook(derived)

    assert "check_and_update_config" not in vars(derived)


def test_the_hook_keeps_its_name_and_its_class():
    platform = make_platform()
    wrap_platform_hook(platform)

    assert platform.check_and_update_config.__name__ == "check_and_update_config"
    assert platform.check_and_update_config.__self__ is platform


@pytest.mark.usefixtures("nothing_is_looked_at")
@pytest.mark.parametrize("additional_config", [{}, {"enable_kvpp": False}, {"enable_kvpp": "false"}, {"other": 1}])
def test_with_kvpp_off_the_platforms_worker_stays(additional_config):
    platform, config = make_platform(), make_config(additional_config)
    wrap_platform_hook(platform)
    platform.check_and_update_config(config)

    assert config.parallel_config.worker_cls == PLATFORM_WORKER


@pytest.mark.usefixtures("nothing_is_looked_at")
@pytest.mark.parametrize(
    "config", [make_config(object(), worker_cls="w"), make_config(worker_cls="w", model_config=None)]
)
def test_a_configuration_that_is_no_mapping_or_has_no_model_is_left_alone(config):
    enable_if_asked(config)

    assert config.parallel_config.worker_cls == "w"


@pytest.mark.usefixtures("nothing_is_looked_at")
def test_a_copy_of_an_enabled_configuration_is_not_wrapped_again():
    name = name_kvpp_worker(PLATFORM_WORKER)
    config = make_config(worker_cls=name)
    enable_if_asked(config)

    assert config.parallel_config.worker_cls == name


def test_a_misspelt_switch_is_refused_at_configuration_time():
    with pytest.raises(KVPPConfigError, match="enable_kvpp is 'maybe'"):
        enable_if_asked(make_config({"enable_kvpp": "maybe"}))


def test_a_deployment_that_cannot_run_is_refused_with_every_reason(described):
    described.deployment = Deployment(tensor_parallel_size=8, graph_mode="FULL", is_mla=False)
    config = make_config(worker_cls=PLATFORM_WORKER)
    with pytest.raises(KVPPConfigError) as caught:
        enable_if_asked(config)

    assert len(caught.value.reasons) == 2
    assert config.parallel_config.worker_cls == PLATFORM_WORKER


def test_a_group_of_one_rank_has_no_effect_and_says_so(described, messages):
    described.deployment = Deployment(tensor_parallel_size=1, graph_mode="FULL", is_mla=False)
    config = make_config(worker_cls=PLATFORM_WORKER)
    enable_if_asked(config)

    assert config.parallel_config.worker_cls == PLATFORM_WORKER
    assert [message.split(":")[0] for message in messages] == ["enable_kvpp has no effect"]


def test_the_log_says_that_kvpp_is_on_and_the_group_size(described, messages):
    enable_if_asked(make_config(worker_cls=PLATFORM_WORKER))

    assert messages == ["KVPP is on: group size 8."]


def test_a_vllm_that_is_not_proven_is_used_with_a_warning(described, messages, monkeypatch):
    monkeypatch.setattr(symbols, "installed_version", lambda: "9.9.9")
    config = make_config(worker_cls=PLATFORM_WORKER)
    enable_if_asked(config)

    assert config.parallel_config.worker_cls == name_kvpp_worker(PLATFORM_WORKER)
    assert messages[0] == "KVPP is proven with vLLM 0.32.0; 9.9.9 has every symbol it needs, but has not been tested."


def test_a_vllm_that_has_changed_is_refused(described, monkeypatch):
    def check_seam(_symbols):
        raise KVPPSeamError("changed")

    monkeypatch.setattr(symbols, "check_seam", check_seam)
    config = make_config(worker_cls=PLATFORM_WORKER)

    with pytest.raises(KVPPSeamError, match="changed"):
        enable_if_asked(config)
    assert config.parallel_config.worker_cls == PLATFORM_WORKER


@pytest.mark.parametrize(("uses_v2", "package"), [(False, "gpu_model_runner"), (True, "gpu.model_runner")])
def test_the_model_runner_in_use_is_checked_and_not_the_other(described, monkeypatch, uses_v2, package):
    checked = []
    monkeypatch.setattr(symbols, "check_seam", checked.extend)
    config = make_config(worker_cls=PLATFORM_WORKER)
    config.use_v2_model_runner = uses_v2
    enable_if_asked(config)

    runners = {symbol.path.split(":")[0] for symbol in checked if "model_runner:" in symbol.path}
    assert runners == {f"vllm.v1.worker.{package}"}


def test_prefill_context_parallelism_is_used_with_a_warning_that_nobody_has_run_it(described, messages):
    described.deployment = Deployment(
        tensor_parallel_size=2, prefill_context_parallel_size=2, uses_model_runner_v2=True
    )
    enable_if_asked(make_config(worker_cls=PLATFORM_WORKER))

    assert any("prefill context parallelism" in message and "nobody has run it" in message for message in messages)
