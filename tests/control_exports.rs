//! Exports: how they change, what is left when a change is refused, and what comes back.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, PATIENCE, SCRATCH, free_port};
use nix::sys::signal::Signal;
use rimrock::host::{ControllerOptions, blocking};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// With a volume `v`.
fn configured() -> (Daemon, u16) {
    let (daemon, port) = Daemon::configured();
    daemon.call("volume_create", json!({ "name": "v", "size": 64 << 20 }));
    (daemon, port)
}

fn nsids(daemon: &Daemon, nqn: &str) -> Vec<u64> {
    let subsystem = daemon.call("nvmf_get_subsystems", json!({ "nqn": nqn }));
    subsystem[0]["namespaces"].as_array().unwrap().iter().map(|ns| ns["nsid"].as_u64().unwrap()).collect()
}

#[test]
fn a_volume_in_a_configured_subsystem_does_not_stop_the_next_start() {
    let (mut daemon, _) = configured();
    let add = json!({ "nqn": SCRATCH, "namespace": { "bdev_name": "main/v" } });
    assert_eq!(daemon.call("nvmf_subsystem_add_ns", add.clone()), 2);
    daemon.signal(Signal::SIGTERM);
    daemon.restart();
    assert_eq!(nsids(&daemon, SCRATCH), [1, 2]);
    // The volume takes the place of the configured device; after the next start it still has it.
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": SCRATCH, "nsid": 1 }));
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": SCRATCH, "nsid": 2 }));
    assert_eq!(daemon.call("nvmf_subsystem_add_ns", add), 1);
    let before = daemon.call("nvmf_get_subsystems", json!({ "nqn": SCRATCH }));
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    assert_eq!(daemon.call("nvmf_get_subsystems", json!({ "nqn": SCRATCH })), before, "{}", daemon.log());
}

#[test]
fn discovery_can_be_neither_deleted_nor_exported() {
    let (daemon, port) = configured();
    daemon.refused("nvmf_delete_subsystem", json!({ "nqn": DISCOVERY }));
    let error = daemon.refused("volume_export", json!({ "name": "v", "nqn": DISCOVERY }));
    assert_eq!(error["data"]["field"], "nqn", "{error}");
    daemon.refused("nvmf_create_subsystem", json!({ "nqn": DISCOVERY }));
    let subsystems = daemon.call("nvmf_get_subsystems", Value::Null);
    assert_eq!(subsystems[0]["nqn"], DISCOVERY);
    TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(daemon.call("volume_get", json!({ "name": "v" }))["exports"], json!([]));
}

#[test]
fn an_old_record_does_not_let_a_removed_host_back_in() {
    let (daemon, _) = configured();
    daemon.call("pool_create", json!({ "name": "second", "devices": ["disk1"] }));
    daemon.call("volume_create", json!({ "pool": "second", "name": "w", "size": 64 << 20 }));
    let nqn = "nqn.2014-08.org.example:both";
    let host = json!({ "nqn": nqn, "host": "nqn.2014-08.org.example:h" });
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
    for bdev in ["main/v", "second/w"] {
        daemon.call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": bdev } }));
    }
    daemon.call("nvmf_subsystem_add_host", host.clone());
    daemon.call("pool_export", json!({ "name": "second" }));
    daemon.call("nvmf_subsystem_remove_host", host);
    daemon.call("pool_import", json!({ "devices": ["disk1"] }));
    let subsystem = daemon.call("nvmf_get_subsystems", json!({ "nqn": nqn }));
    assert_eq!(subsystem[0]["hosts"], json!([]));
    assert_eq!(nsids(&daemon, nqn), [1, 2]);

    // An NSID that was given to another meanwhile is not given twice, and whoever imports is told.
    daemon.call("pool_export", json!({ "name": "second" }));
    daemon.call("volume_create", json!({ "name": "x", "size": 64 << 20 }));
    let add = json!({ "nqn": nqn, "namespace": { "bdev_name": "main/x" } });
    assert_eq!(daemon.call("nvmf_subsystem_add_ns", add), 2);
    let imported = daemon.call("pool_import", json!({ "devices": ["disk1"] }));
    assert!(imported["warnings"][0].as_str().unwrap().contains("namespace 2"), "{imported}");
    assert_eq!(nsids(&daemon, nqn), [1, 2]);
    assert_eq!(daemon.call("volume_get", json!({ "name": "second/w" }))["exports"], json!([]));
}

#[test]
fn a_listener_that_could_not_be_opened_is_not_called_open_and_opens_later() {
    let (mut daemon, _) = configured();
    let port = free_port();
    let export = json!({ "name": "v", "listen": format!("127.0.0.1:{port}") });
    daemon.call("volume_export", export);
    daemon.signal(Signal::SIGTERM);
    let other = TcpListener::bind(("127.0.0.1", port)).unwrap();
    daemon.restart();
    let error = daemon.refused("volume_export", json!({ "name": "v" }));
    assert_eq!(error["code"], -i64::from(libc::EADDRINUSE), "{error}");
    drop(other);
    let started = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(started.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    daemon.call("volume_export", json!({ "name": "v" }));
}

#[test]
fn what_is_gone_is_gone_once() {
    let (daemon, _) = configured();
    let twice = json!(["nqn.2014-08.org.example:h", "nqn.2014-08.org.example:h"]);
    let exported = daemon.call("volume_export", json!({ "name": "v", "hosts": twice }));
    let nqn = &exported["nqn"];
    daemon.call("nvmf_subsystem_remove_host", json!({ "nqn": nqn, "host": "nqn.2014-08.org.example:h" }));
    daemon.refused("nvmf_subsystem_remove_host", json!({ "nqn": nqn, "host": "nqn.2014-08.org.example:h" }));
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": nqn, "nsid": 1 }));
    daemon.refused("nvmf_subsystem_remove_ns", json!({ "nqn": nqn, "nsid": 1 }));
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": nqn }));
    daemon.refused("nvmf_delete_subsystem", json!({ "nqn": nqn }));
    daemon.call("pool_export", json!({ "name": "main" }));
    daemon.call("pool_import", json!({ "devices": ["disk0"] }));
    assert_eq!(daemon.refused("nvmf_get_subsystems", json!({ "nqn": nqn }))["code"], -19);
    // The subsystem can be made again at once.
    daemon.call("volume_export", json!({ "name": "v" }));
}

#[test]
fn the_limits_of_the_transport_come_back_and_go_with_the_newest_pool() {
    let (mut daemon, _) = configured();
    let limits = |daemon: &Daemon| daemon.call("nvmf_get_transports", Value::Null);
    let set = json!({ "trtype": "TCP", "max_queue_depth": 64, "max_io_qpairs_per_ctrlr": 3,
        "in_capsule_data_size": 4096, "max_io_size": 131_072, "c2h_success": false });
    daemon.call("nvmf_create_transport", set);
    let wanted = limits(&daemon);
    for (field, value) in
        [("max_queue_depth", json!(64)), ("max_io_size", json!(131_072)), ("c2h_success", json!(false))]
    {
        assert_eq!(wanted[0][field], value);
    }
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    assert_eq!(limits(&daemon), wanted);
    // A pool that is made later has them as well, and takes them to another machine.
    daemon.call("pool_create", json!({ "name": "second", "devices": ["disk1"] }));
    daemon.call("pool_export", json!({ "name": "second" }));
    let elsewhere = Daemon::start();
    assert_ne!(limits(&elsewhere), wanted);
    daemon.call("device_delete", json!({ "name": "disk1" }));
    let disk = format!("uring:{}/disk1.img", daemon.path().display());
    elsewhere.call("pool_import", json!({ "devices": [disk] }));
    assert_eq!(limits(&elsewhere), wanted);
    // What is set in this life stands against what comes in.
    daemon.call("nvmf_create_transport", json!({ "trtype": "TCP", "max_queue_depth": 128 }));
    assert_eq!(limits(&daemon)[0]["max_queue_depth"], 128);
    elsewhere.call("pool_export", json!({ "name": "second" }));
    daemon.call("pool_import", json!({ "devices": [disk] }));
    assert_eq!(limits(&daemon)[0]["max_queue_depth"], 128);
    daemon.signal(Signal::SIGTERM);
    daemon.restart();
    assert_eq!(limits(&daemon)[0]["max_queue_depth"], 128, "{}", daemon.log());
    daemon.refused("nvmf_create_transport", json!({ "trtype": "TCP", "max_queue_depth": 15 }));
    assert_eq!(limits(&daemon)[0]["max_queue_depth"], 128);
}

/// A subsystem that shows a volume of `main` and one of `second`, on `disk1`.
fn in_two_pools(daemon: &Daemon, nqn: &str) {
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true }));
    for bdev in ["main/v", "second/w"] {
        daemon.call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": bdev } }));
    }
}

#[test]
fn a_subsystem_that_was_deleted_while_a_pool_was_away_stays_deleted() {
    let (mut daemon, _) = configured();
    let nqn = "nqn.2014-08.org.example:both";
    let second = json!({ "devices": ["disk1"] });
    let present = |daemon: &Daemon| {
        daemon.client().call("nvmf_get_subsystems", json!({ "nqn": nqn }))["error"].is_null()
    };
    daemon.call("pool_create", json!({ "name": "second", "devices": ["disk1"] }));
    daemon.call("volume_create", json!({ "pool": "second", "name": "w", "size": 64 << 20 }));
    in_two_pools(&daemon, nqn);
    daemon.call("pool_export", json!({ "name": "second" }));
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": nqn }));
    daemon.call("pool_import", second.clone());
    assert!(!present(&daemon), "{}", daemon.log());
    daemon.call("pool_export", json!({ "name": "second" }));
    daemon.call("pool_import", second.clone());
    assert!(!present(&daemon), "{}", daemon.log());

    // The same over a restart in which the pool is not there, and with another subsystem of that name made meanwhile.
    in_two_pools(&daemon, nqn);
    daemon.call("pool_export", json!({ "name": "second" }));
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": nqn }));
    daemon.signal(Signal::SIGKILL);
    daemon.restart();
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
    let add = json!({ "nqn": nqn, "namespace": { "bdev_name": "main/v" } });
    daemon.call("nvmf_subsystem_add_ns", add);
    daemon.call("pool_import", second.clone());
    assert_eq!(nsids(&daemon, nqn), [1], "the new one does not show what the old one did");
    assert_eq!(daemon.call("volume_get", json!({ "name": "second/w" }))["exports"], json!([]));
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": nqn }));

    // Not deleted, it comes back whole.
    in_two_pools(&daemon, nqn);
    daemon.call("pool_export", json!({ "name": "second" }));
    daemon.call("pool_import", second);
    assert_eq!(nsids(&daemon, nqn), [1, 2]);
}

#[test]
fn hosts_of_a_pool_that_is_away_may_retry_and_those_of_a_deleted_subsystem_need_not() {
    let (daemon, port) = configured();
    let exported = daemon.call("volume_export", json!({ "name": "v" }));
    let nqn = exported["nqn"].as_str().unwrap();
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let refusal = || {
        let options = ControllerOptions::new(uuid::Uuid::new_v4());
        blocking::connect(address, nqn, &options).err().expect("it is not here").to_string()
    };
    let options = ControllerOptions::new(uuid::Uuid::new_v4());
    drop(blocking::connect(address, nqn, &options).unwrap());
    daemon.call("pool_export", json!({ "name": "main", "force": true }));
    let for_now = refusal();
    daemon.call("pool_import", json!({ "devices": ["disk0"] }));
    drop(blocking::connect(address, nqn, &options).unwrap());
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": SCRATCH }));
    daemon.call("volume_unexport", json!({ "name": "v" }));
    // Nothing is left that listens there, and still it answers.
    let for_good = refusal();
    assert_ne!(for_now, for_good);
    assert!(for_good.contains("do not retry") && !for_now.contains("do not retry"), "{for_now}; {for_good}");
}
