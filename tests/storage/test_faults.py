"""Stores that fail: what is read stays exact, is counted, and a store that is away is waited for.

Nothing here counts on a server being quick: whoever must be retried is given somebody to tell
instead of an end of its patience, and where time decides, it is the test's own clock.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store, retry
from elastic_dp.storage.retry import Retry
from tests.patience import PATIENCE_S
from tests.storage.proxy import FAULTS, FaultProxy
from tests.storage.servers import answering_server, http_server, s3_options

OLD = b"-" * 100_000
NEW = random.Random(7).randbytes(len(OLD))


def patient(message):
    """Somebody to tell: no call ends before it has succeeded."""


def s3(endpoint, url, *, timeout_s=30.0, on_wait=patient, **options):
    return Store(url, {**s3_options(endpoint), **options}, timeout_s=timeout_s, on_wait=on_wait)


def spans(number):
    chance = random.Random(0)
    return [sorted(chance.sample(range(len(NEW)), 2)) for _ in range(number)]


def read_exactly(store, path, number, threads, version=""):
    def read(span):
        return bytes(store.read(path, *span, version)) == NEW[slice(*span)]

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(read, spans(number)))


def test_reads_with_5_percent_of_each_fault_are_exact(bucket):
    endpoint, name = bucket
    with FaultProxy(endpoint, dict.fromkeys(FAULTS, 0.05), seed=3) as proxy:
        store = s3(proxy.url, f"s3://{name}", timeout_s=8.0)
        store.write("shard", OLD)
        store.write("shard", NEW)
        version = s3(endpoint, f"s3://{name}").find("shard")[0].version
        before = store.counts.retries
        read_exactly(store, "shard", 300, 16, version)
        assert set(proxy.faults) == set(FAULTS)
        counts = store.counts
        assert counts.bytes_read == sum(end - start for start, end in spans(300))
        assert counts.requests == counts.retries + 300 + 2
        assert counts.retries >= sum(proxy.faults.values()) > 45
        assert counts.retries > before


def test_reads_over_http_with_faults_are_exact(tmp_path):
    rates = dict.fromkeys(("error", "stall", "cut", "reset"), 0.05)
    (tmp_path / "shard").write_bytes(NEW)
    with http_server(tmp_path) as files, FaultProxy(files, rates, seed=5) as proxy:
        store = Store(f"{proxy.url}/shard", timeout_s=8.0, on_wait=patient)
        read_exactly(store, store.path, 100, 8)
        assert store.counts.retries >= sum(proxy.faults.values()) - proxy.faults["reset"] > 10


def test_a_store_that_is_away_is_waited_for_and_said_once(bucket):
    endpoint, name = bucket
    said, waiting = [], threading.Semaphore(0)
    with FaultProxy(endpoint) as proxy:
        s3(endpoint, f"s3://{name}").write("shard", NEW)
        store = s3(proxy.url, f"s3://{name}", timeout_s=0.5, on_wait=said.append)
        tell = store._retry._tell
        store._retry._tell = lambda *args: (tell(*args), waiting.release())
        proxy.go_away()
        with ThreadPoolExecutor(8) as pool:
            reads = [pool.submit(store.read, "shard", i, 2 * i + 5) for i in range(8)]
            for _ in reads:  # each has told of itself
                assert waiting.acquire(timeout=PATIENCE_S)
            assert not any(read.done() for read in reads)
            proxy.come_back()
            assert [bytes(r.result()) for r in reads] == [NEW[i : 2 * i + 5] for i in range(8)]
        assert len(said) == 2, said
        assert "read shard" in said[0] and "0.5 s" in said[0] and "going on" in said[0]
        assert said[1] == f"s3://{name} is back"


def test_store_without_a_wait_callback_raises_when_the_time_is_up(bucket):
    endpoint, name = bucket
    with FaultProxy(endpoint) as proxy:
        store = s3(proxy.url, f"s3://{name}", timeout_s=0.5, on_wait=None)
        proxy.go_away()
        with pytest.raises(StorageError, match=r"read shard .* \(tried for 0.5 s\)"):
            store.read("shard", 0, 5)


def test_pauses_grow_and_the_last_try_is_when_the_time_is_up(monkeypatch):
    now, pauses = [100.0], []
    monkeypatch.setattr("elastic_dp.storage.retry.time.monotonic", lambda: now[0])
    monkeypatch.setattr("elastic_dp.storage.retry._chance.uniform", lambda low, high: high)
    retry = Retry("a store", str, 2.0, None)

    class Passing(threading.Event):
        def wait(self, pause):
            pauses.append(round(pause, 3))
            now[0] += pause

    retry._closed = Passing()

    def attempt():
        raise TimeoutError("nothing came")

    with pytest.raises(StorageError, match=r"nothing came \(tried for 2 s\)"):
        retry.run("read x", attempt)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 0.5] and now[0] == pytest.approx(102.0)
    assert retry.counts.retries == 5


def test_a_pause_takes_nothing_from_what_the_users_code_draws(monkeypatch):
    """Steps are seeded and draw there, while other threads read and write."""
    monkeypatch.setattr("elastic_dp.storage.retry.FIRST_PAUSE_S", 0.0)
    answers = iter([TimeoutError("nothing came")] * 3)

    def attempt():
        for error in answers:
            raise error

    retry = Retry("a store", str, 60.0, None)
    before = random.getstate()
    retry.run("read x", attempt)
    assert retry.counts.retries == 3 and random.getstate() == before


def test_each_retry_of_any_store_of_the_process_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(retry, "_on_retry", [])
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 1e-3)
    retry.on_retry(lambda: told.append(1))
    for name in ("data", "checkpoints"):
        failures = iter((ConnectionError("reset"), ConnectionError("reset")))

        def attempt(failures=failures):
            for failure in failures:
                raise failure

        Retry(name, str, 60.0, None).run("read x", attempt)
    assert len(told) == 4


def test_closing_ends_the_wait(bucket):
    endpoint, name = bucket
    told = threading.Event()
    with FaultProxy(endpoint) as proxy:
        store = s3(proxy.url, f"s3://{name}", timeout_s=0.1, on_wait=lambda said: told.set())
        proxy.go_away()
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(store.read, "shard", 0, 5)
            assert told.wait(PATIENCE_S)
            store.close()
            with pytest.raises(StorageError, match="closed"):
                read.result(timeout=PATIENCE_S)


def test_a_hung_request_is_given_up(bucket):
    endpoint, name = bucket
    with FaultProxy(endpoint, {"stall": 1.0}) as proxy:
        store = s3(proxy.url, f"s3://{name}", timeout_s=1.0, on_wait=None)
        path = f"{store.path}/shard"
        for call in (
            lambda: store.read(path, 0, 5),
            lambda: store.find(store.path),
            lambda: store.write(path, b"x"),
        ):
            with pytest.raises(StorageError, match="tried for 1 s"):
                call()
        assert proxy.faults["stall"] > 0


def test_a_create_whose_answer_was_lost_is_known_as_our_own(bucket):
    endpoint, name = bucket
    with FaultProxy(endpoint, {"reset": 0.3}, seed=1) as proxy:
        store = s3(proxy.url, f"s3://{name}")
        for number in range(5):
            store.write(f"seal-{number}", b"ours %d" % number, create_only=True)
        assert proxy.faults["reset"] > 1
        for number in range(5):
            with pytest.raises(FileExistsError):
                store.write(f"seal-{number}", b"theirs", create_only=True)
            assert bytes(store.read_all(f"seal-{number}")) == b"ours %d" % number


XML = b"<Error><Code>TheCode</Code><Message>the store's own words</Message></Error>"


def answered(kind, url):
    return s3(url, "s3://bucket/shard") if kind == "s3" else Store(f"{url}/shard", on_wait=patient)


def close_after(store, retries):
    """Ends what would be tried for ever."""
    pause = store._retry._pause

    def counted(call):
        pause(call)
        if store.counts.retries >= retries:
            store.close()

    store._retry._pause = counted


KINDS = ["s3", "http"]


@pytest.mark.parametrize("kind", KINDS)
def test_permanent_http_status_is_raised_at_once(kind):
    for status in (301, 400, 401, 403, 405, 416, 501):
        with answering_server(status, XML) as url:
            store = answered(kind, url)
            with pytest.raises(StorageError) as raised:
                store.read(store.path, 0, 5)
            assert store.counts.retries == 0, (status, raised.value)
            if kind == "s3" and status != 301:
                assert "the store's own words" in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_transient_http_status_is_tried_again(kind):
    for status in (408, 429, 500, 502, 503, 504):
        with answering_server(status, XML) as url:
            store = answered(kind, url)
            close_after(store, retries=2)
            with pytest.raises(StorageError, match=r"the store was closed"):
                store.read(store.path, 0, 5)
            assert store.counts.retries == 2, status


def test_a_server_without_ranges_is_said():
    with answering_server(200, NEW) as url:
        store = answered("http", url)
        with pytest.raises(StorageError, match=r"(?i)range"):
            store.read(store.path, 5, 10)
        assert store.counts.retries == 0
