"""Requests to an SGLang server and its replies, as plain data. A request names every sampling parameter, so that no
default of a server or of a model's folder (`generation_config.json`) cuts the distribution: behaviour logprobs are
those of softmax(logits / temperature), as the learner computes them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_like.models.experts import Routing, joined_experts
from areal_like.types import Completion, Finish, Limits, Runs, merged

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Parameters with one value each: any other would make logprobs differ from the learner's."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The experts that a reply must bring: of decoder layers `numbers`, out of `layers`, by the model's `routing`."""

    numbers: list[int]
    layers: int
    routing: Routing

    def read(self, meta: Mapping[str, Any], positions: int) -> np.ndarray:
        """[positions, layers, k], from base64 of int32 for all of the model's layers. Raises RuntimeError."""
        text = meta.get("routed_experts")
        if not isinstance(text, str):
            raise RuntimeError("SGLang returns no experts: was it started with --enable-return-routed-experts?")
        found = np.frombuffer(base64.b64decode(text), np.int32)
        if len(found) != positions * self.layers * self.routing.top_k:
            raise RuntimeError(f"SGLang returns {len(found)} experts, which are not those of {positions} positions")
        found = found.reshape(positions, self.layers, -1)[:, self.numbers]
        if len(found) and not 0 <= found.min() <= found.max() < self.routing.experts:
            raise RuntimeError(f"SGLang returns experts from {found.min()} to {found.max()}")
        return found.astype(self.routing.dtype)


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens int32 [n], logprobs float32 [n], and `runs` of versions. `cached`: prompt tokens that were not computed
    but kept from before; `first`: the label of the first token. `experts` [positions, layers, k]; None: not asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    runs: Runs
    cached: int
    first: str | None
    experts: np.ndarray | None = None

    def is_stale(self, label: str) -> bool:
        """Whether cached prompt tokens were used although other weights came before the first token: requests with the
        same label share them, but this one may have waited through an update."""
        return self.cached > 0 and self.first is not None and self.first != label


def generate_request(
    rid: str, tokens: np.ndarray, done: int, limits: Limits, share: str, experts_from: int | None = None
) -> dict[str, Any]:
    """The body of a request: `done` tokens at the end of `tokens` are the completion's own. `share`: only requests with
    the same share what is kept of prompts. `experts_from`: the first position whose experts are wanted, if any."""
    sampling = {
        **NEUTRAL,
        "max_new_tokens": limits.max_tokens - done,
        "temperature": limits.temperature,
        "stop_token_ids": [*limits.stop, *limits.stop_ids],
        "ignore_eos": not limits.stop and not limits.stop_ids,
        "sampling_seed": limits.key & 0x7FFFFFFF,  # heeded by servers with --enable-deterministic-inference only
        "skip_special_tokens": False,
    }
    body = {"rid": rid, "input_ids": tokens.tolist(), "extra_key": share}
    body |= {"sampling_params": sampling, "return_logprob": True}
    if experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
    return body


def score_request(rid: str, tokens: np.ndarray) -> dict[str, Any]:
    """The body of a request for the logprobs of `tokens`, all computed again, without the cache of other requests."""
    return generate_request(rid, tokens, 0, Limits(1, 1.0), rid) | {"logprob_start_len": 0}


def scored(answer: Mapping[str, Any], tokens: np.ndarray, label: str) -> np.ndarray | None:
    """The logprobs of `tokens` behind the first, float32 [n - 1], from the answer to a `score_request`; None where the
    request was aborted, or other weights than those of `label` had a part in it. NaN where SGLang (0.5.23) puts token 0
    in place of the last one of its vocabulary. Raises RuntimeError for an answer that does not add up."""
    meta = answer["meta_info"]
    _refuse_errors(meta["finish_reason"])
    spans = meta.get("weight_versions") or []
    if not answer.get("output_ids") or any(span["version"] != label for span in spans):
        return None
    ids, logprobs = _columns((meta.get("input_token_logprobs") or [])[1:])
    same = ids == tokens[1:] if len(ids) == len(tokens) - 1 else np.zeros(0, bool)
    if len(same) < len(tokens) - 1 or meta.get("cached_tokens") or ids[~same].any():
        raise RuntimeError("SGLang's logprobs of a prompt are of other tokens, or kept ones")
    return np.where(same, logprobs, np.float32(np.nan))


def reply_of(
    answer: Mapping[str, Any], versions: Mapping[str, int], returned: Returned | None = None, behind: int = 0
) -> Reply:
    """What an answer brings. `returned`: the experts that it must bring, of `behind` positions and the tokens but the
    last. Raises RuntimeError for an answer that does not add up or names weights unknown here."""
    meta = answer["meta_info"]
    _refuse_errors(meta["finish_reason"])
    tokens, logprobs = _columns(meta.get("output_token_logprobs") or [])
    if tokens.tolist() != (answer.get("output_ids") or []):
        raise RuntimeError("SGLang's tokens and logprobs do not agree")
    if not len(tokens):
        return Reply(tokens, logprobs, [], 0, None)
    spans = meta.get("weight_versions") or []
    cached = int(meta.get("cached_tokens") or 0)
    experts = returned.read(meta, behind + len(tokens) - 1) if returned else None
    return Reply(tokens, logprobs, _runs(spans, len(tokens), versions), cached, spans[0]["version"], experts)


def _columns(rows: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [n] and their logprobs float32 [n]. Raises RuntimeError for one that is no number."""
    logprobs = np.array([row[0] for row in rows], np.float32)
    if np.isnan(logprobs).any():
        raise RuntimeError("SGLang's logprobs are no numbers")
    return np.array([row[1] for row in rows], np.int32), logprobs


def _refuse_errors(reason: Mapping[str, Any] | None) -> None:
    """An abort that is none: a request which the server could not run ends with a status."""
    if reason and reason["type"] == "abort" and reason.get("status_code") not in (None, 503):
        raise RuntimeError(f"SGLang could not run a request: {reason.get('message')}")


def _runs(spans: Sequence[Mapping[str, Any]], count: int, versions: Mapping[str, int]) -> Runs:
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends != sorted(set(ends)) or ends[-1] != count:
        raise RuntimeError(f"SGLang's versions do not cover its {count} tokens: {spans}")
    if unknown := {span["version"] for span in spans} - versions.keys():
        raise RuntimeError(f"SGLang sampled with weights {sorted(unknown)}, which were not given to it here")
    return [(versions[span["version"]], span["end"] - span["start"]) for span in spans]


def concatenated(replies: Sequence[Reply], finish: Finish) -> Completion:
    runs = merged([run for reply in replies for run in reply.runs])
    tokens = [np.zeros(0, np.int32), *(reply.tokens for reply in replies)]
    logprobs = [np.zeros(0, np.float32), *(reply.logprobs for reply in replies)]
    experts = joined_experts([reply.experts for reply in replies if len(reply.tokens)])
    return Completion(np.concatenate(tokens), np.concatenate(logprobs), runs, finish, experts)
