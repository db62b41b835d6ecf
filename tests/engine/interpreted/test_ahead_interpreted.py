"""One step ahead on the GPU's path draws what a step at a time draws, void rows and pending tokens included."""

from chatd.engine.messages import Cancel, FinishReason

CONFIG = {"max_num_seqs": 3, "max_num_batched_tokens": 12}


def answers(model, engine_on, steps_in_flight):
    """Return answers that end by a stop id, by their length and by a cancel, greedy, sampled and penalized."""
    engine = engine_on(model, CONFIG | {"steps_in_flight": steps_in_flight}, wrap=lambda _: model.runner)
    engine.submit(1, [*range(30, 41)], max_tokens=5)
    engine.submit(2, [60, 61, 62], max_tokens=5, temperature=1.0, top_k=20, seed=3, frequency_penalty=0.4)
    engine.submit(3, [70, 71], max_tokens=50)
    while len(engine.ids.get(3, [])) < 3:
        engine.step()
    engine.send(Cancel(3))
    engine.run()
    # The next turn of the cancelled one goes on where that was cut, in slots that a void row has written to.
    engine.submit(4, [80], lease=3, base_len=4, max_tokens=3)
    engine.submit(5, [*range(30, 41)], max_tokens=5, stop_token_ids=(engine.ids[1][3],))
    engine.run()
    return engine


def test_every_token_is_the_same_one_step_ahead(load, real_engine):
    ahead, plain = (answers(load(), real_engine, steps_in_flight) for steps_in_flight in (2, 1))
    for request in (1, 2, 4, 5):
        assert ahead.ids[request] == plain.ids[request]
    shorter = min(len(ahead.ids[3]), len(plain.ids[3]))
    assert ahead.ids[3][:shorter] == plain.ids[3][:shorter]
    assert ahead.done[5].reason is FinishReason.STOP
    assert len(ahead.ids[5]) <= 4
    assert ahead.core.scheduler.step > plain.core.scheduler.step
