"""Configuration of the training data: files, columns, and mixtures of several sources."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mrl.config.branch import Branch
from mrl.config.reward import Rewards, describe_rewards

Paths = str | tuple[str, ...]
ENVIRONMENT_TASKS = "environment:tasks"
"""The path that stands for the tasks of `environment.verifiers`."""
TEMPLATE_OWN = ("add_generation_prompt", "conversation", "messages", "tokenize", "tools")
"""Arguments of `apply_chat_template` that mrl sets itself."""


def _not_empty(path: Paths) -> Paths:
    if path == ():
        raise ValueError("the list is empty; give at least one path")
    if "" in paths_of(path):
        raise ValueError("the path is empty; give the path of a file or folder")
    return path


class RowsConfig(Branch):
    path: Paths
    """A file, a glob, a folder written by `save_to_disk`, a hub id, or a list of these, like
    `data.path`."""
    prompt_key: str | None = None
    """The column with the prompt, like `data.prompt_key`."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """New names of columns, like `data.columns`."""
    split: str | None = None
    """The split, like `data.split`. Null takes `train`; in `data.sources`, null takes the value of
    `data.split`."""
    subset: str | None = None
    """The subset of a data set on the Hugging Face hub, like `data.subset`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """For the path `environment:tasks`, like `data.arguments`."""

    @field_validator("path")
    @classmethod
    def _at_least_one(cls, path: Paths) -> Paths:
        return _not_empty(path)

    def data(self, chat_template_kwargs: dict[str, Any]) -> DataConfig:
        """Return a DataConfig with which these rows are read in the same way as training data."""
        return DataConfig(
            path=self.path,
            prompt_key=self.prompt_key,
            columns=self.columns,
            split=self.split or "train",
            subset=self.subset,
            arguments=self.arguments,
            chat_template_kwargs=chat_template_kwargs,
        )


class SourceConfig(RowsConfig):
    """One of several data sources. `prompt_key`, `split` and `subset` default to the values of
    these keys in `data`, and `columns` are added to `data.columns`."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the source in messages, checkpoints and metrics (`source/NAME/...`). Null takes the
    last part of the (first) path, such as the file name."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts that come from this source, relative to the weights of the other sources.
    Give a weight to every source, or to none. Without weights, a pass over the data contains each
    row once."""
    reward: Rewards | None = None
    """The reward for the prompts of this source: one reward, or a list with weights, like the
    recipe's `reward`. Null takes the recipe's `reward`."""


class DataConfig(Branch):
    path: Paths | None = None
    """A file (`.jsonl`, `.json`, `.csv`, `.tsv`, each also with `.gz`, or `.parquet`), a glob, a
    folder written by `save_to_disk`, a hub id, or a list of these. All rows together form one data
    set; see docs/data.md. Give either this key or `data.sources`. `environment:tasks`, which is the
    default with `environment.verifiers`, stands for the tasks of that environment."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources, each with its own columns, reward and weight."""
    prompt_key: str | None = None
    """The column with the prompt: a string or a list of messages. By default the first of `prompt`,
    `messages` and `conversations` that the rows have."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Maps new names of columns to the names in the data: `answer: solution` passes the column
    `solution` to the reward as `answer`, `answer: reward_model.ground_truth` takes a value from
    inside an object, and `image: null` drops the column `image`."""
    split: str = "train"
    """The split of a data set folder with several splits, or of a data set on the hub. Of data without
    splits, such as a file, `train` is all rows, and another split is refused."""
    subset: str | None = None
    """The subset, such as `main`, of a data set on the Hugging Face hub that has several subsets
    (`name` in `datasets.load_dataset`). For any other data it is refused."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """For the path `environment:tasks`: keys merged over `environment.arguments` when the tasks are
    loaded, such as `{taskset: {split: test}}` or `{select: {limit: 100}}`."""
    overlong: Literal["refuse", "filter", "truncate_left"] = "refuse"
    """What happens to prompts that, together with the longest response, do not fit into the
    context. `refuse`: the run does not start, and the error message names the row. `filter`: these
    prompts are left out and counted. `truncate_left`: these prompts are shortened and counted; a
    string keeps its last tokens, and a chat keeps its system message and its last messages."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`. They apply to prompts, SFT
    rows, evaluation sets and conversations with an environment."""
    shuffle: bool = True
    """Shuffle the prompts again for each pass over the data, in an order that depends on `seed`.
    Without shuffling, the prompts keep the order of the data."""

    @field_validator("path")
    @classmethod
    def _at_least_one(cls, path: Paths | None) -> Paths | None:
        return None if path is None else _not_empty(path)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_our_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in TEMPLATE_OWN if name in value]:
            raise ValueError(f"mrl sets {taken[0]!r} itself; leave it out")
        return value

    @model_validator(mode="after")
    def _path_or_sources(self) -> DataConfig:
        if (self.path is None) == (not self.sources):
            given = "both are" if self.sources else "neither is"
            raise ValueError(f"give data.path or data.sources; {given} given")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("data.sources: give every source a weight, or none")
        names = [source.name for source in self.sources if source.name is not None]
        if len(set(names)) < len(names):
            raise ValueError(f"data.sources: got the names {', '.join(names)}, expected each once")
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The `sources` or, if there are none, one source with the key `path`. Keys that a source
        does not set are filled in from this DataConfig."""
        sources = self.sources or (SourceConfig(path=self.path or ()),)
        return tuple(
            source.model_copy(
                update={
                    "prompt_key": source.prompt_key or self.prompt_key,
                    "columns": self.columns | source.columns,
                    "split": source.split or self.split,
                    "subset": source.subset or self.subset,
                    "arguments": source.arguments or self.arguments,
                }
            )
            for source in sources
        )

    @property
    def rewards(self) -> dict[str, Rewards]:
        """The rewards that are set in the sources, as a dict. The key of a reward is the line of
        text that `describe_rewards` returns for it. `Prompt.reward` contains the same line."""
        own = (source.reward for source in self.sources if source.reward is not None)
        return {describe_rewards(reward): reward for reward in own}

    @property
    def has_all_rewards(self) -> bool:
        """Whether every source of `sources` has its own reward; False without `sources`."""
        return bool(self.sources) and all(s.reward is not None for s in self.sources)

    def describe(self) -> str:
        """Return the paths of all sources in one line."""
        return ", ".join(path for source in self.all_sources for path in paths_of(source.path))


def paths_of(path: Paths) -> tuple[str, ...]:
    """Return `path` as a tuple: a single path becomes a 1-tuple."""
    return (path,) if isinstance(path, str) else path
