"""`megarl plan`: predicts memory and time of a run without a GPU."""

from __future__ import annotations

import json

from megarl.config import ConfigError, load_config
from megarl.config.old_log_probs import source_of_old_log_probs, why_own_pass
from megarl.plan.cluster import Plan, check_size, plan_of
from megarl.plan.command.request import Request
from megarl.plan.command.show import as_json, proposal_json, show, show_proposals
from megarl.plan.from_config import job_of
from megarl.plan.job import Job
from megarl.plan.predict import Prediction, predict
from megarl.plan.search import Proposal, search
from megarl.terminal import pages, sentences


def main(request: Request, words: list[str]) -> int:
    """words: key=value.  Returns the exit code: 0 even if the run does not fit, because this is a valid result."""
    plan = plan_of(request, words)
    job = _job(plan, request)
    check_size(request, job)
    for warning in plan.warnings:
        sentences(stderr=True).print(f"warning: {warning}")
    prediction = predict(job)
    shared = _prefixes(plan, job, prediction)
    old = source_of_old_log_probs(plan.config, why_own_pass(plan.config))
    said = [*plan.said, *_lengths(job, request), *_dispatch(plan, job), *shared, old]
    proposals = _proposals(plan, request, job) if request.search else []
    console = pages()
    if request.json:
        found = as_json(job, prediction, said)
        if request.search:
            found["proposals"] = [proposal_json(one) for one in proposals]
        print(json.dumps(found))
        return 0
    show(console, job, prediction, said)
    if request.search:
        show_proposals(console, prediction, proposals)
    return 0


def _job(plan: Plan, request: Request, more: tuple[str, ...] = ()) -> Job:
    config = load_config([*plan.words, *more], command="config")[0] if more else plan.config
    return job_of(config, plan.gpu, prompt_tokens=request.prompt_tokens, response_tokens=request.response_tokens)


def _proposals(plan: Plan, request: Request, job: Job) -> list[Proposal]:
    def composed(words: list[str]) -> Job | None:
        """None if the configuration is invalid."""
        try:
            return _job(plan, request, tuple(words))
        except ConfigError:
            return None

    return search(job, composed, {word.partition("=")[0] for word in plan.words})


def _dispatch(plan: Plan, job: Job) -> list[str]:
    """That `auto` is planned as alltoall: whether the cluster has the package deep_ep is not known here."""
    key = "actor.megatron.moe_token_dispatcher_type"
    is_open = plan.config.actor.megatron.moe_token_dispatcher_type == "auto" and job.layout.ep > 1
    return [f"tokens reach experts by alltoall; where deep_ep is installed, {key}=flex plans DeepEP"] if is_open else []


def _prefixes(plan: Plan, job: Job, prediction: Prediction) -> list[str]:
    """What becomes of prompts with several completions."""
    asked = plan.config.trainer.share_prefixes
    if job.n == 1 or asked == "off":
        return []
    key, count = f"trainer.share_prefixes={asked}", f"{job.n} completions"
    if not job.shares_prefixes:
        on_gpus = "trainer.share_prefixes=on on GPUs too"
        return [f"a prompt is computed with each of its {count}; {key} shares it on CPUs alone, {on_gpus}"]
    part = f"{prediction.computed_tokens['update_actor']:,.0f} of {job.tokens * job.epochs:,.0f} tokens"
    return [f"a prompt is computed once for its {count} ({key}): update_actor computes {part}"]


def _lengths(job: Job, request: Request) -> list[str]:
    """The mean lengths that were assumed because the user gave none."""
    said = []
    if request.prompt_tokens is None:
        said.append(f"--prompt-tokens {job.prompt_tokens:.0f}, a quarter of data.max_prompt_length")
    if request.response_tokens is None:
        said.append(f"--response-tokens {job.response_tokens:.0f}, half of data.max_response_length")
    return said
