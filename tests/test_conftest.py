"""How tests are spread over the processes of pytest-xdist."""

from types import SimpleNamespace

import pytest

from tests.conftest import TwoRaysAtATime

TESTS = [f"tests/test_{file:02}.py::test_{number}" for file in range(90) for number in range(3)]
CONFIG = SimpleNamespace(
    getvalue=lambda name: {"tx": ["4*popen"]}[name],
    option=SimpleNamespace(loadscopereorder=False),
)


class Process:
    """Stands for a process of pytest-xdist. It keeps its last test until it has another one, or is
    told that there is none."""

    def __init__(self):
        self.tests, self.shutting_down = [], False
        self.gateway = SimpleNamespace(id="gw")  # its name in messages

    def send_runtest_some(self, tests):
        self.tests += tests

    def shutdown(self):
        self.shutting_down = True

    def next_test(self):
        """The number of the test that it runs now, or None."""
        return self.tests.pop(0) if self.tests[not self.shutting_down :] else None


def add_process(scheduler):
    process = Process()
    scheduler.add_node(process)
    scheduler.add_node_collection(process, TESTS)


def finished_tests(scheduler, crash_at):
    """Runs the tests as pytest-xdist does. The process of one test crashes there the first time,
    and another takes its place. Returns the tests that finish until no process has one to run."""
    finished, crashed = set(), False
    for _ in range(4):
        add_process(scheduler)
    scheduler.schedule()
    running = True
    while running:
        running = False
        for process in scheduler.nodes:
            number = process.next_test()
            if number is None:
                continue
            running = True
            if TESTS[number] == crash_at and not crashed:
                crashed = True
                scheduler.remove_node(process)
                add_process(scheduler)
                scheduler.schedule()
            else:
                finished.add(TESTS[number])
                scheduler.mark_test_complete(process, number)
            if scheduler.tests_finished:
                for one in scheduler.nodes:
                    one.shutdown()
    return finished


@pytest.mark.parametrize("crash_at", [None, TESTS[0], TESTS[100], TESTS[240], TESTS[-1]])
def test_all_tests_finish_although_a_process_crashes(crash_at):
    assert finished_tests(TwoRaysAtATime(CONFIG), crash_at) == set(TESTS)
