"""A server whose engine costs nothing: what is left is what HTTP, JSON and the way between the processes cost.

    python -m scripts.serving.stand_in --port 8123 [--step-ms 10] [--kind jpaged | bare]

jpaged: jpaged's server, and in an engine process of its own the stand-in of scripts/bench_link.py, which gives every
request a token each step. bare: the least that an answer of events can cost on starlette and uvicorn, for comparison:
one process, each event made by `json.dumps`, no checks, no engine.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any


async def serve_jpaged(port: int, step_s: float) -> None:
    """Until SIGTERM."""
    from jpaged.async_engine import AsyncEngine
    from jpaged.engine_process import EngineProcess, EngineRecipe
    from jpaged.server import ServerConfig, serve

    recipe = EngineRecipe(maker="scripts.bench_link:StandIn", options={"step_s": step_s})
    async with AsyncEngine(EngineProcess(recipe)) as client:
        config = ServerConfig(models=("stand-in",), port=port, log_level="warning")
        await serve(config, client, None)


async def serve_bare(port: int, step_s: float) -> None:
    """Until SIGTERM."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    step = asyncio.Condition()

    async def events(num_tokens: int) -> AsyncIterator[str]:
        choice = {"index": 0, "text": "text", "logprobs": None, "finish_reason": None, "stop_reason": None}
        for _ in range(num_tokens):
            async with step:
                await step.wait()
            event = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "bare", "choices": [choice]}
            yield f"data: {json.dumps(event)}\n\n"
        usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    async def complete(request: Request) -> Response:
        num_tokens = (await request.json())["max_tokens"]
        return StreamingResponse(events(num_tokens), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "bare", "max_model_len": 1 << 20}]})

    async def beat() -> None:
        while True:
            await asyncio.sleep(step_s)
            async with step:
                step.notify_all()

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="warning", access_log=False))
    beating = asyncio.create_task(beat())
    await server.serve()
    beating.cancel()


def run(work: Coroutine[Any, Any, None]) -> None:
    """As `jpaged serve` does: on uvloop, if it is there."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--kind", choices=("jpaged", "bare"), default="jpaged")
    args = parser.parse_args()
    run((serve_jpaged if args.kind == "jpaged" else serve_bare)(args.port, args.step_ms / 1e3))


if __name__ == "__main__":
    main()
