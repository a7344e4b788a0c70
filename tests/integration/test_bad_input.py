"""Every bad input of a user: one clear line, the documented exit code, nothing lost, no traceback.

pytest tests/integration/test_bad_input.py
"""

from __future__ import annotations

import resource
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from support.cluster import SECONDS, Cluster, free_port, loco, run_loco

from loco.demo.config import SITE_NAMES

HERE = "127.0.0.1:9"  # the discard port: nobody listens


def refused(*arguments: str, code: int, says: tuple[str, ...]) -> str:
    """Run a command that must end with `code` and one line that contains all of `says`."""
    done = run_loco(*arguments)
    assert done.returncode == code, (done.returncode, done.stderr)
    line = done.stderr.strip().splitlines()[-1]
    for text in says:
        assert text in line, line
    return line


def worker(address: str, *arguments: str, site: str = "paris") -> list[str]:
    return ["worker", "--coordinator", address, "--site", site, *arguments]


# --- a worker without a coordinator -------------------------------------------------------------


def test_no_ranks() -> None:
    refused(*worker(HERE, "--ranks", "0"), code=2, says=("--ranks 0", "at least 1"))


def test_odd_site_name() -> None:
    refused(*worker(HERE, site="Paris/1"), code=2, says=("'Paris/1'", "a-z, 0-9"))


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:99999", ":29400"])
def test_an_address_that_is_none(address: str) -> None:
    refused(*worker(address), code=2, says=("HOST:PORT",))


def test_metrics_beyond_this_machine_in_plaintext() -> None:
    """Sites have no certificate to serve with: what is not loopback must be meant."""
    for address in ("0.0.0.0:9500", "[::]:9500", "node1:9500"):
        says = (f"--metrics {address}", "127.0.0.1:9500", "--insecure")
        refused(*worker(HERE, "--metrics", address), code=2, says=says)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_is_not_torchruns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("abc", "-1", "2.0", ""):
        monkeypatch.setenv(name, text)
        refused(*worker(HERE), code=2, says=(f"{name}={text!r}", "torchrun"))


def test_nobody_at_the_address() -> None:
    refused(*worker(HERE, "--patience", "1"), code=4, says=(HERE, "--patience"))


def test_a_missing_address() -> None:
    done = run_loco("worker", "--site", "paris")
    assert done.returncode == 2
    assert "--coordinator" in done.stderr


def test_an_unknown_device() -> None:
    refused(*worker(HERE, "--device", "tpu"), code=2, says=("'tpu'", "auto, cpu or cuda"))


def test_status_of_nobody() -> None:
    refused("status", HERE, code=4, says=(HERE,))


def test_control_of_nobody_and_of_unknown_verbs() -> None:
    refused("control", HERE, "pause", code=4, says=(HERE,))
    refused("control", HERE, "stop", code=2, says=("'stop'", "pause"))
    refused("control", HERE, "set", "outer.alpha", code=2, says=("KEY=VALUE",))
    refused("control", HERE, "evict", code=2, says=("evict SITE",))


# --- a demo that cannot be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--algorithm", "fedavg"), ("'fedavg'", "sparseloco, diloco, ddp")),
        (("--sites", "0"), ("--sites 0", str(len(SITE_NAMES)))),
        (("--sites", "99"), ("--sites 99", str(len(SITE_NAMES)))),
        (("--ranks", "0"), ("--ranks 0", "at least 1")),
        (("--rounds", "-1"), ("-1",)),
    ],
)
def test_demo(arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    refused("demo", *arguments, code=2, says=says)


# --- a coordinator that cannot start ------------------------------------------------------------


def coordinator(config: Path, state: Path, *arguments: str) -> list[str]:
    return ["coordinator", str(config), "--state", str(state), *arguments]


def test_a_config_that_is_missing_or_wrong(tmp_path: Path) -> None:
    config, state = tmp_path / "run.toml", tmp_path / "state"
    refused(*coordinator(config, state), code=2, says=("cannot read", str(config)))
    config.write_text("[codec]\nkk = 3\n")
    refused(*coordinator(config, state), code=2, says=("'codec.kk'", "did you mean 'k'"))
    config.write_text("[codec]\nk = 5000\n")
    refused(*coordinator(config, state), code=2, says=("codec.k = 5000", "4096"))
    config.write_text("[outer.own_fragments.head]\ntensors = ['embed.weight']\n")
    fault = ("own_fragments.head.tensors", "'embed.weight'", "did you mean 'embed_tokens.weight'?")
    refused(*coordinator(config, state), code=2, says=fault)
    refused(
        "plan", "--config", str(config), "--mbit", "100", "--step-seconds", "1", code=2, says=fault
    )
    config.write_text("[codec\n")
    refused(*coordinator(config, state), code=2, says=("not valid TOML",))
    assert not state.exists()


def test_a_state_directory_that_cannot_be_one(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    assert run_loco("init", str(config), "--preset", "tiny").returncode == 0
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for state in (file, file / "below"):
        says = (f"{state} cannot be a state directory", "another --state")
        refused(*coordinator(config, state), code=2, says=says)
    assert file.read_text() == "mine"


def test_export_of_nothing(tmp_path: Path) -> None:
    arguments = ("export", "--state", str(tmp_path), "--out", str(tmp_path / "out"))
    refused(*arguments, code=2, says=(str(tmp_path), "holds no run"))
    assert not (tmp_path / "out").exists()


def no_room(num_bytes: int) -> None:
    """As on a full disk: no file takes more than so much."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


@pytest.mark.slow
def test_a_disk_without_room(tmp_path: Path) -> None:
    """Every command that writes says what it could not, and leaves nothing half done."""
    (tmp_path / "text.txt").write_text("We the people.\n" * 400)
    with Cluster(tmp_path, run={"rounds": 1}, quorum={"min_sites": 1}) as cluster:
        cluster.coordinator()
        cluster.finish(cluster.site("paris"))
    for room, arguments, says in (
        (16, ("init", "new.toml"), "cannot write new.toml"),
        (16, ("certs", "init", "ca"), "cannot write ca/ca.key"),
        (16, ("data", "prepare", "text.txt", "--out", "tokens"), "cannot write to tokens"),
        (2048, ("data", "prepare", "text.txt", "--out", "more"), "cannot write a shard to more"),
        (49_152, ("export", "--state", "state", "--out", "model"), "state/work/theta"),
        (16, ("coordinator", "run.toml", "--state", "new", "--listen", "127.0.0.1:0"), "refused"),
    ):
        done = subprocess.run(
            loco(*arguments),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            preexec_fn=partial(no_room, room),
            timeout=SECONDS,
        )
        assert done.returncode in (1, 2), done
        assert says in done.stderr.strip().splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_coordinator_in_use(tmp_path: Path) -> None:
    """Port, state directory, metrics port; wrong config; and what a site may not do to it."""
    with Cluster(tmp_path, quorum={"min_sites": 1}) as cluster:
        running = cluster.coordinator()
        running.says("listening on")
        other = tmp_path / "other"
        listen = ("--listen", cluster.address)
        refused(
            *coordinator(cluster.config, other, *listen),
            code=2,
            says=(cluster.address, "in use", "--listen"),
        )
        assert not other.exists(), "nothing is created for a coordinator that cannot listen"
        refused(
            *coordinator(cluster.config, cluster.state, "--listen", "127.0.0.1:0"),
            code=2,
            says=(str(cluster.state), "in use by another coordinator"),
        )
        refused(
            *coordinator(cluster.config, tmp_path / "third", "--listen", "127.0.0.1:0",
                         "--metrics", cluster.address),
            code=2,
            says=(cluster.address, "--metrics"),
        )  # fmt: skip
        free = f"127.0.0.1:{free_port()}"
        refused(
            *coordinator(cluster.config, tmp_path / "third", "--listen", free, "--metrics", free),
            code=2,
            says=(free, "--metrics"),
        )
        assert not (tmp_path / "third").exists()
        before = cluster.status()
        _corpora_that_cannot_be_used(cluster, tmp_path)
        assert cluster.status()["theta_digest"] == before["theta_digest"]
        assert cluster.status()["sites_registered"] == 0
        running.kill()
        changed = cluster.config.read_text().replace("steps = 3", "steps = 4")
        cluster.config.write_text(changed)
        refused(
            *coordinator(cluster.config, cluster.state),
            code=2,
            says=("inner.steps was 3, is 4", "another --state"),
        )


def _corpora_that_cannot_be_used(cluster: Cluster, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for data, says in (
        (str(tmp_path / "nothing"), ("does not exist",)),
        (str(empty), (str(empty),)),
        ("sotu:1600-1700", ("1600-1700",)),
    ):
        refused(*worker(cluster.address, "--data", data), code=2, says=says)
    refused(*worker(cluster.address, "--ranks", "3"), code=2, says=("data.batch = 4", "3 ranks"))


@pytest.mark.slow
def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """Exit code 5; theta of the coordinator is that of the last committed round."""
    wild = {"optimizer": "sgd", "lr": 1e6, "max_grad_norm": 0.0}
    with Cluster(tmp_path, inner=wild, quorum={"min_sites": 1}) as c:
        c.coordinator()
        paris = c.site("paris", ranks=2)
        assert paris.wait() == 5, paris.output
        assert "inner.lr" in paris.output
        assert "Traceback" not in paris.output
        status = c.status()
        assert status["sites"][0]["status"] == "left"
        paris_again = c.site("paris", log="again")
        assert paris_again.wait() == 5, "theta is still what it was: the same happens again"


@pytest.mark.slow
def test_the_same_site_twice_at_once(tmp_path: Path) -> None:
    """The newer process goes on; the older one stops and says why."""
    with Cluster(tmp_path, run={"rounds": 200}, quorum={"min_sites": 1}) as cluster:
        cluster.coordinator()
        older = cluster.site("paris")
        cluster.reaches(1)
        newer = cluster.site("paris", log="newer")
        assert older.wait() == 3, older.output
        assert "joined again by another process" in older.output
        assert "Traceback" not in older.output
        at = cluster.status()["round"]
        cluster.reaches(at + 1)
        assert newer.popen.poll() is None, newer.output
