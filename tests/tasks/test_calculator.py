"""The calculator task and its environment."""

import asyncio

import numpy as np
import pytest

from areal_like.tasks.calculator import EOS, PAD, Calculator, Characters, Desk, share_in_place

TEXT = Characters()


@pytest.mark.parametrize("digits", [1, 2, 5])
def test_prompts_are_products_of_the_right_size(digits):
    task = Calculator(3, digits=digits)
    for row in range(50):
        prompt = task.prompt("train", row)
        question = prompt.codec.decode(prompt.tokens)
        a, b = question.removesuffix("=").split("*")
        assert len(a) == len(b) == digits and int(a) * int(b) == int(prompt.answer)
        assert len(question) == len(f"{prompt.answer}|")  # a call and an answer are as far from what they repeat
        assert EOS not in prompt.tokens and prompt.tokens.max() < PAD < task.vocab_size


def test_the_ideal_episode_fits_and_earns_everything():
    task = Calculator(0, digits=2)
    prompt = task.prompt("train", 1)
    desk, question = Desk(), TEXT.decode(prompt.tokens)
    assert desk.reset(prompt) == ""
    first = desk.step(question)
    last = desk.step(prompt.answer)
    assert first == (f"{prompt.answer}|", 0.5, False) and last == ("", 0.5, True)
    assert len(f"{question}{prompt.answer}|{prompt.answer}|") <= prompt.max_tokens


@pytest.mark.parametrize("call", ["", "?", "*", "1*", "2*-1-", "0*1**-2", "9**9**9", "012*3"])
def test_whatever_is_asked_the_desk_answers_in_its_own_characters(call):
    desk = Desk()
    desk.reset(Calculator(0).prompt("train", 0))
    outcome = desk.step(f"{call}=")
    assert outcome.observation == "?|" and TEXT.encode(outcome.observation)[-1] == EOS and not outcome.done


def test_only_the_first_turn_earns_the_credit_of_a_call():
    prompt = Calculator(0).prompt("train", 0)
    desk, call = Desk(call_credit=0.25), TEXT.decode(prompt.tokens)
    desk.reset(prompt)
    assert [desk.step(call).reward, desk.step(call).reward, desk.step(prompt.answer).reward] == [0.25, 0.0, 0.75]


def test_exact_answers_earn_all_or_nothing_and_calls_nothing():
    prompt = Calculator(0).prompt("train", 0)
    for answer, reward in [(prompt.answer, 1.0), (prompt.answer[:-1], 0.0), (prompt.answer + "0", 0.0), ("", 0.0)]:
        desk, call = Desk(call_credit=0, credit="exact"), TEXT.decode(prompt.tokens)
        desk.reset(prompt)
        assert desk.step(call) == (f"{prompt.answer}|", 0.0, False)
        assert desk.step(answer) == ("", reward, True)


def test_what_was_not_asked_for_earns_no_part_of_an_answer():
    prompt = Calculator(0).prompt("train", 0)
    zeros, question = "0" * len(prompt.answer), TEXT.decode(prompt.tokens)
    some = share_in_place(zeros, prompt.answer)
    for asked, answer, reward in [(False, zeros, 0.0), (False, prompt.answer, 0.75), (True, zeros, 0.75 * some)]:
        desk = Desk(call_credit=0.25)
        desk.reset(prompt)
        if asked:
            desk.step(question)
        in_call = 0.0 if asked else 0.25 * share_in_place(answer, question)
        assert desk.step(answer).reward == pytest.approx(reward + in_call)
    assert 0 < some < 1


def test_padding_in_an_answer_is_seen():
    tokens = np.array([*TEXT.encode("40"), PAD, *TEXT.encode("8"), EOS], np.int32)
    assert TEXT.decode(tokens) == "40?8" and TEXT.decode(TEXT.encode("408|")) == "408"


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
    with pytest.raises(ValueError, match="credit"):
        Desk(credit="some")  # type: ignore[arg-type]
