"""Tokens are shown one by one as they stand in the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lucidrl.data.token_texts import TokenTexts


@pytest.fixture
def bytes_tokenizer():
    """A byte-level tokenizer without merges: a character beyond ASCII has several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def pieces_tokenizer():
    """A tokenizer that strips the space before the first word, as SentencePiece models do."""
    vocabulary = {"▁how": 0, "▁are": 1, "▁you": 2, "?": 3, "▁a": 4, "[unk]": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_tokens_of_a_character_are_one_text(bytes_tokenizer):
    text = "a é€b"
    texts = TokenTexts(bytes_tokenizer)(bytes_tokenizer.encode(text))
    assert texts == ["a", " ", "é€", "", "", "", "", "b"]


def test_words_keep_the_space_before_them(pieces_tokenizer):
    assert TokenTexts(pieces_tokenizer)([0, 1, 2, 3]) == [" how", " are", " you", "?"]


def test_no_tokens_have_no_texts(bytes_tokenizer):
    assert TokenTexts(bytes_tokenizer)([]) == []
