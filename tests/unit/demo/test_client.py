import httpx
import pytest

from vllm_kvpp.demo.client import Answer, CacheSize, ServerClient, make_request, parse_answer, parse_cache_size
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.questions import NUM_WORDS, is_right, make_batches
from vllm_kvpp.demo.server import run_server

LABELS = '_block_size_resolved="True",block_size="16",hash_block_size="32",num_gpu_blocks="1450"'
LINE = f"vllm:cache_config_info{{{LABELS}}} 1.0\n"
BODY = {"choices": [{"text": " rome .", "token_ids": [4, 5], "logprobs": {"token_logprobs": [-0.5, -1]}}]}


@pytest.fixture
def reply(monkeypatch):
    """Lets every request of a client be answered with this response."""

    def reply_with(status, **content):
        response = httpx.Response(status, request=httpx.Request("POST", "http://x/y"), **content)
        for method in ("get", "post"):
            monkeypatch.setattr(httpx.Client, method, lambda *_, **__: response)
        return ServerClient("http://x", timeout_seconds=1)

    return reply_with


def test_questions_asked_at_once_get_their_answers_in_order(make_fake, interrupts):
    questions = make_batches(8)[0]
    with run_server(
        make_fake("kvpp"), timeout_seconds=30, interrupts=interrupts, on_phase=lambda _: None, grace_seconds=0.2
    ) as server:
        answers = server.client.ask([question.prompt for question in questions], num_tokens=NUM_WORDS)
    assert [is_right(question, answer) for question, answer in zip(questions, answers, strict=True)] == [True] * 4


def test_the_cache_size_is_read_from_the_metrics(reply):
    assert reply(200, text=LINE).read_cache_size() == CacheSize(num_blocks=1450, block_size=16)


def test_workers_answer_by_rank(reply):
    assert reply(200, json={"results": [{"rank": 0}, {"rank": 1}]}).call_workers("x", num_workers=2) == (
        {"rank": 0},
        {"rank": 1},
    )


@pytest.mark.parametrize("body", [{"results": [1, 2]}, {"results": None}, {}])
def test_another_number_of_workers_is_an_error(reply, body):
    with pytest.raises(DemoError, match="once for each of 3 workers"):
        reply(200, json=body).call_workers("kvpp_report", num_workers=3)


@pytest.mark.parametrize("content", [{"text": "no"}, {"json": [1]}])
def test_a_reply_that_is_no_object_is_an_error(reply, content):
    with pytest.raises(DemoError, match="answer"):
        reply(200, **content).call_workers("kvpp_report", num_workers=3)


def test_an_error_status_is_an_http_error_with_what_the_server_said(reply):
    with pytest.raises(httpx.HTTPStatusError, match=r"500.*engine is dead"):
        reply(500, text="engine is dead").call_workers("kvpp_report", num_workers=2)


def test_a_request_is_greedy_and_asks_for_ids_and_logprobs():
    request = make_request("a b", num_tokens=7)
    assert (request["temperature"], request["max_tokens"], request["ignore_eos"]) == (0, 7, True)
    assert request["return_token_ids"]
    assert request["logprobs"] == 1


def test_an_answer_is_read():
    assert parse_answer(BODY, num_tokens=2) == Answer(text=" rome .", token_ids=(4, 5), logprobs=(-0.5, -1.0))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": BODY["choices"] * 2},
        {"choices": [{**BODY["choices"][0], "token_ids": None}]},
        {"choices": [{**BODY["choices"][0], "logprobs": None}]},
        {"choices": [{**BODY["choices"][0], "logprobs": {"token_logprobs": [-0.5, None]}}]},
    ],
)
def test_an_answer_of_another_form_is_an_error(body):
    with pytest.raises(DemoError, match="unexpected form"):
        parse_answer(body, num_tokens=2)


def test_an_answer_of_another_length_is_an_error():
    with pytest.raises(DemoError, match="should generate 3 tokens, but sent 2 token ids and 2 log"):
        parse_answer(BODY, num_tokens=3)


def test_the_cache_size_is_found_among_other_metrics():
    metrics = f"# TYPE vllm:cache_config_info gauge\n{LINE}vllm:other 2.0\n"
    assert parse_cache_size(metrics) == CacheSize(num_blocks=1450, block_size=16)
    assert parse_cache_size(metrics).num_tokens == 23200


@pytest.mark.parametrize("metrics", ["", LINE + LINE, LINE.replace(" 1.0", " 0.0")])
def test_no_cache_line_or_several_is_an_error(metrics):
    with pytest.raises(DemoError, match="one vllm:cache_config_info line"):
        parse_cache_size(metrics)


@pytest.mark.parametrize("name", ["num_gpu_blocks", "block_size"])
def test_a_cache_line_without_a_number_is_an_error(name):
    metrics = LINE.replace(f',{name}="', f',{name}="None').replace(f'{{{name}="', f'{{{name}="None')
    with pytest.raises(DemoError, match=f"no number for {name}"):
        parse_cache_size(metrics)
