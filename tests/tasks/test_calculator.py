"""The calculator task and its environment."""

import pytest

from areal_like.tasks.calculator import EOS, Calculator, Characters, Desk

TEXT = Characters()


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


def test_exact_answers_earn_all_or_nothing_and_calls_nothing():
    prompt = Calculator(0).prompt("train", 0)
    for answer, reward in [(prompt.answer, 1.0), (prompt.answer[:-1], 0.0), (prompt.answer + "0", 0.0), ("", 0.0)]:
        desk, call = Desk(call_credit=0, credit="exact"), TEXT.decode(prompt.tokens)
        desk.reset(prompt)
        assert desk.step(call) == (f"{prompt.answer}|", 0.0, False)
        assert desk.step(answer) == ("", reward, True)
