"""The files of deploy/ by the tools that will read them: hadolint, compose's schema, systemd,
shellcheck, helm and Kubernetes' schemas. What they do is run in the tests beside this one.

Run alone: pytest tests/deploy/test_files.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from support.programs import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "loco"
SITE = {
    "name": "paris", "coordinator": "loco.example.com:29400", "bundleSecret": "loco-paris",
    "nodes": 2, "ranksPerNode": 8, "gpusPerNode": 8, "data": "/data/corpus", "dataClaim": "corpus",
    "checkpointClaim": "paris", "resources": {"requests": {"cpu": "32"}},
    "nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "extraArgs": ["--link-mbit=1000"], "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
}  # fmt: skip
COORDINATOR: dict[str, Any] = {"config": '[run]\nname = "mine"\n'}
OPENED: dict[str, Any] = COORDINATOR | {
    "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}, "metricsToken": True,
    "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}],
    "extraVolumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "theta"}}],
    "extraVolumeMounts": [{"name": "model", "mountPath": "/model", "readOnly": True}],
}  # fmt: skip
EGRESS = [{"ports": [{"port": 443, "protocol": "TCP"}]}]
KUBERNETES = ("1.29", "1.34")
RELEASE = "mine"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tool(name: str) -> str:
    """A program that a package of the `test` extra ships."""
    return str(Path(sys.executable).with_name(name))


# --- docker and compose ---------------------------------------------------------------------------


def test_the_dockerfile_by_hadolint() -> None:
    config = str(DEPLOY / "docker" / ".hadolint.yaml")
    assert run(tool("hadolint"), "-c", config, str(DEPLOY / "docker" / "Dockerfile")) == ""


def test_the_image_is_built_from_what_the_context_holds() -> None:
    copied = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.M
    )
    allowed = set(re.findall(r"^!(\w.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert {name for line in copied for name in line.split()} == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_the_image_for_aarch64_builds_the_torchft_that_the_project_asks_for() -> None:
    """It has no wheel there; from source it needs Rust and protoc. Not built in these tests."""
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (wanted,) = re.findall(r"'torchft>=([\d.]+); platform_machine == \"x86_64\"", project)
    assert set(re.findall(r"^ARG TORCHFT=(.+)$", dockerfile, re.M)) == {wanted}
    stages = re.split(r"^FROM ", dockerfile, flags=re.M)
    (stage,) = (text for text in stages if " AS torchft-arm64" in text)
    assert stage.startswith("rust:")
    assert "protobuf-compiler" in stage
    assert "--no-binary torchft" in stage
    assert "FROM torchft-${TARGETARCH} AS torchft\n" in dockerfile
    assert "/wheels/torchft-*.whl" in dockerfile


def test_the_platform_that_an_image_is_built_for_is_left_to_the_builder() -> None:
    """A default wins over what BuildKit gives: every image would be one for that platform."""
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    declared = re.findall(
        r"^ARG ((?:TARGET|BUILD)(?:PLATFORM|OS|ARCH|VARIANT).*)$", dockerfile, re.M
    )
    assert declared == ["TARGETARCH"]


def test_compose_by_its_schema() -> None:
    compose = str(DEPLOY / "compose" / "compose.yaml")
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", compose)


def test_every_file_that_compose_mounts_exists() -> None:
    composed = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    mounted = [
        volume.split(":")[0]
        for service in composed["services"].values()
        for volume in service.get("volumes", [])
    ]
    for source in mounted:
        if source.startswith("."):
            assert (DEPLOY / "compose" / source).exists(), source
        else:
            assert source in composed["volumes"]


# --- systemd --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "exposure"), [("loco-coordinator.service", 20), ("loco-worker@.service", 25)]
)
def test_units_by_systemd(unit: str, exposure: int, tmp_path: Path) -> None:
    """`exposure` is systemd's own score, 0 (nothing) to 100: the units stay below it."""
    text = (DEPLOY / "systemd" / unit).read_text()
    assert text.count("/opt/loco/bin/loco ") == 1
    copy = tmp_path / unit.replace("@.", "@paris.")
    copy.write_text(text.replace("/opt/loco/bin/loco", tool("loco")))
    analyze = program("systemd-analyze")
    assert run(analyze, "verify", "--man=no", str(copy)) == ""
    run(analyze, "security", "--offline=true", f"--threshold={exposure}", str(copy))


@pytest.mark.parametrize(
    "devices",
    [
        ("nvidia-frontend", "nvidia-caps", "nvidia-nvswitch", "nvidia-uvm"),  # driver 535
        ("nvidia", "nvidiactl", "nvidia-modeset", "nvidia-caps", "nvidia-nvlink",
         "nvidia-nvswitch", "nvidia-caps-imex-channels", "nvidia-uvm"),  # driver 550 and later
    ],
)  # fmt: skip
def test_the_unit_of_a_site_lets_it_at_the_gpus_of_every_driver(devices: tuple[str, ...]) -> None:
    """Compared with the names of character devices in /proc/devices of machines with a GPU."""
    unit = (DEPLOY / "systemd" / "loco-worker@.service").read_text()
    allowed = re.findall(r"^DeviceAllow=char-(\S+) rw$", unit, re.M)
    for device in devices:
        assert any(fnmatchcase(device, pattern) for pattern in allowed), device
    for other in ("mem", "sd", "input", "vhost", "fuse"):
        assert not any(fnmatchcase(other, pattern) for pattern in allowed), other


def test_new_credentials_restart_the_unit_that_holds_copies(tmp_path: Path) -> None:
    """Compared with: what LoadCredential copies, which systemd does once, at the start."""
    directory = DEPLOY / "systemd"
    for unit, watch in (
        ("loco-coordinator.service", "loco-coordinator-renewed"),
        ("loco-worker@.service", "loco-worker-renewed@"),
    ):
        text, path = (directory / unit).read_text(), (directory / f"{watch}.path").read_text()
        copied = re.findall(r"^LoadCredential=\S+?:(\S+)$", text, re.M)
        assert copied
        assert re.findall(r"^PathChanged=(\S+)$", path, re.M) == copied
        assert f"\nAlso={watch.replace('@', '@%i')}.path\n" in text
        (restarted,) = re.findall(
            r"^ExecStart=systemctl try-restart (\S+)$",
            (directory / f"{watch}.service").read_text(), re.M,
        )  # fmt: skip
        assert restarted.replace("%i", "") == unit
        copies = []
        for name in (unit, f"{watch}.path", f"{watch}.service"):
            copies.append(tmp_path / name.replace("@.", "@paris."))
            copies[-1].write_text(
                (directory / name).read_text().replace("/opt/loco/bin/loco", tool("loco"))
            )
        assert run(program("systemd-analyze"), "verify", "--man=no", *map(str, copies)) == ""


# --- shell ----------------------------------------------------------------------------------------


def test_scripts_by_shellcheck() -> None:
    scripts = [str(path) for path in (DEPLOY / "slurm").glob("*.sbatch")]
    assert scripts
    assert run(program("shellcheck"), "--severity=style", *scripts) == ""


# --- helm -----------------------------------------------------------------------------------------


def rendered(values: dict[str, Any], chart: Path = CHART) -> list[dict[str, Any]]:
    with helm_python.Chart.load(str(chart)) as loaded:
        loaded.validate_schema(values)
        files = loaded.render(values, name=RELEASE, namespace="loco")
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


VALUES: dict[str, dict[str, Any]] = {
    "coordinator": {"coordinator": COORDINATOR},
    "both": {
        "coordinator": OPENED,
        "serviceMonitor": {"enabled": True, "serverName": "loco.example.com"},
        "networkPolicy": {"egress": EGRESS},
        "sites": [SITE],
    },
    "sites": {
        "coordinator": {"enabled": False},
        "sites": [SITE, {"name": "oslo", "coordinator": "c:1", "bundleSecret": "b"}],
    },
    "jobset": {"coordinator": {"enabled": False}, "workload": "JobSet", "sites": [SITE]},
}
# Custom resources: their schemas come with their controllers, not with Kubernetes.
CUSTOM = {"ServiceMonitor", "JobSet"}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_by_helm_and_kubernetes(values: dict[str, Any]) -> None:
    found = helm_python.lint(str(CHART), values)
    assert found["errors"] == []
    assert [m for m in found["messages"] if m["severity"] > 1] == []
    documents = rendered(values)
    assert documents
    for document in documents:
        if document["kind"] not in CUSTOM:
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)


def test_what_each_cluster_gets() -> None:
    kinds = {
        name: sorted(document["kind"] for document in rendered(values))
        for name, values in VALUES.items()
    }
    coordinator = ["ConfigMap", "NetworkPolicy", "Service", "Service", "StatefulSet"]
    assert kinds["coordinator"] == coordinator
    assert kinds["both"] == sorted([*coordinator, "Job", "Service", "ServiceMonitor"])
    assert kinds["sites"] == ["Job", "Job", "Service", "Service"]
    assert kinds["jobset"] == ["JobSet", "Service"]


def containers(value: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod spec, container) wherever one lies below `value`."""
    if isinstance(value, list):
        return [found for item in value for found in containers(item)]
    if not isinstance(value, dict):
        return []
    if "containers" in value:
        return [(value, container) for container in value["containers"]]
    return [found for item in value.values() for found in containers(item)]


def test_no_container_has_more_rights_than_it_needs() -> None:
    found = [f for values in VALUES.values() for f in containers(rendered(values))]
    assert len(found) == 6
    for pod, container in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert mounted - volumes <= {"state"}  # of the StatefulSet's claim


def of_kind(kind: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (d for d in documents if d["kind"] == kind)
    return found


def test_a_coordinator_is_given_volumes_environment_and_a_way_out() -> None:
    """For models that it reads or fetches, and for traces; by default it has neither."""
    both = rendered(VALUES["both"])
    ((pod, container),) = containers(of_kind("StatefulSet", both))
    assert OPENED["extraEnv"][0] in container["env"]
    assert OPENED["extraVolumes"][0] in pod["volumes"]
    assert OPENED["extraVolumeMounts"][0] in container["volumeMounts"]
    assert "--metrics-token=/bundle/token" in container["args"]
    assert of_kind("NetworkPolicy", both)["spec"]["egress"] == EGRESS
    ((pod, container),) = containers(of_kind("Job", both))
    assert SITE["extraEnv"][0] in container["env"]  # type: ignore[index]
    assert SITE["extraVolumes"][0] in pod["volumes"]  # type: ignore[index]
    assert SITE["extraVolumeMounts"][0] in container["volumeMounts"]  # type: ignore[index]
    alone = rendered(VALUES["coordinator"])
    assert of_kind("NetworkPolicy", alone)["spec"]["egress"] == []


def test_caches_of_what_loco_uses_can_be_written() -> None:
    """The home is read-only in every deployment; each cache lies below a directory that is not."""
    image = (DEPLOY / "docker" / "Dockerfile").read_text()
    names = ("LOCO_CACHE_DIR", "NUMBA_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR")
    for name in (*names, "TORCHINDUCTOR_CACHE_DIR"):
        (place,) = re.findall(rf"\b{name}=(\S+)", image)
        assert Path("/cache") in (Path(place), *Path(place).parents), name
        for unit, directory in (("loco-coordinator", "loco"), ("loco-worker@", "loco-%i")):
            text = (DEPLOY / "systemd" / f"{unit}.service").read_text()
            assert f"\nCacheDirectory={directory}\n" in text
            (place,) = re.findall(rf"^Environment=.*\b{name}=%C/(\S+)", text, re.M)
            assert Path(directory) in (Path(place), *Path(place).parents), name
    for values in VALUES.values():
        for pod, container in containers(rendered(values)):
            assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
            assert {"name": "cache", "emptyDir": {}} in pod["volumes"]
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    for name in ("coordinator", "paris", "oslo"):
        assert f"cache-{name}:/cache" in services[name]["volumes"]


@pytest.mark.parametrize("workload", ["Job", "JobSet"])
def test_an_upgrade_changes_no_job_in_place(workload: str, tmp_path: Path) -> None:
    """Kubernetes refuses it ("field is immutable"): a Job that differs has another name."""

    def made(chart: Path, **values: Any) -> tuple[str, dict[str, Any]]:
        common = {"coordinator": {"enabled": False}, "workload": workload}
        job = of_kind(workload, rendered(common | {"sites": [SITE]} | values, chart))
        name: str = job["metadata"]["name"]
        assert len(name) <= 54  # its pods add an index, and of a JobSet three more numbers
        ((_, container),) = containers(job)
        (master,) = (a for a in container["command"] if a.startswith("--master-addr="))
        assert master.startswith(f"--master-addr={name}-")
        return name, job["spec"]

    newer = tmp_path / "loco"
    shutil.copytree(CHART, newer)
    about = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(re.sub(r"^version: .*$", "version: 0.9.9", about, flags=re.M))
    before = made(CHART)
    assert made(newer) == before  # and no site is restarted for nothing
    for change in (
        {"image": {"tag": "0.9.9"}},
        {"sites": [SITE | {"nodes": 3}]},
        {"sites": [SITE | {"extraArgs": []}]},
    ):
        name, spec = made(CHART, **change)
        assert spec != before[1]
        assert name != before[0]


def test_sites_are_let_in_by_address_and_in_the_same_cluster_by_label() -> None:
    """Cilium matches no pod by its address. Compared with: the labels of the chart's own sites."""
    both = rendered(VALUES["both"])
    (peers,) = (
        rule["from"]
        for rule in of_kind("NetworkPolicy", both)["spec"]["ingress"]
        if rule["ports"][0]["port"] == "grpc"
    )
    assert {"ipBlock": {"cidr": "0.0.0.0/0"}} in peers
    (pods,) = (peer for peer in peers if "podSelector" in peer)
    assert pods["namespaceSelector"] == {}
    labels = of_kind("Job", both)["spec"]["template"]["metadata"]["labels"]
    assert pods["podSelector"]["matchLabels"].items() <= labels.items()
    service = next(d for d in both if d["metadata"]["name"] == f"{RELEASE}-paris")
    assert service["spec"]["selector"].items() <= labels.items()
    (outside,) = (d for d in both if d.get("spec", {}).get("type") == "LoadBalancer")
    assert outside["spec"]["externalTrafficPolicy"] == "Local"


@pytest.mark.parametrize(
    ("token", "said"), [(True, "get secret loco-coordinator"), (False, "--cert certs/ops.pem")]
)
def test_the_notes_say_how_to_be_let_in_to_the_page(token: bool, said: str) -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        values = {"coordinator": COORDINATOR | {"metricsToken": token}}
        files = chart.render(values, name=RELEASE, namespace="loco")
    (notes,) = (text for name, text in files.items() if name.endswith("NOTES.txt"))
    assert "port-forward svc/mine-coordinator-metrics 9400" in notes
    assert said in notes


def test_the_flags_of_the_chart_and_of_the_units_exist() -> None:
    """Every flag in deploy/ is one that the command line knows."""
    known = {
        name: set(re.findall(r"--[a-z-]+", run(tool("loco"), name, "--help", COLUMNS="200")))
        for name in ("coordinator", "worker")
    }
    for values in VALUES.values():
        for _, container in containers(rendered(values)):
            if container["name"] == "coordinator":
                used, name = container["args"], "coordinator"
            else:
                assert pod_policy_ends_on(values) == [2, 3, 5]
                command = container["command"]
                used, name = command[command.index("worker") :], "worker"
            flags = {argument.partition("=")[0] for argument in used if argument.startswith("--")}
            assert flags <= known[name], flags - known[name]
    for unit, name in (
        ("loco-coordinator.service", "coordinator"),
        ("loco-worker@.service", "worker"),
    ):
        (line,) = re.findall(r"^ExecStart=(.+)$", (DEPLOY / "systemd" / unit).read_text(), re.M)
        assert set(re.findall(r"--[a-z-]+", line)) <= known[name]


def pod_policy_ends_on(values: dict[str, Any]) -> list[int]:
    """Exit codes with which a site's Job fails for good."""
    specs = [d["spec"] for d in rendered(values) if d["kind"] in ("Job", "JobSet")]
    jobs = [
        s["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in s else s for s in specs
    ]
    (codes,) = {tuple(j["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]) for j in jobs}
    return list(codes)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"coordinator": {"enabled": True}}, "coordinator.config is empty"),
        ({"coordinater": {}}, "coordinater"),
        ({"coordinator": COORDINATOR, "workload": "Deployment"}, "workload"),
        ({"coordinator": COORDINATOR, "sites": [{"name": "paris"}]}, "bundleSecret"),
        ({"coordinator": COORDINATOR, "serviceMonitor": {"enabled": True}}, "serverName is empty"),
        (
            {"coordinator": COORDINATOR | {"service": {"externalTrafficPolicy": "Local"}}},
            "LoadBalancer or NodePort",
        ),
        ({"coordinator": COORDINATOR, "sites": [{**SITE, "name": "Paris"}]}, "name"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        rendered(values)
