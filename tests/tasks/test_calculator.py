"""The calculator task and its desk."""

import asyncio

import pytest

from areal_like.tasks.calculator import EOS, Calculator, Characters, Desk, share_in_place

TEXT = Characters()


@pytest.mark.parametrize("digits", [1, 2, 5])
def test_prompts_are_products_of_the_right_size(digits):
    task = Calculator(3, digits=digits)
    for row in range(50):
        prompt = task.prompt("train", row)
        a, b = prompt.codec.decode(prompt.tokens).rstrip("=").split("*")
        assert len(a) == len(b) == digits and int(a) * int(b) == int(prompt.answer)
        assert prompt.tokens.max() < EOS < task.vocab_size


def test_the_ideal_episode_fits_and_earns_everything():
    task = Calculator(0, digits=2)
    prompt = task.prompt("train", 1)
    desk, question = Desk(), TEXT.decode(prompt.tokens)[:-1]
    assert desk.reset(prompt) == ""
    first = desk.step(f"[{question}]")
    last = desk.step(prompt.answer)
    assert first == (f"{prompt.answer}|", 0.5, False) and last == ("", 0.5, True)
    assert len(f"[{question}]{prompt.answer}|{prompt.answer}$") <= prompt.max_tokens


@pytest.mark.parametrize("call", ["[", "[]", "]", "[1*]", "[2*-1-", "[0*1**-2", "[9**9**9", "[1]1"])
def test_whatever_is_asked_the_desk_answers_in_its_own_characters(call):
    desk = Desk()
    desk.reset(Calculator(0).prompt("train", 0))
    outcome = desk.step(f"{call}]")
    assert outcome.observation.endswith("|") and len(TEXT.encode(outcome.observation)) >= 2 and not outcome.done


def test_only_the_first_turn_earns_the_credit_of_a_call():
    prompt = Calculator(0).prompt("train", 0)
    desk, call = Desk(call_credit=0.25), f"[{TEXT.decode(prompt.tokens)[:-1]}]"
    desk.reset(prompt)
    assert [desk.step(call).reward, desk.step(call).reward, desk.step(prompt.answer).reward] == [0.25, 0.0, 0.75]


def test_in_the_head_an_answer_earns_its_share():
    task = Calculator(0)
    prompt = task.prompt("train", 0)
    assert asyncio.run(task.reward(prompt, TEXT.encode(prompt.answer))) == 1.0
    assert share_in_place("408", "4081") == 0.75 and share_in_place("", "1") == 0.0


@pytest.mark.parametrize("knobs", [{"digits": 0}, {"digits": 10}])
def test_knobs_are_checked(knobs):
    with pytest.raises(ValueError, match="digits"):
        Calculator(0, **knobs)
    with pytest.raises(ValueError, match="call_credit"):
        Desk(call_credit=1.0)
