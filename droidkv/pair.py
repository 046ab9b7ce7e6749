"""Ordered pairs of models, one TOML file each, and whether two models can be a pair at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from droidkv.architecture import missing_settings, rope_settings, shared_settings
from droidkv.differences import differences, flatten, lines
from droidkv.errors import PairError, unknown_name
from droidkv.fields import Fields
from droidkv.jsonio import read_toml
from droidkv.recipe import Recipe

SCHEMA_VERSION = 1
Apply = Literal["merge", "lora", "icarus"]
Source = Literal["folder", "package", "tiny", "hub"]
APPLIES: tuple[Apply, ...] = get_args(Apply)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_FOLDER_STARTS = (".", "/", "~")


@dataclass(frozen=True)
class ModelRef:
    """Where a model comes from.

    Attributes:
        model: A folder (starts with `./`, `../`, `/` or `~`), a hub id, `package:NAME` (a model
            that a Python package brings) or `tiny:ARCHITECTURE?seed=0` (random, for tests).
        revision: Commit or tag on the hub.
        adapter: Folder or hub id of a PEFT adapter on top of it.
        adapter_revision: Commit or tag of the adapter on the hub.
        apply: `merge` adds the adapter into the weights, `lora` runs it beside them, `icarus` runs
            it as a second stream that reads the KV of the model without it.
        aliases: Other names a server gives this model.
        trust_remote_code: Let the model's own Python code run. Off unless asked for.

    Raises:
        PairError: The text of `model` or `adapter` has none of these forms.
    """

    model: str
    revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None
    apply: Apply = "merge"
    aliases: tuple[str, ...] = ()
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for text in (self.model, self.adapter):
            if text is None or text.startswith((*_FOLDER_STARTS, "package:", "tiny:")):
                continue
            if not _HUB_ID.fullmatch(text):
                raise PairError(
                    f"expected a folder (starting with './', '../', '/' or '~'), a hub id "
                    f"('owner/name'), 'package:NAME' or 'tiny:ARCHITECTURE', got {text!r}"
                )
        if self.apply not in APPLIES:
            raise PairError(unknown_name("way to apply an adapter", self.apply, APPLIES))

    @property
    def source(self) -> Source:
        """Which of the four kinds of place the model comes from."""
        if self.model.startswith(_FOLDER_STARTS):
            return "folder"
        if self.model.startswith("package:"):
            return "package"
        return "tiny" if self.model.startswith("tiny:") else "hub"

    @property
    def name(self) -> str:
        """One canonical name for people; as an identity it proves nothing."""
        name = Path(self.model).name if self.source == "folder" else self.model
        name = f"{name}@{self.revision}" if self.revision else name
        if self.adapter is None:
            return name
        local = self.adapter.startswith(_FOLDER_STARTS)
        return f"{name}+{Path(self.adapter).name if local else self.adapter}"

    @classmethod
    def from_table(cls, table: object, where: str, folder: Path) -> ModelRef:
        """Read the [sender] or [receiver] table; relative folders are seen from `folder`.

        Raises:
            PairError: A value is missing or of the wrong kind, or a key is unknown.
        """
        fields = Fields(table, where, PairError)
        adapter = fields.optional("adapter", str)
        values: dict[str, Any] = {
            "model": _absolute(fields.take("model", str), folder),
            "revision": fields.optional("revision", str),
            "adapter": None if adapter is None else _absolute(adapter, folder),
            "adapter_revision": fields.optional("adapter_revision", str),
            "apply": fields.take("apply", str, cls.apply, choices=APPLIES),
            "aliases": fields.take_list("aliases", str, ()),
            "trust_remote_code": fields.take("trust_remote_code", bool, False),
        }
        fields.done()
        try:
            return cls(**values)
        except PairError as error:
            raise PairError(f"{where}: {error}") from error


@dataclass(frozen=True)
class TaskRef:
    """A task to profile a pair on: its name, and its options where the defaults are not wanted."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    @classmethod
    def from_value(cls, value: object, where: str) -> TaskRef:
        """Read one element of `tasks`: a name, or a table of `name` and options.

        Raises:
            PairError: It is neither.
        """
        if isinstance(value, str):
            return cls(value)
        name = Fields(value, f"{where} (a name, or a table)", PairError).take("name", str)
        assert isinstance(value, dict)
        return cls(name, {key: each for key, each in value.items() if key != "name"})


@dataclass(frozen=True)
class Pair:
    """An ordered pair: the receiver answers on what the sender has prefilled.

    Attributes:
        name: The file's name without `.toml`.
        description: What the pair is, for people.
        sender: The model that prefills the prefix.
        receiver: The model that answers.
        tasks: The tasks the pair is profiled on, the main one first.
        chat: Whether prompts go through the tokenizer's chat template.
        allow_extra_tokens: Accept that one vocabulary has tokens the other lacks, as long as
            every token both have has the same id.
        train: How the receiver is made from the sender's base; None where it comes ready.
        reference: The model whose full prefill a loss is against; None = the receiver itself. A
            receiver trained to read the base's KV has no prefill of its own that would be right,
            so it is held against the ordinary fine-tune.
        path: The file the pair was read from.
    """

    name: str
    description: str
    sender: ModelRef
    receiver: ModelRef
    tasks: tuple[TaskRef, ...]
    chat: bool = True
    allow_extra_tokens: bool = False
    train: Recipe | None = None
    reference: ModelRef | None = None
    path: Path | None = None


def read_pair(name_or_path: str | os.PathLike[str]) -> Pair:
    """Read a pair file by path (it ends in `.toml` or has a slash) or by name (see `list_pairs`).

    Raises:
        PairError: No such pair, or the file is not one; names the file and the key.
        StorageError: The file could not be read.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text:
        return _read(Path(text))
    known = list_pairs()
    if text not in known:
        folders = ", ".join(str(folder) for folder in pair_folders())
        raise PairError(f"{unknown_name('pair', text, known)}. Looked in: {folders}")
    return _read(known[text])


def list_pairs() -> dict[str, Path]:
    """Name and file of every pair that can be had by name; a name found twice is the first."""
    found: dict[str, Path] = {}
    for folder in pair_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def pair_folders() -> list[Path]:
    """Where pairs are looked for: `DROIDKV_PAIRS`, `pairs/` here, `pairs/` of the checkout."""
    listed = [Path(each) for each in os.environ.get("DROIDKV_PAIRS", "").split(os.pathsep) if each]
    shipped = Path(__file__).resolve().parent.parent / "pairs"
    return list(dict.fromkeys([*listed, Path.cwd() / "pairs", shipped]))


def check_compatible(
    sender_config: Any, receiver_config: Any, allow_extra_tokens: bool = False
) -> None:
    """Do nothing if the receiver can attend to the sender's KV.

    Args:
        sender_config: Hugging Face configuration of the sender, or its parsed config.json.
        receiver_config: That of the receiver.
        allow_extra_tokens: Let the two sizes of the vocabulary differ (see `check_vocabularies`).

    Raises:
        PairError: They cannot; the message names each differing field with both values.
    """
    sides = []
    for config in (sender_config, receiver_config):
        if missing := missing_settings(config):
            raise PairError(
                f"expected a decoder-only model's configuration, but it lacks "
                f"{', '.join(missing)}; check that config.json is whole"
            )
        table = shared_settings(config)
        if allow_extra_tokens:
            del table["vocab_size"]
        sides.append(flatten({**table, "rope": rope_settings(config)}))
    if found := differences(*sides):
        raise PairError(
            "expected sender and receiver to be fine-tunes of one base, but they differ in:"
            + lines(each.between("the sender", "the receiver") for each in found)
            + "\nA KV cache of one means nothing to the other; choose two models that agree in "
            "these" + _vocabulary_hint([each.field for each in found])
        )


def check_vocabularies(
    sender: Mapping[str, int], receiver: Mapping[str, int], allow_extra_tokens: bool = False
) -> None:
    """Do nothing if both models mean the same by every token id.

    Args:
        sender: Full map token -> id of the sender's tokenizer, added tokens included.
        receiver: That of the receiver's.
        allow_extra_tokens: Accept tokens that only one of them has.

    Raises:
        PairError: A token has two ids, an id two tokens, or only one model has it.
    """
    clashes = sorted(
        token for token in sender.keys() & receiver if sender[token] != receiver[token]
    )
    extra = sorted(sender.keys() ^ receiver.keys())
    ids = {index: token for token, index in receiver.items()}
    clashes += [token for token in extra if sender.get(token) in ids]
    if clashes:
        shown = lines(
            f"{token!r}: {sender.get(token, 'none')} in the sender, "
            f"{receiver.get(token, 'none')} in the receiver"
            for token in clashes[:5]
        )
        raise PairError(
            f"expected both vocabularies to give each token one id, but {len(clashes)} tokens "
            f"clash, such as:{shown}\nPrefix tokens would mean different texts; choose two models "
            "with one tokenizer"
        )
    if extra and not allow_extra_tokens:
        raise PairError(
            f"expected one vocabulary, but {len(extra)} tokens are in only one of the two, such "
            f"as: {', '.join(map(repr, extra[:5]))}; choose two models with one tokenizer"
            + _vocabulary_hint(["vocab_size"])
        )


def resolve_alias(name: str, refs: Iterable[ModelRef]) -> ModelRef:
    """The one model that a name or an alias (a server's name, a path) stands for.

    Raises:
        PairError: No model or more than one has it.
    """
    names = {ref: (ref.name, ref.model, *ref.aliases) for ref in refs}
    found = {ref for ref in names if ref.name == name}
    found = found or {ref for ref, each in names.items() if name in each}
    if not found:
        raise PairError(unknown_name("model", name, {n for each in names.values() for n in each}))
    if len(found) > 1:
        several = ", ".join(sorted(ref.name for ref in found))
        raise PairError(f"expected {name!r} to stand for one model, got several: {several}")
    return found.pop()


def _read(path: Path) -> Pair:
    path = Path(os.path.abspath(path))
    if not _NAME.fullmatch(path.stem):
        raise PairError(
            f"{path}: expected a file name of small letters, digits, '.', '_' and '-', such as "
            f"'smollm2-records.toml'; rename the file"
        )
    fields = Fields(read_toml(path, PairError), str(path), PairError)
    fields.take_version(SCHEMA_VERSION, "write it as the shipped pair files are")
    train = fields.optional("train", dict)
    reference = fields.optional("reference", dict)
    tasks = fields.take("tasks", list)
    pair = Pair(
        name=path.stem,
        description=fields.take("description", str),
        sender=ModelRef.from_table(fields.take("sender", dict), f"{path}, [sender]", path.parent),
        receiver=ModelRef.from_table(
            fields.take("receiver", dict), f"{path}, [receiver]", path.parent
        ),
        tasks=tuple(
            TaskRef.from_value(value, f"{path}, tasks[{index}]")
            for index, value in enumerate(tasks)
        ),
        chat=fields.take("chat", bool, True),
        allow_extra_tokens=fields.take("allow_extra_tokens", bool, False),
        train=None if train is None else Recipe.from_table(train, f"{path}, [train]"),
        reference=None
        if reference is None
        else ModelRef.from_table(reference, f"{path}, [reference]", path.parent),
        path=path,
    )
    fields.done()
    if not pair.tasks:
        raise PairError(f"{path}: expected at least one task in tasks, got none")
    return pair


def _absolute(text: str, folder: Path) -> str:
    if not text.startswith(_FOLDER_STARTS):
        return text
    return os.path.normpath(folder / Path(text).expanduser())


def _vocabulary_hint(fields: list[str]) -> str:
    if fields != ["vocab_size"]:
        return "."
    return (
        ", or, if one has only added tokens that the shared prefixes never hold, say "
        "'allow_extra_tokens = true' in the pair file."
    )
