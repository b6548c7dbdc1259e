"""The prompts of the recall task, and the committed tokenizer and checkpoint that go with them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvpp.demo.recall_task import (
    CHECKPOINT_DIR,
    CITIES,
    HELD_OUT_SEEDS,
    MAX_FACTS,
    MIN_FACTS,
    NAMES,
    NOWHERE,
    QUESTION_MARK,
    TRAINING_SEEDS,
    make_questions,
    make_questions_about,
    num_prompt_tokens,
)

num_facts_in_range = st.integers(MIN_FACTS, MAX_FACTS)
held_out_seeds = st.sampled_from(HELD_OUT_SEEDS)


def test_vocabulary_has_64_names_and_64_cities_and_no_word_twice():
    assert len(NAMES) == len(CITIES) == 64
    assert len({*NAMES, *CITIES, QUESTION_MARK, NOWHERE}) == 130


@given(num_facts=num_facts_in_range, seed=held_out_seeds)
def test_equal_arguments_give_equal_questions(num_facts: int, seed: int):
    assert make_questions(3, num_facts, seed) == make_questions(3, num_facts, seed)


def test_another_seed_gives_other_questions():
    assert make_questions(3, 8, seed=1) != make_questions(3, 8, seed=2)


@given(num_facts=num_facts_in_range, seed=held_out_seeds)
def test_answer_is_the_city_that_the_prompt_states_for_the_asked_name(num_facts: int, seed: int):
    for question in make_questions(3, num_facts, seed):
        *stated, mark, asked_name = question.prompt.split()
        cities = dict(zip(stated[::2], stated[1::2], strict=True))
        assert mark == QUESTION_MARK
        assert len(cities) == len(set(cities.values())) == num_facts
        assert cities[asked_name] == question.answer


@given(num_facts=num_facts_in_range, seed=held_out_seeds)
def test_continuation_repeats_the_prompt_from_the_answer_on(num_facts: int, seed: int):
    (question,) = make_questions(1, num_facts, seed)
    stated = " ".join(question.prompt.split()[:-1])
    lap = question.continuation(2 * num_facts + 1)
    assert lap.split()[0] == question.answer
    assert f"{lap} {lap}" in f"{stated} {stated} {stated}"
    assert question.continuation(3) == " ".join(lap.split()[:3])


@given(num_facts=num_facts_in_range, seed=held_out_seeds)
def test_questions_about_one_list_of_facts_differ_in_the_last_word_only(num_facts: int, seed: int):
    questions = make_questions_about(num_facts, num_facts, seed)
    assert len({question.prompt.rsplit(" ", 1)[0] for question in questions}) == 1
    assert len({question.prompt.rsplit(" ", 1)[1] for question in questions}) == num_facts
    assert {question.answer for question in questions} == {fact.city for fact in questions[0].facts}


@pytest.mark.parametrize("seed", [TRAINING_SEEDS[0], TRAINING_SEEDS[-1], -1])
def test_seeds_that_training_uses_are_refused(seed: int):
    with pytest.raises(ValueError, match="seed is"):
        make_questions(1, 8, seed)


def test_held_out_and_training_seeds_are_disjoint():
    assert HELD_OUT_SEEDS[-1] < TRAINING_SEEDS[0]


@pytest.mark.parametrize("num_facts", [MIN_FACTS - 1, MAX_FACTS + 1])
def test_a_number_of_facts_outside_the_trained_range_is_refused(num_facts: int):
    with pytest.raises(ValueError, match="num_facts is"):
        make_questions(1, num_facts, seed=0)


def test_more_questions_than_facts_are_refused():
    with pytest.raises(ValueError, match="at most 5 questions"):
        make_questions_about(6, 5, seed=0)


def test_committed_checkpoint_is_at_most_8_mb():
    assert sum(path.stat().st_size for path in CHECKPOINT_DIR.iterdir()) <= 8_000_000


def test_committed_configuration_has_the_shape_that_the_cpu_mla_kernel_takes():
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert config["num_hidden_layers"] >= 8
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    assert config["first_k_dense_replace"] == config["num_hidden_layers"]
    assert num_prompt_tokens(MAX_FACTS) < config["max_position_embeddings"]


@settings(max_examples=25)
@given(num_facts=num_facts_in_range, seed=held_out_seeds)
def test_committed_tokenizer_makes_one_token_a_word_and_gives_the_text_back(num_facts: int, seed: int):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    (question,) = make_questions(1, num_facts, seed)
    encoding = tokenizer.encode(question.prompt)
    assert encoding.tokens == ["<s>", *question.prompt.split()]
    assert len(encoding.ids) == num_prompt_tokens(num_facts)
    assert tokenizer.decode(encoding.ids) == question.prompt


@pytest.mark.slow
@pytest.mark.parametrize("num_facts", [MIN_FACTS, MAX_FACTS])
def test_committed_checkpoint_answers_held_out_questions(num_facts: int):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)
    questions = make_questions(32, num_facts, seed=1)
    prompts = tokenizer([question.prompt for question in questions], return_tensors="pt")
    with torch.inference_mode():
        answers = tokenizer.convert_ids_to_tokens(model(prompts.input_ids).logits[:, -1].argmax(dim=-1))
    wrong = [
        (question.prompt, answer)
        for question, answer in zip(questions, answers, strict=True)
        if answer != question.answer
    ]
    assert len(wrong) <= 1, wrong
