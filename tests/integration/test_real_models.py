"""Whole runs: with text, from a Hugging Face folder with a chat template to the folder at the end; with agents at the
endpoint, which learn; with rewards of parts; with weights that stay on a device."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_like.models.causal_lm import state_of
from areal_like.run.api import Run
from areal_like.tasks.text import TEMPLATE
from scripts import export, ledger
from tests.folders import write_folder
from tests.integration.living import train
from tests.integration.runs import published, rows, summary

pytestmark = pytest.mark.integration


def test_a_run_from_a_folder_ends_as_a_folder(tmp_path: Path) -> None:
    """Actors attest the digest of the weights that they sample from; the last folder holds the last version's bits."""
    path = write_folder(tmp_path / "base", "qwen2")
    lines = [json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    run = train(
        tmp_path,
        "run",
        "model={name: folder, path: " + path + "}",
        "task={name: jsonl, path: " + str(tmp_path / "sums.jsonl") + ", tokenizer: " + path + ", "
        "system: Add., max_prompt_tokens: 64, max_tokens: 8}",
        "learner.lora={rank: 4}",
        "actors.count=1",
        "run.steps=3",
        "groups_per_batch=4",
        "sizing.group_size=4",
        "eval.prompts=2",
        "rewards.workers=2",
        "rewards.timeout=20",
    )
    assert len(rows(run)) == 3 and summary(run)["version"] == 3
    final = tmp_path / "exported"
    assert export.main([str(run), "--to", str(final)]) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert state_of(model).digest() == summary(run)["weights_digest"]
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert (final / "adapter" / "adapter_config.json").is_file()


AGENT = "workflow={name: agent, agent: 'examples.agent.function:copies'}"


def test_an_agent_that_speaks_openais_protocol_learns_without_being_rewritten(tmp_path: Path) -> None:
    """One digit, so that few samples are enough. Held-out prompts would be other digits: the test looks at the reward
    in training."""
    small = ["task.digits=1", "groups_per_batch=8", "run.steps=25", "learner.lr=4e-3", "run.target_reward=null"]
    small += ["actors.count=1", "eval.every=0"]
    run = train(tmp_path, "run", *small, "eval.prompts=4", AGENT, config="configs/copy4.yaml")
    rewards = [row["reward/mean"] for row in rows(run)]
    assert sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-5:]) / 5 > 0.6, rewards
    found, last = summary(run), rows(run)[-1]
    assert found["staleness_max"] <= found["staleness_bound"]
    assert last["agents/turns"] > 0 and last["agents/crashes"] == last["agents/turns_left_out"] == 0
    mismatch = [row["mismatch_max"] for row in rows(run) if "mismatch_max" in row]
    assert mismatch and max(mismatch) < 1e-3, "the endpoint's logprobs are the learner's"


HERE = "tests.integration.components"
ALONE = ["groups_per_batch=4", "run.target_reward=null", "actors.count=1"]


def test_parts_of_rewards_reach_metrics_and_samples_and_groups_do_without_samples_that_have_none(tmp_path: Path):
    few = ["eval.prompts=2", "run.steps=4", "sizing.group_size=4"]
    run = train(tmp_path, "run", f"task={HERE}:Parted", *ALONE, *few)
    for row in rows(run):
        assert row["reward/mean"] == pytest.approx(row["reward/part/place"] + 0.5 * row["reward/part/even"])
    groups = [sample.group for sample in Run(run).samples()]
    kept = [sample for sample in Run(run).samples() if sample.parts]
    assert kept and all(sample.reward == sample.parts["place"] + 0.5 * sample.parts["even"] for sample in kept)
    assert {groups.count(sample.group) for sample in kept} & {2, 3}, "a group is trained without them"
    assert summary(run)["steps"] == 4 and ledger.main([str(run), "--verify"]) == 0


@pytest.mark.parametrize("more", [[], ["learner.lora={rank: 2}"]], ids=["whole", "adapters"])
def test_weights_that_stay_on_a_device_are_those_of_the_host(tmp_path: Path, more: list[str]) -> None:
    """Learner and actor compare, digest and write the bits there, from the first version on and after a resume."""
    common = ["mode=sync", "engine.batch_invariant=true", *ALONE, "eval.prompts=0", "weights.sweep_every=2", *more]
    host = train(tmp_path, "host", *common, "run.steps=5")
    ours = train(tmp_path, "device", *common, f"task={HERE}:OnDevice", "run.steps=3")
    train(tmp_path, ours.name, *common, f"task={HERE}:OnDevice", "run.steps=5", f"resume={ours}")
    assert published(ours) == published(host) and len(set(published(host))) == 6
    for name in ("actor-0", "learner"):
        assert "weights on a device" in (ours / "logs" / f"{name}.log").read_text()
        assert "weights on a device" not in (host / "logs" / f"{name}.log").read_text()
    for row, other in zip(rows(ours), rows(host), strict=True):
        assert all(row.get(name) == other.get(name) for name in ("loss", "publish/delta_bytes", "publish/density"))
