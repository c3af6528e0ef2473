//! Damage in the file of a pool, as an operator and a host meet it: what is damaged is named, nothing else suffers, and
//! what has a second copy or can be derived is made whole.
#![forbid(unsafe_code)]

mod daemon;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use daemon::Daemon;
use daemon::host::{BLOCK, Host, content, contents};
use nix::sys::signal::Signal;
use rimrock::nvme::Status;
use serde_json::{Value, json};

/// A daemon with pool `p` on a file of `mib` MiB.
fn started(mib: u64) -> Daemon {
    let port = daemon::free_port();
    let daemon = Daemon::start_with(Some(&format!("[target]\nlisten = \"127.0.0.1:{port}\"\n")));
    daemon.cli_ok(&["pool", "create", "p", &format!("{}?size={mib}MiB", uri(&daemon)), "--shards", "2"]);
    daemon
}

fn file(daemon: &Daemon) -> PathBuf {
    daemon.path().join("pool.img")
}

fn uri(daemon: &Daemon) -> String {
    format!("uring:{}", file(daemon).display())
}

/// Flips a bit in the only block of the pool's file that holds these bytes.
fn spoil(daemon: &Daemon, bytes: &[u8]) -> u64 {
    let image = std::fs::read(file(daemon)).unwrap();
    let found: Vec<usize> =
        (0..image.len() / BLOCK).filter(|at| &image[at * BLOCK..][..BLOCK] == bytes).collect();
    let [block] = found[..] else { panic!("{found:?}") };
    flip(daemon, block as u64);
    (block * BLOCK) as u64
}

fn flip(daemon: &Daemon, block: u64) {
    let file = std::fs::File::options().read(true).write(true).open(file(daemon)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, block * BLOCK as u64 + 20).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], block * BLOCK as u64 + 20).unwrap();
    file.sync_all().unwrap();
}

/// Runs a check of the file, which is not in use: exit code and report.
fn check(daemon: &Daemon, more: &[&str]) -> (Option<i32>, Value) {
    let uri = uri(daemon);
    let arguments = [&["pool", "check", "--device", &uri, "-o", "json"], more].concat();
    let output = daemon.cli(&arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{error}")))
}

/// Findings that are no mere traces of a kill.
fn findings(report: &Value) -> Vec<&Value> {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["severity"] != "note").collect()
}

fn damage(daemon: &Daemon) -> Vec<Value> {
    let list: Value = serde_json::from_str(&daemon.cli_ok(&["pool", "damage", "p", "-o", "json"])).unwrap();
    list.as_array().unwrap().clone()
}

fn wait_for_event(daemon: &Daemon, text: &str) {
    let started = Instant::now();
    while !daemon.cli_ok(&["events"]).contains(text) {
        assert!(started.elapsed() < daemon::PATIENCE, "no event says {text}: {}", daemon.cli_ok(&["events"]));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_damaged_block_of_data_is_an_error_for_that_block_and_is_named() {
    let daemon = started(64);
    daemon.cli_ok(&["volume", "create", "v", "16MiB"]);
    {
        let v = Host::connect(&daemon, "v");
        v.write(0, contents(0, 256, 1)).unwrap();
        v.flush();
        daemon.cli_ok(&["snapshot", "create", "v@1"]);
        v.write(0, contents(0, 4, 2)).unwrap();
        v.flush();
    }
    daemon.cli_ok(&["pool", "export", "p", "--force"]);
    let at = spoil(&daemon, &content(100, 1));
    let (code, report) = check(&daemon, &["--data"]);
    let [finding] = findings(&report)[..] else { panic!("{report:#}") };
    assert_eq!((code, &finding["kind"], &finding["repairable"]), (Some(1), &json!("data"), &json!(false)));
    assert_eq!(finding["place"]["offset"], at);
    let out = daemon.cli(&["pool", "check", "--device", &uri(&daemon), "--data"]);
    let out = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.contains("v@1: 1 blocks from LBA 100 on") && out.contains("is not sound"), "{out}");

    daemon.cli_ok(&["pool", "import", &uri(&daemon)]);
    let (v, snapshot) = (Host::connect(&daemon, "v"), Host::connect(&daemon, "v@1"));
    for host in [&v, &snapshot] {
        assert!(host.read(100, 1).unwrap_err().is(Status::UNRECOVERED_READ_ERROR));
        assert!(host.read(64, 64).unwrap_err().is(Status::UNRECOVERED_READ_ERROR));
        assert!(host.read(4, 96).unwrap() == contents(4, 96, 1));
        assert!(host.read(101, 155).unwrap() == contents(101, 155, 1));
    }
    let [found] = &damage(&daemon)[..] else { panic!() };
    assert_eq!((&found["kind"], &found["state"]), (&json!("data"), &json!("lost")));
    assert_eq!(found["epoch"], 1, "from before the snapshot");
    let names: BTreeSet<&str> =
        found["extents"].as_array().unwrap().iter().map(|extent| extent["name"].as_str().unwrap()).collect();
    assert_eq!(names, BTreeSet::from(["v", "v@1"]));
    assert!(
        found["extents"].as_array().unwrap().iter().all(|e| e["lba"] == 100 && e["blocks"] == 1),
        "{found}"
    );
    assert_eq!(daemon.call("pool_get", json!({ "name": "p" }))["health"], "degraded");
    wait_for_event(&daemon, &format!("byte {at} of"));

    // What is found later at a lower place is told as well, and what was told is not told again.
    let lower = spoil(&daemon, &content(10, 1));
    assert!(lower < at);
    assert!(v.read(10, 1).unwrap_err().is(Status::UNRECOVERED_READ_ERROR));
    wait_for_event(&daemon, &format!("byte {lower} of"));
    assert_eq!(daemon.cli_ok(&["events"]).matches(&format!("byte {at} of")).count(), 1);

    // Written over, the volume is whole; the snapshot has it still.
    v.write(100, content(100, 3)).unwrap();
    assert!(v.read(100, 1).unwrap() == content(100, 3));
    assert!(snapshot.read(100, 1).is_err());
    let list = daemon.cli_ok(&["pool", "damage", "p"]);
    assert!(
        list.contains("v@1: 1 blocks from LBA 100 on") && !list.contains("v: 1 blocks from LBA 100"),
        "{list}"
    );
    daemon.cli_ok(&["pool", "damage", "p", "--clear"]);
    assert!(daemon.cli_ok(&["pool", "damage", "p"]).contains("no damage was found"));
    let again = daemon.cli(&["pool", "check", "p", "--data"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(snapshot.read(100, 1).is_err());
    assert_eq!(damage(&daemon).len(), 2, "both are found again");
}

/// A pool as a kill leaves it: volumes `v` and `w`, a snapshot, records in the journal. Its image.
fn killed() -> (Daemon, Vec<u8>) {
    let mut daemon = started(64);
    for name in ["v", "w"] {
        daemon.cli_ok(&["volume", "create", name, "16MiB"]);
        Host::connect(&daemon, name).write(0, contents(0, 256, 1)).unwrap();
    }
    daemon.cli_ok(&["snapshot", "create", "v@1"]);
    assert_eq!(daemon.cli(&["pool", "check", "p"]).status.code(), Some(0), "everything is committed");
    let v = Host::connect(&daemon, "v");
    // Twice: what was flushed before the last write must be whole in both copies of the journal.
    for _ in 0..2 {
        v.write(0, contents(0, 16, 2)).unwrap();
        v.flush();
    }
    daemon.signal(Signal::SIGKILL);
    drop(v);
    let image = std::fs::read(file(&daemon)).unwrap();
    (daemon, image)
}

fn is_data(block: &[u8]) -> bool {
    // The words of `content` grow by two; no metadata does.
    let word = |at: usize| u64::from_le_bytes(block[at * 8..][..8].try_into().unwrap());
    (0..8).all(|at| word(at + 1).wrapping_sub(word(at)) == 2)
}

/// Blocks of metadata, in use or not.
fn metadata(image: &[u8]) -> Vec<u64> {
    let holds = |block: &&[u8]| block.iter().any(|byte| *byte != 0) && !is_data(block);
    image.chunks(BLOCK).enumerate().filter(|(_, block)| holds(block)).map(|(at, _)| at as u64).collect()
}

#[test]
fn one_damaged_copy_of_any_metadata_is_named_and_written_again() {
    let (daemon, image) = killed();
    let (code, report) = check(&daemon, &["--data"]);
    assert!(code == Some(0) && findings(&report).is_empty(), "{report:#}");
    assert_eq!(std::fs::read(file(&daemon)).unwrap(), image, "a check writes nothing");
    let mut kinds: BTreeMap<String, u32> = BTreeMap::new();
    for block in metadata(&image) {
        std::fs::write(file(&daemon), &image).unwrap();
        flip(&daemon, block);
        let (code, report) = check(&daemon, &[]);
        let found = findings(&report);
        let Some(first) = found.first() else {
            // An old one, which nothing leads to any more.
            assert_eq!(code, Some(0));
            continue;
        };
        let kind = first["kind"].as_str().unwrap().to_owned();
        assert_eq!(code, Some(1), "{report:#}");
        assert!(
            found.iter().any(|f| f["place"]["offset"] == block * BLOCK as u64),
            "block {block}: {report:#}"
        );
        assert!(found.iter().all(|f| f["repairable"] == true && f["repaired"] == false), "{report:#}");
        let times = kinds.entry(kind).or_default();
        *times += 1;
        if *times > 3 {
            continue;
        }
        let bad = std::fs::read(file(&daemon)).unwrap();
        let dry = daemon.cli(&["pool", "check", "--device", &uri(&daemon), "--repair", "--dry-run"]);
        let said = String::from_utf8_lossy(&dry.stdout).into_owned();
        assert!(dry.status.code() == Some(1) && said.contains("would be repaired"), "{said}");
        assert!(std::fs::read(file(&daemon)).unwrap() == bad, "--dry-run writes nothing");
        let (code, repaired) = check(&daemon, &["--repair"]);
        assert_eq!(code, Some(0), "block {block}: {repaired:#}");
        assert!(repaired["repaired"].as_u64() >= Some(found.len() as u64), "{repaired:#}");
        let (code, report) = check(&daemon, &["--data"]);
        assert!(code == Some(0) && findings(&report).is_empty(), "block {block}: {report:#}");
    }
    println!("{kinds:?}");
    for kind in ["label", "root", "journal", "catalog", "metadata"] {
        assert!(kinds.contains_key(kind), "{kind} was not met: {kinds:?}");
    }
}

#[test]
fn metadata_lost_in_both_copies_costs_what_is_said_and_nothing_else() {
    let (mut daemon, image) = killed();
    // Copies are alike.
    let mut twins: BTreeMap<&[u8], Vec<u64>> = BTreeMap::new();
    for block in metadata(&image) {
        twins.entry(&image[block as usize * BLOCK..][..BLOCK]).or_default().push(block);
    }
    let (mut kinds, mut pages) = (BTreeSet::new(), 0);
    // Without any label there is no pool to be checked.
    for blocks in twins.values().filter(|blocks| blocks.len() == 2 && blocks[0] != 0) {
        std::fs::write(file(&daemon), &image).unwrap();
        blocks.iter().for_each(|block| flip(&daemon, *block));
        let (code, report) = check(&daemon, &[]);
        let found = findings(&report);
        let Some(worst) = found.first() else { continue };
        assert_eq!(code, Some(1), "{report:#}");
        kinds.insert(worst["kind"].as_str().unwrap().to_owned());
        let can = found.iter().all(|finding| finding["repairable"] == true);
        assert!(can || found.iter().any(|finding| finding["cost"] != "nothing"), "{report:#}");
        if can {
            let (code, report) = check(&daemon, &["--repair"]);
            assert_eq!(code, Some(0), "{report:#}");
            let (code, report) = check(&daemon, &["--data"]);
            assert!(code == Some(0) && findings(&report).is_empty(), "{report:#}");
        }
        if worst["kind"] == "page" && pages < 3 {
            pages += 1;
            daemon.restart();
            daemon.cli_ok(&["pool", "import", &uri(&daemon)]);
            let mut lost = 0;
            for name in ["v", "w"] {
                let host = Host::connect(&daemon, name);
                let version = |block| if name == "v" && block < 16 { 2 } else { 1 };
                for block in [0, 15, 16, 255] {
                    match host.read(block, 1) {
                        Ok(bytes) => assert!(bytes == content(block, version(block)), "{name} {block}"),
                        Err(status) => {
                            assert!(status.is(Status::UNRECOVERED_READ_ERROR), "{name}: {status}");
                            lost += 1;
                        }
                    }
                }
            }
            assert!(lost <= 4, "a lost page costs one volume: {report:#}");
            daemon.signal(Signal::SIGKILL);
        }
    }
    println!("{kinds:?}, {pages} pages read around");
    for kind in ["page", "nodes", "bitmap"] {
        assert!(kinds.contains(kind), "{kind} was not met: {kinds:?}");
    }
}

fn scrub(daemon: &Daemon, more: &[&str]) -> Value {
    let arguments = [&["pool", "scrub", "p", "-o", "json"], more].concat();
    serde_json::from_str(&daemon.cli_ok(&arguments)).unwrap()
}

fn scrubbed(daemon: &Daemon) -> Value {
    let started = Instant::now();
    loop {
        let status = scrub(daemon, &["--status"]);
        if status["state"] == "idle" {
            return status["last_completed"].clone();
        }
        assert!(started.elapsed() < daemon::PATIENCE, "{status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_scrub_keeps_to_its_rate_stops_goes_on_after_a_restart_and_heals() {
    let mut daemon = started(128);
    let status = scrub(&daemon, &[]);
    assert!(
        status["bytes_total"].as_u64() > Some(0),
        "labels and catalog are there in an empty pool too: {status}"
    );
    assert_eq!(scrubbed(&daemon)["bytes"], status["bytes_total"]);
    let told = daemon.cli_ok(&["pool", "scrub", "p", "--status"]);
    assert!(
        told.contains("last completed") && told.contains("0 errors") && !told.contains("to read"),
        "{told}"
    );

    daemon.cli_ok(&["volume", "create", "v", "64MiB"]);
    let v = Host::connect(&daemon, "v");
    for mib in 0..32 {
        v.write(mib * 256, contents(mib * 256, 256, 1)).unwrap();
    }
    v.flush();
    drop(v);
    let began = Instant::now();
    let status = scrub(&daemon, &["--rate", "8MiB", "--anew"]);
    assert_eq!((&status["state"], &status["rate"]), (&json!("running"), &json!(8 << 20)));
    assert!(status["bytes_total"].as_u64() >= Some(32 << 20), "{status}");
    std::thread::sleep(Duration::from_millis(1500));
    let status = scrub(&daemon, &["--stop"]);
    let done = status["bytes_done"].as_u64().unwrap();
    // A shard reads a step before it waits, and the fixed places at once.
    let most = 8.0 * (1 << 20) as f64 * began.elapsed().as_secs_f64() + (8 << 20) as f64;
    assert!(
        status["state"] == "stopped" && done > 4 << 20 && (done as f64) < most,
        "{done} of {most}: {status}"
    );
    daemon.cli_ok(&["pool", "export", "p", "--force"]);
    daemon.signal(Signal::SIGTERM);
    spoil(&daemon, &content(32 * 256 - 1, 1));
    daemon.restart();
    daemon.cli_ok(&["pool", "import", &uri(&daemon)]);
    let status = scrub(&daemon, &["--status"]);
    assert_eq!((&status["state"], status["bytes_done"].as_u64()), (&json!("stopped"), Some(done)));
    let status = scrub(&daemon, &["--rate", "1TiB"]);
    assert!(status["bytes_done"].as_u64() >= Some(done), "{status}");
    let last = scrubbed(&daemon);
    assert_eq!((&last["errors"], &last["healed"]), (&json!(1), &json!(0)), "{last}");
    assert!(last["bytes"].as_u64() < Some(48 << 20), "what was read before is not read again: {last}");
    let found = damage(&daemon);
    assert_eq!((found.len(), &found[0]["extents"][0]["lba"]), (1, &json!(32 * 256 - 1)));
}
