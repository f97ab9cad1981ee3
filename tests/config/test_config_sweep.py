"""Several values on a command line become runs, each checked, with a folder of its own, before any of them starts."""

import pytest
from config_helpers import BASE

from megarl.config import ConfigError, SweptRun, load_config, load_sweep
from megarl.config.sweep import folder_name


def sweep(*words: str) -> list[SweptRun]:
    return load_sweep([*BASE, *words])


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        sweep(*words)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_each_value_is_a_run_of_its_own() -> None:
    runs = sweep("actor.optim.lr=1e-4,3e-4", "trainer.experiment_name=try")
    assert [run.values for run in runs] == [{"actor.optim.lr": 1e-4}, {"actor.optim.lr": 3e-4}]
    assert [run.config.actor.optim.lr for run in runs] == [1e-4, 3e-4]
    folders = [str(run.config.trainer.run_dir) for run in runs]
    assert folders == ["runs/try_sweep/actor.optim.lr=0.0001", "runs/try_sweep/actor.optim.lr=0.0003"]


def test_several_keys_give_every_combination_the_last_one_fastest() -> None:
    runs = sweep("actor.optim.lr=1e-4,3e-4", "rollout.n=2,4,8")
    assert [tuple(run.values.values()) for run in runs] == [(x, n) for x in (1e-4, 3e-4) for n in (2, 4, 8)]
    assert runs[4].config.trainer.experiment_name == "actor.optim.lr=0.0003,rollout.n=4"


@pytest.mark.parametrize(
    "words",
    [
        ["actor.optim.lr=1e-4,3e-4"],
        ["model.path='a,b/c d','it\\'s','back\\\\slash'"],
        ["actor.clip_ratio_high=null,0.28", "reward.shuffle=true,false"],
        ["model.config={num_hidden_layers:12},{num_hidden_layers:24}", "trainer.default_local_dir='my runs'"],
        ["recipe=quickstart,quickstart_grpo", "trainer.experiment_name=recipes"],
    ],
)
def test_the_words_of_a_run_alone_are_that_run(words: list[str]) -> None:
    for run in sweep(*words):
        assert load_config(list(run.words))[0] == run.config


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("rollout.n=choice(2,4)", [2, 4]),
        ("rollout.n=range(2,9,3)", [2, 5, 8]),
        ("trainer.seed=range(3)", [0, 1, 2]),
        ("rollout.n=sort(8,2,4)", [2, 4, 8]),
        ("rollout.temperature=range(0.1,0.4,0.1)", [0.1, 0.2, 0.3]),
        ("actor.optim.lr=range(3e-6,0,-1e-6)", [3e-6, 2e-6, 1e-6]),
        ("actor.optim.betas=[0.9,0.99],[0.8,0.95]", [[0.9, 0.99], [0.8, 0.95]]),
        ("data.train_files='a,b.jsonl',[c.jsonl,d.jsonl]", ["a,b.jsonl", ["c.jsonl", "d.jsonl"]]),
        ("++actor_rollout_ref.rollout.n=2,4", [2, 4]),
    ],
)
def test_hydras_ways_to_write_several_values(written: str, values: list[object]) -> None:
    runs = sweep(written)
    key = written.lstrip("+").removeprefix("actor_rollout_ref.").partition("=")[0]
    assert [run.values for run in runs] == [{key: value} for value in values]


@pytest.mark.parametrize("word", ["actor.optim.betas=[0.9,0.99]", "model.path='a,b'", "rollout.n=4"])
def test_a_list_and_quoted_commas_are_one_value(word: str) -> None:
    assert refusal(word) == "-m: expected several values of at least one key, such as actor.optim.lr=1e-4,3e-4"
    assert len(sweep(word, "trainer.seed=1,2")) == 2


def test_an_entry_of_a_list_and_a_value_of_a_mapping_are_swept_by_their_own_names() -> None:
    runs = sweep("actor.optim.beta2=0.9,0.95")
    assert [run.config.actor.optim.betas[1] for run in runs] == [0.9, 0.95]
    assert [list(run.values) for run in runs] == [["actor.optim.betas.1"]] * 2


def test_of_two_words_for_one_key_the_later_one_counts() -> None:
    assert [run.values for run in sweep("rollout.n=3", "actor_rollout_ref.rollout.n=2,4")] == [
        {"rollout.n": 2},
        {"rollout.n": 4},
    ]
    assert [run.values for run in sweep("rollout.n=2,4", "trainer.seed=1,2", "rollout.n=3")] == [
        {"trainer.seed": 1},
        {"trainer.seed": 2},
    ]


def test_every_run_is_checked_before_the_first() -> None:
    assert refusal("actor.optim.lrr=1,2") == (
        "actor.optim.lrr=1: there is no key actor.optim.lrr; did you mean actor.optim.lr?"
    )
    assert refusal("rollout.n=2,two") == "rollout.n=two: expected an integer"
    assert refusal("rollout.n=range(3)").startswith("rollout.n=0: expected")
    assert "actor.clip_ratio=0.1" in refusal("algorithm.policy_loss_fn=ppo,reinforce", "actor.clip_ratio=0.1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["actor.optim.lr=interval(0,1)"], "expected values that can be counted: a,b or choice(a,b) or range("),
        (["model=glob(*)"], "expected values that can be counted"),
        (["rollout.n=range(4,2)"], "expected values that can be counted"),
        (["rollout.n=range(1,4,0)"], "expected values that can be counted"),
        (["rollout.temperature=range(0.1,0.4,0)"], "expected values that can be counted"),
        (["rollout.n=2,"], "expected key=value, with quotes"),
        (["~rollout.n"], "no key can be taken away"),
        (["trainer.experiment_name=a,b"], "trainer.experiment_name: expected one value with -m"),
        (["trainer.default_local_dir=a,b"], "trainer.default_local_dir: expected one value with -m"),
        (["trainer.nnodes=2", "rollout.n=2,4"], "trainer.nnodes=2: expected 1 with -m"),
        (["actor.optim.lr=1e-4,0.0001"], "actor.optim.lr=0.0001 and actor.optim.lr=0.0001 are the same settings"),
        (["actor.use_dynamic_bsz=true,false"], "are the same settings"),
        (["recipe=quickstart,quickstart_grpo"], "the runs would stand in runs/quickstart_grpo_sweep, runs/quickstart_"),
    ],
)
def test_what_is_no_sweep_is_one_sentence(words: list[str], sentence: str) -> None:
    assert sentence in refusal(*words)


def test_without_m_several_values_are_refused_with_the_way_to_have_them() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*BASE, "rollout.n=2,4"])
    assert str(refused.value) == (
        "rollout.n=2,4: expected one value; a list is written [a,b], and `megarl train -m` makes a run of each value"
    )


def test_a_folders_name_says_the_values_and_is_one_that_every_file_system_takes() -> None:
    assert folder_name({"actor.optim.betas": [0.9, 0.99], "rollout.n": 4, "actor.clip_ratio_c": None}) == (
        "actor.optim.betas=0.9_0.99,rollout.n=4,actor.clip_ratio_c=null"
    )
    paths = [folder_name({"model.path": path}) for path in ("a/b", "a b", "a:b", "模型" * 100)]
    assert len(set(paths)) == 4
    assert all(len(path.encode()) < 255 and "/" not in path and " " not in path for path in paths)
    assert paths[0].startswith("model.path=a_b_")
    assert folder_name({"model.path": ".."}) == "model.path=.."
