"""A served run in this process, and what asks it."""

import contextlib
import http.client
import json
import threading

from elastic_dp.ui.server import ServedRun, listening_socket, web_server
from elastic_dp.urls import StorageURL
from tests.patience import eventually

TOKEN = "a-token-that-nobody-guesses"


class Recorded:
    """A run that notes what it is asked for. `error` is raised instead, if it is set."""

    def __init__(self):
        self.asked, self.error = [], None

    def live(self):
        if self.error is not None:
            raise self.error
        return self

    def scale(self, size=None):
        self.asked.append(("scale", size))

    def drain(self, worker):
        self.asked.append(("drain", worker))

    def checkpoint(self):
        self.asked.append(("checkpoint",))

    def stop(self, reason="asked"):
        self.asked.append(("stop", reason))


class Served:
    def __init__(self, port, token=TOKEN):
        self.port, self.token = port, token

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method, path, body=None, **headers):
        """(status, headers, content). `path` and `headers` are sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if isinstance(body, dict):
            sent = {"Content-Type": "application/json", **sent}
        with contextlib.closing(connection):
            connection.request(method, path, content, sent)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def read(self, path, **headers):
        return self.ask("GET", path, **{"Authorization": f"Bearer {self.token}"} | headers)

    def json(self, path, **headers):
        status, _, content = self.read(path, **headers)
        assert status == 200, content
        return json.loads(content)

    def post(self, path, body, **headers):
        headers = {"Authorization": f"Bearer {TOKEN}", **headers}
        status, _, content = self.ask("POST", path, body, **headers)
        return status, json.loads(content)


@contextlib.contextmanager
def served(run, *, token=TOKEN, find_live=None, options=None):
    """`run`: the URL of its folder."""
    shown = ServedRun(str(run).rpartition("/")[2], StorageURL(str(run), options), find_live)
    server = web_server(shown, token)
    with listening_socket(0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        eventually(lambda: server.started)
        yield Served(listening.getsockname()[1])
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
