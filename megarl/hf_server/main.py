"""A small rollout server on a CPU or one GPU: SGLang's routes and JSON over transformers' modelling code.

    MEGARL_SERVER_TOKEN=... python -m megarl.hf_server.main --model-path DIR --port 30000

The process ends when its engine fails, so that its supervisor notices and no request waits without end.
`routes` has the routes, `scheduler` the batching, `model` the model; with --is-embedding all of it is `scoring`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import secrets
import signal
import ssl
import sys

import torch

from megarl.hf_server import device as devices
from megarl.hf_server.model import HFModel
from megarl.hf_server.routes import HFServer, logger
from megarl.hf_server.scoring import ScoreModel, ScoreServer
from megarl.io.callers import allow_all_files
from megarl.io.http_limits import served
from megarl.io.sockets import is_loopback
from megarl.processes.garbage import leave_alone_what_is_here
from megarl.processes.lifetime import die_with_parent
from megarl.rollout.protocol import DTYPES
from megarl.servers.launch import REFUSAL, REFUSED, TOKEN_VARIABLE
from megarl.servers.weight_group import KEY_VARIABLE, groups_key


def main() -> None:
    args = _parse_args()
    if args.die_with_parent is not None:
        die_with_parent(args.die_with_parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    allow_all_files()
    torch.set_num_threads(args.num_threads)
    os.environ[KEY_VARIABLE] = groups_key(os.environ.get(TOKEN_VARIABLE, ""))
    code = asyncio.run(_serve(args))
    logging.shutdown()
    os._exit(code)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megarl.hf_server.main", description="A small rollout server.")
    parser.add_argument("--model-path", required=True, help="a Hugging Face model folder with safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ssl-certfile", help="serve https with this certificate (PEM)")
    parser.add_argument("--ssl-keyfile", help="its private key (PEM)")
    parser.add_argument("--is-embedding", action="store_true", help="a reward model: /classify instead of /generate")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-running-requests", type=int, default=512, help="completions decoded at once")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu, or cuda:N for GPU N")
    parser.add_argument("--max-total-tokens", type=int, help="tokens of the KV cache; default: what 2 GiB hold")
    parser.add_argument("--memory-fraction", type=float, help="share of the GPU for weights and KV cache")
    parser.add_argument("--random-seed", type=int, help="for requests without a sampling_seed; default: a fresh one")
    parser.add_argument("--weight-version", default="0", help="stamp of the weights in the folder")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--group-timeout-s", type=float, default=300.0, help="limit of a weight group's every wait")
    parser.add_argument("--decode-sleep-ms", type=float, default=0.0, help="benchmarks: sleep so long in each step")
    parser.add_argument("--enable-return-routed-experts", action="store_true", help="note the experts of every token")
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent process does")
    args = parser.parse_args()
    if not is_loopback(args.host) and not os.environ.get(TOKEN_VARIABLE):
        parser.error(f"--host {args.host} can be reached from other machines: expected a token in {TOKEN_VARIABLE}")
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        parser.error("--ssl-certfile and --ssl-keyfile: expected both or neither")
    return args


def _tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def _device(text: str) -> torch.device:
    if not re.fullmatch(r"cpu|cuda:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cpu or cuda:N")
    return torch.device(text)


async def _serve(args: argparse.Namespace) -> int:
    """Serve until a signal comes or the engine fails; returns the exit code."""
    devices.use(args.device)
    try:
        server = _score_server(args) if args.is_embedding else _rollout_server(args)
    except ValueError as refusal:
        logger.error("this server cannot start", exc_info=refusal)
        print(f"{REFUSAL}{' '.join(str(refusal).split())}", file=sys.stderr, flush=True)
        return REFUSED
    leave_alone_what_is_here()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT,) if args.die_with_parent is not None else (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.end)
    tls = _tls(args.ssl_certfile, args.ssl_keyfile)
    async with served(server.app, args.host, args.port, tls=tls):
        where = (args.model_path, args.dtype, args.device, "http" if tls is None else "https", args.host, args.port)
        logger.info("serving %s (%s, %s) on %s://%s:%d", *where)
        error = await server.ended
        if error is not None:
            logger.error("the engine failed, so this server ends", exc_info=error)
    return 0 if error is None else 1


def _score_server(args: argparse.Namespace) -> ScoreServer:
    model = ScoreModel(args.model_path, DTYPES[args.dtype], args.device)
    return ScoreServer(model, os.environ.get(TOKEN_VARIABLE, ""))


def _rollout_server(args: argparse.Namespace) -> HFServer:
    routes = args.enable_return_routed_experts
    model = HFModel(args.model_path, DTYPES[args.dtype], args.device, returns_routes=routes)
    server = HFServer(
        model,
        os.environ.get(TOKEN_VARIABLE, ""),
        group_timeout_s=args.group_timeout_s,
        max_running=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        memory_fraction=args.memory_fraction,
        random_seed=secrets.randbits(31) if args.random_seed is None else args.random_seed,
        weight_version=args.weight_version,
    )
    server.engine.decode_sleep_s = args.decode_sleep_ms / 1000
    server.engine.start()
    return server


if __name__ == "__main__":
    main()
