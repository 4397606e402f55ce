"""The teacher of a distillation: a frozen model beside the learner's, or a server that is asked for logprobs.

Like the reference model, it is asked once per train step, before any weight changes. A model is sharded over the ranks
like the learner's own; a server is asked by each rank for its own samples.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.client import HTTPException
from typing import Annotated, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.models.causal_lm import deferred_weights, folder
from areal_like.types import Sample
from learners.collectives import Ranks

AT_ONCE = 8
"""Requests to a server."""
TRIES, PAUSE = 4, 1.0
"""Tries of a request, and seconds before the second one; each pause is twice as long as the one before."""
TOLD_CHARACTERS = 500


class Teacher:
    """`path`: the folder of a model with the student's tokens; or `url` of an OpenAI-compatible server (".../v1") that
    gives logprobs of a prompt (`echo`), and the `served` name of its model. `timeout`: seconds of a request.

    With `top` k the KL over the teacher's k most likely tokens (`learners.distillation.lumped_kl`; at least the
    vocabulary: exactly) × `kl` is added to the loss of each trained token, multiplied by `prefix_weights` with the cap
    `trace` if that is a number. It needs `path`. Raises ValueError for knobs that make no sense together.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        url: str | None = None,
        served: str = "default",
        timeout: Annotated[float, "(0, inf)"] = 60.0,
        top: Annotated[int, "[0, inf)"] = 0,
        kl: Annotated[float, "[0, inf)"] = 1.0,
        trace: Annotated[float, "(0, inf)"] | None = None,
    ):
        if (path is None) is (url is None):
            raise ValueError("learner.teacher: give path (a folder) or url (a server), one of the two")
        if url is not None and top:
            raise ValueError("learner.teacher.top: a server says what the sampled token is worth, no others: give path")
        self.path, self.url, self.served = path, url, served
        self.timeout, self.top, self.kl, self.trace = timeout, top, kl, trace

    def load(self, student: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> PreTrainedModel | None:
        """The frozen model, rounded to `dtype`; with several ranks perhaps without weights yet (`learners.sharding`).
        None for a server. Raises ValueError where it does not know the student's tokens."""
        if self.path is None:
            return None
        tokens = int(student.config.vocab_size)
        with deferred_weights(maker=ranks.rank == 0) if ranks.count > 1 else nullcontext():
            model = folder(0, 0, path=self.path)
        known = int(model.config.vocab_size)
        if known < tokens:
            raise ValueError(
                f"learner.teacher.path: the model in {self.path!r} knows {known} token ids and the student {tokens}: "
                "both must use the same tokens"
            )
        model = model.to(student.dtype).eval().requires_grad_(False)
        if model.device.type != "meta":
            for p in model.parameters():
                p.copy_(p.to(dtype))
        return model

    def asked(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The server's logprobs of each sample's response, float32 [R]. Raises TeacherError."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._asked, samples))

    def _asked(self, sample: Sample) -> np.ndarray:
        tokens = sample.tokens.tolist()
        asked = {"model": self.served, "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1}
        request = urllib.request.Request(
            f"{str(self.url).rstrip('/')}/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        answer = self._answer(request)
        try:
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][: len(tokens)]
            said = np.array(logprobs[sample.prompt_length :], np.float32)  # a None becomes NaN
        except (LookupError, TypeError, ValueError):
            said = np.zeros(0, np.float32)
        if len(said) != len(tokens) - sample.prompt_length or not np.isfinite(said).all():
            raise TeacherError(
                f"learner.teacher.url={self.url}: its answer has no logprobs of a prompt's tokens (echo with "
                f"logprobs): {json.dumps(answer)[:TOLD_CHARACTERS]}"
            )
        return said

    def _answer(self, request: urllib.request.Request) -> Any:
        for attempt in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                said = error.read(TOLD_CHARACTERS).decode(errors="replace")
                if error.code < 500 or attempt == TRIES - 1:
                    raise TeacherError(f"learner.teacher.url={self.url}: status {error.code}: {said}") from error
            except (OSError, ValueError, HTTPException) as error:  # the last: it dies in the middle of an answer
                if attempt == TRIES - 1:
                    raise TeacherError(
                        f"learner.teacher.url={self.url}: no answer in {TRIES} tries: {error}"
                    ) from error
            time.sleep(PAUSE * 2**attempt)
        raise AssertionError


class TeacherError(OSError):
    """The server does not answer, or its answer lacks what is needed. The batch is not the cause."""
