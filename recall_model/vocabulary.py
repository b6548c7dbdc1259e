"""Words of the recall task as token ids, and the tokenizer files that do the same for a serving engine."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from vllm_kvpp.demo.recall_task import CITIES, NAMES, NOWHERE, QUESTION_MARK

START, END, UNKNOWN, PADDING = "<s>", "</s>", "<unk>", "<pad>"
SPECIAL = (START, END, UNKNOWN, PADDING)
WORDS: tuple[str, ...] = (*SPECIAL, QUESTION_MARK, NOWHERE, *NAMES, *CITIES)
"""The vocabulary; a word's index is its token id. Names and cities are each one contiguous range."""

TOKEN_ID = {word: token_id for token_id, word in enumerate(WORDS)}
FIRST_NAME_ID = TOKEN_ID[NAMES[0]]
FIRST_CITY_ID = TOKEN_ID[CITIES[0]]


def make_tokenizer() -> Tokenizer:
    """Build the tokenizer: one token a word, words apart by white space, `<s>` put in front."""
    tokenizer = Tokenizer(models.WordLevel(vocab=TOKEN_ID, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, TOKEN_ID[START])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_tokenizer(folder: Path, *, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": START,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
