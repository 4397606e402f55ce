"""Runs whose learner has two ranks. One rank is killed, the run is resumed, and the result equals the run with one
rank. Actors, relays and late joiners follow what both publish."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from areal_like.models.causal_lm import state_of
from areal_like.run import checkpoints
from areal_like.weights.state import State
from learners.publication import BESIDE_FROM
from learners.sharding import _edges
from scripts.eval import model_folder
from tests.integration.living import Run, train
from tests.integration.runs import rows, summary
from tests.integration.test_resume import trained_ids

FEW = ["run.target_reward=null", "eval.every=0", "eval.prompts=4"]
FEW += ["groups_per_batch=5", "sizing.group_size=4", "learner.micro_batch_tokens=128"]
RUN = [*FEW, "run.steps=14", "learner.publish_dtype=float32", "actors.count=1", "checkpoint.every=3"]
RUN += ["model.hidden_size=202", "model.num_attention_heads=1", "model.intermediate_size=101", "learner.lr=1e-4"]
"""Parts of the weights are large enough to be published beside training, and a shard of a norm ends within a word."""


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_killed_rank_ends_the_run_by_name_and_the_run_gone_on_with_is_that_of_one_rank(tmp_path: Path) -> None:
    live = Run(tmp_path, *RUN, "learner.ranks=2", "buffer.keep_journal=true", name="two")
    run = live.folder
    live.until_step(5)
    live.kill("learner-1")
    assert live.end() == 1 and "error: learner-1 was killed by SIGKILL" in live.text(), live.text()
    checkpoint = checkpoints.latest(run)
    assert checkpoint and {path.name for path in checkpoint[1].glob("*.pt")} == {f"learner-{n}-of-2.pt" for n in (0, 1)}

    live.start("resume=auto")
    live.finish()
    assert [row["step"] for row in rows(run)] == list(range(1, 15))
    trained = [group_id for batch in trained_ids(run)[:14] for group_id in batch]
    assert sorted(trained) == list(range(5 * 14)), "a prompt was skipped, or trained twice"

    digests = [line.split() for line in (run / "published.log").read_text().splitlines()]
    assert len({version for version, _ in digests}) == len(digests), "versions came out bit for bit as before the crash"
    saved = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "final")
    assert state_of(saved, "float32").digest() == summary(run)["weights_digest"] == digests[-1][1]
    _, last = checkpoints.latest(run) or pytest.fail("it has no checkpoint")
    assert last.name == "step-00000014" and len(list(last.glob("learner-*.pt"))) == 2
    files = [folder / "model.safetensors" for folder in (model_folder(last), run / "checkpoints" / "final")]
    assert files[0].read_bytes() == files[1].read_bytes(), "both ranks' files make the model"

    one = train(tmp_path, "one", *RUN, f"replay={run}")
    for alone, together in zip(rows(one), rows(run), strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward/mean", "tokens", "staleness/mean"):
            np.testing.assert_allclose(together[key], alone[key], rtol=1e-3, atol=1e-5, err_msg=key)
    assert summary(one)["steps"] == 14
    specs = state_of(saved, "float32").specs
    assert any(_edges(spec, 2) for spec in specs) and State(specs, part=1, parts=2).nbytes > BESIDE_FROM
    ours, theirs = (load_file(each / "checkpoints" / "final" / "model.safetensors") for each in (run, one))
    assert ours.keys() == theirs.keys()
    for name, weights in ours.items():
        np.testing.assert_allclose(weights, theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
