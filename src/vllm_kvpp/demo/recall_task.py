"""Prompts for the recall model: facts first, a question last, one right answer.

A fact is a person and the city where they live. A question names a person:

    alice paris bob rome carol lima ? bob

The right next word is `rome`. After it the model goes on with the facts that follow in the prompt, and after the last
with a question mark and the first: `rome carol lima ? alice paris bob ...`. So a long generation keeps reading the
cache, and `RecallQuestion.continuation` says what each of its words must be.

Prompts with the same facts and different questions share all tokens up to the question mark
(`make_questions_about` builds them); prefix caching can reuse those blocks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT_DIR = Path(__file__).parent / "recall"
"""Folder of the committed checkpoint and its tokenizer; ends in a path that vLLM and transformers load."""

NAMES: tuple[str, ...] = tuple(
    """
    alice bob carol dave erin frank grace heidi ivan judy kevin laura mike nina oscar peggy
    quinn rita sam trudy uma victor wendy xavier yara zoe aaron bella clara diego elena felix
    gina hugo iris jack karen leo mona nora owen paula ralph sara tom ursula vera walter
    anna boris cindy david emma fiona george hanna igor julia karl linda martin nancy otto peter
    """.split()
)
"""First words of facts, each one token."""

CITIES: tuple[str, ...] = tuple(
    """
    paris rome lima oslo cairo delhi tokyo berlin madrid lisbon vienna prague warsaw athens dublin london
    moscow kyiv riga tallinn vilnius minsk sofia bucharest budapest zagreb belgrade tirana skopje ankara tehran baghdad
    amman beirut damascus doha dubai muscat kabul lahore karachi mumbai chennai dhaka bangkok hanoi manila jakarta
    seoul beijing shanghai taipei osaka sydney perth auckland nairobi accra lagos tunis algiers dakar havana quito
    """.split()
)
"""Second words of facts, each one token; no word is both a name and a city."""

QUESTION_MARK = "?"

NOWHERE = "nowhere"
"""What the model answers when a layer finds zeros or the rows of another layer in its cache."""

MIN_FACTS = 4
MAX_FACTS = 32
"""The model is trained and checked on `MIN_FACTS` to `MAX_FACTS` facts in a prompt."""

HELD_OUT_SEEDS = range(0, 2**31)
TRAINING_SEEDS = range(2**31, 2**32)
"""Training draws its facts from seeds that `make_questions` refuses, so every prompt made here is held out."""


@dataclass(frozen=True)
class Fact:
    """One person and the city where they live."""

    name: str
    city: str


@dataclass(frozen=True)
class RecallQuestion:
    """A prompt, the one word that answers it, and the facts both came from.

    `facts` keeps the order of the prompt; `asked` is the index of the fact that is asked for.
    """

    prompt: str
    answer: str
    facts: tuple[Fact, ...]
    asked: int

    def continuation(self, num_words: int) -> str:
        """Return the first `num_words` words that a right generation has, the answer included."""
        period = [word for fact in self.facts for word in (fact.name, fact.city)] + [QUESTION_MARK]
        start = 2 * self.asked + 1
        return " ".join(period[(start + word) % len(period)] for word in range(num_words))


def make_questions(num_questions: int, num_facts: int, seed: int) -> list[RecallQuestion]:
    """Return questions that each come with facts of their own; equal arguments give equal questions.

    Raises `ValueError` for a seed outside `HELD_OUT_SEEDS` and a number of facts outside what the model knows.
    """
    generator = _held_out_generator(num_facts, seed)
    return [ask(_draw_facts(generator, num_facts), asked=generator.randrange(num_facts)) for _ in range(num_questions)]


def make_questions_about(num_questions: int, num_facts: int, seed: int) -> list[RecallQuestion]:
    """Return questions about different people over one list of facts, so that all prompts share a long prefix.

    Only the last word of the prompts differs. At most `num_facts` questions exist; asking for more is a `ValueError`.
    """
    if num_questions > num_facts:
        raise ValueError(f"num_questions is {num_questions}; {num_facts} facts allow at most {num_facts} questions")
    generator = _held_out_generator(num_facts, seed)
    facts = _draw_facts(generator, num_facts)
    return [ask(facts, asked=asked) for asked in generator.sample(range(num_facts), num_questions)]


def ask(facts: Sequence[Fact], *, asked: int) -> RecallQuestion:
    """Write the prompt that states `facts` and asks for the city of fact number `asked`."""
    statements = " ".join(f"{fact.name} {fact.city}" for fact in facts)
    prompt = f"{statements} {QUESTION_MARK} {facts[asked].name}"
    return RecallQuestion(prompt=prompt, answer=facts[asked].city, facts=tuple(facts), asked=asked)


def num_prompt_tokens(num_facts: int) -> int:
    """Return the length of a prompt in tokens, the start token that the tokenizer adds included."""
    return 1 + 2 * num_facts + 2


def _held_out_generator(num_facts: int, seed: int) -> random.Random:
    if seed not in HELD_OUT_SEEDS:
        raise ValueError(f"seed is {seed}; choose one from 0 to {HELD_OUT_SEEDS[-1]}, others are training seeds")
    if not MIN_FACTS <= num_facts <= MAX_FACTS:
        raise ValueError(f"num_facts is {num_facts}; the recall model knows {MIN_FACTS} to {MAX_FACTS} facts")
    return random.Random(f"{seed} {num_facts}")


def _draw_facts(generator: random.Random, num_facts: int) -> list[Fact]:
    names = generator.sample(NAMES, num_facts)
    cities = generator.sample(CITIES, num_facts)
    return [Fact(name, city) for name, city in zip(names, cities, strict=True)]
