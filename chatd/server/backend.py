"""What serves behind the doors: finds the model, starts the engine, and puts sessions between the two. No torch.

Loading runs while the doors are open already and say how far it is. The tokenizer and the template are loaded while the
engine's process starts, since either takes a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar, cast

from chatd.config import Settings, disk_tier_directory, journal_directory, local_url, parse_bytes
from chatd.engine.client import EngineClient
from chatd.engine.messages import Ready
from chatd.engine.options import EngineOptions, TenantShare
from chatd.errors import ConfigError, EnvironmentProblem, StartupError
from chatd.journal.journal import Journal
from chatd.server.daemon import Daemon
from chatd.server.logging import get_logger
from chatd.sessions.limits import SessionLimits
from chatd.sessions.manager import PublicPrompt, SessionManager
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.prompt_encoder import PromptEncoder
from chatd.sessions.stored_blocks import remove_stored_blocks
from chatd.sessions.template import ChatTemplate
from chatd.sessions.tokenizer import ChatTokenizer, load_tokenizer

MEMORY_KILLS_EVERY_S = 5.0
"""How often the journal looks whether the kernel has killed anybody for want of memory."""

T = TypeVar("T")
Progress = Callable[[str, float], None]
logger = get_logger("chatd.server")


class ModelFiles(Protocol):
    """A checked model on this machine; see `models.registry.ModelFiles`."""

    @property
    def id(self) -> str:
        """The name that clients use."""
        ...

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def digest(self) -> str:
        """Of weights and config."""
        ...


Resolve = Callable[[str, Progress], ModelFiles]


def resolve_model(name: str, progress: Progress) -> ModelFiles:
    """Return a model's files, fetched and converted if need be.

    Raises:
        ModelError: It cannot be had.
    """
    # Here and not above: a daemon whose model is given by a test never needs the registry.
    from chatd.models.registry import resolve

    return resolve(name, progress=progress)


class Backend:
    """The model, the engine and the sessions of one daemon.

    Args:
        daemon: Told of progress, and opened when all is there.
        settings: All of them.
        resolve: Finds the model; blocks, so it runs in a thread.
        make_engine: Makes the engine's front side.
    """

    def __init__(
        self,
        daemon: Daemon,
        settings: Settings,
        *,
        resolve: Resolve = resolve_model,
        make_engine: Callable[[EngineOptions], EngineClient] = EngineClient,
    ) -> None:
        self._daemon = daemon
        self._settings = settings
        self._resolve = resolve
        self._make_engine = make_engine
        self._engine: EngineClient | None = None
        self._journal: Journal | None = None
        self._manager: SessionManager | None = None
        self._running: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None

    async def load(self) -> Ready:
        """Bring everything up and open the daemon.

        Raises:
            StartupError: What is wrong with the model, the machine or the settings.
        """
        daemon, settings = self._daemon, self._settings
        options_of = engine_options(settings)
        prompts = await asyncio.to_thread(public_prompts, settings)
        if settings.journal.enabled:
            # Before anything large: another daemon may have it.
            daemon.report("opening the journal", 0.0)
            self._journal = await open_journal(settings, time.time(), notes_crashes=daemon.owns_process)
            daemon.usage = self._journal.usage
            self._journal.announce(local_url(daemon.url))
        files = await _in_daemon_thread(lambda: self._resolve(settings.model.name, daemon.report))
        engine = self._engine = self._make_engine(options_of(files))
        daemon.report("starting the engine", 0.0)
        starting = asyncio.create_task(engine.start(self._on_progress), name="engine start")
        try:
            tokenizer, encoder = await asyncio.to_thread(load_encoder, files.path, settings)
            vocabulary = await asyncio.to_thread(vocabulary_digest, files.path, encoder)
            ready = await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        profile = ModelProfile.from_folder(
            files.path,
            model_id=files.id,
            context=ready.max_model_len,
            vocab_size=ready.vocab_size,
            stop_token_ids=encoder.stop_token_ids,
            max_tokens=settings.sessions.max_tokens,
            vocabulary=vocabulary,
        )
        manager = self._manager = SessionManager(
            engine,
            encoder,
            profile,
            session_limits(settings),
            vocabulary=tokenizer,
            boot=daemon.boot,
            journal=self._journal,
        )
        self._running = asyncio.create_task(manager.run(), name="sessions")
        shared = await manager.share_prompts(prompts)
        if self._journal is not None:
            daemon.report("reading the journal", 0.0)
            restored = await manager.restore()
            daemon.take_up(restored)
            self._noting = asyncio.create_task(_note_memory_kills(self._journal), name="kills for want of memory")
        daemon.open(manager, engine)
        for line in (*describe(ready, encoder), *shared):
            logger.info("engine.note", note=line)
        return ready

    def _on_progress(self, phase: str, progress: float) -> None:
        self._daemon.report(phase, progress)

    async def close(self) -> None:
        """End the sessions and the engine's process; what is in progress goes on from the journal the next time."""
        if self._engine is not None:
            await self._engine.close()
        tasks = [task for task in (self._running, self._noting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._manager is not None:
            await self._manager.settle()
        if self._journal is not None:
            await self._journal.close()


async def _note_memory_kills(journal: Journal) -> None:
    while True:
        await asyncio.sleep(MEMORY_KILLS_EVERY_S)
        await asyncio.to_thread(journal.note_memory_kills)


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run what may take minutes in a thread that no exit of the process waits for, as it would for `to_thread`."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="model", daemon=True).start()
    return await future


def retention_of(settings: Settings) -> tuple[dict[str, float], float | None]:
    """Return for how many days sessions are kept, by tenant and of the others; None is for ever."""
    named = {name: tenant.retention_days for name, tenant in settings.tenants.items()}
    return {name: days for name, days in named.items() if days is not None}, settings.journal.retention_days


async def open_journal(settings: Settings, now: float, *, notes_crashes: bool = False) -> Journal:
    """Return the journal, without the sessions that are kept no longer.

    Raises:
        ConfigError: Another process has it, or the directory cannot be used.
        StorageError: It cannot be written.
    """
    journal = await asyncio.to_thread(Journal.open, journal_directory(settings), notes_crashes=notes_crashes)
    if journal.crash:
        logger.error("server.crashed_before", fault=journal.crash)
    days, default_days = retention_of(settings)
    try:
        expired = []
        if days or default_days is not None:
            names = await journal.expired(now, days, default_days)
            try:
                # No engine has the disk tier yet; the one that comes finds blocks of what sessions have only.
                await remove_stored_blocks(journal, disk_tier_directory(settings), names)
            except EnvironmentProblem as error:
                # Another daemon's, where this one has none; where it has one, its engine says so and does not start.
                logger.warning("journal.blocks_left", why=error.message)
            expired = await journal.expire(now, days, default_days)
    except BaseException:
        await journal.close()
        raise
    if expired:
        logger.info("journal.expired", sessions=len(expired))
    return journal


def vocabulary_digest(folder: Path, encoder: PromptEncoder) -> str:
    """Return what tells whether ids that were kept still mean what they meant; reads files."""
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes())
    digest.update(b"\0" + encoder.template.source.encode(errors="surrogatepass"))
    return digest.hexdigest()


def load_encoder(folder: Path, settings: Settings) -> tuple[ChatTokenizer, PromptEncoder]:
    """Return what makes ids of conversations and text of ids. Takes a second for a large vocabulary: use a thread.

    Raises:
        ModelError: The model cannot chat, or its files are refused.
    """
    tokenizer = load_tokenizer(folder)
    # What is longer than the context allows is refused before, once the engine has said what that is.
    max_bytes = session_limits(settings).max_history_bytes
    template = ChatTemplate.load(folder, tokenizer)
    return tokenizer, PromptEncoder(template, tokenizer, max_bytes=max_bytes, thoughts=settings.model.thoughts)


def engine_options(settings: Settings) -> Callable[[ModelFiles], EngineOptions]:
    """Return what makes the engine's options once the model is known; settings that are wrong are refused now.

    Raises:
        ConfigError: A setting that is a size is none.
    """
    model, engine = settings.model, settings.engine
    kv_memory = engine.kv_memory.strip()
    kv_bytes = None if kv_memory.lower() == "auto" else parse_bytes(kv_memory, param="engine.kv_memory")
    host_bytes = parse_bytes(engine.host_memory, param="engine.host_memory")
    disk_bytes = parse_bytes(engine.disk_space, param="engine.disk_space")
    log_limit_bytes = parse_bytes(engine.decision_log_limit, param="engine.decision_log_limit")
    tenants: Mapping[str, TenantShare] = {
        name: TenantShare(weight=share.weight, floor=share.floor) for name, share in settings.tenants.items()
    }

    def options(files: ModelFiles) -> EngineOptions:
        return EngineOptions(
            model_id=files.id,
            model_path=str(files.path),
            model_digest=files.digest,
            quantization=model.quantization,
            dtype=model.dtype,
            kv_dtype=model.kv_dtype,
            device=engine.device,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            enforce_eager=engine.enforce_eager,
            deterministic=engine.deterministic,
            max_model_len=model.max_model_len,
            block_size=engine.block_size,
            kv_memory_bytes=kv_bytes,
            host_memory_bytes=host_bytes,
            disk_space_bytes=disk_bytes,
            disk_directory=str(disk_tier_directory(settings)),
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_queued_requests=engine.max_queued_requests,
            num_threads=engine.threads,
            tenants=dict(tenants),
            log_level=settings.log.level,
            decision_log=None if engine.decision_log is None else str(engine.decision_log.absolute()),
            decision_log_limit_bytes=log_limit_bytes,
        )

    return options


def public_prompts(settings: Settings) -> list[PublicPrompt]:
    """Read the system prompts that all tenants share; opens files.

    Raises:
        ConfigError: A file cannot be read, or a prompt is too large or empty.
    """
    prompts = []
    limit = settings.sessions.max_content_bytes
    for name, prompt in settings.public_prompts.items():
        param = f"public_prompts.{name}"
        text = prompt.text or ""
        if prompt.file is not None:
            try:
                with prompt.file.expanduser().open("rb") as file:
                    data = file.read(limit + 3)
                text = data.decode() if len(data) < limit + 3 else ""
            except OSError as error:
                raise ConfigError(f"{prompt.file} cannot be read: {error.strerror}", param=param) from None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{prompt.file} is not UTF-8: {error}", param=param) from None
            text = text.removesuffix("\n").removesuffix("\r")
            if not data.strip():
                raise ConfigError(f"{prompt.file} is empty, and a public prompt has a text", param=param)
        if not text or len(text.encode()) > limit:
            raise ConfigError(f"{param} is above {limit} bytes (sessions.max_content_bytes)", param=param)
        prompts.append(PublicPrompt(name, text))
    return prompts


def session_limits(settings: Settings) -> SessionLimits:
    """Return the bounds of sessions."""
    sessions = settings.sessions
    retention_days_of, retention_days = retention_of(settings)
    return SessionLimits(
        max_sessions_per_user=sessions.max_sessions_per_user,
        max_kept_sessions_per_user=sessions.max_kept_sessions_per_user,
        max_kept_bytes_per_user=sessions.max_kept_bytes_per_user,
        max_content_bytes=sessions.max_content_bytes,
        max_history_bytes=settings.server.max_body_bytes,
        max_text_bytes_per_user=sessions.max_text_bytes_per_user,
        max_turns_per_user=settings.quotas.max_inflight,
        replay_events=sessions.replay_events,
        replay_bytes=sessions.replay_bytes,
        replay_ttl_s=sessions.replay_ttl_s,
        max_known_messages=sessions.max_known_messages,
        context_policy=sessions.context_policy,
        idle_release_s=sessions.idle_release_s,
        idle_archive_days=sessions.idle_archive_days,
        retention_days=retention_days,
        retention_days_of=retention_days_of,
    )


def describe(ready: Ready, encoder: PromptEncoder) -> list[str]:
    """Return what a person at the terminal wants to know of the engine that runs."""
    return [
        *ready.notes,
        f"weights in {ready.quantization}, {ready.kv_bytes / 2**20:.0f} MiB of KV cache",
        f"chat template: {encoder.template.kind}",
    ]


def startup_reason(error: BaseException) -> str:
    """Return an error of loading in one line, for `/ready`."""
    return error.message if isinstance(error, StartupError) else f"{type(error).__name__}: {error}"
