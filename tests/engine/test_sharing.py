"""What sharing saves is counted once for each table and once for all, and told with every frame of the pool."""

from chatd.engine.messages import WatchPool
from chatd.engine.plan import RequestId
from chatd.engine.sharing import Sharing, sharing_of
from chatd.testing.engine import EngineHarness, sampling_params

PROMPT = [1 + i % 7 for i in range(14)]


def test_blocks_of_samples_are_counted_for_each_and_once():
    engine = EngineHarness()
    engine.submit(1, PROMPT, params=sampling_params(9))
    for number in (2, 3):
        engine.submit(number, PROMPT, params=sampling_params(9), sample_of=RequestId(1))
    engine.step(2)
    # Three full blocks of four tokens are shared by all three; each has a fourth of its own.
    assert sharing_of(lease.table for lease in engine.core.leases) == Sharing(12, 6)
    assert sharing_of([]) == Sharing(0, 0)


def test_a_frame_tells_what_sharing_saves():
    engine = EngineHarness()
    engine.send(WatchPool(0.001))
    engine.submit(1, PROMPT, params=sampling_params(9))
    engine.submit(2, PROMPT, params=sampling_params(9), sample_of=RequestId(1))
    engine.step(2)
    frame = engine.core.pool_frame(engine.clock.now)
    assert (frame.num_held, frame.num_active, frame.num_shared) == (8, 5, 3)
