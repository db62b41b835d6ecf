"""What the front says to the engine.

The engine keeps the ids of each lease, so a turn sends only what is new.
"""

from __future__ import annotations

from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.engine.vocabulary import LeaseId, Message, RequestClass


class Submit(Message, frozen=True):
    """Generate after `new_ids`, appended to the lease at `base_len`.

    Attributes:
        request: Chosen by the front, never reused.
        lease: Chosen by the front; a lease that the engine does not know is opened where `base_len` is 0.
        tenant: The tenant of the key; the namespace of every block comes from it.
        base_len: The length, in tokens, of what the front believes the lease to hold. More in the engine is
            trimmed; less is answered with `LeaseLost`.
        new_ids: Appended. Empty goes on from what is there.
        params: Resolved sampling parameters.
        request_class: Its place in the schedule.
        keep_lease: False releases the lease with the request (stateless requests that nobody will continue).
        compute_only: Compute the prompt, its last token too, draw nothing, and end as `computed`; without a step where
            all of it is computed already. It has to fit as any other: with one token of an answer after it.
        sample_of: Another sample of the prompt of that request, which was submitted before: where it has not ended, its
            blocks are shared as soon as the prompt is computed. Lease and ids are given as for any other request.
        beam: Search instead of drawing; the sequences come in one `Beams` before `Done`, the best stays in the lease.
        num_answered: So many of the ids, at their end, are the answer's already: it goes on after them. Draws are
            numbered, penalties, `min_tokens` and `max_tokens` counted and `Done` told as if it had never stopped; so
            it has fewer than `max_tokens` of them. Not with `compute_only`, `sample_of` or `beam`.
        is_suspect: It was running when an engine died. It is computed alone until its next two tokens are drawn, and
            their rows computed: whatever one step did to that engine, it does to this request only.
    """

    request: RequestId
    lease: LeaseId
    tenant: str
    base_len: int
    new_ids: list[int]
    params: SamplingParams
    request_class: RequestClass = RequestClass.INTERACTIVE
    keep_lease: bool = True
    compute_only: bool = False
    sample_of: RequestId | None = None
    beam: BeamSearch | None = None
    num_answered: int = 0
    is_suspect: bool = False


class Fork(Message, frozen=True):
    """Open `new_lease` with the first `at` tokens of `lease`: full blocks are shared, no KV is copied now.

    Answered with `Forked` at once, also while a request is on `lease`.
    """

    lease: LeaseId
    new_lease: LeaseId
    at: int


class Trim(Message, frozen=True):
    """Cut a lease to `length` tokens; one that a request is on, when that has ended.

    Attributes:
        lease: Which.
        length: Tokens that stay.
        forget: What only this lease has of the rest can be found no more, in any tier; not while a request is on it.
    """

    lease: LeaseId
    length: int
    forget: bool = False


class Release(Message, frozen=True):
    """Forget a lease: its ids and its claim to blocks."""

    lease: LeaseId


class Erase(Message, frozen=True):
    """Forget a lease, and in every tier the blocks of one sequence that no other lease of the tenant begins with.

    Answered with `Erased`. A request on the lease is cancelled; the lease need not be open.

    Attributes:
        lease: Of the session that is erased.
        tenant: Its tenant.
        token_ids: A log that the session had; one message for each of its branches.
    """

    lease: LeaseId
    tenant: str
    token_ids: list[int]


class EraseTenant(Message, frozen=True):
    """Forget all that there is of a tenant: its leases, its blocks in the pool and in the host, and some on the disk.

    Answered with `Erased`. Requests of the tenant are cancelled.

    Attributes:
        lease: Names the answer; nobody's.
        tenant: Which; not the public one.
        digests: Names of its blocks on the disk, which knows no tenants.
    """

    lease: LeaseId
    tenant: str
    digests: list[bytes]


class Cancel(Message, frozen=True):
    """End a request as cancelled; what it has computed stays in the lease."""

    request: RequestId


class Finish(Message, frozen=True):
    """The answer ends at lease length `length` (a stop string): the rest is trimmed and not counted.

    Attributes:
        request: A request of the front's; one that has ended since is trimmed all the same.
        lease: Its lease.
        length: Tokens of the lease, prompt included, that stay.
    """

    request: RequestId
    lease: LeaseId
    length: int


class Retain(Message, frozen=True):
    """Tell how a lease should be valued while idle: is anybody attached to its session. It may be open or not yet."""

    lease: LeaseId
    attached: bool


class WatchPool(Message, frozen=True):
    """Send `PoolFrame`s no more often than every `interval_s`; 0 stops them.

    Attributes:
        interval_s: Seconds between frames.
        with_map: Include the state of every block.
        with_leases: Include a row per lease.
    """

    interval_s: float
    with_map: bool = False
    with_leases: bool = False


class InspectBlocks(Message, frozen=True):
    """Tell what is known of some blocks; answered with `Inspected`. Costs a look through the block tables.

    Attributes:
        question: Echoed in the answer.
        first: The first block.
        num_blocks: How many follow each other from there; an answer has `MAX_INSPECTED` at most.
        tenant: Number only the blocks of this tenant: the shared ones first, then the others that are held, then the
            cached ones, each kind in an order that nobody else has a part in. None numbers all blocks of the pool.
    """

    question: int
    first: int
    num_blocks: int
    tenant: str | None = None


class SetTenant(Message, frozen=True):
    """Change a tenant's part of the machine from now on.

    `Ready.max_model_len` stays; a prompt that the other tenants' floors leave no room for is refused as any.

    Attributes:
        tenant: Its name.
        weight: Of service tokens, slots and blocks beside the other tenants' weights.
        floor: Part of the pool, 0 to 0.5, that no other tenant can take; all floors together get at most half.
    """

    tenant: str
    weight: float
    floor: float


class Ping(Message, frozen=True):
    """Asks for a `Pong`: the engine's loop is alive."""

    nonce: int


class Shutdown(Message, frozen=True):
    """End the process after the current step."""


FrontMessage = (
    Submit
    | Fork
    | Trim
    | Release
    | Erase
    | EraseTenant
    | Cancel
    | Finish
    | Retain
    | WatchPool
    | InspectBlocks
    | SetTenant
    | Ping
    | Shutdown
)
