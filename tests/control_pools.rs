//! Pools, volumes, snapshots and exports over the control socket, across restarts and kills.
#![forbid(unsafe_code)]

mod daemon;

use daemon::Daemon;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

fn reason(error: &Value) -> &str {
    error["data"]["reason"].as_str().unwrap_or_else(|| error["message"].as_str().unwrap())
}

#[test]
fn repeated_calls_give_the_same_objects_and_other_parameters_conflict() {
    let (daemon, _) = Daemon::configured();
    let volume = json!({ "name": "v", "size": 1 << 30 });
    let first = daemon.call("volume_create", volume.clone());
    assert_eq!(daemon.call("volume_create", volume)["uuid"], first["uuid"]);
    for (field, params) in [
        ("size", json!({ "name": "v", "size": 2_u64 << 30 })),
        ("block_size", json!({ "name": "v", "size": 1 << 30, "block_size": 512 })),
        ("write_cache", json!({ "name": "v", "size": 1 << 30, "write_cache": false })),
        ("uuid", json!({ "name": "v", "size": 1 << 30, "uuid": "8b1e1c4a-1f5e-4d9a-9d0e-3a3a7a7d7b11" })),
    ] {
        let error = daemon.refused("volume_create", params);
        assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-17), &json!(field)), "{error}");
    }
    let snapshot = json!({ "volume": "v", "name": "v@1" });
    let taken = daemon.call("snapshot_create", snapshot.clone());
    assert_eq!(daemon.call("snapshot_create", snapshot)["uuid"], taken["uuid"]);
    let clone = json!({ "snapshot": "v@1", "name": "c" });
    let made = daemon.call("clone_create", clone.clone());
    assert_eq!(daemon.call("clone_create", clone)["uuid"], made["uuid"]);
    assert_eq!(daemon.refused("clone_create", json!({ "snapshot": "v@1", "name": "v@1" }))["code"], -17);
    assert_eq!(daemon.refused("snapshot_create", json!({ "volume": "c", "name": "v@1" }))["code"], -17);
    assert_eq!(
        daemon.refused("snapshot_create", json!({ "volume": "v@1", "name": "x" }))["data"]["field"],
        "volume"
    );

    let pool = json!({ "name": "main", "devices": ["disk0"] });
    assert_eq!(
        daemon.call("pool_create", pool)["uuid"],
        daemon.call("pool_get", json!({ "name": "main" }))["uuid"]
    );
    let error = daemon.refused("pool_create", json!({ "name": "main", "devices": ["scratch"] }));
    assert_eq!(error["code"], -17);
    let device = json!({ "name": "d", "uri": "ram:64MiB" });
    assert_eq!(daemon.call("device_create", device.clone()), daemon.call("device_create", device));
    assert_eq!(daemon.refused("device_create", json!({ "name": "d", "uri": "ram:1MiB" }))["code"], -17);

    let exported = daemon.call("volume_export", json!({ "name": "v" }));
    assert_eq!(daemon.call("volume_export", json!({ "name": "v" })), exported);
    let hosts = json!({ "name": "v", "hosts": ["nqn.2014-08.org.example:h"] });
    assert_eq!(daemon.refused("volume_export", hosts)["data"]["field"], "hosts");
    assert_eq!(
        daemon.refused("volume_export", json!({ "name": "c", "nqn": exported["nqn"] }))["data"]["field"],
        "nqn"
    );
}

#[test]
fn sizes_are_exact_or_rounded_up_and_impossible_ones_refused() {
    let (daemon, _) = Daemon::configured();
    // A pool of 1 GiB with thin volumes of many times its size.
    for (at, size) in
        [(2_u64 << 40) - 1, 2 << 40, 512 << 32, 512 * ((1 << 32) + 1), 1, 4097].iter().enumerate()
    {
        let name = format!("v{at}");
        let made = daemon.call("volume_create", json!({ "name": name, "size": size, "block_size": 512 }));
        assert_eq!(made["size"], size.next_multiple_of(1 << 20));
    }
    for size in [json!(0), json!(-1), json!(1.5), json!("10GiB"), json!(1_u64 << 63), Value::Null] {
        let error = daemon.refused("volume_create", json!({ "name": "bad", "size": size }));
        assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-32602), &json!("size")), "{size}");
    }
    let error = daemon.refused("volume_create", json!({ "name": "bad", "size": (1_u64 << 63) - 1 }));
    assert!(error["code"] == -22 && reason(&error).contains("more than a volume"), "{error}");
    assert_eq!(daemon.refused("volume_get", json!({ "name": "bad" }))["code"], -19);
}

#[test]
fn resizing_says_precisely_why_not() {
    let (daemon, _) = Daemon::configured();
    daemon.call("volume_create", json!({ "name": "v", "size": 64 << 20 }));
    let error = daemon.refused("volume_resize", json!({ "name": "v", "size": 32 << 20 }));
    assert_eq!(error["code"], -22, "{error}");
    assert!(reason(&error).contains("shrink") || reason(&error).contains("smaller"), "{error}");
    assert_eq!(daemon.call("volume_get", json!({ "name": "v" }))["size"], 64 << 20);
    assert_eq!(daemon.call("volume_resize", json!({ "name": "v", "size": 64 << 20 }))["size"], 64 << 20);
    assert_eq!(daemon.call("volume_resize", json!({ "name": "v", "size": 128 << 20 }))["size"], 128 << 20);
    for size in ["0", "-1", "18446744073709551616", "1.5", "\"10GiB\""] {
        let mut client = daemon.client();
        let request = format!(r#"{{"id":1,"method":"volume_resize","params":{{"name":"v","size":{size}}}}}"#);
        client.send(request.as_bytes());
        let error = client.receive()["error"].clone();
        assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-32602), &json!("size")), "{size}");
    }
    let params = json!({ "name": "v", "size": 32 << 20, "allow_shrink": true });
    assert_eq!(daemon.call("volume_resize", params)["size"], 32 << 20);
}

#[test]
fn what_is_used_is_not_taken_away() {
    let (daemon, _) = Daemon::configured();
    daemon.call("volume_create", json!({ "name": "v", "size": 64 << 20 }));
    daemon.call("volume_export", json!({ "name": "v" }));
    for (method, params) in [
        ("volume_delete", json!({ "name": "v" })),
        ("pool_destroy", json!({ "name": "main", "confirm": "main" })),
        ("device_delete", json!({ "name": "disk0" })),
        ("device_delete", json!({ "name": "scratch" })),
        ("pool_create", json!({ "name": "other", "devices": ["disk0"] })),
        ("pool_create", json!({ "name": "other", "devices": ["scratch"] })),
    ] {
        assert_eq!(daemon.refused(method, params.clone())["code"], -16, "{method} {params}");
    }
    let error = daemon.refused("pool_destroy", json!({ "name": "main", "confirm": "mein" }));
    assert_eq!(error["data"]["field"], "confirm");
    daemon.call("volume_unexport", json!({ "name": "v" }));
    assert_eq!(daemon.refused("volume_unexport", json!({ "name": "v" }))["code"], -2);
    daemon.call("volume_delete", json!({ "name": "v" }));
    daemon.call("pool_destroy", json!({ "name": "main", "confirm": "main" }));
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
    // Destroyed, its device is free, and holds no pool.
    assert_eq!(daemon.refused("pool_import", json!({ "devices": ["disk0"] }))["code"], -19);
    daemon.call("pool_create", json!({ "name": "again", "devices": ["disk0"] }));
}

#[test]
fn a_rollback_can_be_rolled_back() {
    let (daemon, _) = Daemon::configured();
    daemon.call("volume_create", json!({ "name": "v", "size": 64 << 20 }));
    daemon.call("snapshot_create", json!({ "volume": "v", "name": "v@1" }));
    let done = daemon.call("volume_rollback", json!({ "name": "v", "snapshot": "v@1" }));
    assert_eq!(
        (&done["name"], &done["snapshot"], &done["kept"]),
        (&json!("v"), &json!("v@1"), &json!("v@before-rollback-1"))
    );
    let done = daemon
        .call("volume_rollback", json!({ "name": "v", "snapshot": "v@before-rollback-1", "discard": true }));
    assert_eq!(done["kept"], Value::Null);
    let both = json!({ "name": "v", "snapshot": "v@1", "keep": "x", "discard": true });
    assert_eq!(daemon.refused("volume_rollback", both)["data"]["field"], "discard");
    let error = daemon.refused("volume_rollback", json!({ "name": "v", "snapshot": "v@2" }));
    assert!(error["code"] == -19 && error["data"]["hint"].as_str().unwrap().contains("v@1"), "{error}");
}

#[test]
fn names_are_found_by_pool_and_uuid_and_nearest_names_are_offered() {
    let (daemon, _) = Daemon::configured();
    daemon.call("device_create", json!({ "name": "d", "uri": "ram:128MiB" }));
    daemon.call("pool_create", json!({ "name": "second", "devices": ["d"] }));
    for pool in ["main", "second"] {
        daemon.call("volume_create", json!({ "pool": pool, "name": "v", "size": 1 << 20 }));
    }
    let error = daemon.refused("volume_create", json!({ "name": "w", "size": 1 << 20 }));
    assert_eq!(error["data"]["field"], "pool");
    assert_eq!(daemon.refused("volume_get", json!({ "name": "v" }))["data"]["field"], "name");
    let found = daemon.call("volume_get", json!({ "name": "second/v" }));
    assert_eq!(found["pool"], "second");
    assert_eq!(daemon.call("volume_get", json!({ "name": found["uuid"] })), found);
    assert_eq!(daemon.call("volume_list", json!({ "pool": "second" })).as_array().unwrap().len(), 1);
    assert_eq!(daemon.call("volume_list", Value::Null).as_array().unwrap().len(), 2);
    let error = daemon.refused("pool_get", json!({ "name": "scond" }));
    assert_eq!(error["data"]["hint"], "did you mean second?");
}

#[test]
fn exports_survive_a_kill_and_a_clean_stop() {
    let (mut daemon, port) = Daemon::configured();
    for name in ["v", "w", "gone"] {
        daemon.call("volume_create", json!({ "name": name, "size": 64 << 20 }));
    }
    daemon.call("snapshot_create", json!({ "volume": "v", "name": "v@1" }));
    let exported = daemon.call("volume_export", json!({ "name": "v" }));
    let connect = exported["connect"][0].as_str().unwrap();
    assert_eq!(
        connect,
        format!("nvme connect -t tcp -a 127.0.0.1 -s {port} -n {}", exported["nqn"].as_str().unwrap())
    );
    daemon.call("volume_export", json!({ "name": "v@1", "hosts": ["nqn.2014-08.org.example:h1"] }));
    daemon.call("volume_export", json!({ "name": "gone" }));
    daemon.call("volume_unexport", json!({ "name": "gone" }));
    // One made in SPDK's steps, with identities of its own.
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn, "serial_number": "S1", "max_namespaces": 9 }));
    let namespace = json!({ "bdev_name": "main/w", "nsid": 4, "nguid": "ABCDEF0123456789ABCDEF0123456789", "eui64": "ABCDEF0123456789" });
    assert_eq!(daemon.call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": namespace })), 4);
    daemon.call("nvmf_subsystem_add_host", json!({ "nqn": nqn, "host": "nqn.2014-08.org.example:h1" }));
    let address =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    daemon.call("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": address }));

    let before = daemon.call("nvmf_get_subsystems", Value::Null);
    assert_eq!(before.as_array().unwrap().len(), 5, "{before:#}");
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        daemon.signal(signal);
        daemon.restart();
        assert_eq!(
            daemon.call("nvmf_get_subsystems", Value::Null),
            before,
            "after {signal}:\n{}",
            daemon.log()
        );
    }
    std::net::TcpStream::connect(("127.0.0.1", port)).expect("it listens again");

    // A pool that is exported and imported within one life brings its exports back as well.
    daemon.call("pool_export", json!({ "name": "main" }));
    let without = daemon.call("nvmf_get_subsystems", Value::Null);
    assert_eq!(without.as_array().unwrap().len(), 2, "{without:#}");
    daemon.call("pool_import", json!({ "devices": ["disk0"] }));
    assert_eq!(daemon.call("nvmf_get_subsystems", Value::Null), before);
}

#[test]
fn a_long_derived_nqn_becomes_a_short_one() {
    let (daemon, _) = Daemon::configured();
    let name = "x".repeat(223);
    let made = daemon.call("volume_create", json!({ "name": name, "size": 1 << 20 }));
    let exported = daemon.call("volume_export", json!({ "name": name }));
    assert_eq!(
        exported["nqn"],
        format!("nqn.2014-08.org.nvmexpress:uuid:{}", made["uuid"].as_str().unwrap())
    );
}

#[test]
fn host_nqns_are_judged_by_the_rules_of_the_field() {
    let (daemon, _) = Daemon::configured();
    let nqn = "nqn.2014-08.org.example:scratch";
    let add = |host: &str| json!({ "nqn": nqn, "host": host });
    daemon.call("nvmf_subsystem_add_host", add("nqn.2008-04.org.example.lan.host1"));
    let long = format!("nqn.2014-08.org.example:{}", "x".repeat(224 - 24));
    for host in ["10.0.0.1", &long, "nqn.2014-08.org.example:a b", "nqn.2014-08.örg.example:h", ""] {
        let error = daemon.refused("nvmf_subsystem_add_host", add(host));
        assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-32602), &json!("host")), "{host}");
        assert!(!reason(&error).is_empty());
    }
    let hosts = &daemon.call("nvmf_get_subsystems", json!({ "nqn": nqn }))[0]["hosts"];
    assert_eq!(*hosts, json!([{ "nqn": "nqn.2008-04.org.example.lan.host1" }]));
}

#[test]
fn a_bad_configuration_is_refused_with_the_entry_at_fault() {
    let directory = tempfile::Builder::new().prefix("rr").tempdir_in(daemon::scratch()).unwrap();
    let path = directory.path().join("c.toml");
    for (text, words) in [
        ("[reactr]", "did you mean `reactor`?"),
        ("[[device]]\nname = \"a\"\nuri = \"tape:1\"", "[[device]] a"),
        ("[[pool]]\nname = \"p\"\ndevices = [\"ram:64MiB\"]", "[[pool]] p"),
        ("[[subsystem]]\nnqn = \"not-an-nqn\"\ndevices = []", "[[subsystem]] not-an-nqn"),
    ] {
        std::fs::write(&path, text).unwrap();
        let output = daemon::rimrock()
            .arg("--socket")
            .arg(directory.path().join("s"))
            .args(["serve", "--config"])
            .arg(&path)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}: {error}");
        assert!(error.contains(words), "{text}: {error}");
        assert!(!directory.path().join("s").exists(), "the socket of a failed start is removed");
    }
}

#[test]
fn a_long_list_is_one_answer_in_strict_json() {
    let (daemon, _) = Daemon::configured();
    let mut client = daemon.client();
    // Enough to make an answer of many reads; ten thousand creations would test the pool instead.
    for number in 0..300 {
        let answer = client.call(
            "volume_create",
            json!({ "name": format!("v{number:05}{}", "x".repeat(200)), "size": 1 << 20 }),
        );
        assert!(answer["error"].is_null(), "{answer}");
    }
    assert_eq!(client.call("volume_list", Value::Null)["result"].as_array().unwrap().len(), 300);
    assert_eq!(client.call("bdev_get_bdevs", Value::Null)["result"].as_array().unwrap().len(), 303);
}
