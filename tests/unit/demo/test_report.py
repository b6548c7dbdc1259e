import json
from dataclasses import replace

from rich.console import Console

from vllm_kvpp.demo.report import make_document, make_report, make_table, make_verdict


def render(renderable, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def find_row(table, label):
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in render(table).splitlines() if "│" in line]
    (row,) = [row for row in rows if row[0] == label]
    return row[1:]


def test_the_table_shows_the_cache_with_and_without_kvpp(result):
    table = make_table(result)
    assert find_row(table, "KV cache tokens that fit") == ["14,560", "19,360", "–"]
    assert find_row(table, "times as many") == ["1", "1.330", "–"]
    assert find_row(table, "by the formula L/(⌈L/N⌉+2)") == ["1", "1.333", "–"]


def test_the_table_shows_right_answers_of_all_three_runs(result):
    assert find_row(make_table(result), "right answers") == ["4 of 4", "4 of 4", "0 of 4"]


def test_the_table_shows_how_far_logprobs_differ_with_and_without_kvpp(result):
    other = tuple(replace(answer, logprobs=(-0.26, *answer.logprobs[1:])) for answer in result.off.answers)
    table = make_table(replace(result, off=replace(result.off, answers=other)))
    assert find_row(table, "largest logprob difference") == ["–", "0.01", "–"]


def test_the_table_shows_what_was_moved(result):
    table = make_table(result)
    assert find_row(table, "bytes moved, on rank 0") == ["–", "123,456", "0"]
    assert find_row(table, "history, in layer transfers") == ["–", "123,000", "–"]
    assert find_row(table, "queries to owners, outputs") == ["–", "456", "–"]
    assert find_row(table, "of which decode in place") == ["–", "1", "–"]
    assert find_row(table, "of which decode at the owner") == ["–", "7", "–"]
    assert find_row(table, "steps without, nothing moved") == ["–", "2", "–"]


def test_the_table_fits_into_80_columns_without_breaking_a_label(result):
    narrow, wide = (render(make_table(result), width=width).splitlines() for width in (80, 120))
    assert len(narrow) == len(wide)


def test_the_report_shows_one_question_with_all_its_answers(result):
    text = render(make_report(result, ()))
    assert f"? {result.questions[0].prompt.split()[-1]}" in text
    for answers in (result.off.answers, result.on.broken_answers):
        assert f"  {' '.join(answers[0].text.split()[:6])} …\n" in text


def test_the_verdict_is_one_sentence_when_all_is_as_claimed(result):
    verdict = make_verdict(result, ()).plain
    assert "1.33 times as many tokens" in verdict
    assert verdict.count("\n") == 0


def test_the_verdict_lists_every_problem(result):
    assert make_verdict(result, ("one thing", "another")).plain.splitlines() == [
        "Something is off:",
        "  - one thing",
        "  - another",
    ]


def test_an_answer_with_brackets_is_printed_as_it_is(result):
    odd = replace(result.off.answers[0], text="[bold]oslo[/bold]")
    changed = replace(result, off=replace(result.off, answers=(odd, *result.off.answers[1:])))
    assert "[bold]oslo[/bold]" in render(make_report(changed, ()))


def test_the_document_is_plain_json_with_the_measured_numbers(result):
    document = json.loads(json.dumps(make_document(result, ())))
    assert document["is_as_claimed"] is True
    assert document["problems"] == []
    assert (document["off"]["num_tokens"], document["on"]["num_tokens"]) == (14560, 19360)
    assert document["factor"] == document["factor_expected"] == 1210 / 910
    assert (document["off"]["num_right"], document["on"]["num_right"], document["broken"]["num_right"]) == (4, 4, 0)
    assert [report["group_rank"] for report in document["on"]["reports"]] == [0, 1]
    assert document["num_differing"] == 0


def test_the_document_holds_every_question_with_its_answers(result):
    first, *others = make_document(result, ())["questions"]
    assert len(others) == 3
    assert first["right"] == first["off"]["text"] == first["on"]["text"]
    assert first["broken"]["is_right"] is False


def test_the_document_says_what_is_off(result):
    document = make_document(result, ("one thing",))
    assert (document["is_as_claimed"], document["problems"]) == (False, ["one thing"])
