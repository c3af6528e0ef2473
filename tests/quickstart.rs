//! The demonstration, twice in one directory, with the real binary.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{free_port, rimrock, scratch};
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
