"""What k8s/README.md and k8s/docs say: commands that can be run, and names, paths, labels, flags
and fields that exist."""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

from elastic_dp.cli import app
from elastic_dp.config import JobSpec
from tests.k8s import test_machines
from tests.k8s.fields import is_field
from tests.k8s.filled import copy_filled, params
from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    SHARED,
    _kubectl,
    build,
    cluster,
    containers,
    groups,
    of_kind,
    ray_object,
    templates,
)

PAGES = {path.name: path.read_text() for path in [K8S / "README.md", *(K8S / "docs").glob("*.md")]}
README, REFERENCE, EKS = PAGES["README.md"], PAGES["reference.md"], PAGES["eks.md"]
ALL = "\n".join(PAGES.values())
OF_THE_OPERATOR = {"RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS"}
MADE_BY_THE_README = {"overlays/wide"}


def found(pattern: str, text: str, flags: int = 0) -> list[Any]:
    """All matches, of which there must be one at least: a loop over none shows nothing."""
    matches = re.findall(pattern, text, flags)
    assert matches, f"nothing in the pages is like {pattern}"
    return matches


def blocks(page: str) -> list[str]:
    """The page's shell commands, a block each."""
    return re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)


def commands() -> Iterator[list[str]]:
    """Each command of ours: `elastic-dp …`, and `edp RUN …` without the run."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", ALL, flags=re.M | re.S))
    lines = "\n".join(block for page in PAGES.values() for block in blocks(page))
    for text in [*lines.replace("\\\n", " ").splitlines(), *inline]:
        for found in re.finditer(r"(?:\belastic-dp|\bedp \w+) ([a-z].*)", text):
            words = shlex.split(re.split(r" (?:&|\||&&) |;", found[1])[0], comments=True)
            if words[0] != "--":
                yield words


def block_with(page: str, text: str) -> str:
    [found] = [block for block in blocks(page) if text in block]
    return found


def test_readme_shell_commands_are_valid_syntax():
    all_blocks = [block for page in PAGES.values() for block in blocks(page)]
    assert len(all_blocks) > 20
    for block in all_blocks:
        made = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert made.returncode == 0, (block, made.stderr)


def test_readme_commands_name_kustomizations_that_exist():
    named = {name.rstrip("/") for name in found(r"(?:-k|kustomize) k8s/([\w/-]+)", ALL)}
    assert named <= {*OVERLAYS, *SHARED, *MADE_BY_THE_README}
    for folder in OVERLAYS:
        assert folder.removeprefix("overlays/") in README, folder
    for folder in SHARED:
        assert f"k8s/{folder}" in ALL, folder


def test_readme_commands_name_verbs_flags_and_fields_that_exist():
    verbs = set()
    for words in commands():
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command = command.commands[words.pop(0)]
        verbs.add(command.name)
        flags = {name for parameter in command.params for name in parameter.opts}
        for place, word in enumerate(words):
            if word == "--":
                break
            assert not word.startswith("--") or word in flags, (command.name, word)
            if word == "--set" and place + 1 < len(words):
                field = words[place + 1].partition("=")[0]
                known = field == "storage_path" or is_field(JobSpec, field.split("."))
                assert known or field == "FIELD", field
    wanted = {"status", "scale", "stop", "run", "logs", "convert", "list", "verify", "save"}
    assert wanted <= verbs


def test_readme_shared_job_reads_object_storage_and_asks_for_a_gpu():
    """On a cluster that stays nothing else says so: shards on the head's disk, and training on the
    CPU."""
    block = block_with(README, "ray job submit")
    given = found(r"--set ([\w.]+)=(\S+)", block)
    assert dict(given)["data.url"].startswith("gs://")
    assert dict(given)["scaling.resources_per_worker.GPU"] == "1"
    name = ray_object(build("overlays/gke-shared"))["metadata"]["name"]
    assert f"svc/{name}-head-svc " in block and f"edp {name} status" in block


def test_readme_each_failure_is_governed_by_a_field_that_exists():
    table = REFERENCE.partition("## What happens when")[2]
    governors = [row.rpartition("|")[0].rpartition("|")[2] for row in table.splitlines()]
    named = set(found(r"`([^`]+)`", " ".join(governors))) - OF_THE_OPERATOR
    manifests = "".join(path.read_text() for path in K8S.rglob("*.yaml"))
    for name in named:
        path = name.partition(":")[0].split(".")
        in_a_manifest = all(re.search(rf"\b{step}\b", manifests) for step in path)
        assert in_a_manifest or is_field(JobSpec, path), name
    assert len(named) > 15


def test_readme_paths_exist():
    for path in found(r"(?<![\w/-])((?:k8s|tests|jobs)/[\w./-]*[\w/])", ALL):
        made = path.startswith(tuple(f"k8s/{name}" for name in MADE_BY_THE_README))
        assert made or path.startswith("k8s/Dockerfile") or (ROOT / path).exists(), path
    for folder in found(r"^\| `([a-z/]+)/`", README, re.M):
        assert (K8S / folder).is_dir(), folder


@pytest.mark.parametrize("name", PAGES)
def test_readme_links_lead_somewhere(name):
    folder = K8S if name == "README.md" else K8S / "docs"
    for target, anchor in found(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", PAGES[name]):
        page = (folder / target).resolve()
        assert page.is_file(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors, anchor


def test_readme_labels_containers_and_objects_exist():
    pods = templates(build("overlays/gke-spot"))
    known = {key for pod in pods.values() for key in pod["metadata"]["labels"]}
    known |= {"ray.io/node-type", "ray.io/group"}  # KubeRay's own
    for selector in found(r' -l "?([^\s"]+)"?', ALL):
        for pair in selector.rstrip(")").split(","):
            key, _, value = pair.partition("=")
            assert key in known, key
            if key == "ray.io/group":
                assert value in groups(build("overlays/gke-spot"))
            if key == "app.kubernetes.io/instance":
                assert value in ("$1", ray_object(build("overlays/gke-spot"))["metadata"]["name"])
    names = {c["name"] for _, c in containers(build("overlays/gke-spot")) if "name" in c}
    assert set(found(r" -c ([\w-]+)", "".join(map("".join, map(blocks, PAGES.values()))))) - {
        "import",
        "from",
    } <= names | {"autoscaler"}
    assert set(re.findall(r"kubectl -n (\S+)", ALL)) == {
        "training",
        "kuberay-operator",
        "monitoring",
    }
    jobs = {ray_object(build(f))["metadata"]["name"] for f in OVERLAYS}
    assert set(found(r"\brayjob (\w+)(?=[ \n`])", ALL)) - {"and"} <= jobs


def test_readme_secrets_are_those_that_manifests_read():
    made = {
        name: set(re.findall(r"--from-literal=([\w-]+)=", rest))
        for name, rest in found(r"create secret generic ([\w-]+)(.*)", ALL)
    }
    auth = cluster(build("overlays/gke-spot"))["authOptions"]["secretName"]
    wanted = {auth: {"auth_token"}}
    for folder in OVERLAYS:
        for text in re.findall(
            r"secretKeyRef:\n((?: +\w+: .*\n){2})", yaml.safe_dump(build(folder))
        ):
            reference = yaml.safe_load(text)
            wanted.setdefault(reference["name"], set()).add(reference["key"])
    assert made == wanted


def test_readme_cloud_identity_is_given_to_both_service_accounts():
    accounts = {a["metadata"]["name"] for a in of_kind(build("namespaces/base"), "ServiceAccount")}
    assert len(accounts) == 2
    loops = found(r"^for name in (.+); do$", ALL, re.M)
    assert len(loops) == 2  # GKE, AKS
    for names in loops:
        assert set(names.split()) == accounts
    assert set(re.findall(r"system:serviceaccount:training:([a-z-]+)", EKS)) == accounts
    assert "svc.id.goog[training/$name]" in README


@pytest.mark.parametrize(("cloud", "page"), [("gke", README), ("eks", EKS)])
def test_readme_fills_in_each_blank_param_and_the_overlay_then_builds(cloud, page, tmp_path):
    """The page's own commands, on the files as shipped."""
    k8s = tmp_path / "k8s"
    copy_filled(k8s)
    (k8s / f"params/{cloud}/params.env").write_text(
        (K8S / f"params/{cloud}/params.env").read_text()
    )
    block = block_with(page, f"k8s/params/{cloud}/params.env\nkubectl")
    fill = block.partition("kubectl")[0]
    blank = {key for key, value in params(cloud).items() if not value}
    assert set(re.findall(r"s\|\^(\w+)=", fill)) == blank
    settings = {
        **{"IMAGE": "registry.example.com/elastic-dp:1", "BUCKET": "mine", "AWS_ACCOUNT": "1"},
        **{"ACCOUNT": "elastic-dp@mine.iam.gserviceaccount.com", "PATH": os.environ["PATH"]},
    }
    subprocess.run(["bash", "-eu", "-c", fill], cwd=tmp_path, env=settings, check=True)
    for folder in (f"overlays/{cloud}-spot", f"namespaces/{cloud}", f"prepull/{cloud}"):
        made = subprocess.run(
            [_kubectl(), "kustomize", k8s / folder], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
    assert "example-training" not in made.stdout


def test_readme_second_run_builds_as_it_is_written(tmp_path):
    copy_filled(tmp_path / "k8s")
    block = block_with(README, "k8s/overlays/wide").partition("kubectl apply")[0]
    subprocess.run(["bash", "-eu", "-c", block], cwd=tmp_path, check=True)
    made = subprocess.run(
        [_kubectl(), "kustomize", tmp_path / "k8s/overlays/wide"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    job = ray_object(list(yaml.safe_load_all(made.stdout)))
    assert job["metadata"]["name"] == "wide"
    assert "--set name=wide " in job["spec"]["entrypoint"]
    assert job["spec"]["entrypoint"].endswith("--set config.width=512")


def test_readme_node_pools_are_those_that_the_overlay_asks_for():
    pools = found(r"gcloud container node-pools create (\S+) ((?:.*\\\n)*.*)", README)
    assert [name for name, _ in pools] == ["l4-spot", "l4"]
    asked = groups(build("overlays/gke-spot"))
    kind = asked["spot"]["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-accelerator"]
    for name, rest in pools:
        group = asked["spot" if name == "l4-spot" else "on-demand"]
        pod = group["template"]["spec"]
        [machine] = re.findall(r"--machine-type (\S+)", rest)
        assert machine in test_machines.MEANT_FOR["overlays/gke-spot"]
        gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert f"type={kind},count={gpus},gpu-driver-version=latest" in rest  # CUDA 13
        assert f"--max-nodes {group['maxReplicas']} " in rest
        assert ("--spot " in rest) == (name == "l4-spot")
        taints = re.findall(r"--node-taints (\S+)=(\w+):(\w+)", rest)
        assert bool(taints) == (name == "l4-spot")
        for key, value, effect in taints:
            taint = {"key": key, "operator": "Equal", "value": value, "effect": effect}
            assert taint in pod["tolerations"]
    block = block_with(README, "container clusters create")
    assert "--workload-pool $PROJECT.svc.id.goog" in block and "--enable-dataplane-v2" in block


def test_readme_nodepool_of_karpenter_fits_the_overlay():
    [text] = re.findall(r"^```yaml\n(.*?)^```", EKS, re.M | re.S)
    pool = yaml.safe_load(text)["spec"]["template"]["spec"]
    asked = groups(build("overlays/eks-spot"))["spot"]["template"]["spec"]
    requirements = {r["key"]: r["values"] for r in pool["requirements"]}
    for key, value in asked["nodeSelector"].items():
        assert requirements[key] == [value]
    [taint] = pool["taints"]
    assert taint | {"operator": "Exists"} in asked["tolerations"]


def test_readme_operator_is_installed_with_the_status_timeout():
    installs = found(r"helm (install|upgrade) kuberay-operator ((?:.*\\\n)*.*)", ALL)
    assert [verb for verb, _ in installs] == ["install", "install", "upgrade"]
    values = yaml.safe_load((K8S / "admin/kuberay/values.yaml").read_text())
    [variable] = [each for each in values["env"] if each["name"] in OF_THE_OPERATOR]
    for verb, rest in installs:
        assert "--version 1.7.0" in rest and "--namespace kuberay-operator" in rest
        if verb == "install":
            assert "--values k8s/admin/kuberay/values.yaml" in rest
        else:
            assert f"--set 'env[0].name={variable['name']}'" in rest
            assert f"--set-string 'env[0].value={variable['value']}'" in rest
    assert README.count("helm repo add kuberay https://ray-project.github.io/kuberay-helm/") == 2


def test_readme_image_is_built_by_arguments_of_the_dockerfile():
    dockerfile = (K8S / "Dockerfile").read_text()
    for name in found(r"--build-arg (\w+)=", ALL):
        assert f"\nARG {name}=" in dockerfile
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert set(re.findall(r"/elastic-dp:([\w.-]+)", ALL)) == {f"{version}-cuda"}
    local = params("kind")["image"]
    assert f"-t {local} ." in README and f"kind load docker-image {local}" in README


def test_readme_request_as_shipped_is_that_of_the_params():
    shipped = re.search(r"^\| (\S+), \S+ \(as shipped\).*\| (\d+) \| (\w+) \|$", REFERENCE, re.M)
    values = params("gke")
    assert (values["worker_cpu"], values["worker_memory"]) == shipped.groups()[1:]


def test_readme_spot_times_are_those_of_the_manifests():
    rows = dict(re.findall(r"^\| (EKS|GKE|AKS|head).*?\| (\d+ s \| \d+ s) \|", REFERENCE, re.M))
    for cloud, folder in {"EKS": "eks-spot", "GKE": "gke-spot", "AKS": "aks-spot"}.items():
        pods = templates(build(f"overlays/{folder}"))
        for row, pod in ((cloud, pods["spot"]["spec"]), ("head", pods["head"]["spec"])):
            env = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
            drain = env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
            assert rows[row] == f"{drain} s | {pod['terminationGracePeriodSeconds']} s", row
    options = cluster(build("overlays/gke-spot"))["autoscalerOptions"]
    env = {e["name"]: e["value"] for e in options["env"]}
    wait = env["RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S"]
    assert f"({wait} s here)" in REFERENCE
    assert f"on-demand after {int(wait) // 60} minutes" in REFERENCE
    assert f"cannot deliver for {int(wait) // 60} minutes" in README


def test_readme_says_what_strangers_did_not_find():
    """Issue 13, 17 and 19: each was missing."""
    for text in (
        "simulate-maintenance-event",
        "send-spot-instance-interruptions",
        "kind load",
        "no submitter pod",
        "clears the message at each retry",
        "each retry is a new cluster",
        "Kueue 0.18 or newer",
        "One namespace for each team",
        "without `resourceNames`",
        "e-mail address of a Google Group",
        "docker push",
        "roles/storage.objectUser",
        "PREEMPTIBLE_NVIDIA_L4_GPUS",
        "base64 --decode",
        "kubectl delete -k k8s/overlays/gke-spot",
    ):
        assert text in ALL, text
