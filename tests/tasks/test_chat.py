"""Replies in a chat template: with earlier turns, they are the tokens of the whole conversation."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from areal_like.tasks.chat import TokenizerCodec
from areal_like.tasks.text import byte_tokenizer
from tests.tasks.templates import DEEPSEEK_R1, QWEN3

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
    found: Any = byte_tokenizer()
    found.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    found.chat_template = template
    return found


def test_a_template_that_leaves_out_the_past_is_refused_where_it_is_to_be_continued():
    codec = TokenizerCodec(tokenizer(FORGETFUL), chat=True)
    assert codec.rewrites("4", [user("x")])
    with pytest.raises(ValueError, match="leaves out earlier turns"):
        codec.reply("x")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


RESULT = {"role": "tool", "content": "4", "tool_call_id": "call_1_0"}
SHOWN = user("<tool_response>\n4\n</tool_response>")
UNTHINKING = QWEN3.replace("enable_thinking is defined and enable_thinking is false", "true")
THOUGHT = "<think>\nHm.\n</think>\n\nIt is 4."


@pytest.mark.parametrize(
    "template, said, follows, expected",
    [
        (QWEN, THOUGHT, user("ok"), False),
        (QWEN, "It is 4.", user("ok"), False),
        (QWEN3, THOUGHT, user("ok"), True),
        (QWEN3, THOUGHT, RESULT, False),
        (QWEN3, THOUGHT, SHOWN, False),
        (QWEN3, "It is 4.", user("ok"), False),
        (QWEN3, "It is 4.", RESULT, False),
        (UNTHINKING, "It is 4.", user("ok"), True),
        (DEEPSEEK_R1, "Hm.\n</think>\n\nIt is 4.", user("ok"), True),
        (DEEPSEEK_R1, "Hm", user("ok"), True),
    ],
    ids=range(10),
)
def test_whether_a_template_rewrites_a_turn_follows_from_it_and_the_next(template, said, follows, expected):
    """Against the tokens that the model saw and made, and the rendered conversation."""
    words = tokenizer(template)
    codec = TokenizerCodec(words, chat=True)
    assert codec.rewrites(said, [follows]) == expected
    talk = [user("2+2?"), {"role": "assistant", "content": said}]
    seen = words.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=False) + said
    whole = words.apply_chat_template([*talk, follows], add_generation_prompt=True, tokenize=False)
    assert whole.startswith(seen) == (not expected)
    if not expected:
        for closed in (True, False):
            said_so = codec.encode(seen + "<|im_end|>" * closed)
            grown = np.concatenate([said_so, codec.continuation([follows], closed=closed)])
            assert grown.tolist() == codec.encode(whole).tolist()
