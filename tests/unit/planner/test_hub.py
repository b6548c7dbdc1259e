"""Models of a hub, from a server of this test that answers as one does. Every case is a process of its own, since
huggingface_hub reads its settings when it is imported."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_kvpp.planner import hub
from vllm_kvpp.planner.hub import is_hub_id

COMMAND = "import sys; from vllm_kvpp.cli import app; app()"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# What the command may take at most, with the start of its process.
LIMIT_SECONDS = 10


class Hub(ThreadingHTTPServer):
    """`owner/here` has a configuration; other names are faults. `asked` lists the files that were asked for."""

    daemon_threads = True
    content = b""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.asked = []
        self.is_over = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer(has_body=False)

    def do_GET(self):
        self._answer(has_body=True)

    def _answer(self, *, has_body):
        _, owner, name, *rest = self.path.split("/")
        if owner != "owner":
            # huggingface_hub asks for other things, too.
            self._refuse(404, "")
            return
        self.server.asked.append("/".join((name, *rest)))
        if name == "silent":
            self.server.is_over.wait()
        elif name == "here" or (name == "trickling" and not has_body):
            self._send(has_body)
        elif name == "trickling":
            self._trickle()
        else:
            self._refuse(*FAULTS[name])

    def _refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_head(self):
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        # huggingface_hub writes it to stderr.
        self.send_header("X-HF-Warning", "topic; ask less often")
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()

    def _send(self, has_body):
        self._send_head()
        if has_body:
            self.wfile.write(self.server.content)

    def _trickle(self):
        self._send_head()
        while not self.server.is_over.wait(0.2):
            self.wfile.write(b" ")


FAULTS = {
    "gated": (401, "GatedRepo"),
    "missing": (401, "RepoNotFound"),
    "empty": (404, "EntryNotFound"),
    "broken": (503, ""),
}


@pytest.fixture
def server(config):
    server = Hub()
    server.content = json.dumps(config(num_hidden_layers=12)).encode()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.is_over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(tmp_path):
    """Run `vllm-kvpp plan` on a name; what it printed and how long it took."""

    def run(name, endpoint, *, command=COMMAND, **settings):
        kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
        kept = {name: value for name, value in kept.items() if not name.startswith("HF_")}
        places = {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint}
        started = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-c", command, "plan", name, "--tp", "2", "--kv-memory", "4GiB", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**kept, **places, **settings},
        )
        return result, time.monotonic() - started

    return run


def _assert_refused(result, *expected):
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for part in (*expected, "give a path, or one of: deepseek-ai/DeepSeek-R1"):
        assert part in result.stderr


def test_a_model_of_a_hub_is_planned_from_its_configuration_and_says_where_it_is_from(server, ask):
    result, _ = ask("owner/here", server.url)
    document = json.loads(result.stdout)

    assert (result.returncode, result.stderr) == (0, "")
    assert document["model"]["num_layers"] == 12
    assert f"config.json of owner/here is from {server.url}." in document["notes"]


def test_nothing_but_the_configuration_is_fetched(server, ask):
    ask("owner/here", server.url)

    assert set(server.asked) == {"here/resolve/main/config.json"}


def test_asking_a_hub_loads_neither_torch_nor_vllm(server, ask):
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_kvpp.cli import app; "
        "result = CliRunner().invoke(app, sys.argv[1:]); "
        "print(result.exit_code, [name for name in ('huggingface_hub', 'torch', 'vllm') if name in sys.modules])"
    )
    result, _ = ask("owner/here", server.url, command=code)

    assert result.stdout.strip() == "0 ['huggingface_hub']"


def test_no_hub_is_asked_for_a_model_of_the_catalogue(server, ask):
    result, _ = ask("deepseek-ai/DeepSeek-V3", server.url)

    assert result.returncode == 0
    assert server.asked == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gated", "accounts that accepted its terms; set HF_TOKEN"),
        ("missing", "has no such model, or only for its owner"),
        ("empty", "has the model, but no config.json"),
        ("broken", "answered with status 503"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_that_says_what_was_asked_and_what_to_do(name, expected, server, ask):
    result, seconds = ask(f"owner/{name}", server.url)

    _assert_refused(result, f"'owner/{name}'", server.url, expected)
    assert seconds < LIMIT_SECONDS


def test_a_hub_that_nobody_answers_for_is_one_line(ask):
    result, seconds = ask("owner/here", "http://127.0.0.1:9")

    _assert_refused(result, "http://127.0.0.1:9 cannot be reached")
    assert seconds < LIMIT_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("silent", "cannot be reached (ReadTimeout"), ("trickling", "within 7 s")]
)
def test_a_hub_that_does_not_get_on_is_given_up_within_ten_seconds(name, expected, server, ask):
    result, seconds = ask(f"owner/{name}", server.url)

    _assert_refused(result, expected)
    assert seconds < LIMIT_SECONDS


def test_offline_no_hub_is_asked(server, ask):
    result, _ = ask("owner/here", server.url, HF_HUB_OFFLINE="1")

    _assert_refused(result, "HF_HUB_OFFLINE is set")
    assert server.asked == []


@pytest.mark.parametrize("settings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_copy_in_the_cache_will_do_and_is_named_as_one(settings, server, ask):
    ask("owner/here", server.url)
    result, _ = ask("owner/here", settings.get("HF_ENDPOINT", server.url), **settings)
    document = json.loads(result.stdout)

    assert document["model"]["num_layers"] == 12
    assert "config.json of owner/here is the copy in the cache, as " in document["notes"][0]


def test_without_huggingface_hub_the_line_says_what_to_install(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = run("owner/here", "--kv-memory", "1GiB")

    assert result.exit_code == 2
    assert "pip install huggingface-hub" in result.stderr


@pytest.mark.parametrize(
    "name", ["here", "/owner/here", "./owner/here", "owner/here/there", "folder/config.json", "owner/", ""]
)
def test_a_name_without_the_form_of_a_hub_id_asks_no_hub(name, monkeypatch, run):
    monkeypatch.setattr(hub, "_Fetch", lambda name: pytest.fail("asked"))
    result = run(name, "--kv-memory", "1GiB")

    assert not is_hub_id(name)
    assert result.exit_code == 2
    assert "As a hub id" not in result.stderr
