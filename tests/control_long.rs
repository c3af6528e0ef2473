//! Lists keep answering while something long is under way, and what has ended has let go of everything.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, free_port};
use rimrock::host::{ControllerOptions, blocking};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest a list may take here, where other tests run at the same time; a list should take a tenth of that.
const LIST_MAX: Duration = Duration::from_millis(500);
const LISTS: [&str; 6] =
    ["device_list", "pool_list", "volume_list", "snapshot_list", "nvmf_get_subsystems", "bdev_get_bdevs"];
const MIB: usize = 1 << 20;

/// Does `work` while all lists are asked for again and again, and checks and prints how long the slowest took.
fn while_listing(daemon: &Daemon, what: &str, work: impl FnOnce()) {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lister = scope.spawn(|| {
            let (mut worst, mut rounds) = ((Duration::ZERO, ""), 0);
            while !ended.load(Ordering::Relaxed) || rounds == 0 {
                for method in LISTS {
                    let started = Instant::now();
                    daemon.call(method, Value::Null);
                    worst = worst.max((started.elapsed(), method));
                }
                rounds += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
            (worst, rounds)
        });
        let started = Instant::now();
        work();
        let took = started.elapsed();
        ended.store(true, Ordering::Relaxed);
        let ((worst, method), rounds) = lister.join().unwrap();
        println!("{what}: {took:?}; the slowest of {rounds} lists: {method} in {worst:?}");
        assert!(worst < LIST_MAX, "{what}: {method} took {worst:?}");
    });
}

/// An export of a volume, and a host on it.
fn connect(daemon: &Daemon, volume: &str, port: u16) -> blocking::BlockingController {
    let exported =
        daemon.call("volume_export", json!({ "name": volume, "listen": format!("127.0.0.1:{port}") }));
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let options = ControllerOptions::new(uuid::Uuid::new_v4());
    blocking::connect(address, exported["nqn"].as_str().unwrap(), &options).unwrap()
}

/// Writes so many MiB from the start of namespace 1.
fn fill(host: &blocking::BlockingController, mib: usize) {
    let namespace = blocking::now(host.namespace(1)).unwrap();
    for at in 0..mib {
        let data = vec![at as u8 | 1; MIB];
        blocking::now(host.write(&namespace, (at * MIB / 4096) as u64, data, false)).unwrap();
    }
}

#[test]
fn lists_are_answered_while_long_work_is_under_way() {
    let daemon = Daemon::start();
    let sparse = format!("uring:{}/big.img?size=1TiB", daemon.path().display());
    let malloc = json!({ "name": "m", "num_blocks": 768 * MIB / 4096, "block_size": 4096 });
    while_listing(&daemon, "nothing", || std::thread::sleep(Duration::from_millis(200)));
    while_listing(&daemon, "a big malloc bdev", || {
        daemon.call("bdev_malloc_create", malloc);
    });
    while_listing(&daemon, "its end", || {
        daemon.call("bdev_malloc_delete", json!({ "name": "m" }));
    });
    while_listing(&daemon, "a pool on a big file", || {
        daemon.call("pool_create", json!({ "name": "main", "devices": [sparse] }));
    });
    daemon.call("volume_create", json!({ "name": "v", "size": 4_u64 << 30 }));
    let port = free_port();
    let host = connect(&daemon, "v", port);
    while_listing(&daemon, "bulk writes", || fill(&host, 1024));
    drop(host);
    daemon.call("volume_unexport", json!({ "name": "v" }));
    daemon.call("snapshot_create", json!({ "volume": "v", "name": "v@1" }));
    while_listing(&daemon, "many volumes", || {
        for number in 0..50 {
            daemon.call("clone_create", json!({ "snapshot": "v@1", "name": format!("c{number}") }));
        }
    });
    for number in 0..50 {
        daemon.call("volume_delete", json!({ "name": format!("c{number}") }));
    }
    while_listing(&daemon, "deleting what holds data", || {
        daemon.call("volume_delete", json!({ "name": "v" }));
        daemon.call("snapshot_delete", json!({ "name": "v@1" }));
        let started = Instant::now();
        while daemon.call("pool_get", json!({ "name": "main" }))["allocated"].as_u64().unwrap() > 64 << 20 {
            assert!(started.elapsed() < Duration::from_secs(60), "the space does not come back");
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    while_listing(&daemon, "taking the pool down and up", || {
        daemon.call("pool_export", json!({ "name": "main" }));
        daemon.call("pool_import", json!({ "devices": [sparse] }));
    });
}

/// A handle that somebody keeps would be waited for, for two seconds.
#[test]
fn a_pool_that_ends_has_let_go_of_its_devices_at_once() {
    let daemon = Daemon::start();
    let uri = format!("uring:{}/disk.img?size=1GiB", daemon.path().display());
    let devices = json!({ "devices": [uri] });
    daemon.call("pool_create", json!({ "name": "main", "devices": [uri] }));
    daemon.call("volume_create", json!({ "name": "v", "size": 1 << 30 }));
    let mut worst = Duration::ZERO;
    let mut ended = |what: &str, method: &str, params: Value| {
        let started = Instant::now();
        daemon.call(method, params);
        worst = worst.max(started.elapsed());
        assert!(
            started.elapsed() < Duration::from_millis(1500),
            "{what}: {method} took {:?}",
            started.elapsed()
        );
    };
    for round in 0..12 {
        // Idle, just committed, with a host that is connected, with deleting under way, with lists under way.
        let host = (round % 3 == 0).then(|| connect(&daemon, "v", free_port()));
        if let Some(host) = &host {
            fill(host, 16);
        }
        daemon.call("snapshot_create", json!({ "volume": "v", "name": format!("v@{round}") }));
        if round % 2 == 1 {
            daemon.call("snapshot_delete", json!({ "name": format!("v@{round}") }));
        }
        std::thread::scope(|scope| {
            if round % 4 == 3 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        for method in LISTS {
                            daemon.call(method, Value::Null);
                        }
                    }
                });
            }
            ended("round", "pool_export", json!({ "name": "main", "force": true }));
        });
        daemon.call("pool_import", devices.clone());
        if host.is_some() {
            daemon.call("volume_unexport", json!({ "name": "v" }));
        }
    }
    for round in 0..4 {
        let method = if round % 2 == 0 { "pool_destroy" } else { "bdev_lvol_delete_lvstore" };
        let params = if round % 2 == 0 {
            json!({ "name": "main", "confirm": "main" })
        } else {
            json!({ "lvs_name": "main" })
        };
        ended("the end", method, params);
        daemon.call("pool_create", json!({ "name": "main", "devices": [uri] }));
    }
    println!("the slowest took {worst:?}");
}
