"""The probe's figure: chances of an order, and an engine without a model that shows both ends of it."""

import itertools
import random

import pytest

from chatd.bench.probe import Prober, auc, spread
from chatd.bench.tables import probe_table
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


@pytest.mark.parametrize("seed", range(5))
def test_the_auc_is_the_share_of_pairs_in_order(seed: int) -> None:
    rng = random.Random(seed)
    fast = [rng.randrange(8) for _ in range(13)]
    slow = [rng.randrange(10) for _ in range(9)]
    pairs = [(a < b) + 0.5 * (a == b) for a, b in itertools.product(fast, slow)]
    assert auc(fast, slow) == pytest.approx(sum(pairs) / len(pairs))


def test_the_spread_is_that_of_shuffled_probes() -> None:
    rng = random.Random(1)
    aucs = [auc([rng.random() for _ in range(40)], [rng.random() for _ in range(40)]) for _ in range(2000)]
    mean = sum(aucs) / len(aucs)
    assert mean == pytest.approx(0.5, abs=0.01)
    assert (sum((a - mean) ** 2 for a in aucs) / len(aucs)) ** 0.5 == pytest.approx(spread(40, 40), rel=0.05)


class CountedEngine:
    """Stands for the real engine: a request takes as many seconds as rows are computed for it."""

    def __init__(self) -> None:
        self._harness = EngineHarness(config=engine_config(num_blocks=4000))
        self.done = self._harness.done
        self._rows: dict[int, int] = {}

    def submit(self, request: int, ids: list[int], *, max_tokens: int, tenant: str) -> None:
        self._number, self._before = request, self._harness.runner.num_rows
        self._harness.submit(request, ids, tenant=tenant, params=sampling_params(max_tokens), keep_lease=False)

    def run(self) -> None:
        self._harness.run()
        self._rows[self._number] = self._harness.runner.num_rows - self._before

    def ttft_s(self, request: int) -> float:
        return float(self._rows[request])


def test_a_foreign_tenant_learns_nothing_and_the_same_one_everything() -> None:
    prober = Prober(CountedEngine(), 97, 13, 3)  # type: ignore[arg-type]
    foreign, same = prober.probe("stranger", 60), prober.probe("victim", 30)
    assert (foreign["auc"], foreign["cached_tokens"]) == (0.5, 0)
    assert (same["auc"], same["cached_tokens"]) == (1.0, 30 * 12)
    assert "| another tenant | 60 + 60 | 13000.0 ms | 13000.0 ms | 0 | **0.500** " in probe_table(
        {"foreign": foreign, "same": same}
    )
