"""The tokens that could be drawn, from the reply of a server to the batch of a step."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_servers import good
from pools import pool_of
from wire import column_on_the_wire, reply_item

from megarl.data.batch import make_batch
from megarl.data.groups import load_groups, save_groups
from megarl.rollout.collector.messages import pack, unpack
from megarl.rollout.continuation import generate_completion, join
from megarl.rollout.engine_columns import EngineSupport
from megarl.rollout.protocol import SamplingParams, parse_replies
from megarl.rollout.wire_columns import ColumnsLost
from megarl.samples.ragged import COUNTS, gathered
from megarl.samples.sample import SUPPORT, Completion, Prompt, Sample

TOLD = EngineSupport(0.9, 20, num_ids=10)


def item(tokens: list[int], masks: Any, log_probs: Any = None) -> dict[str, Any]:
    """A completion as SGLang reports it."""
    found = reply_item(tokens, [-1.0] * len(tokens), [(0, 0, len(tokens))], {})
    log_probs = [-0.25] * len(tokens) if log_probs is None else log_probs
    found["meta_info"] |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": log_probs}
    return found


def read(sent: dict[str, Any], num_asked: int = 3) -> Completion:
    ((completion, *_),) = parse_replies(json.loads(json.dumps(sent)), 1, num_asked=num_asked, columns=[TOLD])
    return completion


def completed(tokens: list[int], masks: list[list[int]], num_asked: int) -> Completion:
    return read(item(tokens, masks), num_asked)


def test_log_probs_are_those_over_the_support() -> None:
    found = completed([4, 6], [[4, 9], [6]], 3)
    assert found.log_probs == [-0.25, -0.25]
    assert found.columns[SUPPORT].lists() == [[], [], [], [4, 9], [6]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("masks", "log_probs", "words"),
    [
        (None, None, "rollout.top_p=0.9 and rollout.top_k=20: the server does not report which tokens could be drawn"),
        *(
            (masks, None, "output_token_sampling_mask of a completion: expected 2 lists of ids below 10, each with the")
            for masks in ("no list", [[4]], *([[4], odd] for odd in ([], [7, 8], [6, None], [6, 2.7], [6, True])))
        ),
        *(([[4, beyond], [6]], None, "expected 2 lists of ids below 10") for beyond in (-1, 10)),
        ([[4], [6]], -0.5, "a completion has 2 tokens and no list of log-probs of its sampling"),
        ([[4], [6]], [-0.5, None], "a completion has the log-prob None: expected a finite number of at most 0"),
        ([[4], [6]], [float("nan"), -0.5], "a completion has the log-prob nan"),
        ([[4], [6]], [-0.5, True], "a completion has the log-prob True"),
        ([[4], [6]], [0.5, -0.5], "a completion has the log-prob 0.5"),
        ([[4], [6]], [-0.5], "a completion has 2 tokens and 1 log-probs of its sampling"),
    ],
)
def test_a_support_that_does_not_fit_the_tokens_is_an_error(masks: Any, log_probs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read(item([4, 6], masks, log_probs))
    assert not isinstance(error.value, ColumnsLost)


def test_an_id_that_no_column_holds_is_an_error_also_where_the_vocabulary_is_not_known() -> None:
    meta = item([4], [[4, 2**31]])["meta_info"]
    with pytest.raises(ValueError, match="expected 1 lists of ids below 2147483648"):
        EngineSupport(0.9, 20).read(meta, 3, 1, num_known=0)


def test_half_of_a_support_and_an_array_are_none() -> None:
    half, array = item([4], [[4]]), item([4], [[4]])
    del half["meta_info"]["output_token_sampling_logprobs"]
    array["meta_info"]["columns"] = {SUPPORT: column_on_the_wire(np.zeros((4, 2), np.int32))}
    for sent, words in ((half, "does not report which tokens"), (array, "but the field output_token_sampling_mask")):
        with pytest.raises(ValueError, match=words):
            read(sent)


def test_a_request_that_ended_in_the_queue_has_lost_its_support() -> None:
    sent = item([4], None)
    sent["meta_info"]["finish_reason"] = {"type": "abort"}
    with pytest.raises(ColumnsLost):
        read(sent)


def test_it_comes_through_pieces_a_pipe_files_and_a_batch(tmp_path: Path) -> None:
    first = completed([4, 6], [[4, 9, 5], [6]], 1)
    second = completed([7], [[8, 7]], 3)
    whole = join(first, second, 1)
    assert whole.columns[SUPPORT].lists() == [[], [4, 9, 5], [6], [8, 7]]  # type: ignore[attr-defined]
    prompt = Prompt("0-1", [3], "")
    other = completed([5], [[5, 6, 7, 8, 9]], 1)
    group = [Sample.of(prompt, completion, 1.0) for completion in (whole, other)]
    group = unpack(pickle.loads(pickle.dumps(pack(group))), prompt)
    save_groups(tmp_path, {0: group, 1: [group[1]]})
    groups = list(load_groups(tmp_path).values())
    assert [sample.rows[0].columns[SUPPORT].lists() for sample in groups[0]] == [  # type: ignore[attr-defined]
        [[], [4, 9, 5], [6], [8, 7]],
        [[], [5, 6, 7, 8, 9]],
    ]
    batch = make_batch(groups).select([1, 0])
    counts = batch.columns[SUPPORT + COUNTS].long()
    assert counts.tolist() == [0, 5, 0, 3, 1, 2]
    starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
    lists = [ids[a : a + n].tolist() for a, n in zip(starts.tolist(), counts.tolist(), strict=True)]
    assert lists == [[], [5, 6, 7, 8, 9], [], [4, 9, 5], [6], [8, 7]]


async def test_an_evaluation_which_samples_otherwise_does_not_ask_for_it() -> None:
    async with pool_of(good, columns=[TOLD]) as (pool, _, (bodies,)):
        narrow = SamplingParams(top_p=0.9, top_k=20, max_new_tokens=4)
        for params in (replace(narrow, top_k=-1), replace(narrow, top_p=1.0, top_k=-1), narrow.as_greedy()):
            completion = await generate_completion(pool, [3], params)
            assert not completion.columns and len(completion.log_probs) == 2
        assert not [body for body in bodies if "return_sampling_mask" in body]
