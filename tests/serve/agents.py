"""Two modules that were trained to read a tiny base's KV, and a conversation between them.

The conversation is worked out by the Hugging Face engine, whose answers engines are held against.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from serve.engines import Answer, Models, reference, token_ids

from droidkv.loading import load_pair
from droidkv.pair import Pair, read_pair
from droidkv.profile_job import ProfileSettings
from droidkv.profiler import profile_pair
from droidkv.servable import servable_folder
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer
from droidkv.training.pairs import full_share_pair, train_pair

CONTEXT = token_ids(230, seed=50)
QUESTIONS = [token_ids(20 + index, seed=60 + index) for index in range(3)]
NEW = 24
_PAIR = """
schema_version = 1
description = "x"
tasks = [{ name = "records", num_records = 2 }]
[sender]
model = "./base"
[receiver]
model = "./base"
adapter = "./adapters/NAME"
[train]
task = "records"
options = { num_records = 2, questions_per_context = 2 }
steps = STEPS
learning_rate = 0.02
rank = 4
batch_size = 4
"""


@dataclass(frozen=True)
class Agent:
    """A module that was trained to read the base's KV, served from `models.folder`."""

    pair: Pair
    models: Models
    profile: Path

    def answer(self, prompt: list[int], step: int, new: int = NEW) -> Answer:
        """The Hugging Face engine's, behind the base's KV of whole chunks or blocks of `step`."""
        return reference(self.models, prompt, "none", new, (len(prompt) - 1) // step * step)


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: whom is asked what, and what is answered."""

    agent: int
    prompt: list[int]
    answer: Answer


def make_agents(folder: Path) -> list[Agent]:
    """A base and two agents, trained for a few steps."""
    tiny_model(TinySpec("llama", layers=3), torch.float32, "cpu").save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DROIDKV_CACHE", str(folder / "cache"))
        return [_make_agent(folder, "first", 12), _make_agent(folder, "second", 6)]


def make_turns(agents: list[Agent], step: int) -> list[Turn]:
    """Three turns on one context, each behind all that was said before: two switches."""
    said, made = CONTEXT, list[Turn]()
    for agent, question in zip((0, 1, 0), QUESTIONS, strict=True):
        prompt = said + question
        answer = agents[agent].answer(prompt, step)
        made.append(Turn(agent, prompt, answer))
        said = prompt + answer[1]
    return made


def _make_agent(folder: Path, name: str, steps: int) -> Agent:
    path = folder / f"{name}.toml"
    path.write_text(_PAIR.replace("NAME", name).replace("STEPS", str(steps)), encoding="utf-8")
    plain = read_pair(path)
    pair = full_share_pair(plain, "prefillshare")
    for each in (plain, pair):
        train_pair(each)
    profile = folder / f"{name}.json"
    settings = ProfileSettings(task=pair.tasks[0], num_items=2, calibration_items=2)
    profile_pair(pair, settings, profile)
    served = folder / name
    served.mkdir()
    for role, ref in (("sender", pair.sender), ("receiver", pair.receiver)):
        (served / role).symlink_to(servable_folder(ref, "float32"))
    sender, receiver = load_pair(pair)
    return Agent(pair, Models(served, sender, receiver, None), profile)
