"""Origins of settings, and the sentences for what is not possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.config import (
    HostPort,
    JoinLink,
    NodeConfig,
    TrackerConfig,
    load,
    parse_address,
    parse_host_port,
    parse_join,
    parse_peers,
)

RUN = bytes(range(32))


def test_flags_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('name = "file"\nthreads = 2\ndevice = "cpu"\n')
    environment = {"P2PDILOCO_NAME": "env", "P2PDILOCO_THREADS": "3", "HOME": "/"}
    loaded = load(NodeConfig, {"name": "flag", "threads": None}, file=file, environment=environment)
    assert (loaded.values.name, loaded.values.threads, loaded.values.device) == ("flag", 3, "cpu")
    assert loaded.values.micro_batch == 0
    assert loaded.origins["name"] == "--name"
    assert loaded.origins["threads"] == "P2PDILOCO_THREADS"
    assert loaded.origins["device"] == str(file)
    assert loaded.origins["micro_batch"] == "default"


def test_the_environment_may_name_the_file_and_hold_lists_and_switches(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("threads = 2\n")
    environment = {
        "P2PDILOCO_CONFIG": str(file),
        "P2PDILOCO_PEERS": "a:1, b:2",
        "P2PDILOCO_KEEP_DELTAS": "true",
    }
    values = load(NodeConfig, {}, environment=environment).values
    assert (values.threads, values.peers, values.keep_deltas) == (2, ("a:1", "b:2"), True)


def test_a_variable_of_the_other_command_is_known_and_ignored() -> None:
    assert load(TrackerConfig, {}, environment={"P2PDILOCO_THREADS": "3"}).values == TrackerConfig()


@pytest.mark.parametrize(
    ("text", "environment", "sentence"),
    [
        ("thraeds = 2", {}, "unknown key 'thraeds'; did you mean 'threads'?"),
        ("threads = 0", {}, "threads = 0 is not possible: give a whole number >= 1."),
        ("threads = 'many'", {}, "threads = 'many' is not possible: give a whole number."),
        ("stay = 'yes'", {}, "stay = 'yes' is not possible: give true or false."),
        ("advertise = 7", {}, "advertise = 7 is not possible: give a list."),
        ("advertise = [7]", {}, "advertise = [7] is not possible: give text."),
        ("tensorboard = 7", {}, "tensorboard = 7 is not possible: give text."),
        ("device = 'gpu'", {}, "device = 'gpu' is not possible: give auto, cpu, cuda or cuda:N"),
        ("checkpointing = 'yes'", {}, "checkpointing = 'yes' is not possible: give auto, on or off"),
        ("offload = 'all'", {}, "offload = 'all' is not possible: give auto, none, anchor or moments"),
        ("threads", {}, "is not valid TOML"),
        ("", {"P2PDILOCO_DATADIR": "x"}, "did you mean 'P2PDILOCO_DATA_DIR'?"),
        ("", {"P2PDILOCO_COFNIG": "x"}, "did you mean 'P2PDILOCO_CONFIG'?"),
        ("", {"P2PDILOCO_Threads": "2"}, "variable P2PDILOCO_Threads; did you mean 'P2PDILOCO_THREADS'?"),
        ("", {"P2PDILOCO_THREADS": "x"}, "P2PDILOCO_THREADS: threads = 'x' is not possible"),
        (
            "",
            {"P2PDILOCO_FOO": "x"},
            "variable P2PDILOCO_FOO: the names are those of the flags in p2pdiloco ",
        ),
        ("", {"P2PDILOCO_PORT": "7474"}, "variable P2PDILOCO_PORT"),
        ("", {"P2PDILOCO_SERVICE_HOST": "tracker"}, "variable P2PDILOCO_SERVICE_HOST"),
    ],
)
def test_a_slip_is_refused_in_one_sentence(
    tmp_path: Path, text: str, environment: dict[str, str], sentence: str
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(OperatorError) as caught:
        load(NodeConfig, {}, file=file, environment=environment)
    assert sentence in str(caught.value)
    assert "?." not in str(caught.value)
    assert caught.value.exit_code == 3


def test_no_name_is_advised_that_is_near_only_by_the_prefix() -> None:
    with pytest.raises(OperatorError) as caught:
        load(NodeConfig, {}, environment={"P2PDILOCO_FOO": "x"})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["P2PDILOCO", "P2PDILOCO_TRACKER"])
def test_what_kubernetes_and_docker_set_beside_a_service_of_that_name_is_no_slip(name: str) -> None:
    """No node started in a pod beside a Service named p2pdiloco."""
    environment = {
        f"{name}_SERVICE_HOST": "10.0.171.239",
        f"{name}_SERVICE_PORT": "8080",
        f"{name}_SERVICE_PORT_HTTP": "8080",
        f"{name}_PORT": "tcp://[fd00::1]:8080",
        f"{name}_PORT_8080_TCP": "tcp://10.0.171.239:8080",
        f"{name}_PORT_8080_TCP_PROTO": "tcp",
        f"{name}_PORT_8080_TCP_PORT": "8080",
        f"{name}_PORT_8080_TCP_ADDR": "fd00::1",
        f"{name}_ENV_PYTHON_VERSION": "two\nlines",
        f"{name}_ENV_http_proxy": "",
    }
    assert load(NodeConfig, {}, environment=environment).values == NodeConfig()
    assert load(TrackerConfig, {}, environment={f"{name}_NAME": "/web/alias"}).values == TrackerConfig()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be read: No such file"):
        load(NodeConfig, {}, file=tmp_path / "none.toml", environment={})


def test_join_links() -> None:
    assert parse_join(f"http://10.0.0.1:7474/#{RUN.hex()}") == JoinLink("http://10.0.0.1:7474", RUN)
    assert parse_join(" https://tracker.example/ ") == JoinLink("https://tracker.example:443", None)
    assert parse_join("http://[::1]:80") == JoinLink("http://[::1]:80", None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "No tracker is named"),
        ("10.0.0.1:7474", "has no scheme: write http://10.0.0.1:7474"),
        ("http//1.2.3.4", "has no scheme: write http://HOST:PORT/#RUNID"),
        ("ftp://1.2.3.4:1", "the scheme is http or https"),
        ("http://1.2.3.4:99999", "is not an address"),
        ("http://1.2.3.4:1/page", "is not an address"),
        ("http://1.2.3.4:1/#abc", "is not a RunId"),
        ("http://1.2.3.4:1/#" + "00" * 31, "is not a RunId"),
    ],
)
def test_a_bad_join_link_says_how_to_write_it(text: str, sentence: str) -> None:
    with pytest.raises(OperatorError) as caught:
        parse_join(text)
    assert sentence in str(caught.value)
    assert caught.value.exit_code == 2


def test_host_and_port() -> None:
    assert parse_host_port("1.2.3.4:5", "x") == HostPort("1.2.3.4", 5)
    assert str(parse_host_port("[::1]:5", "x")) == "[::1]:5"
    assert parse_host_port(":5", "x").host == "0.0.0.0"
    for bad in ("1.2.3.4", "1.2.3.4:x", "1.2.3.4:70000", "a:b:5"):
        with pytest.raises(OperatorError, match="not HOST:PORT"):
            parse_host_port(bad, "--listen")


def test_peers_dial_literals_only() -> None:
    assert parse_address("localhost:5", "--listen") == HostPort("127.0.0.1", 5)
    with pytest.raises(OperatorError, match="names a host: give its IP address"):
        parse_address("tracker.example:5", "--listen")


def test_an_empty_list_of_peers_is_not_taken_for_none() -> None:
    assert parse_peers(None) == []
    assert parse_peers(("1.2.3.4:5",)) == [HostPort("1.2.3.4", 5)]
    for empty in ((), ("",), (" ",)):
        with pytest.raises(OperatorError, match="list of peers is empty"):
            parse_peers(empty)
