from dataclasses import replace

import pytest

from vllm_kvpp.demo.client import Answer
from vllm_kvpp.demo.questions import NUM_WORDS, count_right, is_right, make_batches
from vllm_kvpp.demo.recall_task import num_prompt_tokens
from vllm_kvpp.demo.vllm_command import MAX_MODEL_LEN


def answer(text):
    return Answer(text=text, token_ids=(), logprobs=())


@pytest.mark.parametrize("num_questions", [2, 3, 24])
def test_the_batches_hold_all_questions(num_questions):
    first, second = make_batches(num_questions)
    assert len(first) + len(second) == num_questions
    assert 0 <= len(first) - len(second) <= 1


def test_the_questions_are_the_same_each_time_and_no_prompt_comes_twice():
    batches = make_batches(256)
    assert make_batches(256) == batches
    assert len({question.prompt for batch in batches for question in batch}) == 256


def test_prompt_and_answer_fit_into_the_servers_length():
    longest = max(len(question.facts) for batch in make_batches(4) for question in batch)
    assert num_prompt_tokens(longest) + NUM_WORDS <= MAX_MODEL_LEN


def test_an_answer_is_right_when_every_word_is():
    question = make_batches(2)[0][0]
    right = question.continuation(NUM_WORDS)
    assert is_right(question, answer(f" {right}"))
    assert not is_right(question, answer(right.rsplit(" ", 1)[0]))
    assert not is_right(question, answer(f"{right.rsplit(' ', 1)[0]} oslo"))


def test_the_right_first_word_alone_is_not_enough():
    question = make_batches(2)[0][0]
    assert not is_right(question, answer(question.answer))


def test_right_answers_are_counted_by_question():
    first, second = make_batches(2)[0][0], make_batches(2)[1][0]
    right = [answer(question.continuation(NUM_WORDS)) for question in (first, second)]
    assert count_right((first, second), right) == 2
    assert count_right((first, second), right[::-1]) == 0
    assert count_right((first, second), [right[0], replace(right[1], text="oslo")]) == 1
