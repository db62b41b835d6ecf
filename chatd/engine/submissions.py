"""Whether what the front submits can be computed at all, and the request that it becomes."""

from __future__ import annotations

from chatd.engine.engine_config import EngineConfig
from chatd.engine.messages import Submit
from chatd.engine.request import Request, check_fits, stop_ids_of
from chatd.engine.sampling import check_beam_search, check_sampling_params
from chatd.engine.scheduler import Scheduler
from chatd.errors import InvalidRequest, Unavailable
from chatd.kvcache.lease import Lease, LeaseState


class Submissions:
    """Makes requests of submissions.

    Args:
        config: The engine core's.
        scheduler: Says what waits already, and has the leases and the pool.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self._config = config
        self._scheduler = scheduler

    def open(self, message: Submit, tenant: str | None, lease: Lease | None, now: float) -> Request:
        """Return the request of a submission, on its lease with its ids; nothing has changed where one is refused.

        Args:
            message: The submission.
            tenant: Whose it is; None is "public".
            lease: The tenant's, no request is on it and it has `base_len` ids at least; None where it is not open.
            now: Seconds.

        Raises:
            ChatdError: Says what cannot be.
        """
        self._check(message, tenant)
        leases = self._scheduler.leases
        if lease is None:
            lease = leases.open(message.lease, tenant)
            if lease is None:
                raise Unavailable(f"{self._config.max_leases} leases are in use (max_leases)", retry_after_ms=1000)
        else:
            leases.set_state(lease, LeaseState.ACTIVE)
            leases.trim(lease, message.base_len)
        leases.extend(lease, message.new_ids)
        return Request(
            message.request,
            lease,
            message.params,
            message.request_class,
            keep_lease=message.keep_lease,
            stop_ids=stop_ids_of(message.params, self._config.eos_token_ids),
            arrival_s=now,
            compute_only=message.compute_only,
            num_answered=message.num_answered,
            is_suspect=message.is_suspect,
        )

    def _check(self, message: Submit, tenant: str | None) -> None:
        config, ids = self._config, message.new_ids
        if message.request < 0 or message.lease < 0:
            raise InvalidRequest(f"request {message.request} on lease {message.lease}, the least number is 0")
        if message.base_len < 0 or message.base_len + len(ids) == 0:
            raise InvalidRequest("0 tokens to go on from, the least is 1", param="input")
        limit = config.vocab_size or 2**31
        if ids and not 0 <= min(ids) <= max(ids) < limit:
            raise InvalidRequest(f"token ids are {min(ids)} to {max(ids)}, the limit is {limit - 1}", param="input")
        check_sampling_params(message.params, limit)
        self._check_answered(message)
        if message.beam is not None:
            check_beam_search(message.beam, message.params, limit, config.max_num_seqs)
            if message.compute_only:
                raise InvalidRequest("compute_only is true, a beam search draws", param="compute_only")
        check_fits(
            message.base_len + len(ids),
            max_model_len=config.max_model_len,
            usable_blocks=self._scheduler.kv.pool.usable_blocks(tenant),
            block_size=config.block_size,
        )
        if len(self._scheduler.waiting) >= config.max_waiting:
            raise Unavailable(f"{config.max_waiting} requests wait already (max_waiting)", retry_after_ms=1000)

    @staticmethod
    def _check_answered(message: Submit) -> None:
        """Refuse an answer that cannot go on.

        Raises:
            InvalidRequest: There is no prompt before it, it is as long as it may be, or it is no drawn answer.
        """
        answered, param = message.num_answered, "num_answered"
        length = message.base_len + len(message.new_ids)
        if not 0 <= answered < length:
            raise InvalidRequest(f"num_answered is {answered}, the range is 0 to {length - 1}", param=param)
        if answered >= message.params.max_tokens:
            raise InvalidRequest(f"num_answered is {answered}, max_tokens is {message.params.max_tokens}", param=param)
        others = {"compute_only": message.compute_only, "sample_of": message.sample_of is not None}
        others["beam"] = message.beam is not None
        if answered and any(others.values()):
            names = " and ".join(name for name, is_given in others.items() if is_given)
            raise InvalidRequest(f"num_answered is {answered}, {names} has no answer to go on with", param=param)
