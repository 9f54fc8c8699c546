"""The API that the chat page asks, over texts that are counted out: `python scripted_api.py [KEY]` prints its port.

`/state` says what runs, `/fail` lets a stage be killed. With a key, all but the page's files need it.
"""

import asyncio
import json
import os
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from ttlaunch.serving.page import page_routes

KILLED = "rank 1 (stage, localhost) was killed by SIGKILL in step 12"
SEED = 2**62 + 1  # more than JavaScript's numbers can hold
KEY = sys.argv[1] if len(sys.argv) > 1 else ""
state = {"running": 0, "cancelled": 0, "killed": False}
history = {}


async def config(_):
    about = {
        "model_name": "gpt 2x64",
        "recipe": "data_parallel",
        "step": 30,
        "weights_sha256": "ab" * 32,
        "exact": True,
    }
    return JSONResponse(about | {"max_new_tokens": 64, "temperature": 0.8, "top_p": {"temperature": 0.8, "p": 0.9}})


async def health(_):
    if state["killed"]:
        return JSONResponse({"status": "disconnected", "healthy": False, "reason": KILLED}, 503)
    return JSONResponse({"status": "connected", "healthy": True})


async def fail(_):
    state["killed"] = True
    return JSONResponse({})


async def recall(request):
    return JSONResponse({"messages": history.get(request.query_params["session_id"], [])})


async def clear(request):
    for session in (await request.json())["session_ids"]:
        history.pop(session, None)
    return JSONResponse({})


async def chat(request):
    asked = await request.json()
    if asked["text"] == "refuse me":
        return JSONResponse({"error": "the prompt has 900 tokens, and the context 64"}, 413)
    if asked["text"] == "too many":
        return JSONResponse({"error": {"message": "32 requests wait"}}, 429, {"retry-after": "3"})
    return StreamingResponse(answer(asked), media_type="text/event-stream")


async def answer(asked):
    state["running"] += 1
    said = ""
    try:
        for number in range(asked.get("max_tokens") or 10_000):
            await asyncio.sleep(0.005)
            if state["killed"]:
                yield event(error=KILLED, done=True)
                return
            token = f"{asked['text'][:1]}{number} "
            said += token
            yield ": a comment\n\n" + event(token=token, done=False)
        kept = history.setdefault(asked["session_id"], [])
        kept += [{"role": "user", "content": asked["text"]}, {"role": "assistant", "content": said}]
        facts = {"num_tokens": number + 1, "tokens_per_second": 12.5, "seed": SEED, "finish_reason": "length"}
        yield event(
            done=True, full_text=said, tokens_sha256="0123456789abcdef", receipt=f'{{"seed": {SEED}}}\n', **facts
        )
    except (asyncio.CancelledError, GeneratorExit):
        state["cancelled"] += 1
        raise
    finally:
        state["running"] -= 1


def event(**values):
    return f"data: {json.dumps(values)}\n\n"


async def show_state(_):
    return JSONResponse(state)


def needing_key(route):
    if not KEY:
        return route

    async def guarded(request):
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "a key is needed"}, 401)
        return await route.endpoint(request)

    return Route(route.path, guarded, methods=route.methods)


API = [Route(path, asked) for path, asked in {"/config": config, "/health": health, "/memory/history": recall}.items()]
API += [Route("/chat", chat, methods=["POST"]), Route("/memory/clear", clear, methods=["POST"])]
APP = Starlette(
    routes=[*page_routes(), *map(needing_key, API), Route("/state", show_state), Route("/fail", fail, methods=["POST"])]
)


class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        os.write(1, f"{self.servers[0].sockets[0].getsockname()[1]}\n".encode())


if __name__ == "__main__":
    Server(uvicorn.Config(APP, port=0, log_level="warning")).run()
