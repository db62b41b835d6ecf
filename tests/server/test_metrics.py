"""What `/metrics`, `/health`, `/ready` and `/version` say."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from chatd.engine.messages import EngineStats, PoolFrame, TenantPool, Tier, TierPool
from chatd.protocol import Timings, Usage
from chatd.sessions.conversation import Owner

NAMES = {
    "chatd_num_requests_running",
    "chatd_num_requests_waiting",
    "chatd_kv_cache_usage_perc",
    "chatd_prefix_cache_queries",
    "chatd_prefix_cache_hits",
    "chatd_prompt_tokens",
    "chatd_generation_tokens",
    "chatd_time_to_first_token_seconds",
    "chatd_inter_token_latency_seconds",
    "chatd_e2e_request_latency_seconds",
    "chatd_request_queue_time_seconds",
    "chatd_request_success",
    "chatd_num_preemptions",
    "chatd_sessions",
    "chatd_websocket_connections",
    "chatd_engine_restarts",
    "chatd_build_info",
}


def open_http(running, key: str | None = None) -> httpx.AsyncClient:
    headers = running.headers(key) if key else {}
    return httpx.AsyncClient(base_url=running.url, headers=headers, trust_env=False)


async def scrape(running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with open_http(running, running.keys["ann"]) as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


async def test_the_names_are_vllms(start) -> None:
    async with start() as running:
        async with open_http(running, running.key) as http:
            body = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        rows = [TenantPool("acme", 3, 1, 1, 2, 100, 60, 9, 1.0, 0, 9, 6), TenantPool("made-up", 1, 0, 0, 0, 10, 5, 1)]
        frame = PoolFrame(
            7, 10, 5, 1, 4, 0, 11, 1.0, 1, 2, rows, tiers=[TierPool(Tier.DISK, 100, 12, 20, 5, 1)], num_held=9
        )
        running.engine.say(frame, EngineStats(100, 5.0, 4.5, 3, 0, 0, 2, 15, move_s=0.25))
        running.manager.on_engine_messages([])
        samples = await scrape(running)
        names = {name for name, _ in samples}
        stems = {name.removesuffix("_total").removesuffix("_count") for name in names}
        assert stems >= NAMES
        acme, other = (("tenant", "acme"),), (("tenant", "other"),)
        assert samples["chatd_num_requests_running", acme] == 1
        assert samples["chatd_num_requests_waiting", acme] == 2
        assert samples["chatd_kv_cache_usage_perc", ()] == 0.4
        assert samples["chatd_prefix_cache_queries_total", acme] == 100
        assert samples["chatd_prefix_cache_hits_total", acme] == 60
        assert samples["chatd_generation_tokens_total", other] == 1
        assert samples["chatd_num_preemptions_total", ()] == 3
        assert samples["chatd_num_swapped_total", ()] == 2
        assert samples["chatd_num_joins_total", ()] == 15
        assert samples["chatd_kv_cache_evictions_total", ()] == 11
        assert samples["chatd_kv_cache_wanted_again_total", acme] == 6
        assert samples["chatd_kv_cache_blocks_saved", ()] == 5
        assert samples["chatd_engine_move_seconds_total", ()] == 0.25
        disk = (("tier", "disk"),)
        assert samples["chatd_kv_tier_blocks", disk] == 12
        assert samples["chatd_kv_tier_capacity_blocks", disk] == 100
        assert samples["chatd_kv_tier_stored_total", disk] == 20
        assert samples["chatd_kv_tier_loaded_total", disk] == 5
        assert samples["chatd_kv_tier_refused_total", disk] == 1
        assert samples["chatd_request_success_total", (("finished_reason", "stop"), ("tenant", "acme"))] == 1
        assert samples["chatd_time_to_first_token_seconds_count", acme] == 1
        assert samples["chatd_inter_token_latency_seconds_count", acme] == 5
        assert samples["chatd_e2e_request_latency_seconds_count", acme] == 1
        assert not any("made-up" in str(labels) for _, labels in samples)


async def test_how_answers_ended_is_counted_as_vllm_does(start) -> None:
    async with start() as running:
        usage = Usage.of(1, 0, 1)
        timings = Timings(queue_ms=1, ttft_ms=2, prefill_tok_s=3, decode_tok_s=0, preemptions=0)
        for reason in ("stop", "stop_string", "max_output_tokens", "context", "cancelled", "kv_exhausted"):
            running.daemon.metrics.turn_ended(Owner("acme", "ann"), reason, usage, timings)
        running.daemon.metrics.turn_ended(Owner("acme", "ann"), "failed", None, None)
        samples = await scrape(running)
        for reason in ("stop", "length", "abort"):
            assert samples["chatd_request_success_total", (("finished_reason", reason), ("tenant", "acme"))] == 2
        assert samples["chatd_request_failure_total", (("tenant", "acme"),)] == 1


async def test_routes_are_counted_by_their_registered_path(start) -> None:
    async with start() as running:
        async with open_http(running, running.key) as http:
            await http.get("/v1/models/x%00y")
            await http.get("/canary/path")
        samples = await scrape(running)
        counted = {labels for name, labels in samples if name == "chatd_http_requests_total"}
        assert (("route", "/v1/models/{model:path}"), ("status", "404")) in counted
        assert (("route", "unknown"), ("status", "404")) in counted
        assert "canary" not in str(counted)


async def test_ready_says_what_it_is_doing(start) -> None:
    async with start(is_open=False) as running, open_http(running) as http:
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "starting", "phase": "loading weights", "progress": 0.5}
        assert (await http.get("/health")).json() == {"status": "ok"}
        refused = await http.get("/v1/models", headers=running.headers())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert "loading weights 50%" in refused.json()["error"]["message"]
        running.backend.gate.set()
        while (await http.get("/ready")).status_code != 200:
            pass
        assert (await http.get("/ready")).json()["status"] == "ready"
        running.engine.state = "restarting"
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "restarting")


async def test_the_version_is_for_this_machine_or_a_key(start) -> None:
    async with start() as running, open_http(running) as http:
        answer = await http.get("/version")
        assert answer.json() == {"name": "chatd", "version": running.daemon.version, "boot": running.daemon.boot}
        running.daemon.authenticator._behind_proxy = True
        assert (await http.get("/version")).status_code == 401
        assert (await http.get("/version", headers=running.headers())).status_code == 200
