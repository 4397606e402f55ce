"""task=reasoning_gym against the real package: prompts, mixtures, scores, and answers that are code."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.reward_pool import RewardPool
from actors.rewards import reward_function
from areal_like.tasks.reasoning_gym import ReasoningGym

if not find_spec("reasoning_gym"):
    pytest.skip("needs pip install reasoning-gym", allow_module_level=True)
EASY = {"max_terms": 2, "max_digits": 1}


def make(seed: int = 2, **knobs) -> ReasoningGym:
    return ReasoningGym(seed, **{"tokenizer": "bytes", "dataset": "chain_sum"} | knobs)


def text(prompt) -> str:
    return prompt.codec.decode(prompt.tokens)


def say(task, prompt, words: str) -> float:
    """The score through the reward pool, where arguments are JSON."""
    reward = reward_function(task, RewardPool(workers=0))
    return asyncio.run(reward(prompt, prompt.codec.encode(words)))


def test_a_row_is_the_same_in_every_process_and_version():
    task = make(config=EASY)
    assert text(task.prompt("train", 0)) == (
        "[user]State the final answer to the following arithmetic problem: 2 + 2 =[assistant]"
    )
    assert text(make(1, config=EASY).prompt("train", 0)) != text(task.prompt("train", 0))


@pytest.mark.parametrize(
    "extract, words, score",
    [
        ("tags", "I think\n<answer> 4 </answer>", 1.0),
        ("tags", "4", 0.0),
        ("text", "04.0", 1.0),  # the data set's own tolerance
        ("text", "", 0.0),
    ],
)
def test_the_data_set_scores_what_is_extracted(extract, words, score):
    task = make(config=EASY, extract=extract)
    assert say(task, task.prompt("train", 0), words) == score


CODE = '__import__("pathlib").Path({file!r}).touch()'
SNEAKY = [
    "{code}",
    "[{code}]",
    "({code})!",
    'sin("{quoted}")',
    "x + [].__class__",
    "(lambda: {code})()",
    "{code} # 1 2",
]


@pytest.fixture
def procedural():
    """Imported here: it takes seconds, in each process that collects."""
    from areal_like.tasks import procedural

    return procedural


def test_code_from_the_model_is_not_run(procedural, tmp_path):
    for name in procedural.EVALUATED:
        task = make(dataset=name, extract="text", max_prompt_tokens=4096)
        prompt, code = task.prompt("train", 0), CODE.format(file=str(tmp_path / "out"))
        answers = [each.format(code=code, quoted=code.replace('"', "'")) for each in SNEAKY]
        scores = [say(task, prompt, answer) for answer in answers]
        assert not list(tmp_path.iterdir()) and max(scores) < 0.5, name
        right = procedural.item(*prompt.answer)["answer"]
        assert right is None or say(task, prompt, right) == 1.0, "answers still count"


def test_no_other_scorer_evaluates_answers(procedural):
    """Reads the package: a new version may have another one."""
    import reasoning_gym

    folder = Path(reasoning_gym.__file__).parent
    calls = ("eval(", "parse_expr(", "exec(", "sympify(", "literal_eval(")
    texts = {file.stem: file.read_text() for file in folder.rglob("*.py")}
    found = {name for name, text in texts.items() if "score_answer" in text and any(call in text for call in calls)}
    own = {"codeio", "number_sorting", "bitwise_arithmetic", "basic_arithmetic", "propositional_logic"}
    assert found - own - procedural.UNSTEADY == set(procedural.EVALUATED), "`own` evaluate what they have made"
