//! The demonstration, twice in one directory, with the real binary.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, free_port, rimrock, scratch};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

fn quickstart(dir: &Path, more: &[&str]) -> Output {
    let listen = format!("127.0.0.1:{}", free_port());
    let mut command = rimrock();
    command.arg("quickstart").arg("--dir").arg(dir).args(["--once", "--listen", &listen]).args(more);
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn it_verifies_everything_and_goes_on_where_it_ended() {
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(scratch()).unwrap();
    for (run, step) in
        [("first", "step 5000 again"), ("second", "step 10000 again"), ("third", "step 15000 again")]
    {
        let output = quickstart(directory.path(), &["--size", "24MB", "--pool-size", "1GiB"]);
        let text = text(&output);
        assert!(output.status.success(), "the {run} run: {text}");
        assert!(text.contains(step) && text.contains("Every byte was compared"), "the {run} run: {text}");
        assert_eq!(text.contains("as left"), run != "first", "the {run} run: {text}");
    }
    // What another model left is not overwritten.
    let output = quickstart(directory.path(), &["--size", "200MB"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("same --size"), "{}", text(&output));
}

#[test]
fn a_busy_port_and_a_running_one_are_named() {
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(scratch()).unwrap();
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = holder.local_addr().unwrap().to_string();
    let output = rimrock()
        .args(["quickstart", "--once", "--size", "12MB", "--pool-size", "1GiB", "--listen", &listen, "--dir"])
        .arg(directory.path())
        .output()
        .unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&listen) && text.contains("in use") && text.contains("--listen"), "{text}");
}

const SMALL: [&str; 4] = ["--size", "24MB", "--pool-size", "1GiB"];

#[test]
fn what_the_user_made_and_uses_is_left_alone() {
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(scratch()).unwrap();
    let run = || {
        let output = quickstart(directory.path(), &SMALL);
        let text = text(&output);
        assert!(output.status.success() && text.contains("Every byte was compared"), "{text}");
        text
    };
    run();
    let disk = format!("uring:{}/pool.img", directory.path().display());
    {
        let daemon = Daemon::start();
        daemon.cli_ok(&["pool", "import", &disk]);
        daemon.cli_ok(&["volume", "create", "data", "10GiB"]);
        daemon.cli_ok(&["snapshot", "create", "data@v1"]);
        daemon.cli_ok(&["volume", "rollback", "model", "step-2000"]);
        let listen = format!("127.0.0.1:{}", free_port());
        daemon.cli_ok(&["volume", "export", "finetune-5000", "--listen", &listen]);
        daemon.cli_ok(&["volume", "export", "model@step-1000", "--listen", &listen]);
        daemon.cli_ok(&["pool", "export", "main"]);
    }
    let second = run();
    assert!(second.contains("step 2000 as left") && second.contains("step 10000 again"), "{second}");
    assert!(run().contains("step 15000 again"));
    let daemon = Daemon::start();
    daemon.cli_ok(&["pool", "import", &disk]);
    let named = |method: &str, name: &str| daemon.call(method, json!({ "name": name }));
    for name in ["data@v1", "model@before-rollback-1"] {
        named("snapshot_get", name);
    }
    for (method, name) in [("volume_get", "finetune-5000"), ("snapshot_get", "model@step-1000")] {
        let exports = named(method, name)["exports"].as_array().unwrap().len();
        assert_eq!(exports, 1, "{name}");
    }
    named("volume_get", "data");
    // What the first run made and nobody uses is gone.
    for name in ["model@step-2000", "model@step-6000-bad"] {
        daemon.refused("snapshot_get", json!({ "name": name }));
    }
}

#[test]
fn programs_get_a_report_and_the_environments_socket_is_not_taken() {
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(scratch()).unwrap();
    let listen = format!("127.0.0.1:{}", free_port());
    let elsewhere = directory.path().join("daemon.sock");
    let output = rimrock()
        .env("RIMROCK_SOCKET", elsewhere.join("not-a-directory"))
        .args(["-o", "json", "quickstart", "--once", "--listen", &listen, "--dir"])
        .arg(directory.path())
        .args(SMALL)
        .output()
        .unwrap();
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output)));
    assert_eq!(report["checkpoints"].as_array().unwrap().len(), 8);
    assert!(report["rollback_seconds"].as_f64().unwrap() > 0.0 && report["versions"] == 6, "{report}");
    assert!(!elsewhere.exists());
}

#[test]
fn what_to_try_next_can_be_typed_as_it_is_printed() {
    use std::io::BufRead;
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(scratch()).unwrap();
    let listen = format!("127.0.0.1:{}", free_port());
    let mut running = rimrock()
        .args(["quickstart", "--listen", &listen, "--dir"])
        .arg(directory.path())
        .args(SMALL)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(running.stdout.take().unwrap()).lines();
    let told = lines.map(Result::unwrap).skip_while(|line| !line.starts_with("Try next"));
    let commands: Vec<String> =
        told.skip(1).take(5).map(|line| format!("{} >/dev/null", line.trim())).collect();
    let typed = std::process::Command::new("sh").arg("-ec").arg(commands.join("\n")).output().unwrap();
    let pid = nix::unistd::Pid::from_raw(running.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    running.wait().unwrap();
    assert!(commands.len() == 5 && typed.status.success(), "{commands:#?}: {}", text(&typed));
}
