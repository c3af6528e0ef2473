//! `kill -9` in the middle of writes, snapshots, clones, rollbacks and deletes; then every byte is checked.
//!
//! The host writes through NVMe/TCP. Each 4 KiB block carries its number and the count of the write. After a kill a
//! volume's block must hold a write that is not older than the last one flushed and not newer than the last one sent;
//! a snapshot that was acknowledged must hold exactly what was acknowledged before it was asked for.
#![forbid(unsafe_code)]

mod daemon;

use std::collections::BTreeMap;

use daemon::Daemon;
use daemon::host::{BLOCK, Host};
use nix::sys::signal::Signal;
use rimrock::host::blocking;
use serde_json::json;

const BLOCKS: u64 = 1024;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 9) % limit
    }
}

fn content(block: u64, count: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK);
    for word in 0..BLOCK as u64 / 8 {
        bytes.extend_from_slice(&(block << 32 | count).wrapping_mul(word | 1).to_le_bytes());
    }
    bytes
}

/// Which write a block holds; every byte of it must be that write's.
fn count_of(block: u64, bytes: &[u8]) -> u64 {
    let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let count = word & u64::from(u32::MAX);
    let expected = if word == 0 { vec![0; BLOCK] } else { content(block, count) };
    assert!(bytes == expected, "block {block} holds what nobody wrote");
    count
}

/// A host whose connection may break at any time.
struct Victim(Host);

impl Victim {
    fn connect(daemon: &Daemon, name: &str) -> Victim {
        let host = Host::connect(daemon, name);
        assert_eq!(host.namespace.blocks, BLOCKS);
        Victim(host)
    }

    fn write(&self, block: u64, count: u64) -> bool {
        blocking::now(self.0.controller.write(&self.0.namespace, block, content(block, count), false)).is_ok()
    }

    fn flush(&self) -> bool {
        blocking::now(self.0.controller.flush(&self.0.namespace)).is_ok()
    }

    fn counts(&self) -> Vec<u64> {
        let mut counts = Vec::new();
        for first in (0..BLOCKS).step_by(64) {
            let (result, bytes) =
                blocking::now(self.0.controller.read(&self.0.namespace, first, vec![0; 64 * BLOCK]));
            result.unwrap();
            counts
                .extend(bytes.chunks(BLOCK).enumerate().map(|(i, bytes)| count_of(first + i as u64, bytes)));
        }
        counts
    }
}

#[test]
fn nothing_flushed_and_no_snapshot_is_lost_by_kills() {
    let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(fresh);
    println!("SEED={seed}");
    let mut random = Random(seed | 1);
    let port = daemon::free_port();
    let mut daemon = Daemon::start_with(Some(&format!(
        "[target]\nlisten = \"127.0.0.1:{port}\"\n\
         [[device]]\nname = \"disk\"\nuri = \"uring:DIR/pool.img?size=256MiB\"\n\
         [[pool]]\nname = \"p\"\ndevices = [\"disk\"]\ncreate = true\n"
    )));
    daemon.call("volume_create", json!({ "name": "v", "size": BLOCKS * BLOCK as u64 }));
    let (mut flushed, mut sent) = (vec![0u64; BLOCKS as usize], vec![0u64; BLOCKS as usize]);
    let mut snapshots: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut count = 0;
    for round in 0..12 {
        let host = Victim::connect(&daemon, "v");
        let found = host.counts();
        for block in 0..BLOCKS as usize {
            let (low, high) = (flushed[block], sent[block]);
            assert!(
                found[block] == low || (low..=high).contains(&found[block]),
                "round {round}: block {block} holds write {}, flushed {low}, sent {high}",
                found[block]
            );
        }
        // What is there now counts as acknowledged, but not as flushed.
        let mut acknowledged = found;
        flushed.clone_from(&acknowledged);
        assert!(host.flush());
        for (name, expected) in &snapshots {
            let snapshot = Victim::connect(&daemon, name);
            assert!(snapshot.counts() == *expected, "round {round}: snapshot {name} has changed");
            drop(snapshot);
            daemon.call("volume_unexport", json!({ "name": name }));
        }
        let pid = nix::unistd::Pid::from_raw(daemon.pid().cast_signed());
        let delay = std::time::Duration::from_millis(random.below(120) + 5);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
        });
        // Until the kill breaks the connection.
        loop {
            count += 1;
            match random.below(40) {
                0 => {
                    if !host.flush() {
                        break;
                    }
                    flushed.clone_from(&acknowledged);
                }
                1 if snapshots.len() < 8 => {
                    let name = format!("v@{count}");
                    let request = json!({ "volume": "v", "name": name });
                    if daemon.try_call("snapshot_create", request).is_none() {
                        break;
                    }
                    snapshots.insert(name, acknowledged.clone());
                    flushed.clone_from(&acknowledged);
                }
                2 if snapshots.len() > 4 => {
                    let Some(name) = snapshots.keys().next().cloned() else { continue };
                    let expected = snapshots.remove(&name);
                    if daemon.try_call("snapshot_delete", json!({ "name": name })).is_none() {
                        // Not answered: it may be there or not. If it is, it must be whole.
                        let listed = |daemon: &Daemon| daemon.call("snapshot_list", json!({})).to_string();
                        daemon.wait();
                        daemon.restart();
                        if listed(&daemon).contains(&format!("\"{name}\""))
                            && let Some(expected) = expected
                        {
                            snapshots.insert(name, expected);
                        }
                        daemon.signal(Signal::SIGKILL);
                        break;
                    }
                }
                _ => {
                    let block = random.below(BLOCKS);
                    sent[block as usize] = count;
                    if !host.write(block, count) {
                        break;
                    }
                    acknowledged[block as usize] = count;
                }
            }
        }
        killer.join().unwrap();
        daemon.wait();
        daemon.restart();
    }
    let found = daemon.call("pool_get", json!({ "name": "p" }));
    assert_eq!(found["damage"], json!([]), "{found:#}");
}
