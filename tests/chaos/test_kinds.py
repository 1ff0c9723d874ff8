"""Each kind of fault that the soak draws from, by itself: the same steps and the same bits."""

import pytest

from tests.chaos.conftest import check, start
from tests.chaos.hosts import available
from tests.chaos.kinds import KINDS, ON_NODES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not available(), reason="needs root and iproute2, to make hosts"),
]
ALL = {"memory": "rocksdb", "disk_mib": 64, "cable": True}


@pytest.mark.parametrize("cluster", [ALL], indirect=True, ids=["all"])
@pytest.mark.parametrize("kind", KINDS)
def test_chaos_kind_ends_with_the_undisturbed_digest(kind, cluster, calm):
    run = start(cluster, kind.replace(" ", "-"), every_steps=20)
    host = cluster.host_of(run.members[1]) if kind in ON_NODES else cluster.head
    KINDS[kind](cluster, host, 4.0)
    check(run, calm)
