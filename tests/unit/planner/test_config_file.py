import pytest

from vllm_kvpp.planner import config_file
from vllm_kvpp.planner.config_file import list_catalogue, read_config
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import read_model

REFUSED = {
    "deepseek-ai/DeepSeek-V4-Flash": "compress_ratios",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "is hybrid",
    "openbmb/MiniCPM3-4B": "minicpm3",
    "zai-org/GLM-5.3-Flash": "is hybrid",
}


def test_a_folder_and_its_file_give_the_same_model(config_path, tmp_path):
    path = config_path()

    assert read_config(str(tmp_path)).values == read_config(path).values


@pytest.mark.parametrize("name", ["zai-org/GLM-5.2", "GLM-5.2", "glm-5.2"])
def test_a_model_of_the_catalogue_is_found_with_and_without_its_owner(name):
    assert read_config(name).name == "zai-org/GLM-5.2"


@pytest.mark.parametrize("name", list_catalogue())
def test_every_model_of_the_catalogue_says_where_it_is_from(name):
    assert read_config(name).source


@pytest.mark.parametrize("name", [name for name in list_catalogue() if name not in REFUSED])
def test_a_model_of_the_catalogue_can_be_planned(name, plan):
    assert plan(name, tp_size=4, kv_memory="40GiB").capacity.factor > 1


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_model_that_kvpp_does_not_serve_is_refused_by_name_with_the_reason(name, reason):
    with pytest.raises(PlannerError, match=reason) as caught:
        read_model(read_config(name))
    assert name in str(caught.value)


def test_class_defaults_are_named_as_such(config, monkeypatch):
    found = config_file.ConfigFile("small", config(), has_defaults_only=True)

    assert "not its checkpoint's config.json" in read_model(found).notes[0]
    assert read_config("openbmb/MiniCPM3-4B").has_defaults_only


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(PlannerError, match="DeepSeek-V3") as caught:
        read_config("deepseek-v9")
    assert "'deepseek-v9'" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "no object"),
        (b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
    ids=["cut off", "no text", "too deep", "a list", "a number too long"],
)
def test_a_file_that_is_no_configuration_is_refused(content, problem, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(PlannerError, match=problem):
        read_config(str(path))


def test_a_huge_file_is_refused_without_being_parsed(tmp_path, monkeypatch):
    path = tmp_path / "weights.json"
    path.write_bytes(b"{" + b" " * config_file.LARGEST_CONFIG_BYTES + b"}")
    monkeypatch.setattr(config_file.json, "loads", lambda _: pytest.fail("parsed"))

    with pytest.raises(PlannerError, match="larger than 8 MiB"):
        read_config(str(path))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(PlannerError, match=r"no config\.json"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("name", ["x" * 10_000, "a\x00b", ""])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(PlannerError, match="MODEL is "):
        read_config(name)
