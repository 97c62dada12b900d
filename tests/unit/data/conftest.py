"""Tokenizers with one token per character, with and without a chat template."""

import string

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOLS = (  # writes calls instead of the content, as some templates do
    "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{% for call in m.tool_calls or [] %}"
    "call {{ call.function.name }}({{ call.function.arguments }})<|call|>{% else %}{{ m.content }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *string.printable])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    model.decoder = Fuse()  # no spaces between the characters
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", unk_token="<unk>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def chat_tokenizer():
    return make_tokenizer(CHATML)


@pytest.fixture
def tool_tokenizer():
    tokenizer = make_tokenizer(TOOLS)
    tokenizer.add_tokens(["<|call|>"])
    return tokenizer


@pytest.fixture
def plain_tokenizer():
    return make_tokenizer(None)
