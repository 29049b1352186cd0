"""A model by its name: a directory, or an id of the hub, of which this has a small one."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers_checkpoints import write_shards

from checkpoints.safetensors_reader import INDEX
from inkling_jax.errors import InputError
from inkling_jax.hub import resolve


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("published"))


def test_names_of_models(tmp_path):
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "file").write_text("x")
    for name, revision, reason in (
        (tmp_path / "file", None, "is a file"),
        (tmp_path, "main", "is a directory here, it has no revision 'main'"),
        (tmp_path / "absent", None, "is neither a directory nor a hub id"),
        ("../org/name", None, "is neither"),
        (5, None, "the model is 5, it must be"),
        ("", None, "the model is '', it must be"),
        ("a" * 5000, None, "is neither"),
        ("a\0b", None, "is neither"),
    ):
        with pytest.raises(InputError, match=reason):
            resolve(name, revision)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: files of `site`; it notes which it gave."""

    site: Path
    given: list[str]

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, body):
        path, known = self.path.split("?")[0], "/org/tiny"
        files = sorted(file.name for file in self.site.iterdir())
        if path.startswith(f"/api/models{known}/") and "/v2" not in path:
            kind = path.removeprefix(f"/api/models{known}/").split("/")[0]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
            tree = [
                {"type": "file", "path": f, "size": (self.site / f).stat().st_size, "oid": f}
                for f in files
            ]
            self.reply(200, json.dumps(info if kind == "revision" else tree).encode(), body)
        elif path.startswith(f"{known}/resolve/{COMMIT}/"):
            name = path.rsplit("/", 1)[1]
            if body:
                self.given.append(name)
            self.reply(200, (self.site / name).read_bytes(), body, etag=name)
        else:
            code = "RevisionNotFound" if "v2" in path else "RepoNotFound"
            self.reply(404, b"{}", body, error=code)

    def reply(self, status, data, body, etag=None, error=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(source, tmp_path):
    """Address of a hub that has `org/tiny` but no revision v2, and the names of files it gave."""
    site = tmp_path / "site"
    shutil.copytree(source, site)
    (site / "stray.safetensors").write_bytes(b"not listed")
    (site / "pytorch_model.bin").write_bytes(b"pickle")
    given: list[str] = []
    handler = type("Handler", (Hub,), {"given": given, "site": site})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", given
    server.shutdown()
    server.server_close()
    thread.join()


# The hub's library reads its settings when it is imported.
RESOLVE = """
import sys
from inkling_jax.errors import InputError
from inkling_jax.hub import resolve
for name, revision in (("org/tiny", "v1"), ("org/tiny", "v2"), ("org/none", None)):
    try:
        print(resolve(name, revision))
    except InputError as e:
        print(e)
"""


def test_a_hub_id_fetches_the_needed_files_only(source, hub, tmp_path):
    address, given = hub
    environment = {
        **os.environ,
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    for again in (False, True):
        run = subprocess.run(
            [sys.executable, "-c", RESOLVE], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        directory, no_revision, no_model = run.stdout.splitlines()
        shards = set(json.loads((source / INDEX).read_text())["weight_map"].values())
        needed = {"config.json", "tokenizer.json", INDEX, *shards}
        assert sorted(given) == ([] if again else sorted(needed))
        given.clear()
    for name in needed:
        assert (Path(directory) / name).read_bytes() == (source / name).read_bytes()
    fault = "org/{}: is no directory here, and cannot be fetched from the hub{}"
    assert no_revision.startswith(fault.format("tiny", " at revision v2 ("))
    assert no_model.startswith(fault.format("none", " ("))
