"""A stand-in for vLLM's server: the HTTP paths that the demo uses, and ways to fail.

    fake_server.py PORT MODE PIDS_FILE

Modes, separated by commas:
    kvpp            answers kvpp_report and the sabotage calls, and has a larger cache
    forgetful       answers some questions wrong
    immune          sabotage changes no answer
    dies            ends while it starts, and leaves a child behind
    never-ready     runs, but never opens its port
    stubborn        ignores SIGTERM, as its children do
    tidy            takes a moment to end on SIGTERM, and ends with 0 if its children still run then
    breaks          ends when it is asked
The pids of the server and its children go to PIDS_FILE, one a line; one child is in a session of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vllm_kvpp.demo.questions import make_batches

LAYERS = 8
QUESTIONS = {question.prompt: question for batch in make_batches(48) for question in batch}

port, modes, pids_file = int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3])
children = []
state = {"is_broken": False, "steps": 0, "bytes": 0}


def start_child(**options):
    # What is ignored stays ignored behind exec.
    ignore = "trap '' TERM;" if "stubborn" in modes else ""
    child = subprocess.Popen(["sh", "-c", f"{ignore} echo up; exec sleep 120"], stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    return child


def answer(prompt, num_words):
    state["steps"] += 1
    state["bytes"] += 0 if state["is_broken"] else 1000
    right = QUESTIONS[prompt].continuation(num_words).split()
    spoils = (state["is_broken"] and "immune" not in modes) or "forgetful" in modes
    return [right[0], *("oslo" for _ in right[1:])] if spoils else right


def call(method):
    if method == "demo_cache_bytes":
        return {"num_bytes": 60 * 1024**2}
    if method == "kvpp_report":
        counters = {
            "steps": state["steps"] + 1,
            "steps_with_history": state["steps"],
            "steps_with_transfers": state["steps"],
            "transfers": state["steps"] * LAYERS,
            "transferred_bytes": state["bytes"],
            "steps_at_owner": 0,
            "exchanges": 0,
            "query_bytes": 0,
            "output_bytes": 0,
            "steps_in_place": 0,
        }
        return {"num_target_layers": LAYERS, "num_blocks": num_blocks(), "counters": counters}
    state["is_broken"] = method == "demo_break_transfers"
    return {"transport": "NoTransport" if state["is_broken"] else "HostBroadcast"}


def num_blocks():
    return int(os.environ["FAKE_BLOCKS_ON" if "kvpp" in modes else "FAKE_BLOCKS_OFF"])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            labels = f'_block_size_resolved="True",block_size="16",num_gpu_blocks="{num_blocks()}",user="x"'
            self.reply(f"vllm:cache_config_info{{{labels}}} 1.0\n")
        else:
            self.reply(json.dumps({"data": [{"id": "recall"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            report = call(body["method"])
            self.reply(json.dumps({"results": [{**report, "group_rank": rank} for rank in range(2)]}))
            return
        if "breaks" in modes:
            print("ValueError: broken on purpose", flush=True)
            os._exit(3)
        words = answer(body["prompt"], body["max_tokens"])
        choice = {
            "text": " ".join(words),
            "token_ids": [len(word) for word in words],
            "logprobs": {"token_logprobs": [-0.5 for _ in words]},
        }
        self.reply(json.dumps({"choices": [choice]}))

    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


def end_tidily(*_):
    time.sleep(0.5)
    os._exit(0 if all(child.poll() is None for child in children) else 9)


def main():
    if "stubborn" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "tidy" in modes:
        signal.signal(signal.SIGTERM, end_tidily)
    children.extend((start_child(), start_child(start_new_session=True)))
    if "dies" in modes:
        # Nobody had the time to see the one that leaves the session.
        children.pop().kill()
    pids_file.write_text("\n".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
    print("INFO non-default args: {}", flush=True)
    if "dies" in modes:
        print("RuntimeError: no luck today", flush=True)
        sys.exit(7)
    if "never-ready" in modes:
        time.sleep(120)
    print("INFO Starting vLLM server on http://127.0.0.1", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()
