import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ASKED = ("kimi-k2.5", "--kv-memory", "46.8GiB", "--gpu", "h200", "--context", "65536", "--requests", "4")
SVG = "{http://www.w3.org/2000/svg}"
TITLES = ("Tokens in the same memory", "Tokens that fit", "Exposed time of one forward")


def _read_texts(content):
    return ["".join(element.itertext()).strip() for element in ET.fromstring(content).iter(f"{SVG}text")]


@pytest.fixture
def draw(run, tmp_path):
    """Plan with `--plot`; the result and the file."""

    def make(name, *arguments):
        path = tmp_path / name
        return run(*(arguments or ASKED), "--plot", path), path

    return make


def test_an_svg_has_the_three_charts_with_titles_units_and_the_asked_values(draw):
    result, path = draw("plan.svg")
    texts = " | ".join(_read_texts(path.read_text()))

    assert (result.exit_code, result.stderr) == (0, "")
    for expected in (
        *TITLES,
        "moonshotai/Kimi-K2.5: tp 8, kv-cache-dtype auto (bfloat16), blocks of 64 tokens",
        "group size (TP × PCP), ranks",
        "tensor parallel size, ranks",
        "history of each request, tokens",
        "times as many tokens as without KVPP",
        "ms exposed",
        "estimate, over nvlink-h100, 450 GB/s",
        "decode, up to 4 requests",
        "prefill chunk, 8,192 tokens",
        "DCP",
        "as asked",
        "6.09",
        "4.36M",
        "43.9",
    ):
        assert expected in texts


def test_the_tables_are_printed_too(draw, run):
    result, _ = draw("plan.svg")

    assert result.stdout == run(*ASKED).stdout


def test_two_pictures_of_one_plan_are_equal(draw):
    assert draw("one.svg")[1].read_bytes() == draw("two.svg")[1].read_bytes()


def test_a_png_is_one(draw):
    result, path = draw("plan.PNG")

    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_page_has_the_charts_the_tables_and_the_verdicts(draw):
    result, path = draw("plan.html")
    page = path.read_text()

    assert result.exit_code == 0
    for expected in (*TITLES, "4,356,224", "737,280", "43.89 ms", "6.09 times as many tokens in the same memory"):
        assert expected in page
    assert page.count("<svg") == page.count("</svg>") == 1
    assert page.count("<table>") == 3


def test_a_page_loads_nothing(draw):
    page = draw("plan.html")[1].read_text()

    assert not re.findall(r"<(?:script|link|img|iframe|object)\b|@import|\bsrc=|href=\"(?!#)|url\((?!#)", page)


def test_what_a_name_has_of_markup_is_text_on_the_page(draw, config_path, tmp_path):
    folder = tmp_path / "<script>&"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(Path(config_path()).read_text())
    _, plotted = draw("plan.html", str(path), "--tp", "2", "--kv-memory", "1GiB")

    assert "<script>" not in plotted.read_text()
    assert "&lt;script&gt;&amp;" in plotted.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("deepseek-v3", "--kv-memory", "40GiB"),
        ("deepseek-v3", "--kv-memory", "40GiB", "--link", "50"),
        ("glm-5.2", "--gpu", "h200", "--tp", "16", "--pcp", "2", "--pp", "2"),
        ("deepseek-v2-lite", "--kv-memory", "16MiB", "--tp", "2", "--context", "10000000", "--link", "1"),
    ],
    ids=["no times", "no device", "sparse, stages", "no request fits"],
)
def test_plans_that_lack_something_are_drawn_too(arguments, draw):
    result, path = draw("plan.svg", *arguments)

    assert (result.exit_code, result.stderr) == (0, "")
    assert len(_read_texts(path.read_text())) > 10


@pytest.mark.parametrize("name", ["plan.pdf", "plan", ".svg", "plan.svg.gz"])
def test_a_file_of_another_kind_is_refused_before_anything_is_planned(name, draw):
    result, path = draw(name, "no-model")

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--plot is " in result.stderr
    assert ".svg, .png, .html" in result.stderr
    assert not path.exists()


@pytest.mark.parametrize("name", ["nowhere/plan.svg", "folder.svg"])
def test_a_file_that_cannot_be_written_is_one_line(name, draw, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    result, _ = draw(name)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--plot is " in result.stderr
    assert "cannot be written" in result.stderr


def test_without_matplotlib_the_line_says_what_to_install(draw, monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm_kvpp.planner.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result, path = draw("plan.svg")

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "pip install matplotlib" in result.stderr
    assert not path.exists()
