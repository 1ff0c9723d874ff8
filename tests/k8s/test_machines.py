"""A worker's pod fits on the machines that it is meant for: what a node can give is less than what
its type has."""

import pytest

from tests.k8s.manifests import build, groups

# CPUs, memory in GiB and GPUs of a type: "GPU machine types" of Compute Engine, EC2's "Accelerated
# computing", "NCads A100 v4".
TYPES = {
    "g2-standard-8": (8, 32, 1),
    "g6.2xlarge": (8, 32, 1),
    "Standard_NC24ads_A100_v4": (24, 220, 1),
    "a3-ultragpu-8g": (224, 2952, 8),
    "p5.48xlarge": (192, 2048, 8),
}
MEANT_FOR = {
    "overlays/gke-spot": ["g2-standard-8"],
    "overlays/gke-shared": ["g2-standard-8"],
    "overlays/eks-spot": ["g6.2xlarge"],
    "overlays/eks-shared": ["g6.2xlarge"],
    "overlays/aks-spot": ["Standard_NC24ads_A100_v4"],
    "overlays/eks-efa": ["p5.48xlarge"],
    "overlays/gke-gpudirect": ["a3-ultragpu-8g"],
}
DAEMONS_CPU, DAEMONS_GIB = (
    0.5,
    1.0,
)  # network, metrics, logs, drivers: what a cluster has on each node


def allocatable(name):
    """What the strictest cloud leaves: Karpenter takes 7.5 % off a type's memory
    (vmMemoryOverheadPercent in its settings), and GKE reserves in steps ("Plan GKE Standard node
    sizes"), 100 MiB of them for evictions."""
    cpus, memory, _ = TYPES[name]
    reserved = 0.06 + 0.01 * (cpus > 1) + 0.005 * min(max(cpus - 2, 0), 2)
    reserved += 0.0025 * max(cpus - 4, 0)
    kept, below = 0.1, 0
    for until, share in ((4, 0.25), (8, 0.2), (16, 0.1), (128, 0.06), (float("inf"), 0.02)):
        kept += share * max(min(memory, until) - below, 0)
        below = until
    return cpus - reserved - DAEMONS_CPU, memory * 0.925 - kept - DAEMONS_GIB


@pytest.mark.parametrize("folder", MEANT_FOR)
def test_a_worker_fits_on_the_machine_it_is_meant_for(folder):
    for group in groups(build(folder)).values():
        asked = group["template"]["spec"]["containers"][0]["resources"]["requests"]
        huge = int(asked.get("hugepages-2Mi", "0Mi").removesuffix("Mi")) / 1024
        memory = int(asked["memory"].removesuffix("Gi")) + huge
        for name in MEANT_FOR[folder]:
            cpus, gib = allocatable(name)
            assert int(asked["cpu"]) <= cpus and memory <= gib, name
            assert int(asked["nvidia.com/gpu"]) == TYPES[name][2]
