"""task=episodes: seeds of episodes."""

from dataclasses import replace

import numpy as np

from areal_like.tasks.episodes import SEEDS, Episodes, seed_of


def make(seed: int = 0, **knobs) -> Episodes:
    return Episodes(seed, **{"tokenizer": "bytes", "instructions": "Cross the lake.\n"} | knobs)


def test_rows_are_seeds_and_all_say_the_same():
    task = make()
    prompts = [task.prompt("train", row) for row in range(50)]
    assert {prompt.codec.decode(prompt.tokens) for prompt in prompts} == {"[user]Cross the lake.\n[assistant]"}
    seeds = [prompt.answer for prompt in prompts]
    assert len(set(seeds)) == 50 and all(0 <= seed < SEEDS for seed in seeds)
    assert seeds == [make().prompt("train", row).answer for row in range(50)]
    assert seeds != [make(1).prompt("train", row).answer for row in range(50)]


def test_any_prompt_has_a_seed_and_the_same_one_again():
    prompt = make().prompt("train", 0)
    assert seed_of(prompt) == prompt.answer
    others = [replace(prompt, answer=answer) for answer in ("42", "43", None, -1, SEEDS)]
    others.append(replace(others[0], tokens=np.array([1], np.int32)))
    seeds = [seed_of(other) for other in others]
    assert len(set(seeds)) == len(others) and all(0 <= seed < SEEDS for seed in seeds)
    assert seeds[0] == 1139404286  # the same in every process and version
