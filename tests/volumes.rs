//! Volumes as hosts and operators meet them: exact sizes, growth while hosts are connected, rollback under a host, lists
//! while the tree changes, exports through kills, and a device that fails.
#![forbid(unsafe_code)]

mod daemon;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::Daemon;
use daemon::host::{Host, content, contents};
use nix::sys::signal::Signal;
use rimrock::host::{Controller, ControllerOptions, Namespace, blocking};
use rimrock::nvme::Status;
use rimrock::nvme::log::lid;
use serde_json::{Value, json};

type Connected = Controller<blocking::Queue>;

/// A daemon with pool `p` on a file of `mib` MiB.
fn started(mib: u64) -> Daemon {
    let port = daemon::free_port();
    Daemon::start_with(Some(&format!(
        "[target]\nlisten = \"127.0.0.1:{port}\"\n\
         [[device]]\nname = \"disk\"\nuri = \"uring:DIR/pool.img?size={mib}MiB\"\n\
         [[pool]]\nname = \"p\"\ndevices = [\"disk\"]\ncreate = true\n"
    )))
}

/// A host of any block size; exports the volume first.
fn connect(daemon: &Daemon, name: &str) -> Connected {
    let exported = daemon.call("volume_export", json!({ "name": name }));
    let line = exported["connect"][0].as_str().unwrap().to_owned();
    let after = |flag: &str| line.split(' ').skip_while(|word| *word != flag).nth(1).unwrap().to_owned();
    let address = format!("{}:{}", after("-a"), after("-s")).parse().unwrap();
    blocking::connect(address, &after("-n"), &ControllerOptions::new(uuid::Uuid::new_v4())).unwrap()
}

fn namespace(host: &Connected) -> Namespace {
    blocking::now(host.namespace(1)).unwrap()
}

fn read(host: &Connected, namespace: &Namespace, lba: u64, len: usize) -> Result<Vec<u8>, Status> {
    let (result, bytes) = blocking::now(host.read(namespace, lba, vec![0xEE; len]));
    result.map(|()| bytes).map_err(|error| error.status().expect("a status"))
}

#[test]
fn sizes_beyond_32_bits_are_exact_for_hosts_and_their_last_blocks_are_their_own() {
    let mut daemon = started(256);
    let sizes: Vec<u64> = [(2 << 40) - 1, 2 << 40, 512 << 32, 512 * ((1 << 32) + 1), 1].to_vec();
    let block = |lba: u64, count: u64| {
        let word = (lba << 8 | count).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word.to_le_bytes().repeat(64)
    };
    for pass in 0..2 {
        for (at, size) in sizes.iter().enumerate() {
            let name = format!("v{at}");
            if pass == 0 {
                daemon.call("volume_create", json!({ "name": name, "size": size, "block_size": 512 }));
            }
            let host = connect(&daemon, &name);
            let ns = namespace(&host);
            let blocks = size.next_multiple_of(1 << 20) / 512;
            assert_eq!((ns.blocks, ns.block_bytes), (blocks, 512), "{size} bytes");
            // Places that 32-bit arithmetic on blocks or bytes would take for each other.
            let all = [0, 1, (1 << 23) - 1, 1 << 23, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, blocks - 1];
            let places: BTreeSet<u64> = all.into_iter().filter(|lba| *lba < blocks).collect();
            for lba in places.iter().filter(|_| pass == 0) {
                let bytes = block(*lba, at as u64);
                blocking::now(host.write(&ns, *lba, bytes, false)).unwrap();
            }
            blocking::now(host.flush(&ns)).unwrap();
            for lba in &places {
                assert!(read(&host, &ns, *lba, 512).unwrap() == block(*lba, at as u64), "{size}: LBA {lba}");
                if *lba > 1 && !places.contains(&(lba - 1)) {
                    assert_eq!(read(&host, &ns, lba - 1, 512).unwrap(), vec![0; 512]);
                }
            }
            for (lba, len) in [(blocks, 512), (blocks - 1, 1024), (u64::MAX, 512)] {
                assert!(read(&host, &ns, lba, len).unwrap_err().is(Status::LBA_OUT_OF_RANGE), "{lba}");
            }
        }
        if pass == 0 {
            daemon.signal(Signal::SIGKILL);
            daemon.restart();
        }
    }
}

#[test]
fn a_volume_grows_under_two_hosts_that_write_and_each_is_told_once() {
    let daemon = started(512);
    daemon.cli_ok(&["volume", "create", "v", "64MiB"]);
    let hosts = [connect(&daemon, "v"), connect(&daemon, "v")];
    let before = namespace(&hosts[0]);
    // Announced by the end of a log page that nobody read yet, an event would be told at once.
    for host in &hosts {
        blocking::now(host.log_page(lid::CHANGED_NAMESPACES, 0xFFFF_FFFF, 0, 4096, false)).unwrap();
        blocking::now(host.set_feature(0x0B, 0x100)).unwrap();
    }
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Old blocks are written all the while, by a host of its own.
        let writer = scope.spawn(|| {
            let host = Host::connect(&daemon, "v");
            let mut version = 0;
            while !ended.load(Ordering::Relaxed) {
                version += 1;
                for at in (0..16384).step_by(1024) {
                    host.write(at, contents(at, 64, version)).unwrap();
                }
            }
            for at in (0..16384).step_by(1024) {
                assert!(host.read(at, 64).unwrap() == contents(at, 64, version), "block {at}");
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        // Faster than any host reads its list.
        for mib in (128..=1664).step_by(32) {
            daemon.call("volume_resize", json!({ "name": "v", "size": mib << 20 }));
            let found = namespace(&hosts[mib as usize / 32 % 2]);
            assert_eq!(found.blocks, mib << 8, "told before it is true");
        }
        ended.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    let after = namespace(&hosts[1]);
    assert_eq!((before.blocks, after.blocks, before.uuid), (64 << 8, 1664 << 8, after.uuid));
    for host in &hosts {
        let event = blocking::now(host.next_event()).unwrap();
        assert_eq!(event.0, 0x0004_0002, "an attribute of a namespace has changed");
        let list =
            blocking::now(host.log_page(lid::CHANGED_NAMESPACES, 0xFFFF_FFFF, 0, 4096, false)).unwrap();
        assert_eq!((&list[..4], &list[4..8]), (&[1, 0, 0, 0][..], &[0; 4][..]));
        let list =
            blocking::now(host.log_page(lid::CHANGED_NAMESPACES, 0xFFFF_FFFF, 0, 4096, false)).unwrap();
        assert_eq!(list, vec![0; 4096], "once");
    }
    let ns = after;
    for lba in (before.blocks..ns.blocks).step_by(4096).chain([ns.blocks - 256]) {
        assert!(read(&hosts[0], &ns, lba, 1 << 20).unwrap().iter().all(|byte| *byte == 0), "LBA {lba}");
    }
    blocking::now(hosts[0].write(&ns, ns.blocks - 1, content(7, 7), true)).unwrap();
    assert!(read(&hosts[1], &ns, ns.blocks - 1, 4096).unwrap() == content(7, 7));
    assert!(read(&hosts[1], &ns, ns.blocks, 4096).unwrap_err().is(Status::LBA_OUT_OF_RANGE));
    assert_eq!(daemon.cli(&["pool", "check", "p", "--data"]).status.code(), Some(0));
}

/// All of a volume of 1024 blocks.
fn whole(host: &Host) -> Vec<u8> {
    (0..1024).step_by(64).flat_map(|at| host.read(at, 64).unwrap()).collect()
}

#[test]
fn a_rollback_gives_the_same_bytes_every_time_and_is_whole_or_absent_after_a_kill() {
    let mut daemon = started(256);
    daemon.cli_ok(&["volume", "create", "v", "4MiB"]);
    let v = Host::connect(&daemon, "v");
    v.write(0, contents(0, 64, 1)).unwrap();
    v.write(900, contents(900, 20, 1)).unwrap();
    daemon.cli_ok(&["snapshot", "create", "v@1"]);
    let first = whole(&v);
    // To the state it has: nothing changes.
    daemon.call("volume_rollback", json!({ "name": "v", "snapshot": "v@1", "discard": true }));
    assert!(whole(&v) == first);
    v.write(30, contents(30, 64, 2)).unwrap();
    daemon.cli_ok(&["snapshot", "create", "v@2"]);
    let second = whole(&v);
    for round in 0..20 {
        v.write(round * 40, contents(round * 40, 64, 100 + round)).unwrap();
        v.deallocate(900 + round, 10);
        let (name, expected) = if round % 2 == 0 { ("v@1", &first) } else { ("v@2", &second) };
        daemon.call("volume_rollback", json!({ "name": "v", "snapshot": name, "discard": true }));
        // The host that stays connected sees it, and so does one that comes.
        assert!(whole(&v) == *expected, "round {round}");
        assert!(whole(&Host::connect(&daemon, "v")) == *expected, "round {round}");
    }
    drop(v);
    // A kill at any moment of it: the volume is one or the other, and if something was to be kept, it is kept.
    let mut outcomes = BTreeSet::new();
    for round in 0..12_u64 {
        let v = Host::connect(&daemon, "v");
        let kept = contents(0, 64, 1000 + round);
        v.write(0, kept.clone()).unwrap();
        v.flush();
        let before = whole(&v);
        drop(v);
        let pid = nix::unistd::Pid::from_raw(daemon.pid().cast_signed());
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(400 * round));
            nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
        });
        let keep = format!("v@kept{round}");
        let answer =
            daemon.try_call("volume_rollback", json!({ "name": "v", "snapshot": "v@1", "keep": keep }));
        killer.join().unwrap();
        daemon.wait();
        daemon.restart();
        let found = whole(&Host::connect(&daemon, "v"));
        let is_done = found == first;
        outcomes.insert((answer.is_some(), is_done));
        assert!(is_done || found == before, "round {round}: neither");
        assert!(answer.is_none() || is_done, "round {round}: answered and lost");
        let names = daemon.call("snapshot_list", json!({})).to_string();
        assert_eq!(names.contains(&format!("\"{keep}\"")), is_done, "round {round}");
        if is_done {
            let host = Host::connect(&daemon, &keep);
            assert!(whole(&host) == before, "round {round}: what was kept");
        }
    }
    println!("(answered, done): {outcomes:?}");
    assert_eq!(daemon.cli(&["pool", "check", "p", "--data"]).status.code(), Some(0));
}

#[test]
fn every_list_is_one_whole_tree_while_snapshots_come_and_go() {
    let daemon = started(256);
    daemon.cli_ok(&["volume", "create", "v", "4MiB"]);
    daemon.cli_ok(&["snapshot", "create", "v@first"]);
    daemon.cli_ok(&["clone", "create", "v@first", "c"]);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lister = scope.spawn(|| {
            let (mut lists, mut longest) = (0, 0);
            while !ended.load(Ordering::Relaxed) {
                let list = daemon.call("snapshot_list", json!({}));
                let list = list.as_array().unwrap();
                let names: BTreeSet<&str> = list.iter().map(|one| one["name"].as_str().unwrap()).collect();
                assert_eq!(names.len(), list.len(), "a name twice");
                for one in list {
                    if let Some(parent) = one["parent"].as_str() {
                        assert!(
                            names.contains(parent),
                            "{} grew from {parent}, which is not there",
                            one["name"]
                        );
                    }
                    for child in one["children"].as_array().unwrap().iter().filter_map(Value::as_str) {
                        assert!(child == "v" || child == "c" || names.contains(child), "{child} of {one}");
                    }
                }
                lists += 1;
                longest = longest.max(list.len());
            }
            (lists, longest)
        });
        let mut alive = Vec::new();
        let mut random = 7_usize;
        for number in 0..120 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            let volume = ["v", "c"][random >> 40 & 1];
            let name = format!("{volume}@{number}");
            daemon.call("snapshot_create", json!({ "volume": volume, "name": name }));
            alive.push(name);
            if alive.len() > 20 || random >> 50 & 3 == 0 {
                let name = alive.remove((random >> 33) % alive.len());
                daemon.call("snapshot_delete", json!({ "name": name }));
            }
        }
        ended.store(true, Ordering::Relaxed);
        let (lists, longest) = lister.join().unwrap();
        assert!(lists > 20 && longest > 5, "{lists} lists of at most {longest}");
    });
    assert_eq!(daemon.cli(&["pool", "check", "p"]).status.code(), Some(0));
}

/// What hosts are shown, without what only this life knows.
fn exports(daemon: &Daemon) -> Value {
    daemon.call("nvmf_get_subsystems", Value::Null)
}

#[test]
fn a_kill_in_the_middle_of_changing_exports_leaves_each_change_whole_or_absent() {
    let mut daemon = started(256);
    for name in ["a", "b"] {
        daemon.cli_ok(&["volume", "create", name, "4MiB"]);
    }
    let nqn = daemon.call("volume_export", json!({ "name": "a" }))["nqn"].clone();
    let mut interrupted = 0;
    for round in 0..16_u64 {
        let pid = nix::unistd::Pid::from_raw(daemon.pid().cast_signed());
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(900 * round + 300));
            nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
        });
        // Each state as it is after a call that was answered; at the kill one call is open.
        let mut step = 0;
        let open = loop {
            step += 1;
            let host = format!("nqn.2014-08.org.example:h{}", step % 3);
            let (method, params) = match step % 4 {
                0 => ("nvmf_subsystem_remove_host", json!({ "nqn": nqn, "host": host })),
                1 => ("nvmf_subsystem_add_host", json!({ "nqn": nqn, "host": host })),
                2 => ("volume_export", json!({ "name": "b" })),
                _ => ("volume_unexport", json!({ "name": "b" })),
            };
            let state = daemon.try_call("nvmf_get_subsystems", json!({}));
            let Some(state) = state else { break None };
            // Refused, as a host that is there already, changes nothing; so does what the kill cut off at once.
            if daemon.try_call(method, params.clone()).is_none() {
                let alive = daemon.try_call("nvmf_get_subsystems", json!({}));
                match alive {
                    Some(now) => assert_eq!(now, state, "{method} was refused and changed something"),
                    None => break Some((state, method, params)),
                }
            }
        };
        killer.join().unwrap();
        daemon.wait();
        daemon.restart();
        let Some((before, method, params)) = open else { continue };
        interrupted += 1;
        let found = exports(&daemon);
        if found != before {
            // Then it is what the call makes of the state before: making it again changes nothing.
            let _ = daemon.client().call(method, params.clone());
            assert_eq!(exports(&daemon), found, "round {round}: {method} {params} was half made");
        }
        // Both kinds of stop lead to the same.
        daemon.signal(Signal::SIGTERM);
        daemon.restart();
        let again = exports(&daemon);
        daemon.signal(Signal::SIGKILL);
        daemon.restart();
        assert_eq!(exports(&daemon), again, "round {round}");
    }
    println!("{interrupted} calls were cut off");
    assert!(interrupted > 3, "only {interrupted}");
}

#[test]
fn a_device_that_fails_is_told_within_seconds_and_hosts_get_errors_and_no_zeroes() {
    let mut daemon = started(64);
    daemon.cli_ok(&["volume", "create", "v", "16MiB"]);
    let v = Host::connect(&daemon, "v");
    v.write(0, contents(0, 256, 1)).unwrap();
    v.flush();
    let file = daemon.path().join("pool.img");
    let image = std::fs::read(&file).unwrap();
    // Larger is nothing that a pool in use would notice.
    let disk = std::fs::File::options().write(true).open(&file).unwrap();
    disk.set_len(96 << 20).unwrap();
    assert!(v.read(0, 64).unwrap() == contents(0, 64, 1));
    assert_eq!(daemon.call("pool_get", json!({ "name": "p" }))["health"], "ok");
    // A second pool on it is refused, whatever its name.
    for name in ["p", "q"] {
        let uri = format!("uring:{}", file.display());
        assert!(!daemon.cli(&["pool", "create", name, &uri]).status.success(), "{name}");
    }
    // All of it is gone: every read comes short.
    disk.set_len(0).unwrap();
    let started = Instant::now();
    for at in (0..256).step_by(64) {
        let status = v.read(at, 64).unwrap_err();
        assert!(!status.is(Status::LBA_OUT_OF_RANGE), "{status}");
    }
    while daemon.call("pool_get", json!({ "name": "p" }))["health"] == "ok" {
        assert!(started.elapsed() < Duration::from_secs(10), "nobody is told");
        std::thread::sleep(Duration::from_millis(50));
    }
    daemon.assert_alive();
    drop(v);
    // It comes back as it was, with an old image as it would be after its cable was pulled.
    daemon.signal(Signal::SIGKILL);
    std::fs::write(&file, &image).unwrap();
    daemon.restart();
    let v = Host::connect(&daemon, "v");
    for at in (0..256).step_by(64) {
        assert!(v.read(at, 64).unwrap() == contents(at, 64, 1), "block {at}");
    }
    assert_eq!(daemon.call("pool_get", json!({ "name": "p" }))["health"], "ok");
}
