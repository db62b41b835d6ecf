"""The whole product with the real model: the commands, the processes, both doors and the terminal."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from chatd.client import Client
from chatd.local_daemon import LocalDaemon, readiness
from chatd.protocol import Params, ResponseCompleted
from chatd.tenants.keys import create_key
from chatd.testing.ports import free_port

pytestmark = pytest.mark.model

ROOT = Path(__file__).parent.parent
GREEDY = Params(temperature=0.0, max_tokens=24)
CAPITAL = "What is the capital of France?"


def wait_until(
    predicate: Callable[[], bool], timeout_s: float = 60.0, seen: Callable[[], str] = lambda: "nothing to show"
) -> None:
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"waited in vain; last seen:\n{seen()}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"http://127.0.0.1:{free_port()}"
    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        with LocalDaemon(address, ["--no-auth", "--kv-memory", "256MiB"], log_path=folder / "serve.log") as daemon:
            daemon.wait_ready(lambda phase, done: None)
            yield address


def engine_of(url: str) -> psutil.Process:
    """Return the engine process of the daemon that listens at `url`."""
    port = url.rpartition(":")[2]
    for process in psutil.Process().children(recursive=True):
        line = process.cmdline()
        if "serve" in line and port in line:
            (engine,) = [child for child in process.children() if "chatd.engine.process" in child.cmdline()]
            return engine
    raise AssertionError(f"no daemon of ours listens at {url}")


def test_the_readme_example_runs(url: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env={**os.environ, "CHATD_URL": url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_official_client_streams_and_its_history_finds_its_cache(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
    messages = [{"role": "user", "content": "Tell me about the sea. " * 8}]
    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=messages,
        stream=True,
        temperature=0,
        max_tokens=48,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    first = chunks[-1].usage
    assert answer
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=4)
    history = first.prompt_tokens + first.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= 0.95 * history


async def test_a_turn_costs_only_its_new_tokens(url: str) -> None:
    async with Client.connect(url) as client:
        session = await client.create_session()
        usages = []
        for content in (CAPITAL, "And of Italy?", "And of Spain?"):
            async for event in session.say(content, params=GREEDY):
                if isinstance(event, ResponseCompleted):
                    usages.append(event.usage)
    assert len(usages) == 3
    for earlier, later in itertools.pairwise(usages):
        history = earlier.input_tokens + earlier.output_tokens
        # The last token of an answer was drawn and not yet computed.
        assert later.cached_tokens == history - 1


async def test_an_answer_does_not_depend_on_its_batch_mates(url: str) -> None:
    async def ask(client: Client, content: str) -> str:
        session = await client.create_session()
        return "".join([text async for text in session.stream(content, params=GREEDY)])

    async with Client.connect(url) as client:
        alone = await ask(client, CAPITAL)
        crowd = await asyncio.gather(
            *(ask(client, content) for content in [CAPITAL, *[f"Count to {n}." for n in range(7)]])
        )
    assert crowd[0] == alone
    assert "Paris" in alone


async def test_an_answer_goes_on_when_its_engine_is_killed_and_is_what_it_would_have_been(url: str) -> None:
    engine = engine_of(url)
    params = Params(max_tokens=48, temperature=0.8, seed=11, ignore_eos=True)
    async with Client.connect(url) as client:
        session = await client.create_session()
        calm = session.say("Write a story.", params=params)
        async for _ in calm:
            pass
        session = await client.create_session()
        killed, kinds = session.say("Write a story.", params=params), []
        async for event in killed:
            kinds.append(event.__struct_config__.tag)
            if kinds.count("response.output_text.delta") == 10 and engine.is_running():
                engine.send_signal(signal.SIGKILL)
        assert "response.resumed" in kinds
        assert killed.text == calm.text
        assert killed.usage is not None
        assert killed.usage.output_tokens == 48
        wait_until(lambda: (readiness(url) or {}).get("status") == "ready", timeout_s=120)
        again = "".join([text async for text in session.stream("And then?", params=GREEDY)])
        assert again


@pytest.mark.parametrize("params", [Params(temperature=0.0), Params(temperature=1.0, seed=11, top_p=0.9)])
async def test_an_answer_in_pieces_is_that_of_one_run(url: str, params: Params) -> None:
    question = "Tell me about whales in three sentences."
    async with Client.connect(url) as client:
        texts = []
        for pieces in ((40,), (13, 1, 26)):
            session = await client.create_session(params=params)
            turn = session.say(question, params=Params(max_tokens=pieces[0]))
            async for _ in turn:
                pass
            for more in pieces[1:]:
                turn = session.continue_(max_tokens=more)
                async for _ in turn:
                    pass
                assert turn.usage.output_tokens == more
            texts.append(turn.text)
            assert turn.item.content == turn.text
            receipt = await client.erase_session(session.id)
            assert receipt.messages == 1 + len(pieces)
            assert receipt.blocks > 0
        assert texts[0] == texts[1]


async def test_what_is_typed_ahead_is_not_computed_after_enter(url: str) -> None:
    message = "Please name ten rivers of Europe, and say of each in which sea it ends, in a table. " * 3
    async with Client.connect(url) as client:
        session = await client.create_session()
        for end in (60, 120, len(message)):
            while not (await session.prefill(message[:end])).computed:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        turn = session.say(message, params=Params(max_tokens=2))
        async for _ in turn:
            pass
        assert turn.usage.input_tokens - turn.usage.cached_tokens <= 12


async def test_branches_and_forks_of_a_conversation_answer_as_it_does(url: str) -> None:
    async with Client.connect(url) as client:
        session = await client.create_session(params=GREEDY)
        turn = session.say(CAPITAL)
        async for _ in turn:
            pass
        again = session.regenerate()
        async for _ in again:
            pass
        # From the same prompt, of which one token is computed again, the same tokens to the bit.
        assert (again.item.content, again.usage.cached_tokens) == (turn.item.content, turn.usage.input_tokens - 1)
        fork = await client.fork_session(session.id, at=again.item.id)
        shared = fork.created
        assert shared.shared_tokens >= again.usage.input_tokens
        assert shared.shared_blocks == -(-shared.shared_tokens // client.hello.model.block_size)
        async for _ in session.edit(turn.message.id, "Name a color."):
            pass
        await session.select_branch(turn.item.id)
        answers = ["".join([text async for text in one.stream("And of Italy?")]) for one in (fork, session)]
        assert answers[0] == answers[1] != ""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux, a real terminal to drive")
def test_chat_in_a_real_terminal(tmp_path: Path) -> None:
    port = free_port()
    tmux = ["tmux", "-L", f"chatd-{port}"]

    def screen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=False).stdout

    command = f"{sys.executable} -m chatd.cli chat; echo ended with $?; read done"
    environment = {**os.environ, "CHATD_SERVER__PORT": str(port), "XDG_STATE_HOME": str(tmp_path), "LANG": "C.UTF-8"}
    subprocess.run(
        [*tmux, "-u", "-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", command],
        env=environment,
        check=True,
    )
    try:
        wait_until(lambda: "connected" in screen(), timeout_s=120, seen=screen)
        subprocess.run([*tmux, "send-keys", CAPITAL, "Enter"], check=True)
        wait_until(lambda: "The capital of France is Paris" in screen(), seen=screen)
        wait_until(lambda: re.search(r"\d tokens? · ", screen()) is not None, seen=screen)
        subprocess.run([*tmux, "send-keys", "F2"], check=True)
        wait_until(lambda: "The pool" in screen(), seen=screen)
        subprocess.run([*tmux, "send-keys", "C-q"], check=True)
        wait_until(lambda: "ended with 0" in screen(), seen=screen)
        assert readiness(f"http://127.0.0.1:{port}") is None
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)


def test_two_tenants_find_a_public_prompt_at_their_first_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    prompt = "You help the customers of a small shop for bicycles. Be brief, friendly and honest. " * 6
    config, keys_file = tmp_path / "chatd.toml", tmp_path / "keys.json"
    (tmp_path / "shop.txt").write_text(prompt.strip() + "\n")
    config.write_text(f'[public_prompts.shop]\nfile = "{tmp_path / "shop.txt"}"\n')
    keys = [create_key(keys_file, tenant=name, user="u", operator=name == "acme") for name in ("acme", "zeta")]
    address = f"http://127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "chatd.cli", "serve", "--config", str(config), "--keys-file", str(keys_file)]

    def gauge(name: str) -> float:
        headers = {"Authorization": f"Bearer {keys[0]}"}
        text = httpx.get(f"{address}/metrics", headers=headers).text
        return float(re.search(rf"^{name} (.+)$", text, re.M).group(1))

    async def first_turn(key: str, system: str) -> int:
        async with Client.connect(address, key=key) as client:
            session = await client.create_session(system=system, params=Params(temperature=0.0, max_tokens=4))
            turn = session.say("Do you sell tires?")
            async for _ in turn:
                pass
            return turn.usage.cached_tokens

    with (
        (tmp_path / "serve.log").open("w+") as log,
        subprocess.Popen([*command, "--port", port, "--kv-memory", "128MiB"], stdout=log, stderr=log) as daemon,
    ):
        try:
            wait_until(lambda: (readiness(address) or {}).get("status") == "ready", timeout_s=120)
            wait_until(lambda: gauge("chatd_public_prompts_computed") == 1)
            num_tokens = gauge("chatd_public_prompt_tokens")
            assert num_tokens > 64
            assert [asyncio.run(first_turn(key, prompt.strip())) for key in keys] == [num_tokens] * 2
            assert asyncio.run(first_turn(keys[1], "Be rude. " + prompt)) == 0
            log.seek(0)
            assert f"1 public prompt of {num_tokens:.0f} tokens" in log.read()
        finally:
            daemon.terminate()


def test_choices_and_beams_of_a_real_model(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": CAPITAL}]
        options = {"model": model, "messages": messages, "max_tokens": 24}
        drawn = client.chat.completions.create(**options, n=3, temperature=1.5, seed=5)
        alone = client.chat.completions.create(**options, temperature=1.5, seed=7)
        assert len({choice.message.content for choice in drawn.choices}) == 3
        assert drawn.choices[2].message.content == alone.choices[0].message.content
        found = client.chat.completions.create(**options, n=2, extra_body={"use_beam_search": True, "best_of": 4})
        assert len({choice.message.content for choice in found.choices}) == 2
        assert "Paris" in found.choices[0].message.content
        history = [
            {"role": "assistant", "content": found.choices[1].message.content},
            {"role": "user", "content": "And of Spain?"},
        ]
        later = client.chat.completions.create(**(options | {"messages": [*messages, *history]}))
        assert later.usage.prompt_tokens_details.cached_tokens >= found.usage.prompt_tokens - 1
