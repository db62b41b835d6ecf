"""All seeded faults: things that somebody could get wrong, each with the tests that notice it.

`fault_runner` applies them to a copy of the source, one at a time.
"""

from __future__ import annotations

from ahead_faults import AHEAD_FAULTS
from cache_faults import CACHE_FAULTS, LEASE_FAULTS
from death_faults import DEATH_FAULTS
from disk_faults import DISK_FAULTS
from engine_faults import SCHEDULE_FAULTS
from gpu_faults import GPU_FAULTS
from model_faults import MODEL_FAULTS
from pool_faults import POOL_FAULTS
from session_faults import SESSION_FAULTS
from sharing_faults import SHARING_FAULTS
from tier_faults import TIER_FAULTS
from verb_faults import VERB_FAULTS

FAULTS = (
    *CACHE_FAULTS,
    *LEASE_FAULTS,
    *SHARING_FAULTS,
    *TIER_FAULTS,
    *DISK_FAULTS,
    *DEATH_FAULTS,
    *SCHEDULE_FAULTS,
    *AHEAD_FAULTS,
    *MODEL_FAULTS,
    *GPU_FAULTS,
    *SESSION_FAULTS,
    *VERB_FAULTS,
    *POOL_FAULTS,
)
