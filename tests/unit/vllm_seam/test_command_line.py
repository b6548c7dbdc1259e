from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from vllm_kvpp.deployment import Deployment
from vllm_kvpp.errors import KVPPConfigError, KVPPSeamError
from vllm_kvpp.vllm_seam import command_line
from vllm_kvpp.vllm_seam.command_line import MalformedCommandError, judge_command, parse_command
from vllm_kvpp.vllm_seam.findings import ServeCommand
from vllm_kvpp.vllm_seam.log import logger
from vllm_kvpp.vllm_seam.worker_class import name_kvpp_worker


def command(*arguments):
    return ServeCommand(arguments=arguments)


@pytest.mark.parametrize(
    "arguments", [("some/model",), ("--model", "some/model"), ("--seed", "1", "--model=some/model")]
)
def test_the_model_is_found_where_vllm_takes_it_from(arguments):
    assert parse_command(command(*arguments)).model == "some/model"


def test_arguments_are_parsed_as_vllm_does():
    args = parse_command(command("M", "--tensor_parallel_size", "2", "--additional-config.enable_kvpp", "true"))

    assert (args.tensor_parallel_size, args.additional_config) == (2, {"enable_kvpp": True})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("M", "--tensor-parallel-size", "two"), "argument --tensor-parallel-size/-tp: invalid"),
        (("M", "--no-such-option"), "unrecognized arguments: --no-such-option"),
        (("M", "--additional-config", "{x}"), "argument --additional-config"),
        (("M", "--help"), "asks for vLLM's help"),
        (("M", "--config"), "No config file specified"),
        (("M", "--config", "/nowhere.yaml"), "nowhere"),
        (("M", "--additional-config.x"), "IndexError"),
    ],
)
def test_what_the_parser_refuses_is_said_in_one_line(arguments, expected, capfd):
    with pytest.raises(MalformedCommandError) as caught:
        parse_command(command(*arguments))

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "usage:" not in capfd.readouterr().out


@pytest.fixture
def build(monkeypatch):
    """Build this configuration, or raise this error, instead of what vLLM would."""
    monkeypatch.setattr(command_line, "describe_deployment", lambda _: Deployment(tensor_parallel_size=2))
    monkeypatch.setattr(command_line, "set_current_vllm_config", lambda _: nullcontext())
    monkeypatch.setattr(command_line, "choose_backend", lambda *_, **__: make_backend("CPU_MLA"))

    def build(outcome):
        def create_engine_config(**_):
            logger.warning("KVPP says this")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        engine_args = SimpleNamespace(create_engine_config=create_engine_config)
        fake = SimpleNamespace(from_cli_args=lambda _: engine_args)
        monkeypatch.setattr(command_line, "AsyncEngineArgs", fake)

    return build


def make_backend(name, **declared):
    return SimpleNamespace(get_name=lambda: name, get_impl_cls=lambda: SimpleNamespace(**declared))


def make_config(*, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", additional_config=None, pcp_size=1):
    return SimpleNamespace(
        additional_config=additional_config or {},
        parallel_config=SimpleNamespace(worker_cls=worker_cls, prefill_context_parallel_size=pcp_size),
        model_config=SimpleNamespace(get_head_size=lambda: 576, dtype="torch.bfloat16", use_mla=True),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


@pytest.mark.parametrize(
    ("config", "is_attached", "expected"),
    [
        (make_config(), True, "off"),
        (make_config(additional_config={"enable_kvpp": False}), True, "off"),
        (make_config(additional_config={"enable_kvpp": True}), True, "no effect"),
        (make_config(additional_config={"enable_kvpp": True}), False, "not loaded"),
        (make_config(worker_cls=name_kvpp_worker("a.B"), additional_config={"enable_kvpp": True}), True, "on"),
    ],
)
def test_the_finished_configuration_tells_what_would_happen(config, is_attached, expected, build):
    build(config)

    assert judge_command(command("M"), is_attached=is_attached).outcome == expected


def test_the_verdict_has_the_group_the_options_and_what_kvpp_says(build):
    additional = {"enable_kvpp": True, "kvpp": {"transfer": "full"}}
    build(make_config(worker_cls=name_kvpp_worker("a.B"), additional_config=additional))
    verdict = judge_command(command("M"), is_attached=True)

    assert (verdict.model, verdict.group_size, verdict.options["transfer"]) == ("M", 2, "full")
    assert verdict.messages == ("KVPP says this",)


@pytest.mark.parametrize(
    ("error", "outcome", "reasons"),
    [
        (KVPPConfigError(["one", "two"]), "refused", ("one", "two")),
        (KVPPSeamError("symbol gone"), "refused", ("symbol gone",)),
        (OSError("no\nsuch model"), "refused by vLLM", ("OSError: no such model",)),
    ],
)
def test_a_refusal_keeps_every_reason(error, outcome, reasons, build):
    build(error)
    verdict = judge_command(command("M"), is_attached=True)

    assert (verdict.outcome, verdict.reasons) == (outcome, reasons)


def test_what_vllm_checks_before_the_configuration_is_its_refusal(build):
    verdict = judge_command(command("M", "--enable-auto-tool-choice"), is_attached=True)

    assert verdict.outcome == "refused by vLLM"
    assert "--enable-auto-tool-choice requires --tool-call-parser" in verdict.reasons[0]


def test_a_malformed_command_line_is_a_verdict(build):
    assert judge_command(command("M", "--no-such-option"), is_attached=True).outcome == "malformed"


def test_a_backend_that_vllm_does_not_have_is_said(build, monkeypatch):
    def choose_backend(*_, **__):
        raise NotImplementedError("Sparse Attention is not supported on CPU.")

    build(make_config())
    monkeypatch.setattr(command_line, "choose_backend", choose_backend)
    verdict = judge_command(command("M"), is_attached=True)

    assert "Sparse Attention is not supported" in verdict.attention_backend
    assert (verdict.decode_obstacle, verdict.in_place_obstacle) == (None, None)


def judge_decode(build, monkeypatch, *, decode, backend, transport="auto", **config):
    additional = {"enable_kvpp": True, "kvpp": {"decode": decode, "transport": transport}}
    build(make_config(worker_cls=name_kvpp_worker("a.B"), additional_config=additional, **config))
    monkeypatch.setattr(command_line, "choose_backend", lambda *_, **__: backend)
    return judge_command(command("M"), is_attached=True)


def test_a_backend_that_attends_all_heads_has_no_obstacle(build, monkeypatch):
    verdict = judge_decode(build, monkeypatch, decode="owner", backend=make_backend("CPU_MLA"))

    assert (verdict.outcome, verdict.decode_obstacle) == ("on", None)


def test_a_backend_from_elsewhere_may_declare_that_it_does(build, monkeypatch):
    backend = make_backend("OTHERS_MLA", kvpp_attends_all_heads=True)

    assert judge_decode(build, monkeypatch, decode="owner", backend=backend).outcome == "on"


@pytest.mark.parametrize(
    ("backend", "config", "expected"),
    [
        ("FLASHMLA", {}, "attention backend FLASHMLA: its tiles are scheduled for one rank's heads"),
        ("CPU_MLA", {"pcp_size": 2}, "ranks of prefill context parallelism have different tokens"),
    ],
)
def test_decode_at_the_owner_with_an_obstacle_is_refused_as_a_start_would(
    backend, config, expected, build, monkeypatch
):
    verdict = judge_decode(build, monkeypatch, decode="owner", backend=make_backend(backend), **config)

    assert verdict.outcome == "refused"
    assert verdict.reasons[0].startswith(f"Decode tokens cannot attend at the owner. ({expected}; set kvpp.decode to")


@pytest.mark.parametrize("decode", ["auto", "transfer"])
def test_an_obstacle_is_told_where_decode_may_move_history(decode, build, monkeypatch):
    verdict = judge_decode(build, monkeypatch, decode=decode, backend=make_backend("FLASHMLA"))

    assert (verdict.outcome, "FLASHMLA" in verdict.decode_obstacle) == ("on", True)


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(command_line, "current_platform", SimpleNamespace(device_type="cuda"))


OF_THE_MACHINE = (
    ("AMX_MLA", {}, "attention backend AMX_MLA: nobody has run it on another rank's memory yet"),
    ("CPU_MLA", {"pcp_size": 2}, "ranks of prefill context parallelism have different tokens"),
)
# This one the settings refuse by themselves.
OF_THE_SETTINGS = (
    "CPU_MLA",
    {"transport": "broadcast"},
    "the ranks do not share memory, as kvpp.transport is broadcast",
)
NOT_IN_PLACE = ("backend", "config", "expected")


@pytest.mark.parametrize("decode", ["auto", "in_place"])
def test_ranks_on_cpus_whose_backend_reads_in_place_have_no_obstacle_to_it(decode, build, monkeypatch):
    verdict = judge_decode(build, monkeypatch, decode=decode, backend=make_backend("CPU_MLA"))

    assert (verdict.outcome, verdict.in_place_obstacle) == ("on", None)


@pytest.mark.parametrize(NOT_IN_PLACE, [*OF_THE_MACHINE, OF_THE_SETTINGS])
@pytest.mark.parametrize("decode", ["auto", "transfer"])
def test_an_obstacle_to_reading_in_place_is_told_where_decode_has_other_ways(
    backend, config, expected, decode, build, monkeypatch
):
    verdict = judge_decode(build, monkeypatch, decode=decode, backend=make_backend(backend), **config)

    assert (verdict.outcome, verdict.in_place_obstacle) == ("on", expected)


@pytest.mark.parametrize(NOT_IN_PLACE, OF_THE_MACHINE)
def test_reading_in_place_with_an_obstacle_is_refused_as_a_start_would(backend, config, expected, build, monkeypatch):
    verdict = judge_decode(build, monkeypatch, decode="in_place", backend=make_backend(backend), **config)
    (reason,) = verdict.reasons

    assert verdict.outcome == "refused"
    assert reason.startswith(f"Decode tokens cannot read the owner's memory in place. ({expected}; set kvpp.decode to")


def test_ranks_on_devices_do_not_share_memory(build, monkeypatch, on_device):
    verdict = judge_decode(build, monkeypatch, decode="auto", backend=make_backend("CPU_MLA"))

    assert verdict.in_place_obstacle == "the ranks do not share memory, which only ranks on CPUs do"


def test_a_server_without_kvpp_is_not_refused_for_an_obstacle(build, monkeypatch):
    build(make_config(additional_config={"kvpp": {"decode": "in_place"}}))
    monkeypatch.setattr(command_line, "choose_backend", lambda *args, **kwargs: make_backend("FLASHMLA"))

    assert judge_command(command("M"), is_attached=True).outcome == "off"
