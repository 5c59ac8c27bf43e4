"""The files in deploy/: they parse, have what their readers require, and name what exists."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

from scripts.serve_tpu import app

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "jpaged.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TPUS = {"tpu-v4-podslice", "tpu-v5-lite-podslice", "tpu-v5p-slice", "tpu-v6e-slice", "tpu7x"}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def manifests() -> dict[str, Any]:
    return {one["kind"]: one for one in documents("gke-tpu.yaml")}


def container() -> dict[str, Any]:
    [one] = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def options() -> set[str]:
    return {name for parameter in get_command(app).params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_every_file_parses():
    names = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*") if path.is_file())
    for name in names:
        if name.endswith((".yml", ".yaml")):
            assert all(documents(name)), name
    assert [name for name in names if not name.endswith((".yml", ".yaml"))] == [
        "Dockerfile",
        "Dockerfile.dockerignore",
        "constraints.txt",
        "grafana/dashboards/jpaged.json",
    ]


def test_the_image_is_made_of_known_instructions_in_order():
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK"}
    known |= {"STOPSIGNAL", "ENTRYPOINT", "CMD", "LABEL"}
    found = [name for name, _ in instructions()]
    assert set(found) <= known
    assert found[0] == "FROM"
    assert found.index("USER") > max(i for i, name in enumerate(found) if name == "RUN")
    assert [count for name, count in Counter(found).items() if name in ("ENTRYPOINT", "CMD", "HEALTHCHECK")] == [1] * 3


def test_the_image_runs_as_nobody_in_particular_and_says_how_it_is():
    by_name = dict(instructions())
    assert int(by_name["USER"].partition(":")[0]) >= 1000
    assert "/health" in by_name["HEALTHCHECK"]
    assert f":{by_name['EXPOSE']}/health" in by_name["HEALTHCHECK"]
    entry = json.loads(by_name["ENTRYPOINT"])
    assert entry[entry.index("--port") + 1] == by_name["EXPOSE"]
    assert {argument for argument in entry if argument.startswith("--")} <= options()
    assert Path(entry[1]).name == "serve_tpu.py"
    assert json.loads(by_name["CMD"])


def test_what_the_image_copies_is_there_and_not_ignored():
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, arguments in instructions():
        if name != "COPY" or "--from" in arguments:
            continue
        for source in arguments.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == one or source.startswith(f"{one}/") for one in kept), source


def test_the_scripts_of_the_image_import_nothing_else_of_scripts():
    [line] = [arguments for name, arguments in instructions() if name == "COPY" and "serve_tpu.py" in arguments]
    copied = {Path(source).stem for source in line.split()[:-1]}
    for stem in copied:
        text = (ROOT / "scripts" / f"{stem}.py").read_text()
        assert set(re.findall(r"^(?:from|import) scripts\.(\w+)", text, re.MULTILINE)) <= copied


def test_accelerators_of_the_image_are_extras():
    [run] = [arguments for name, arguments in instructions() if name == "RUN" and "extras=" in arguments]
    named = set(re.findall(r"[\w]+", " ".join(re.findall(r"extras=([\w,]+)", run))))
    named |= set(re.findall(r"(\w+)(?:\||\))", re.findall(r"(\S+)\) extras=\S*\$ACCELERATOR", run)[0] + ")"))
    assert named == {"server", "structured", "tpu", "cuda12", "cuda13"}
    assert named <= set(PROJECT["optional-dependencies"])


def test_versions_of_the_image_are_pinned_within_what_the_project_takes():
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["server"], *extras["structured"]):
        need = Requirement(text)
        assert need.specifier.contains(versions[canonicalize_name(need.name)]), need
    assert all(str(pin.specifier).startswith("==") for pin in pins)


def test_the_manifest_has_what_kubernetes_requires():
    found = manifests()
    assert set(found) == {"PersistentVolumeClaim", "Deployment", "Service"}
    for one in found.values():
        assert one["apiVersion"] == ("apps/v1" if one["kind"] == "Deployment" else "v1")
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
    spec = found["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in ports
    volumes = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec["template"]["spec"]["volumes"]
    }
    assert {mount["name"] for mount in container()["volumeMounts"]} == set(volumes)
    assert set(volumes.values()) == {found["PersistentVolumeClaim"]["metadata"]["name"]}


def test_the_pod_gets_one_chip_of_a_known_kind():
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    selector, resources = pod["nodeSelector"], container()["resources"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] in TPUS
    chips = 1
    for side in selector["cloud.google.com/gke-tpu-topology"].split("x"):
        chips *= int(side)
    # This version serves on one device, and a request for chips must be its limit.
    assert resources["requests"]["google.com/tpu"] == resources["limits"]["google.com/tpu"] == chips == 1
    others = re.findall(r"v6e: (\S+)", (DEPLOY / "gke-tpu.yaml").read_text())
    assert others[-1] in TPUS


def test_probes_ask_for_health_and_shutdown_waits_for_the_drain():
    one, pod = container(), manifests()["Deployment"]["spec"]["template"]["spec"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[name]["httpGet"] == {"path": "/health", "port": "http"}
    assert one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"] >= 1200
    arguments = one["args"]
    assert {argument for argument in arguments if argument.startswith("--")} <= options()
    assert int(arguments[arguments.index("--drain-timeout-s") + 1]) < pod["terminationGracePeriodSeconds"]
    assert [variable["name"] for variable in one["env"]] == ["JPAGED_API_KEYS"]
    assert one["securityContext"]["privileged"] is False


def test_prometheus_scrapes_the_servers_metrics():
    [config] = documents("prometheus.yml")
    assert [job["metrics_path"] for job in config["scrape_configs"]] == ["/metrics"]
    annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert int(annotations["prometheus.io/port"]) == container()["ports"][0]["containerPort"]


def test_compose_mounts_files_that_exist_and_listens_on_this_machine_alone():
    [config] = documents("docker-compose.yml")
    assert set(config["services"]) == {"prometheus", "grafana"}
    for service in config["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in config["volumes"] or (DEPLOY / source).exists(), volume
    [datasources] = documents("grafana/provisioning/datasources/prometheus.yml")
    assert datasources["datasources"][0]["url"] == "http://prometheus:9090"
    [providers] = documents("grafana/provisioning/dashboards/jpaged.yml")
    folder = providers["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in config["services"]["grafana"]["volumes"]
    home = config["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/{DASHBOARD.name}"


def expressions() -> Iterator[str]:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query")


def test_the_dashboard_is_laid_out_without_overlaps():
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36
    assert board["uid"] == board["title"] == "jpaged"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: Counter[tuple[int, int]] = Counter()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        taken.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
        if panel["type"] != "row":
            assert panel["title"]
            assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C", "D"][: len(panel["targets"])]
    assert max(taken.values()) == 1
    assert all(text.count("(") == text.count(")") and text.count("{") == text.count("}") for text in expressions())


def exported() -> dict[str, set[str]]:
    """Names and labels of the samples that a server gives."""
    pytest.importorskip("prometheus_client", reason="needs jpaged[server]")
    from prometheus_client.parser import text_string_to_metric_families

    from jpaged.engine_client import EngineReport
    from jpaged.request_metrics import RequestMetrics
    from jpaged.server.metrics import ServerMetrics, render_metrics
    from jpaged.stats import EngineStats, PoolUse

    counters: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 1)
    counters |= {"now": PoolUse(page_size=16), "peak": PoolUse(page_size=16), "num_pages": 9}
    stats = EngineStats(**counters)
    report = EngineReport(
        stats=stats,
        histograms=RequestMetrics().histograms(),
        finished={"stop": 1},
        num_prompt_tokens=1,
        num_cached_prompt_tokens=0,
        num_refused=0,
        num_restarts=0,
        is_paused=False,
    )
    server = ServerMetrics()
    server.responses["/v1/completions", 200] = 1
    now = {"up": True, "report_age_s": 0.0}
    options = {"model": "m", "rejections": Counter(), "num_at_door": 0, "vllm_names": False, **now}
    text = render_metrics(None, report, server, **options).decode()
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def test_the_dashboard_asks_for_metrics_and_labels_that_are_exported():
    samples = exported()
    for text in expressions():
        names = re.findall(r"jpaged:\w+", text)
        assert names, text
        for name in names:
            assert name in samples, name
        for name, matchers in re.findall(r"(jpaged:\w+)\{([^}]*)\}", text):
            assert set(re.findall(r"(\w+)=~?\"", matchers)) <= samples[name], text
        for labels in re.findall(r"by \(([^)]*)\)", text):
            assert set(re.split(r",\s*", labels)) <= samples[names[0]], text
    shown = {name for text in expressions() for name in re.findall(r"jpaged:(\w+?)(?:_bucket|_sum|_count)?\b", text)}
    assert len(shown) >= 25
