"""System prompts that an operator shares with every tenant: computed once ahead, and charged to nobody.

Of each prompt the ids are computed with which all conversations begin that have exactly this system prompt, whole
blocks only, in the namespace "public". Whatever follows in a session is its tenant's own. Knows no settings; the
engine's part is an ordinary request that only computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date as Date
from itertools import takewhile

from chatd.engine.messages import PUBLIC_TENANT, Done, FinishReason, LeaseId, LeaseTier, Release, Retain, Tier
from chatd.engine.plan import RequestId
from chatd.errors import ChatdError, ConfigError
from chatd.protocol import Message
from chatd.sessions.computed_ahead import Computation
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.ports import ChatEncoder

FIRST_MESSAGES = ("a", "Z z", "1", "é", "?", "- x")
"""What conversations with the same system prompt have in common is what these have in common."""
MIN_RENEW_S = 300.0
"""Between two computations of a prompt whose KV was lost to pressure."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublicPrompt:
    """A system prompt that is public.

    Attributes:
        name: The operator's, for logs and refusals.
        text: Exactly what sessions have as their system prompt.
    """

    name: str
    text: str


@dataclass(slots=True)
class _Shared:
    """A prompt and what the engine has of it: `epoch` says which one."""

    prompt: PublicPrompt
    lease: LeaseId
    ids: list[int]
    epoch: int = -1
    request: RequestId | None = None
    is_computed: bool = False
    sent_at: float = 0.0


class PublicPrompts:
    """All public prompts of a daemon.

    Args:
        encoder: Makes prompts' ids; called in threads.
        requests: Sends them to the engine.
        model: Gives the limits of the served model as they are now.
        new_lease: Makes lease ids.
        today: Gives the date that a session which begins now has.
        monotonic: Gives seconds.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        requests: EngineRequests,
        model: Callable[[], ModelProfile],
        new_lease: Callable[[], LeaseId],
        *,
        today: Callable[[], Date],
        monotonic: Callable[[], float],
    ) -> None:
        self._encoder = encoder
        self._requests = requests
        self._model = model
        self._new_lease = new_lease
        self._today = today
        self._monotonic = monotonic
        self._date = today()
        self._shared: dict[LeaseId, _Shared] = {}

    def __len__(self) -> int:
        return len(self._shared)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts, computed or not."""
        return sum(len(shared.ids) for shared in self._shared.values())

    @property
    def num_computed(self) -> int:
        """Prompts whose KV the engine has."""
        epoch = self._requests.epoch
        return sum(shared.is_computed and shared.epoch == epoch for shared in self._shared.values())

    async def share(self, prompts: Sequence[PublicPrompt]) -> list[str]:
        """Take prompts in and have them computed; return what a person at the terminal should know.

        Raises:
            ConfigError: A prompt is too long, or the template has no place for it; the pool is too small for all.
        """
        self._date = self._today()
        notes = []
        for prompt in prompts:
            ids = await asyncio.to_thread(self._encode, prompt, self._date)
            if ids:
                lease = self._new_lease()
                self._shared[lease] = _Shared(prompt, lease, ids)
            else:
                notes.append(f"public prompt {prompt.name} has no full block to share")
        block_size, num_blocks = self._model().block_size, self._model().blocks
        needed = self.num_tokens // max(1, block_size)
        if needed > num_blocks // 2:
            raise ConfigError(
                f"public prompts have {needed} blocks, the limit is half of the pool of {num_blocks}",
                param="public_prompts",
                hint="give the pool more memory (engine.kv_memory), or share less",
            )
        self.compute()
        if self._shared:
            plural = "" if len(self) == 1 else "s"
            notes.insert(0, f"{len(self)} public prompt{plural} of {self.num_tokens} tokens in {needed} blocks")
        return notes

    def compute(self) -> None:
        """Have the engine compute every prompt that it was not told of; call it for each new one."""
        for shared in self._shared.values():
            if shared.epoch != self._requests.epoch:
                self._compute(shared)

    async def renew(self) -> None:
        """Compute again what was lost to pressure, and what has another date in it today."""
        today = self._today()
        if today != self._date:
            self._date = today
            for shared in list(self._shared.values()):
                try:
                    ids = await asyncio.to_thread(self._encode, shared.prompt, today)
                except ConfigError as error:
                    _log.warning("%s", error.message)
                    ids = []
                if ids != shared.ids:
                    self._replace(shared, ids)
        now = self._monotonic()
        for shared in self._shared.values():
            if not shared.is_computed and shared.request is None and now - shared.sent_at >= MIN_RENEW_S:
                self._compute(shared)

    def on_tier(self, message: LeaseTier) -> None:
        """Note that a prompt's KV was lost, or is back."""
        shared = self._shared.get(message.lease)
        if shared is not None:
            # A lease counts as on the device while most of it is.
            is_whole = message.num_tokens_kept >= len(shared.ids)
            shared.is_computed = is_whole or message.tier in (Tier.HOST, Tier.DISK)

    def _replace(self, shared: _Shared, ids: list[int]) -> None:
        del self._shared[shared.lease]
        self._requests.tell(Release(shared.lease))
        if ids:
            lease = self._new_lease()
            self._shared[lease] = _Shared(shared.prompt, lease, ids)
            self._compute(self._shared[lease])

    def _compute(self, shared: _Shared) -> None:
        def on_done(done: Done | None) -> None:
            if shared.request != request:
                return
            shared.request = None
            shared.is_computed = done is not None and done.reason is FinishReason.COMPUTED
            if done is not None and done.reason is FinishReason.FAILED:
                _log.warning("public prompt %s is not computed: %s", shared.prompt.name, done.error_message)

        shared.epoch, shared.is_computed, shared.sent_at = self._requests.epoch, False, self._monotonic()
        computation = Computation(PUBLIC_TENANT, lambda: shared.ids, on_done)
        request = shared.request = self._requests.ahead.compute(shared.lease, computation)
        if request is not None:
            self._requests.tell(Retain(shared.lease, attached=True))

    def _encode(self, prompt: PublicPrompt, date: Date) -> list[int]:
        """Return the ids with which every conversation with this system prompt begins, whole blocks of them."""
        model = self._model()
        try:
            model.check_text([prompt.text])
            begun = [
                self._encoder.begin(prompt.text, [Message(role="user", content=said)], date=date)
                for said in FIRST_MESSAGES
            ]
        except ChatdError as error:
            raise ConfigError(
                f"public prompt {prompt.name} cannot be shared: {error.message}", param=f"public_prompts.{prompt.name}"
            ) from None
        common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*begun, strict=False)))
        if common > model.longest_prompt:
            raise ConfigError(
                f"public prompt {prompt.name} has {common} tokens, the limit is {model.longest_prompt}"
                f" (max_model_len {model.context})",
                param=f"public_prompts.{prompt.name}",
            )
        return begun[0][: common // model.block_size * model.block_size] if model.block_size else []
