from pydantic import BaseModel, ValidationError

from vllm_kvpp.vllm_seam.findings import Findings, ServeCommand, Verdict, describe_error


def test_findings_cross_a_process_border_unchanged():
    verdict = Verdict(outcome="refused", reasons=("one", "two"), group_size=2, options={"staging_mib": None})
    findings = Findings(platform="CpuPlatform", faults=("a",), verdict=verdict)

    assert Findings.model_validate_json(findings.model_dump_json()) == findings


def test_a_command_crosses_a_process_border_unchanged():
    command = ServeCommand(arguments=("MODEL", '{"a": "ü\n"}'))

    assert ServeCommand.model_validate_json(command.model_dump_json()) == command


def test_an_error_is_one_line():
    assert describe_error(OSError("no\n  such model")) == "OSError: no such model"


def test_of_pydantics_report_only_the_message_is_kept():
    class Model(BaseModel):
        size: int

    try:
        Model(size="secret")
    except ValidationError as error:
        said = describe_error(error)

    assert said.startswith("ValidationError: Input should be a valid integer")
    assert "secret" not in said


def test_a_long_message_is_cut():
    assert len(describe_error(ValueError("x" * 10_000))) < 1000
