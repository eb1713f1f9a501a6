"""Configures what the policy is trained on: files, the columns to read, mixtures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mrl.config.branch import Branch
from mrl.config.reward import Rewards, describe_rewards

Paths = str | tuple[str, ...]
TEMPLATE_OWN = ("add_generation_prompt", "conversation", "messages", "tokenize", "tools")
"""Arguments of `apply_chat_template` that mrl gives itself."""


class RowsConfig(Branch):
    path: Paths
    """A file, a glob, a folder written by `save_to_disk`, a hub id, or a list of these; as
    `data.path`."""
    prompt_key: str | None = None
    """The column that holds the prompt, as `data.prompt_key`."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """New names of columns, as `data.columns`."""
    split: str | None = None
    """The split, as `data.split`; null is `train`."""
    subset: str | None = None
    """The configuration of a data set on the hub, as `data.subset`."""

    def data(self, chat_template_kwargs: dict[str, Any]) -> DataConfig:
        """Return these rows as data that is read like that of the training."""
        return DataConfig(
            path=self.path,
            prompt_key=self.prompt_key,
            columns=self.columns,
            split=self.split or "train",
            subset=self.subset,
            chat_template_kwargs=chat_template_kwargs,
        )


class SourceConfig(RowsConfig):
    """What a source leaves null, it takes from `data` itself: `prompt_key`, `split`, `subset`; its
    `columns` are added to those of `data`."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Its name in messages, checkpoints and metrics (`source/NAME/...`); null takes the name of the
    file."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts that come from this source, relative to the other weights. Give every source
    a weight or none: without weights a pass over the data has each row once."""
    reward: Rewards | None = None
    """What scores the prompts of this source: one reward or a list with weights, as the recipe's
    `reward`; null takes that one."""


class DataConfig(Branch):
    path: Paths | None = None
    """A file (`.jsonl`, `.json`, `.csv`, `.tsv`, all of them also with `.gz`, or `.parquet`), a glob, a
    folder written by `save_to_disk`, a hub id, or a list of these, whose rows are one data set; see
    docs/data.md. Give this or `data.sources`."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources, each with its own columns, reward and weight."""
    prompt_key: str | None = None
    """The column that holds the prompt: a string, or a list of messages. By default the first of
    `prompt`, `messages` and `conversations` that the rows have."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """New names of columns: `answer: solution` hands the column `solution` to the reward as `answer`,
    `answer: reward_model.ground_truth` takes a value from within an object, and `image: null` leaves a
    column out."""
    split: str = "train"
    """The split of a data set folder that has several, or of a data set on the hub."""
    subset: str | None = None
    """The configuration of a data set on the hub that has several, such as `main`."""
    overlong: Literal["refuse", "filter", "truncate_left"] = "refuse"
    """What happens to prompts that do not fit into the context beside the response. refuse: the start
    fails and names the row; filter: they are left out, and counted; truncate_left: a string keeps its
    last tokens, a chat its system message and its last messages, and they are counted."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`: in prompts, SFT, evaluation
    sets and conversations with an environment."""
    shuffle: bool = True
    """A new order of the prompts in each pass over the data; it follows from `seed`."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_our_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in TEMPLATE_OWN if name in value]:
            raise ValueError(f"mrl gives {taken[0]!r} itself; leave it out")
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
        """The sources, or `path` as the only one, with what they take from the whole filled in."""
        sources = self.sources or (SourceConfig(path=self.path or ()),)
        return tuple(
            source.model_copy(
                update={
                    "prompt_key": source.prompt_key or self.prompt_key,
                    "columns": self.columns | source.columns,
                    "split": source.split or self.split,
                    "subset": source.subset or self.subset,
                }
            )
            for source in sources
        )

    @property
    def has_weights(self) -> bool:
        """Whether prompts are drawn from the sources by weight."""
        return any(source.weight is not None for source in self.sources)

    @property
    def rewards(self) -> dict[str, Rewards]:
        """The rewards that sources have of their own, by what `Prompt.reward` calls them."""
        own = (source.reward for source in self.sources if source.reward is not None)
        return {describe_rewards(reward): reward for reward in own}

    @property
    def has_all_rewards(self) -> bool:
        """Whether every source has a reward of its own."""
        return bool(self.sources) and all(s.reward is not None for s in self.sources)

    def describe(self) -> str:
        """Return all paths in one line."""
        return ", ".join(path for source in self.all_sources for path in paths_of(source.path))


def paths_of(path: Paths) -> tuple[str, ...]:
    """Return one path or several as a tuple."""
    return (path,) if isinstance(path, str) else path
