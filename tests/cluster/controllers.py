"""Controllers without workers."""

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.telemetry.journal import Journal


class NotedWorkers:
    """A worker group that notes what it is told."""

    def __init__(self):
        self.told = []

    @property
    def started(self):
        return [words[6:] for words in self.told if words.startswith("start ")]

    def start(self, worker):
        self.told.append(f"start {worker}")

    def send(self, workers, command):
        self.told.append(type(command).__name__)

    def kill(self, worker):
        self.told.append(f"kill {worker}")

    def close(self):
        self.told.append("close")


def controller_of(spec, journal=None, **options):
    """A controller that hears no heartbeats."""
    journal = journal or Journal(None)
    made = Controller(spec, journal, host="127.0.0.1", secret=b"secret", **options)
    made._worker_group = NotedWorkers()
    made.heartbeats.close()
    return made
