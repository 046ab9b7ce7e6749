"""The other process of a test: stores and reads at the URLs it is given, and says what it found.

Run as a program: `python store_process.py URL...`, with the folder `tests` on the path. It never
closes its stores: a process must end by itself.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.models import DecoderModel
from droidkv.serve.keys import ChunkKey, chunk_keys, namespace_digest
from droidkv.serve.store import Store, deadline_in

sys.path.insert(0, __file__.rpartition("/serve/")[0])
from serve.senders import a_sender
from tiny import NUM_LAYERS, tiny_model

CHUNK_TOKENS = 8
TOKEN_IDS = [(7 * index) % 89 + 3 for index in range(26)]
THERE, HERE = a_sender(), a_sender(adapter="sha256:" + "a" * 64)


def objects(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and E of one chunk, in the dtype that E is easily rounded in."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, CHUNK_TOKENS, 32, generator=generator)
    hidden = torch.randn(CHUNK_TOKENS, 24, generator=generator).bfloat16()
    return keys, values, hidden


def first_key(seed: int) -> ChunkKey:
    return chunk_keys(namespace_digest(HERE), [seed] * CHUNK_TOKENS, CHUNK_TOKENS)[0]


def put_objects(store: Store, seed: int) -> bool:
    keys, values, hidden = objects(seed)
    key = first_key(seed)
    taken = [store.put_kv(key, 3, keys, values), store.put_hidden(key, 2, hidden)]
    return all(taken) and store.flush(deadline_in(60))


def has_objects(store: Store, seed: int) -> bool:
    """Whether both come back bit by bit, and nothing else is there."""
    keys, values, hidden = objects(seed)
    key, soon = first_key(seed), deadline_in(60)
    found_keys, found_values = store.get_kv(key, 3, soon)
    found_hidden = store.get_hidden(key, 2, soon)
    pairs = [(found_keys, keys), (found_values, values), (found_hidden, hidden)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs) and not (
        store.contains_kv(key, [2], soon) or store.contains_hidden(key, [3], soon)
    )


def captured_by(model: DecoderModel) -> CapturedCache:
    return capture(
        model,
        torch.tensor([TOKEN_IDS]),
        hidden_layers=range(1, NUM_LAYERS),
        fingerprint=THERE.to_json(),
    )


def main(urls: list[str]) -> None:
    from droidkv.serve.lmcache_settings import LMCacheSettings
    from droidkv.serve.lmcache_store import LMCacheStore
    from droidkv.serve.verbs import store

    report = {}
    captured = captured_by(tiny_model())
    for url in urls:
        settings = LMCacheSettings(url, CHUNK_TOKENS, max_local_cpu_gib=0.05)
        opened = LMCacheStore(settings)
        report[url] = {
            "read": has_objects(opened, 1),
            "wrote": put_objects(opened, 2),
            "stored": store(opened, TOKEN_IDS, captured).is_complete,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
