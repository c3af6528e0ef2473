//! The command line: what it prints, what it refuses, and with which exit code.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, free_port, rimrock};
use serde_json::Value;
use std::process::Output;

fn texts(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn every_command_has_help_with_an_example() {
    let top = ["serve", "quickstart", "pool", "device", "volume", "snapshot", "clone", "events", "rpc"];
    let mut commands: Vec<Vec<&str>> = top.iter().map(|command| vec![*command]).collect();
    for (noun, verbs) in [
        ("pool", &["create", "import", "export", "list", "show", "destroy"][..]),
        ("device", &["create", "list", "show", "delete"]),
        (
            "volume",
            &[
                "create", "list", "show", "delete", "resize", "rename", "rollback", "promote", "diff",
                "export", "unexport",
            ],
        ),
        (
            "snapshot",
            &["create", "list", "show", "delete", "pin", "unpin", "rollback", "diff", "send", "receive"],
        ),
        ("clone", &["create", "list", "show", "delete"]),
        ("bench", &["target"]),
    ] {
        commands.extend(verbs.iter().map(|verb| vec![noun, verb]));
    }
    for command in commands {
        let (code, out, err) = texts(&rimrock().args(&command).arg("--help").output().unwrap());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{command:?}");
        let nouns = command.len() == 1 && !["serve", "quickstart", "events", "rpc"].contains(&command[0]);
        assert!(nouns || out.contains("Example"), "{command:?} has no example:\n{out}");
        // A longer one would be broken in two, and could not be copied.
        let long = out.lines().find(|line| line.starts_with("  rimrock ") && line.chars().count() > 80);
        assert_eq!(long, None, "{command:?}");
    }
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    for arguments in [
        &["volume", "crate"][..],
        &["volume", "create", "v"],
        &["volume", "create", "v", "10Gx"],
        &["volume", "create", "v", "0"],
        &["volume", "create", "v", "-5G"],
        &["volume", "create", "v", "99999999P"],
        &["volume", "create", "v", "1G", "--block-size", "1024"],
        &["volume", "export", "v", "--listen", "nowhere"],
        &["snapshot", "create", "no-volume-named"],
        &["volume", "create", "v", "10Gb"],
        &["volume", "export", "v", "--listen", "127.0.0.1:0"],
        &["bench", "target", "--connect", "127.0.0.1:1", "--nqn", "nqn", "--workload", "write"],
        &["bench", "target", "--backend", "uring:Cargo.toml", "--workload", "randrw:90"],
        &["bench", "target", "--backend", "uring:Cargo.toml?size=1GiB", "--volume"],
        &["rpc", "pool_list", "--list"],
        &["pool", "destroy", "p"],
        &["rpc"],
        &["rpc", "pool_list", "not json"],
        &["serve", "--cores", "3-1"],
        &["pool", "list", "-o", "yaml"],
        &[],
    ] {
        let (code, out, err) = texts(&rimrock().args(arguments).output().unwrap());
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}: {err}");
        assert!(!err.is_empty());
    }
}

#[test]
fn without_a_daemon_the_next_step_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("none.sock");
    let (code, out, err) =
        texts(&rimrock().arg("--socket").arg(&socket).args(["pool", "list"]).output().unwrap());
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("no Rimrock daemon answers") && err.contains("rimrock serve"), "{err}");
    // The same by environment.
    let output = rimrock().env("RIMROCK_SOCKET", &socket).args(["pool", "list"]).output().unwrap();
    assert!(texts(&output).2.contains(socket.to_str().unwrap()));
}

#[test]
fn a_day_at_the_command_line() {
    let daemon = Daemon::start();
    let disk = format!("uring:{}/disk.img?size=1GiB", daemon.path().display());
    assert!(
        daemon.cli_ok(&["pool", "create", "main", &disk]).contains("1023")
            || daemon.cli_ok(&["pool", "list"]).contains("main")
    );
    let out = daemon.cli_ok(&["volume", "create", "model", "10GiB"]);
    assert!(out.contains("10 GiB") && out.contains("model"), "{out}");
    daemon.cli_ok(&["snapshot", "create", "model@step-1000"]);
    daemon.cli_ok(&["snapshot", "create", "main/model@step-2000"]);
    let out = daemon.cli_ok(&["snapshot", "list", "model"]);
    assert!(out.starts_with("NAME") && out.lines().count() == 3, "{out}");
    daemon.cli_ok(&["clone", "create", "model@step-1000", "finetune"]);
    assert!(daemon.cli_ok(&["clone", "list"]).contains("finetune"));
    assert!(
        daemon
            .cli_ok(&["snapshot", "diff", "model@step-1000", "model@step-2000"])
            .contains("nothing differs")
    );
    let out = daemon.cli_ok(&["volume", "rollback", "model", "step-1000"]);
    assert!(out.contains("kept as model@before-rollback-1"), "{out}");
    daemon.cli_ok(&["snapshot", "rollback", "model@step-2000", "--discard"]);
    daemon.cli_ok(&["volume", "resize", "model", "20GiB"]);
    daemon.cli_ok(&["volume", "rename", "finetune", "tuned"]);

    let listen = format!("127.0.0.1:{}", free_port());
    let out = daemon.cli_ok(&["volume", "export", "model", "--listen", &listen]);
    let port = listen.rsplit_once(':').unwrap().1;
    assert!(
        out.contains(&format!(
            "nvme connect -t tcp -a 127.0.0.1 -s {port} -n nqn.2026-01.io.rimrock:main:model"
        )),
        "{out}"
    );
    let (code, _, err) = texts(&daemon.cli(&["volume", "delete", "model"]));
    assert!(code == Some(1) && err.contains("rimrock volume unexport model"), "{err}");
    daemon.cli_ok(&["volume", "unexport", "model"]);

    let json: Value =
        serde_json::from_str(&daemon.cli_ok(&["-o", "json", "volume", "show", "model"])).unwrap();
    assert_eq!(json["size"], 20_u64 << 30);
    let rpc: Value =
        serde_json::from_str(&daemon.cli_ok(&["rpc", "volume_get", r#"{"name":"model"}"#])).unwrap();
    assert_eq!(rpc, json);
    let (code, _, err) = texts(&daemon.cli(&["rpc", "volume_gte", r#"{"name":"model"}"#]));
    assert!(code == Some(1) && err.contains("did you mean volume_get?"), "{err}");
    let (code, _, err) = texts(&daemon.cli(&["rpc", "volume_get", r#"{"nam":"model"}"#]));
    assert!(code == Some(1) && err.contains("did you mean name?"), "{err}");

    daemon.cli_ok(&["device", "create", "scratch", "ram:64MiB"]);
    assert!(daemon.cli_ok(&["device", "list"]).contains("pool main"));
    daemon.cli_ok(&["device", "delete", "scratch"]);
    for name in ["tuned", "model"] {
        daemon.cli_ok(&["volume", "delete", name]);
    }
    daemon.cli_ok(&["pool", "export", "main"]);
    daemon.cli_ok(&["pool", "import", disk.split('?').next().unwrap()]);
    let (code, _, err) = texts(&daemon.cli(&["pool", "destroy", "main", "--confirm", "mian"]));
    assert!(code == Some(1) && err.contains("main"), "{err}");
    daemon.cli_ok(&["pool", "destroy", "main", "--confirm", "main"]);
}

#[test]
fn the_methods_are_listed_whatever_the_environment_says() {
    let with_socket = |arguments: &[&str]| {
        let mut command = rimrock();
        texts(&command.env("RIMROCK_SOCKET", "/nowhere.sock").args(arguments).output().unwrap())
    };
    let (code, out, err) = with_socket(&["rpc", "--list"]);
    assert!(code == Some(0) && out.contains("volume_create name size"), "{err}");
    let (code, out, err) = with_socket(&["rpc", "--list", "-o", "json"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let methods: Vec<String> = serde_json::from_str(&out).unwrap();
    assert!(methods.contains(&"volume_create".to_owned()));
    assert_eq!(with_socket(&["rpc", "--reference"]).0, Some(0));
}

#[test]
fn programs_get_errors_as_objects() {
    let daemon = Daemon::start();
    let (code, out, err) = texts(&daemon.cli(&["volume", "show", "none", "-o", "json"]));
    assert_eq!((code, out.as_str()), (Some(1), ""));
    let error: Value = serde_json::from_str(&err).unwrap();
    assert!(error["code"].as_i64().unwrap() < 0 && error["data"]["hint"].is_string(), "{error}");
    let output =
        rimrock().args(["--socket", "/nowhere.sock", "pool", "list", "-o", "json"]).output().unwrap();
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(
        error["code"] == 1 && error["data"]["hint"].as_str().unwrap().contains("rimrock serve"),
        "{error}"
    );
}

#[test]
fn a_rollback_goes_by_the_snapshots_own_volume() {
    let daemon = Daemon::start();
    daemon.cli_ok(&["pool", "create", "main", "ram:256MiB"]);
    daemon.cli_ok(&["volume", "create", "model", "64MiB"]);
    daemon.cli_ok(&["snapshot", "create", "model@step-1000"]);
    // A snapshot of another client's naming, without `@`.
    daemon.call(
        "bdev_lvol_snapshot",
        serde_json::json!({ "lvol_name": "main/model", "snapshot_name": "nightly" }),
    );
    assert!(daemon.cli_ok(&["snapshot", "rollback", "nightly"]).contains("model is what nightly was"));
    assert!(daemon.cli_ok(&["volume", "rollback", "model", "nightly"]).contains("model is what nightly was"));
    // The volume by its UUID.
    let shown = daemon.call("volume_get", serde_json::json!({ "name": "model" }));
    let out = daemon.cli_ok(&["volume", "rollback", shown["uuid"].as_str().unwrap(), "step-1000"]);
    assert!(out.contains("model is what model@step-1000 was"), "{out}");
    // Under another name, while a new volume bears the old one.
    daemon.cli_ok(&["volume", "rename", "model", "model-v1"]);
    daemon.cli_ok(&["volume", "create", "model", "64MiB"]);
    let out = daemon.cli_ok(&["snapshot", "rollback", "model@step-1000", "--discard"]);
    assert!(out.contains("model-v1 is what model@step-1000 was"), "{out}");
    let out = daemon.cli_ok(&["volume", "rollback", "model-v1", "step-1000", "--discard"]);
    assert!(out.contains("model-v1 is what model@step-1000 was"), "{out}");
    let (code, _, err) = texts(&daemon.cli(&["volume", "rollback", "model", "step-1000"]));
    assert_eq!(code, Some(1), "{err}");
}

#[test]
fn clones_are_the_volumes_that_began_as_a_snapshot() {
    let daemon = Daemon::start();
    daemon.cli_ok(&["pool", "create", "main", "ram:256MiB"]);
    daemon.cli_ok(&["volume", "create", "model", "64MiB"]);
    daemon.cli_ok(&["snapshot", "create", "model@1"]);
    daemon.cli_ok(&["clone", "create", "model@1", "finetune"]);
    daemon.cli_ok(&["snapshot", "create", "finetune@1"]);
    let clones: Value = serde_json::from_str(&daemon.cli_ok(&["clone", "list", "-o", "json"])).unwrap();
    assert!(clones.as_array().unwrap().len() == 1 && clones[0]["name"] == "finetune", "{clones}");
    let (code, _, err) = texts(&daemon.cli(&["clone", "delete", "model"]));
    assert!(code == Some(1) && err.contains("did not begin as a snapshot"), "{err}");
    daemon.cli_ok(&["clone", "delete", "finetune"]);
    assert!(daemon.cli_ok(&["volume", "list"]).contains("model"));
}

#[test]
fn sizes_that_lose_or_add_something_are_said() {
    let daemon = Daemon::start();
    daemon.cli_ok(&["pool", "create", "main", "ram:256MiB"]);
    let out = daemon.cli_ok(&["volume", "create", "tiny", "1"]);
    assert!(out.contains("The size is 1 MiB, not 1 B"), "{out}");
    let out = daemon.cli_ok(&["volume", "create", "model", "64MiB"]);
    assert!(!out.contains("The size is"), "{out}");
    let (code, _, err) = texts(&daemon.cli(&["volume", "resize", "model", "32MiB"]));
    assert_eq!(code, Some(1));
    assert!(err.contains("--allow-shrink"), "{err}");
    assert!(daemon.cli_ok(&["volume", "resize", "model", "32MiB", "--allow-shrink"]).contains("32 MiB"));
}

#[test]
fn an_answer_that_is_lost_is_a_failure_and_one_that_nobody_reads_is_none() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = rimrock().args(["rpc", "--list"]).stdout(full).output().unwrap();
    let (code, _, err) = texts(&output);
    assert!(code == Some(1) && err.contains("cannot write the answer"), "{err}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = rimrock().args(["rpc", "--list"]).stdout(writer).output().unwrap();
    assert_eq!(texts(&output), (Some(0), String::new(), String::new()));
}

#[test]
fn a_bench_of_what_exists_only_reads() {
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(daemon::scratch()).unwrap();
    let path = directory.path().join("precious.img");
    let precious = vec![0xA5; 8 << 20];
    std::fs::write(&path, &precious).unwrap();
    let backend = format!("uring:{}", path.display());
    let bench = |more: &[&str]| {
        let always = ["bench", "target", "--seconds", "0.05", "--warmup", "0", "--backend", &backend];
        let (code, out, err) = texts(&rimrock().args(always).args(more).output().unwrap());
        assert_eq!(code, Some(0), "{err}");
        out
    };
    let out = bench(&[]);
    assert!(out.contains("randread") && out.contains("Reads only") && !out.contains("randwrite"), "{out}");
    assert_eq!(std::fs::read(&path).unwrap(), precious);
    let out = bench(&["--overwrite", "--workload", "write"]);
    assert!(out.contains("write"), "{out}");
}

#[test]
fn groups_pins_and_promotion() {
    let daemon = Daemon::start();
    let ram = "ram:256MiB";
    daemon.cli_ok(&["pool", "create", "main", ram]);
    for volume in ["rank0", "rank1", "main/rank2"] {
        daemon.cli_ok(&["volume", "create", volume, "16M"]);
    }
    let out = daemon.cli_ok(&["snapshot", "create", "rank0@1", "rank1@1", "main/rank2@1"]);
    assert_eq!(out.lines().count(), 4, "{out}");
    let out = daemon.cli_ok(&["snapshot", "list", "-o", "json"]);
    let listed: Value = serde_json::from_str(&out).unwrap();
    let epochs: Vec<&Value> = listed.as_array().unwrap().iter().map(|node| &node["epoch"]).collect();
    assert!(epochs.len() == 3 && epochs.iter().all(|epoch| *epoch == epochs[0]), "{epochs:?}");
    let out = daemon.cli_ok(&["snapshot", "pin", "rank0@1", "--by", "serving", "--reason", "in use"]);
    assert!(out.contains("serving"), "{out}");
    let (code, _, err) = texts(&daemon.cli(&["snapshot", "delete", "rank0@1"]));
    assert!(
        code == Some(1) && err.contains("'rank0@1' cannot be deleted: it is pinned by 'serving' (in use)"),
        "{err}"
    );
    assert!(daemon.cli_ok(&["snapshot", "list"]).contains("serving"));
    daemon.cli_ok(&["snapshot", "unpin", "rank0@1", "--by", "serving"]);
    daemon.cli_ok(&["clone", "create", "rank0@1", "tuned"]);
    let (code, _, err) = texts(&daemon.cli(&["volume", "promote", "rank1"]));
    assert!(code == Some(1) && err.contains("'rank1' is no clone"), "{err}");
    daemon.cli_ok(&["volume", "promote", "tuned"]);
    let out = daemon.cli_ok(&["clone", "list"]);
    assert!(out.contains("rank0") && !out.contains("tuned"), "{out}");
    daemon.cli_ok(&["volume", "delete", "rank0"]);
    daemon.cli_ok(&["snapshot", "delete", "rank0@1"]);
    let out = daemon.cli_ok(&["events"]);
    for text in ["volume rank0 was created", "snapshot rank2@1 was created", "snapshot rank0@1 was deleted"] {
        assert!(out.contains(text), "{out}");
    }
    let events: Value =
        serde_json::from_str(&daemon.cli_ok(&["events", "--since", "3", "--limit", "2", "-o", "json"]))
            .unwrap();
    assert_eq!((&events[0]["sequence"], events.as_array().unwrap().len()), (&Value::from(4), 2));
    assert_eq!((&events[0]["kind"], &events[0]["name"]), (&"snapshot_created".into(), &"rank0@1".into()));
}
