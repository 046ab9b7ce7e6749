"""A sender, a receiver and a store between them: one document, answered each way over HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from droidkv.encode import EncodedItem, encode_shared
from droidkv.errors import RefusedError, ServeError
from droidkv.model_identity import load_tokenizer
from droidkv.pair import ModelRef, Pair
from droidkv.servable import servable_folder
from droidkv.serve.audit import read_audit
from droidkv.serve.connector_plan import PARAMS_KEY, AuditRecord
from droidkv.serve.http_client import complete, read_text
from droidkv.serve.launch import launch
from droidkv.serve.opening import check_address
from droidkv.serve.processes import ServerProcess, free_port, serving
from droidkv.serve.purge import remove_store
from droidkv.serve.refusals import BAD_REQUEST
from droidkv.serve.settings import ServeSettings, with_miss_policy
from droidkv.tasks import Item, Task

# A receiver that reads the base's KV answers the worse, the more of a prefix it computes itself.
DEFAULT_CHUNK, FULL_SHARE_CHUNK = 64, 16
_MODEL = "demo"
_FLAGS = ("--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "4096")
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_START_SECONDS = 600.0
_STORED_SECONDS = 60.0


@dataclass(frozen=True)
class Way:
    """One way to have a question answered.

    Attributes:
        name: For people.
        ask: What its request says to the receiver's connector, beside the length of the prefix
            where `names_prefix`; empty = what the server picks.
        server: Who is asked: `sender` or `receiver`.
        names_prefix: Whether it says where the prefix ends.
    """

    name: str
    ask: Mapping[str, Any] = field(default_factory=dict)
    server: str = "receiver"
    names_prefix: bool = False

    def params(self, item: EncodedItem) -> dict[str, Any] | None:
        """Its request's `kv_transfer_params`."""
        border = {"prefix_tokens": len(item.prefix_ids)} if self.names_prefix else {}
        ask = {**self.ask, **border}
        return {PARAMS_KEY: ask} if ask else None


# The first one is what the others are compared with, the last one what the server picks.
WAYS = (
    Way("full prefill", {"reuse": False}),
    Way("naive reuse", {"plan": "[0,0)"}),
    Way("picked plan"),
)
# A receiver that was trained to read the base's KV: its own prefill was not.
FULL_SHARE_WAYS = (
    Way("base alone, full prefill", server="sender"),
    Way("own full prefill", {"reuse": False}),
    Way("behind the base's KV", names_prefix=True),
)


@dataclass(frozen=True)
class DemoSettings:
    """What to show.

    Attributes:
        profile: The pair's profile.
        folder: For logs, the audit file and, without `store`, the store; the `audit.jsonl` and
            `store` in it are removed first.
        store: Where caches lie; None = a folder.
        chunk_tokens: Tokens in one chunk; None = few for a receiver that reads the base's KV.
        dtype: Of both models.
        max_loss: Largest loss of the picked plan, as in `ServeSettings`.
        repeats: Timed runs of each question and way.
    """

    profile: Path
    folder: Path
    store: str | None = None
    chunk_tokens: int | None = None
    dtype: str = "float32"
    max_loss: float | None = None
    repeats: int = 1


def shared_document(items: Iterator[Item], num_questions: int) -> list[Item]:
    """The first items, all of which ask about one and the same text.

    Raises:
        ServeError: The task asks fewer questions about one text.
    """
    first = next(items)
    shared = [first]
    for item in items:
        if len(shared) == num_questions or item.prefix != first.prefix:
            break
        shared.append(item)
    if len(shared) < num_questions:
        raise ServeError(
            f"expected {num_questions} questions about one text, got {len(shared)}; ask for fewer, "
            "or give the task options that make more"
        )
    return shared


def run_demo(
    pair: Pair,
    task: Task,
    items: Sequence[Item],
    settings: DemoSettings,
    on_progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Start both servers, let the sender read the document, and ask.

    Args:
        pair: The pair.
        task: Scores the answers.
        items: Questions about one text; see `shared_document`.
        settings: What to show.
        on_progress: Told of each step.

    Raises:
        ServeError: A server did not start, or nothing was reused.
        StorageError: The store's address is wrong, or `store` in the folder is no store.
    """
    folder = settings.folder
    if settings.store is not None:
        check_address(settings.store)
    remove_store(folder / "store")
    folder.mkdir(parents=True, exist_ok=True)
    audit = folder / "audit.jsonl"
    audit.unlink(missing_ok=True)
    store = settings.store or f"fs://{(folder / 'store').absolute()}"
    is_full_share = pair.reference is not None
    ways = FULL_SHARE_WAYS if is_full_share else WAYS
    chunk_tokens = settings.chunk_tokens or (FULL_SHARE_CHUNK if is_full_share else DEFAULT_CHUNK)
    num_steps = 3 + (1 + settings.repeats * len(items)) * len(ways)
    steps = count(1)

    def step() -> None:
        on_progress("demo", next(steps), num_steps)

    shared = {"store": store, "chunk_tokens": chunk_tokens}
    profiles = (str(settings.profile.absolute()),)
    roles = {
        "sender": (pair.sender, ServeSettings(role="sender", profiles=profiles, **shared)),  # type: ignore[arg-type]
        "receiver": (
            pair.receiver,
            with_miss_policy(
                ServeSettings(
                    role="receiver",
                    profiles=profiles,
                    max_loss=settings.max_loss,
                    audit=str(audit.absolute()),
                    timeline=True,
                    **shared,  # type: ignore[arg-type]
                )
            ),
        ),
    }
    folders = {role: servable_folder(ref, settings.dtype) for role, (ref, _) in roles.items()}
    sends, receives = [
        load_tokenizer(ModelRef(str(path.absolute())), path) for path in folders.values()
    ]
    encoded = [encode_shared(item, sends, receives, pair.chat) for item in items]
    with ExitStack() as servers:
        running: dict[str, ServerProcess] = {}
        for role, (_, role_settings) in roles.items():
            started = launch(role_settings, folders[role], settings.dtype, (_MODEL,), _FLAGS)
            running[role] = servers.enter_context(
                serving(started, free_port(), folder / f"{role}.log", _ENVIRONMENT)
            )
        for server in running.values():
            server.wait_until_ready(_START_SECONDS)
            step()
        complete(running["sender"].url, _MODEL, encoded[0].prefix_ids, 1)
        step()
        asker = _Asker({role: server.url for role, server in running.items()}, audit)
        asker.wait_until_stored(encoded[0], task.max_new_tokens, ways[-1], chunk_tokens)
        rows = []
        for way in ways:  # a first run of each pays for what is done once
            asker.ask(encoded[0], task.max_new_tokens, way)
            step()
        for _ in range(settings.repeats):
            for item, tokens in zip(items, encoded, strict=True):
                for way in ways:
                    row = asker.ask(tokens, task.max_new_tokens, way)
                    rows.append({**row, "id": item.id, "score": task.score(item, row["text"])})
                    step()
        metrics = read_text(f"{running['receiver'].url}/metrics")
    return {
        "pair": pair.name,
        "profile": str(settings.profile),
        "store": store,
        "chunk_tokens": chunk_tokens,
        "prefix_tokens": len(encoded[0].prefix_ids),
        "suffix_tokens": round(statistics.mean(len(each.suffix_ids) for each in encoded)),
        "ways": _ways(rows, ways),
        "answers": rows,
        "metrics": [line for line in metrics.splitlines() if line.startswith("droidkv_")],
        "audit": str(audit),
    }


class _Asker:
    """Asks a server, and finds what the receiver's audit file says of the request."""

    def __init__(self, urls: Mapping[str, str], audit: Path) -> None:
        self._urls, self._audit = urls, audit
        self._salts = count()

    def ask(self, item: EncodedItem, max_tokens: int, way: Way) -> dict[str, Any]:
        # A salt of its own: the server's prefix cache must not answer instead.
        answer = complete(
            self._urls[way.server],
            _MODEL,
            item.prefix_ids + item.suffix_ids,
            max_tokens,
            way.params(item),
            f"demo-{next(self._salts)}",
        )
        if way.server == "receiver":
            record = self._record(answer.request_id)
        else:  # a sender reuses nothing, and keeps no audit
            record = AuditRecord(answer.request_id)
        return {
            "way": way.name,
            "text": answer.text.strip(),
            "ttft_seconds": answer.ttft_seconds,
            "plan": record.plan,
            "prefix_tokens": len(item.prefix_ids),
            "advertised_tokens": record.advertised_tokens,
            "loaded_bytes": record.report.loaded_bytes,
            "recomputed_layers": record.recomputed_layers,
            "reason": None if record.reason is None else str(record.reason),
        }

    def wait_until_stored(
        self, item: EncodedItem, max_tokens: int, way: Way, chunk_tokens: int
    ) -> None:
        """Ask until every whole chunk of the prefix is reused: the sender stores meanwhile."""
        give_up_at = time.monotonic() + _STORED_SECONDS
        wanted = len(item.prefix_ids) // chunk_tokens * chunk_tokens
        while True:
            try:
                row = self.ask(item, max_tokens, way)
            except RefusedError as cause:  # a receiver without an own prefill says no meanwhile
                if time.monotonic() > give_up_at or cause.status == BAD_REQUEST:
                    raise
                time.sleep(1.0)
                continue
            if row["reason"] is None and row["advertised_tokens"] == wanted:
                return
            is_early = row["reason"] in (None, "not_covered", "load_absent")
            if time.monotonic() > give_up_at or not is_early:
                raise ServeError(
                    f"expected the receiver to reuse {wanted} tokens of the sender's cache, got "
                    f"{row['advertised_tokens']} by the plan {row['plan']}, the reason against it "
                    f"being {row['reason']!r}; see {self._audit.parent}"
                )
            time.sleep(1.0)

    def _record(self, request_id: str) -> AuditRecord:
        give_up_at = time.monotonic() + 10.0
        while time.monotonic() < give_up_at:
            if self._audit.exists():
                for record in reversed(read_audit(self._audit)):
                    if record.request_id.startswith(request_id):
                        return record
            time.sleep(0.02)
        raise ServeError(f"expected an audit line of {request_id} in {self._audit}, got none")


def _ways(rows: Sequence[dict[str, Any]], asked: Sequence[Way]) -> list[dict[str, Any]]:
    ways = []
    for way in asked:
        own = [row for row in rows if row["way"] == way.name]
        ttft = statistics.median(row["ttft_seconds"] for row in own)
        ways.append(
            {
                "way": way.name,
                "plan": own[0]["plan"],
                "recomputed_layers": own[0]["recomputed_layers"],
                "loaded_bytes": own[0]["loaded_bytes"],
                "advertised_tokens": own[0]["advertised_tokens"],
                "reused_share": statistics.mean(
                    row["advertised_tokens"] / row["prefix_tokens"] for row in own
                ),
                "median_ttft_seconds": ttft,
                "mean_score": statistics.mean(row["score"] for row in own),
                "num_answers": len(own),
            }
        )
    full = ways[0]["median_ttft_seconds"]
    return [{**way, "ratio": full / way["median_ttft_seconds"]} for way in ways]
