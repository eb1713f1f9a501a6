"""Unknown keys are answered with the key that was meant, also in the words of other frameworks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl.algorithms import list_algorithms, load_algorithm
from mrl.cli import main
from mrl.config import load_recipe
from mrl.config.foreign import ALGORITHMS, FOREIGN, advice_for_algorithm
from mrl.config.suggest import all_keys
from mrl.errors import InputError

TOY = Path(__file__).parents[2] / "launch/recipes/toy_moe.yaml"


def test_the_table_leads_to_keys_and_hides_none():
    own = set(all_keys())
    assert {key for key, _ in FOREIGN.values()} <= own
    assert not own & set(FOREIGN)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("lora.r=8", "did you mean 'lora.rank'?"),
        ("reward=[{path: first_char, wieght: 2}]", "did you mean 'reward.weight'?"),
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optimizer.lr'?"),
        ("optimizer.learning_rte=1", "'optimizer.learning_rte'; did you mean 'optimizer.lr'?"),
        ("rollout.n=8", "'rollout.n'; did you mean 'rollout.samples_per_prompt'?"),
        ("actor_rollout_ref.rollout.n=8", "rollout.n is 'rollout.samples_per_prompt'"),
        ("report_to=wandb", "did you mean 'logging.trackers' (logging=[jsonl, wandb]"),
        ("num_train_epochs=1", "did you mean 'train.num_epochs'?"),
        (
            "resume_from_checkpoint=true",
            "did you mean 'output_dir' (the same command resumes a run",
        ),
        ("use_peft=true", "did you mean 'lora' (lora: {} turns it on)?"),
        ("lr_scheduler=cosine", "did you mean 'optimizer.lr_decay_style'?"),
        ("lr_scheduler.type=cosine", "did you mean 'optimizer.lr_decay_style'?"),
        ("num_generations=8", "did you mean 'rollout.samples_per_prompt'?"),
        ("train.per_device_train_batch_size=8", "did you mean 'train.micro_batch_tokens' (micro"),
        ("max_completion_length=8", "did you mean 'rollout.max_response_len'?"),
        ("algorithm.kl_loss_coef=0.1", "did you mean 'algorithm.kl_coef'?"),
        ("algorithm.beta=0.1", "did you mean 'algorithm.kl_coef'?"),
        ("epsilon=0.2", "did you mean 'algorithm.clip_low' (and algorithm.clip_high)?"),
        ("eps-clip=0.2", "did you mean 'algorithm.clip_low'"),
        ("n_samples_per_prompt=8", "did you mean 'rollout.samples_per_prompt'?"),
        ("rollout.rollout_batch_size=8", "did you mean 'rollout.prompts_per_step' (prompts"),
        ("global_batch_size=8", "did you mean 'train.num_steps_per_rollout' (optimizer steps"),
        (
            "actor_rollout_ref={actor: {optim: {lr: 1}, clip_ratio_high: 1}}",
            "unknown key 'actor_rollout_ref'; here actor_rollout_ref.actor.optim.lr is "
            "'optimizer.lr', actor_rollout_ref.actor.clip_ratio_high is 'algorithm.clip_high'",
        ),
    ],
)
def test_names_of_other_frameworks(override, answer):
    with pytest.raises(InputError) as caught:
        load_recipe(TOY, [override])
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["train", "--config", "r.yaml"],
            "give the recipe without an option: mrl train RECIPE.yaml",
        ),
        (["train", "--config=r.yaml"], "give the recipe without an option: mrl train RECIPE.yaml"),
        (
            ["train", "r.yaml", "--nproc_per_node=8"],
            "python -m mrl.launch --nproc-per-node N -m mrl",
        ),
        (["train", "r.yaml", "--learning_rate", "1e-6"], "without dashes: 'optimizer.lr'; see"),
        (
            ["train", "r.yaml", "--optimizer.lr=1e-6"],
            "are written optimizer.lr=1e-6, without dashes",
        ),
        (["train", "r.yaml", "--num-generations", "8"], "dashes: 'rollout.samples_per_prompt'"),
        (["dpo", "--config", "r.yaml"], "in mrl: not supported: mrl trains by RL"),
        (["grpo"], "in mrl: mrl train RECIPE algorithm.name=NAME"),
        (
            ["train", "r.yaml", "--gpus", "2"],
            "python -m mrl.launch --nproc-per-node N -m mrl train",
        ),
        (["train"], "the following arguments are required: RECIPE; see mrl train --help"),
        (["trian", "r.yaml"], "did you mean mrl train?"),
    ],
)
def test_command_lines_of_other_frameworks(words, answer, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert answer in line
    assert "--help" in line


def test_one_rank_explains_the_words_that_all_ranks_have(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["dpo", "reinforce++", "Reinforce-Plus-Plus-Baseline", "dr-grpo"])
def test_algorithms_of_other_frameworks(name):
    recipe = load_recipe(TOY, [f"algorithm.name={name}"])
    with pytest.raises(InputError, match=f"algorithm.name '{re.escape(name)}'") as caught:
        load_algorithm(recipe.algorithm.name)
    assert advice_for_algorithm(name) in str(caught.value) or "did you mean 'dr_grpo'" in str(
        caught.value
    )


def test_no_algorithm_of_ours_is_said_to_be_another_frameworks():
    assert not set(list_algorithms()) & set(ALGORITHMS)


def test_a_key_with_a_dot_in_a_file_is_told_apart_from_the_key_it_looks_like(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.yaml").write_text(f"{TOY.read_text()}train.num_epochs: 4\n")
    with pytest.raises(InputError, match=r"'train.num_epochs': .* write train: \{num_epochs: 4\}$"):
        load_recipe(tmp_path / "a.yaml")
