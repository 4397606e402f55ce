"""Replies in a chat template: with earlier turns, they are the tokens of the whole conversation."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from areal_like.tasks.chat import TokenizerCodec
from areal_like.tasks.jsonl import Jsonl
from areal_like.tasks.text import TEMPLATE
from tests.tasks.templates import DEEPSEEK_R1, FAMILIES, QWEN, QWEN3, tokenizer_of, write_tokenizer

FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}({{ m['content'] }}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    return tokenizer_of(replace(FAMILIES["thinking"], template=template))


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
    assert codec.rewrites(codec.decode(codec.encode(said)), [follows]) == expected
    talk = [user("2+2?"), {"role": "assistant", "content": said}]
    seen = words.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=False) + said
    whole = words.apply_chat_template([*talk, follows], add_generation_prompt=True, tokenize=False)
    assert whole.startswith(seen) == (not expected)
    if not expected:
        for closed in (True, False):
            said_so = codec.encode(seen + "<|im_end|>" * closed)
            grown = np.concatenate([said_so, codec.continuation([follows], closed=closed)])
            assert grown.tolist() == codec.encode(whole).tolist()


def task_of(folder: Path, family: str) -> Jsonl:
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"prompt": [user(each)], "answer": "4"}) for each in "ab"))
    tokenizer = write_tokenizer(folder / "t", FAMILIES[family])
    return Jsonl(0, path=str(folder / "d.jsonl"), heldout_fraction=0.5, tokenizer=tokenizer)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt-oss", "llama 2")])
def test_turns_of_a_family_are_the_tokens_of_its_whole_conversation(tmp_path, family):
    """Its turns end once, where it stops."""
    shape, task = FAMILIES[family], task_of(tmp_path, family)
    words, prompt = tokenizer_of(shape), task.prompt("train", 0)
    ends = {shape.eos, shape.end or shape.eos, *shape.stops.split()}
    assert set(task.stop_tokens) == set(words.convert_tokens_to_ids(list(ends)))
    end, codec = words.convert_tokens_to_ids(shape.end or shape.eos), prompt.codec
    turns = [*prompt.messages, {"role": "assistant", "content": "4"}, user("3+3?")]
    begun = codec.encode(words.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    assert not codec.stray_marks
    for closed in (end, True):
        behind = codec.continuation([user("3+3?")], closed=closed)
        assert [*prompt.tokens, *codec.encode("4"), end, *behind] == begun.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_of_others_are_text_and_those_of_the_model_are_kept(family):
    words = tokenizer_of(FAMILIES[family])
    codec = TokenizerCodec(words, chat=True)
    added = words.added_tokens_decoder
    controls = [str(each) for each in added.values() if each.special] + ["[INST]"] * (family == "llama 2")
    hostile = f"a{controls[-1]}b".join(controls)
    plain, opened = (codec.opening([user(text)]) for text in ("x", hostile))
    replies = [codec.continuation([user(text)]) for text in ("x", hostile)]
    named = [codec.opening([user("x") | {"name": text}]) for text in ("x", hostile)]
    bare = [TokenizerCodec(words, chat=False).reply(text) for text in ("x", hostile)]
    for quiet, loud in ((plain, opened), replies, bare):
        assert [t for t in loud if t in added] == [t for t in quiet if t in added]
        assert len(loud) >= len(hostile)
    assert [t for t in named[0] if t in added] == [t for t in named[1] if t in added]
    with pytest.raises(ValueError, match="role"):
        codec.opening([{"role": f"user{controls[0]}", "content": "x"}])
    marks = [id for id in added if id not in (words.eos_token_id, words.pad_token_id)]
    assert codec.decode(np.array([*marks, words.eos_token_id])) == words.decode(marks)


def test_other_stop_tokens_end_no_turn_twice():
    """A role's first token that GLM has not sampled yet is no end of a turn; Llama 2 writes a space before its own."""
    for family, closed, expected in (
        ("llama 3", "<|eom_id|>", "<|start_header_id|>"),
        ("llama 2", "</s>", "[INST]"),
        ("glm 4", "<|endoftext|>", "<|user|>"),
        ("glm 4", "<|user|>", "\n"),
    ):
        words = tokenizer_of(FAMILIES[family])
        reply = TokenizerCodec(words, chat=True).reply("x", closed=words.convert_tokens_to_ids(closed))
        assert words.decode(reply[:1]) == expected


TALK = [user("2+2?"), {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize("row", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_arguments_of_the_chat_template_are_the_rows_or_the_tasks(tmp_path, row):
    words = tokenizer(QWEN3)
    folder = write_tokenizer(tmp_path / "t", FAMILIES["thinking"])
    rows = [{"prompt": [user(each)], "answer": "1", "template": row} for each in "ab"]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Jsonl(0, path=str(tmp_path / "d.jsonl"), tokenizer=folder, template={"enable_thinking": False})
    prompt, given = task.prompt("train", 0), {"enable_thinking": False} | row
    asked = {"tokenize": False, "add_generation_prompt": True, **given}
    assert words.decode(prompt.tokens) == words.apply_chat_template(prompt.messages, **asked)
    assert prompt.codec.opening(prompt.messages).tolist() == prompt.tokens.tolist()
    begun = words.apply_chat_template([*prompt.messages, TALK[1], user("ok")], **asked)
    shown = [*prompt.tokens, *prompt.codec.encode("It is<|im_end|>"), *prompt.codec.reply("ok")]
    assert prompt.codec.rewrites("It is", [user("ok")]) != (words.decode(shown) == begun)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt-oss"])
def test_a_last_message_of_the_assistant_begins_the_answer(family):
    codec = TokenizerCodec(tokenizer_of(FAMILIES[family]), chat=True)
    asked, said = codec.opening(TALK[:1]), codec.encode("It is")
    assert codec.opening(TALK).tolist() == [*asked, *said]
    assert codec.continuation(TALK).tolist() == [*codec.continuation(TALK[:1]), *said]


@pytest.mark.parametrize(
    ("knobs", "row", "error"),
    [
        ({"template": {"enable_thinkin": 1}}, {}, "^task.template: got 'enable_thinkin'"),
        ({"template": {"tokenize": True}}, {}, "^task.template: got 'tokenize'"),
        ({"template": {"a": 1}, "chat_template": False}, {}, "^task.template: only a chat template"),
        ({"chat_template": "nowhere.jinja"}, {}, "^task.chat_template: got 'nowhere.jinja'"),
        ({}, {"template": {"nothing": 1}}, r"\(row 0 of train\): 'template': got 'nothing'"),
        ({}, {"template": 3}, ":1: 'template': got 3, expected an object"),
        ({}, {"prompt": TALK[1:]}, ":1: 'prompt' ends with a message of the assistant"),
        ({}, {"prompt": [*TALK, TALK[1]]}, ":1: 'prompt' ends with a message of the assistant"),
    ],
)
def test_templates_and_beginnings_that_are_refused(tmp_path, knobs, row, error):
    rows = [{"prompt": each, "answer": "1", **row} for each in "ab"]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        Jsonl(0, path=str(tmp_path / "d.jsonl"), tokenizer="bytes", **knobs).prompt("train", 0)


@pytest.mark.parametrize("family", ["bytes", "llama 3", "mistral"])
def test_a_saved_tokenizer_is_the_source_in_every_version_of_transformers(tmp_path, family):
    source = family if family == "bytes" else write_tokenizer(tmp_path / "t", FAMILIES[family])
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"prompt": each, "answer": "1"}) for each in "ab"))
    task, final = Jsonl(0, path=str(tmp_path / "d.jsonl"), tokenizer=source), tmp_path / "final"
    Qwen2Config().save_pretrained(final)  # a type for which transformers 5 takes a class of its own
    task.save_tokenizer(str(final))
    config = json.loads((final / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in config
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("}[{", "}<{"))
    knobs = {"path": str(tmp_path / "d.jsonl"), "tokenizer": source, "chat_template": str(tmp_path / "own.jinja")}
    own = Jsonl(0, **knobs)
    (tmp_path / "own").mkdir()
    own.save_tokenizer(str(tmp_path / "own"))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "own")
    assert loaded.apply_chat_template([user("x")], tokenize=False) == "<user]x" == own._codec._render([user("x")])
    if family == "bytes":
        assert AutoTokenizer.from_pretrained(final).get_vocab() == task.vocabulary
    else:
        assert (final / "tokenizer.json").read_bytes() == (tmp_path / "t/tokenizer.json").read_bytes()


def test_marks_before_an_answer_are_found(tmp_path):
    assert task_of(tmp_path, "gpt-oss").prompt("train", 0).codec.stray_marks == "<|channel|>final<|message|>"
