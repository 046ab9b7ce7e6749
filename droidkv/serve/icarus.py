"""Several logical decoders (ICaRus) in one engine: settings, requests, whose rows. No engine here.

The frozen base writes the KV of every token, whoever decodes, so one prefix cache serves all. A
request names its decoder; one that names none is answered by the base itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from droidkv.errors import ServeError, unknown_name
from droidkv.fields import Fields
from droidkv.serve.connector_plan import PARAMS_KEY, slots_of

# Where vLLM checks a request, it knows no connector's settings; only the environment is there.
NAMES_VARIABLE = "DROIDKV_DECODERS"
REQUEST_CHECK = "droidkv.serve.vllm_icarus:DecoderExists"


@dataclass(frozen=True)
class IcarusSettings:
    """`kv_connector_extra_config` of an engine with several decoders.

    Attributes:
        decoders: Name -> the adapter's folder.
        content_hash: As `droidkv.model_identity.weights_identity`, of the base.
    """

    decoders: Mapping[str, str]
    content_hash: bool = True

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> IcarusSettings:
        """Read `kv_connector_extra_config`.

        Raises:
            ServeError: A value is missing or of the wrong kind, or a key is unknown.
        """
        where = "kv_connector_extra_config"
        fields = Fields(table, where, ServeError)
        decoders = fields.take("decoders", dict)
        settings = cls(decoders, fields.take("content_hash", bool, True))
        fields.done()
        named = Fields(decoders, f"{where}, decoders", ServeError)
        for name in decoders:
            named.take(name, str)
        if not decoders:
            raise ServeError(f"{where}: expected at least one decoder, got none")
        return settings


def known_decoders() -> list[str]:
    """The decoders of this process's engine, as the environment names them.

    Raises:
        ServeError: The environment names none.
    """
    try:
        names = json.loads(os.environ[NAMES_VARIABLE])
    except (KeyError, ValueError) as cause:
        raise ServeError(
            f"expected the names of the decoders as a JSON list in {NAMES_VARIABLE}, got "
            f"{os.environ.get(NAMES_VARIABLE)!r}; start the engine by `droidkv serve icarus`"
        ) from cause
    return [str(name) for name in names]


def decoder_asked(params: Mapping[str, Any] | None, known: Sequence[str]) -> str | None:
    """Read `{"droidkv": {"decoder": "NAME"}}`; None = the base.

    Args:
        params: A request's `kv_transfer_params`; keys of other connectors are left alone.
        known: The engine's decoders.

    Raises:
        ServeError: There is no such decoder, or the table has another key.
    """
    value = (params or {}).get(PARAMS_KEY)
    if value is None:
        return None
    fields = Fields(value, f"kv_transfer_params, {PARAMS_KEY}", ServeError)
    name = fields.optional("decoder", str)
    fields.done()
    if name is not None and name not in known:
        raise ServeError(unknown_name("decoder", name, known))
    return name


@dataclass(frozen=True)
class Turn:
    """One request in one step of the engine.

    Attributes:
        request_id: The request.
        block_ids: Blocks of its page table, the first one for token 0.
        start: The step computes the request's tokens `[start, stop)`.
        stop: See there.
        num_tokens: Tokens of the request that are known so far.
    """

    request_id: str
    block_ids: Sequence[int]
    start: int
    stop: int
    num_tokens: int


@dataclass(frozen=True)
class DecodedRows:
    """What the decoders have to do in one step, decoder by decoder.

    Attributes:
        decoders: Index of each decoder that has something to do, and for how many tokens.
        slots: Slots of the paged cache that these tokens' KV go to. They name the tokens, in
            whatever order the engine computes them.
    """

    decoders: tuple[tuple[int, int], ...] = ()
    slots: tuple[int, ...] = ()


@dataclass
class IcarusScheduler:
    """The half in the scheduler: which tokens of a step need the decoder stream.

    These are the tokens whose logits are used: the last one of a prompt, each generated one, and
    where a request asks for its prompt's log-probabilities all of the prompt. For all others the
    encoder stream alone writes KV.

    Args:
        names: The engine's decoders, in the order of their index.
        block_tokens: Tokens of one block.
    """

    names: Sequence[str]
    block_tokens: int
    _asked: dict[str, tuple[int, bool]] = field(default_factory=dict)

    def admit(self, request_id: str, params: Mapping[str, Any] | None, all_tokens: bool) -> None:
        """A request has come; `all_tokens` if logits of its whole prompt are wanted.

        Raises:
            ServeError: As `decoder_asked`.
        """
        name = decoder_asked(params, self.names)
        if name is not None:
            self._asked[request_id] = (self.names.index(name), all_tokens)

    def finish(self, request_id: str) -> None:
        """A request has ended."""
        self._asked.pop(request_id, None)

    def step(self, turns: Sequence[Turn]) -> DecodedRows:
        """What the decoders do in a step."""
        slots: dict[int, list[int]] = {}
        for turn in turns:
            if turn.request_id not in self._asked:
                continue
            decoder, all_tokens = self._asked[turn.request_id]
            start = turn.start if all_tokens else turn.stop - 1
            if all_tokens or turn.stop >= turn.num_tokens:
                slots.setdefault(decoder, []).extend(
                    slots_of(turn.block_ids, self.block_tokens, start, turn.stop)
                )
        return DecodedRows(
            tuple((decoder, len(slots[decoder])) for decoder in sorted(slots)),
            tuple(slot for decoder in sorted(slots) for slot in slots[decoder]),
        )
