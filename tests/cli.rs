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
    let top = ["serve", "quickstart", "pool", "device", "volume", "snapshot", "clone", "rpc"];
    let mut commands: Vec<Vec<&str>> = top.iter().map(|command| vec![*command]).collect();
    for (noun, verbs) in [
        ("pool", &["create", "import", "export", "list", "show", "destroy"][..]),
        ("device", &["create", "list", "show", "delete"]),
        (
            "volume",
            &[
                "create", "list", "show", "delete", "resize", "rename", "rollback", "diff", "export",
                "unexport",
            ],
        ),
        ("snapshot", &["create", "list", "show", "delete", "rollback", "diff"]),
        ("clone", &["create", "list", "show", "delete"]),
        ("bench", &["target"]),
    ] {
        commands.extend(verbs.iter().map(|verb| vec![noun, verb]));
    }
    for command in commands {
        let (code, out, err) = texts(&rimrock().args(&command).arg("--help").output().unwrap());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{command:?}");
        let nouns = command.len() == 1 && !["serve", "quickstart", "rpc"].contains(&command[0]);
        assert!(nouns || out.contains("Example"), "{command:?} has no example:\n{out}");
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
        &["snapshot", "rollback", "no-volume-named"],
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
