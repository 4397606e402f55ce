"""Replies in a chat template: with what came before, they are the tokens of the whole conversation."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_like.tasks.chat import TokenizerCodec

# As Qwen2's: every turn is <|im_start|>role\ncontent<|im_end|>\n
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}({{ m['content'] }}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = template
    return wrapped


@pytest.mark.parametrize("closed", [True, False])
def test_a_conversation_grows_by_replies_into_what_the_template_renders(closed):
    words = tokenizer(QWEN)
    codec = TokenizerCodec(words, chat=True)
    talk = [{"role": "user", "content": "2+2?"}]
    so_far = words.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    tokens = [codec.encode(so_far), codec.encode("<tool_call>2+2</tool_call>" + "<|im_end|>" * closed)]
    tokens += [codec.reply("4 [ä]", closed=closed)]
    talk += [{"role": "assistant", "content": "<tool_call>2+2</tool_call>"}, {"role": "user", "content": "4 [ä]"}]
    whole = words.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert np.concatenate(tokens).tolist() == words.encode(whole, add_special_tokens=False)


def test_what_only_ends_a_turn_is_no_text():
    codec = TokenizerCodec(tokenizer(QWEN), chat=True)
    assert codec.decode(codec.encode("4<|im_end|>")) == "4"


def test_without_a_template_a_reply_is_its_text():
    codec = TokenizerCodec(tokenizer(QWEN), chat=False)
    assert codec.decode(codec.reply("ab")) == "ab"


def test_a_template_that_rewrites_the_past_is_refused():
    with pytest.raises(ValueError, match="writes earlier turns differently"):
        TokenizerCodec(tokenizer(FORGETFUL), chat=True).reply("x")
