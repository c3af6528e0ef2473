//! A full pool as hosts and operators meet it: it refuses new data for good, and nothing else; space that is given back
//! can be used; each threshold is told once.
#![forbid(unsafe_code)]

mod daemon;

use std::time::{Duration, Instant};

use daemon::Daemon;
use daemon::host::{Host, content, contents};
use nix::sys::signal::Signal;
use rimrock::nvme::Status;
use serde_json::{Value, json};

/// Writes 256 KiB at a time until it is refused. Blocks written.
fn fill(host: &Host, first: u64) -> u64 {
    let mut at = first;
    loop {
        match host.write(at, contents(at, 64, 1)) {
            Ok(()) => at += 64,
            Err(status) => {
                assert!(status.is(Status::CAPACITY_EXCEEDED) && status.dnr(), "{status}");
                return at;
            }
        }
    }
}

/// Thresholds told so far, in order.
fn thresholds(daemon: &Daemon) -> Vec<(u64, String)> {
    let events: Value = serde_json::from_str(&daemon.cli_ok(&["events", "-o", "json"])).unwrap();
    let told = events.as_array().unwrap().iter().filter(|event| event["kind"] == "pool_threshold");
    told.map(|e| (e["percent"].as_u64().unwrap(), e["direction"].as_str().unwrap().to_owned())).collect()
}

fn wait_for_thresholds(daemon: &Daemon, expected: &[(u64, &str)]) {
    let expected: Vec<(u64, String)> = expected.iter().map(|(p, d)| (*p, (*d).to_owned())).collect();
    let started = Instant::now();
    while thresholds(daemon) != expected {
        assert!(started.elapsed() < daemon::PATIENCE, "{:?}", thresholds(daemon));
        std::thread::sleep(Duration::from_millis(100));
    }
    // And no more.
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(thresholds(daemon), expected);
}

const RISING: [(u64, &str); 3] = [(75, "rising"), (85, "rising"), (95, "rising")];

#[test]
fn a_full_pool_refuses_new_data_alone_and_each_threshold_is_told_once() {
    let port = daemon::free_port();
    let mut daemon = Daemon::start_with(Some(&format!(
        "[target]\nlisten = \"127.0.0.1:{port}\"\n\
         [[device]]\nname = \"disk\"\nuri = \"uring:DIR/pool.img?size=512MiB\"\n\
         [[pool]]\nname = \"p\"\ndevices = [\"disk\"]\ncreate = true\n"
    )));
    daemon.cli_ok(&["volume", "create", "v", "2GiB"]);
    daemon.cli_ok(&["volume", "create", "other", "16MiB"]);
    let (v, other) = (Host::connect(&daemon, "v"), Host::connect(&daemon, "other"));
    other.write(0, contents(0, 64, 7)).unwrap();
    let end = fill(&v, 0);
    assert!(end > 400 << 8, "only {end} blocks went in");
    wait_for_thresholds(&daemon, &RISING);
    assert!(daemon.cli_ok(&["events"]).contains("% of pool p is in use"), "{}", daemon.cli_ok(&["events"]));

    // Everything but new data goes on, also beside the refused one.
    let last = fill(&other, 1024);
    assert!(last < 1024 + (8 << 8), "{last}: more than the rests of all shards");
    for at in (0..end).step_by(64) {
        assert!(v.read(at, 64).unwrap() == contents(at, 64, 1), "block {at}");
    }
    v.write(3, content(3, 2)).unwrap();
    v.flush();
    let everything = |daemon: &Daemon| {
        let allocated = daemon.call("pool_get", json!({ "name": "p" }))["allocated"].clone();
        let lists = ["volume_list", "snapshot_list"].map(|method| daemon.call(method, json!({})));
        (allocated, lists)
    };
    let before = everything(&daemon);
    daemon.cli_ok(&["volume", "create", "new", "1GiB"]);
    assert!(Host::connect(&daemon, "new").read(0, 16).unwrap().iter().all(|byte| *byte == 0));
    daemon.call("volume_unexport", json!({ "name": "new" }));
    daemon.cli_ok(&["volume", "delete", "new"]);
    daemon.cli_ok(&["snapshot", "create", "v@full"]);
    daemon.cli_ok(&["clone", "create", "v@full", "c"]);
    daemon.cli_ok(&["volume", "resize", "c", "3GiB"]);
    daemon.cli_ok(&["volume", "rename", "c", "d"]);
    daemon.cli_ok(&["volume", "delete", "d"]);
    daemon.cli_ok(&["snapshot", "delete", "v@full"]);
    // What the snapshot had goes over to the volume again, in the background.
    let started = Instant::now();
    while everything(&daemon) != before {
        assert!(
            started.elapsed() < daemon::PATIENCE,
            "something was left behind: {:#?}",
            everything(&daemon)
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(daemon.cli(&["pool", "check", "p", "--data"]).status.code(), Some(0));

    // A new life tells once more how it is; hosts find everything.
    drop((v, other));
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    wait_for_thresholds(&daemon, &RISING);
    let v = Host::connect(&daemon, "v");
    assert!(v.read(0, 4).unwrap() == [contents(0, 3, 1), content(3, 2)].concat());
    assert!(v.write(end, contents(end, 64, 1)).unwrap_err().is(Status::CAPACITY_EXCEEDED));

    // Space that is given back can be used, without a restart.
    v.deallocate(0, end as u32);
    v.flush();
    let mut all = RISING.to_vec();
    all.extend([(75, "falling"), (85, "falling"), (95, "falling")]);
    wait_for_thresholds(&daemon, &all);
    let again = fill(&v, 0);
    assert!(again + (32 << 8) > end, "{again} blocks after {end}");
    assert_eq!(daemon.cli(&["pool", "check", "p"]).status.code(), Some(0));
}

/// Peak resident memory of the daemon in bytes.
fn peak(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn memory_stays_within_its_budget_however_much_is_mapped() {
    const CACHE: u64 = 16 << 20;
    const BUFFERS: u64 = 64 << 20;
    let port = daemon::free_port();
    let mut daemon = Daemon::start_with(Some(&format!(
        "[memory]\npage_cache = \"16MiB\"\nbuffers = \"64MiB\"\n[target]\nlisten = \"127.0.0.1:{port}\"\n\
         [[device]]\nname = \"disk\"\nuri = \"uring:DIR/pool.img?size=1GiB\"\n\
         [[pool]]\nname = \"p\"\ndevices = [\"disk\"]\ncreate = true\n"
    )));
    daemon.cli_ok(&["volume", "create", "v", "16GiB"]);
    // One block in each MiB: a page of the map for each, four times what the cache may hold.
    let v = Host::connect(&daemon, "v");
    for mib in 0..16 << 10 {
        v.write(mib * 256, content(mib, 1)).unwrap();
    }
    v.flush();
    let metadata = daemon.call("pool_get", json!({ "name": "p" }))["metadata"].as_u64().unwrap();
    assert!(metadata > 3 * CACHE, "only {metadata} bytes of metadata");
    drop(v);
    let written = peak(&daemon);
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    let v = Host::connect(&daemon, "v");
    for mib in (0..16u64 << 10).map(|at| at * 7919 % (16 << 10)) {
        assert!(v.read(mib * 256, 1).unwrap() == content(mib, 1), "MiB {mib}");
    }
    assert_eq!(daemon.cli(&["pool", "check", "p"]).status.code(), Some(0));
    println!("peak {} MiB while writing, {} MiB after", written >> 20, peak(&daemon) >> 20);
    let most = CACHE + BUFFERS + (128 << 20);
    assert!(written <= most && peak(&daemon) <= most, "{written}, {} of {most}", peak(&daemon));
}
