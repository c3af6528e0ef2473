//! Exports: how they change, what is left when a change is refused, and what comes back.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, PATIENCE, free_port};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
const SCRATCH: &str = "nqn.2014-08.org.example:scratch";
const CONFIG: &str = r#"
[target]
listen = "127.0.0.1:PORT"

[[device]]
name = "disk0"
uri = "uring:DIR/disk0.img?size=1GiB"

[[device]]
name = "disk1"
uri = "uring:DIR/disk1.img?size=1GiB"

[[device]]
name = "scratch"
uri = "ram:64MiB"

[[pool]]
name = "main"
devices = ["disk0"]
create = true

[[subsystem]]
nqn = "nqn.2014-08.org.example:scratch"
devices = ["scratch"]
"#;

fn configured() -> (Daemon, u16) {
    let port = free_port();
    let daemon = Daemon::start_with(Some(&CONFIG.replace("PORT", &port.to_string())));
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
