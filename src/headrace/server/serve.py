"""Starts everything: the engine process first, then what HTTP needs while that one loads.

`serve()` is the whole life of a server and returns its exit status. Knows the order of things.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from headrace.assemble import read_chat_template, read_tokenizer
from headrace.core.config import EngineConfig
from headrace.core.server_config import ServerConfig
from headrace.server import wire
from headrace.server.app import App
from headrace.server.logs import set_up_logging
from headrace.server.routes import all_routes
from headrace.server.service import ServedModel, Service
from headrace.server.supervisor import Supervisor
from headrace.server.watching import watch
from headrace.weights.describe import describe_file
from headrace.weights.load import open_weights

log = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(path: Path, name: str, config: ServerConfig, engine: EngineConfig, backend: str) -> int:
    set_up_logging(config.log_level, config.log_format, show_content=config.log_content)
    return asyncio.run(_Serving(path, name, config, engine, backend).run())


class _Serving:
    def __init__(
        self, path: Path, name: str, config: ServerConfig, engine: EngineConfig, backend: str
    ) -> None:
        self._began = time.perf_counter()
        self._path = path
        self._name = name
        self._config = config
        self._engine = engine
        self._signals = 0
        self._supervisor = Supervisor(
            wire.Configure(
                model_path=str(path),
                backend=backend,
                engine=engine,
                log_level=config.log_level,
                log_format=config.log_format,
                max_grammar_bytes=config.max_schema_bytes,
            ),
            hang_timeout_s=config.hang_timeout_s,
            max_restarts=config.max_restarts,
            on_phase=lambda phase: print(f"  {phase.name} {phase.seconds:.2f} s"),
            on_ready=lambda ready, seconds: print(f"ready after {seconds:.2f} s"),
        )

    async def run(self) -> int:
        watching = asyncio.create_task(self._supervisor.run())
        await asyncio.sleep(0)
        service = Service(
            config=self._config,
            engine_config=self._engine,
            model=await asyncio.to_thread(self._read_model),
            supervisor=self._supervisor,
        )
        watching_ended = watch(service)
        server = _HttpServer(
            uvicorn.Config(
                App(service, all_routes()),
                host=self._config.host,
                port=self._config.port,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, server, service)
        serving = asyncio.create_task(server.serve())
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        watching_ended()
        return 0

    def _read_model(self) -> ServedModel:
        file = open_weights(self._path)
        try:
            spec, _ = describe_file(file, self._engine.context_tokens)
            tokenizer = read_tokenizer(file)
        finally:
            file.close()
        return ServedModel(
            name=self._config.served_model_name or self._name,
            tokenizer=tokenizer,
            template=read_chat_template(tokenizer),
            vocab_size=spec.vocab_size,
        )

    def _stop(self, server: uvicorn.Server, service: Service) -> None:
        self._signals += 1
        service.draining = True
        server.should_exit = True
