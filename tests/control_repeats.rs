//! Calls that meet, are repeated, or come over several connections at once.
#![forbid(unsafe_code)]

mod daemon;

use daemon::Daemon;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Makes the calls at the same time, each over a connection of its own, and gives the whole answers.
fn at_once(daemon: &Daemon, calls: &[(&str, Value)]) -> Vec<Value> {
    let mut clients: Vec<_> = calls.iter().map(|_| daemon.client()).collect();
    for (client, (method, params)) in clients.iter_mut().zip(calls) {
        client.send(json!({ "id": 1, "method": method, "params": params }).to_string().as_bytes());
    }
    clients.iter_mut().map(daemon::Client::receive).collect()
}

#[test]
fn one_device_never_becomes_two_pools() {
    let daemon = Daemon::start();
    daemon.call("device_create", json!({ "name": "d", "uri": "ram:256MiB" }));
    daemon
        .call("nvmf_create_subsystem", json!({ "nqn": "nqn.2014-08.org.example:s", "allow_any_host": true }));
    let namespace = json!({ "nqn": "nqn.2014-08.org.example:s", "namespace": { "bdev_name": "d" } });
    for round in 0..3 {
        let answers = at_once(
            &daemon,
            &[
                ("pool_create", json!({ "name": "a", "devices": ["d"] })),
                ("pool_create", json!({ "name": "b", "devices": ["d"] })),
                ("nvmf_subsystem_add_ns", namespace.clone()),
                ("device_delete", json!({ "name": "d" })),
            ],
        );
        let done: Vec<bool> = answers.iter().map(|answer| answer["error"].is_null()).collect();
        assert_eq!(done, [true, false, false, false], "round {round}: {answers:#?}");
        assert_eq!(daemon.call("pool_list", Value::Null).as_array().unwrap().len(), 1);
        assert_eq!(daemon.call("device_get", json!({ "name": "d" }))["used_by"], "pool a");
        daemon.call("pool_export", json!({ "name": "a" }));
        let import = ("pool_import", json!({ "devices": ["d"] }));
        let answers = at_once(&daemon, &[import.clone(), import.clone(), import]);
        assert!(answers.iter().all(|answer| answer["result"]["uuid"] == answers[0]["result"]["uuid"]));
        assert_eq!(answers[0]["result"]["name"], "a", "{answers:#?}");
        daemon.call("pool_destroy", json!({ "name": "a", "confirm": "a" }));
    }
}

#[test]
fn a_refused_pool_gives_its_devices_back() {
    let daemon = Daemon::start();
    daemon.call("device_create", json!({ "name": "d", "uri": "ram:128MiB" }));
    daemon.call("device_create", json!({ "name": "small", "uri": "ram:1MiB" }));
    assert_eq!(daemon.refused("pool_create", json!({ "name": "p", "devices": ["d", "small"] }))["code"], -22);
    assert_eq!(
        daemon.refused("pool_create", json!({ "name": "p", "devices": ["d", "nothing"] }))["code"],
        -19
    );
    assert_eq!(daemon.refused("pool_import", json!({ "devices": ["d"] }))["code"], -19);
    assert_eq!(daemon.call("device_get", json!({ "name": "d" }))["used_by"], Value::Null);
    daemon.call("pool_create", json!({ "name": "p", "devices": ["d"] }));
}

#[test]
fn equal_calls_at_once_give_one_object() {
    let daemon = Daemon::in_memory();
    daemon.call("volume_create", json!({ "name": "base", "size": 1 << 30 }));
    daemon.call("volume_create", json!({ "name": "other", "size": 1 << 30 }));
    daemon.call("snapshot_create", json!({ "volume": "base", "name": "base@0" }));
    for round in 0..5 {
        let group = json!({ "snapshots": [
            { "volume": "base", "name": format!("base@g{round}") },
            { "volume": "other", "name": format!("other@g{round}") },
        ]});
        for (method, params) in [
            ("volume_create", json!({ "pool": "main", "name": format!("v{round}"), "size": 1 << 20 })),
            ("snapshot_create", json!({ "volume": "base", "name": format!("base@s{round}") })),
            ("snapshot_create_group", group),
            ("clone_create", json!({ "snapshot": "base@0", "name": format!("c{round}") })),
            ("device_create", json!({ "name": format!("d{round}"), "uri": "ram:64MiB" })),
            ("pool_create", json!({ "name": format!("p{round}"), "devices": [format!("d{round}")] })),
            ("volume_export", json!({ "name": format!("v{round}") })),
        ] {
            let calls = vec![(method, params); 4];
            let answers = at_once(&daemon, &calls);
            let identity = |answer: &Value| match &answer["result"] {
                Value::Array(nodes) => nodes.iter().map(|node| node["uuid"].clone()).collect(),
                object if object["uuid"].is_null() => object["nqn"].clone(),
                object => object["uuid"].clone(),
            };
            assert!(!identity(&answers[0]).is_null(), "{method}: {answers:#?}");
            assert!(
                answers.iter().all(|answer| identity(answer) == identity(&answers[0])),
                "{method}: {answers:#?}"
            );
        }
    }
}

#[test]
fn a_name_that_is_taken_by_something_else_is_never_success() {
    let daemon = Daemon::in_memory();
    daemon.call("volume_create", json!({ "name": "model", "size": 1 << 30 }));
    daemon.call("snapshot_create", json!({ "volume": "model", "name": "model@1" }));
    let itself = json!({ "snapshot": "model@1", "name": "model" });
    assert_eq!(daemon.refused("clone_create", itself)["code"], -17);
    let clone = json!({ "snapshot": "model@1", "name": "c" });
    let made = daemon.call("clone_create", clone.clone());
    assert_eq!(daemon.refused("volume_create", json!({ "name": "c", "size": 1 << 30 }))["code"], -17);
    // A snapshot of its own puts another node between the clone and what it came from.
    daemon.call("snapshot_create", json!({ "volume": "c", "name": "c@1" }));
    assert_eq!(daemon.call("clone_create", clone)["uuid"], made["uuid"]);
    daemon.call("snapshot_create", json!({ "volume": "model", "name": "model@2" }));
    assert_eq!(daemon.refused("clone_create", json!({ "snapshot": "model@2", "name": "c" }))["code"], -17);
    let group =
        json!({ "snapshots": [{ "volume": "model", "name": "model@1" }, { "volume": "c", "name": "c@1" }] });
    assert_eq!(daemon.refused("snapshot_create_group", group)["code"], -17, "not of one instant");

    daemon.call("device_create", json!({ "name": "d", "uri": "ram:128MiB" }));
    let pool = json!({ "name": "p", "devices": ["d"], "shards": 2 });
    daemon.call("pool_create", pool.clone());
    daemon.call("pool_create", pool);
    for (field, value) in [("shards", json!(4)), ("region_bytes", json!(64 << 20))] {
        let mut pool = json!({ "name": "p", "devices": ["d"] });
        pool[field] = value;
        let error = daemon.refused("pool_create", pool);
        assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-17), &json!(field)), "{error}");
    }
}

#[test]
fn the_pool_parameter_is_obeyed() {
    let daemon = Daemon::in_memory();
    daemon.call("device_create", json!({ "name": "d", "uri": "ram:128MiB" }));
    daemon.call("pool_create", json!({ "name": "second", "devices": ["d"] }));
    for pool in ["main", "second"] {
        daemon.call("volume_create", json!({ "pool": pool, "name": "v", "size": 1 << 20 }));
        let name = format!("v@{pool}");
        let taken = daemon.call("snapshot_create", json!({ "volume": "v", "pool": pool, "name": name }));
        assert_eq!(taken["pool"], pool);
    }
    for params in [json!({ "volume": "second/v" }), json!({ "volume": "v", "pool": "second" })] {
        let listed = daemon.call("snapshot_list", params);
        assert_eq!(
            (listed.as_array().unwrap().len(), &listed[0]["name"]),
            (1, &json!("v@second")),
            "{listed}"
        );
    }
    let contradiction = json!({ "volume": "main/v", "pool": "second", "name": "x" });
    assert_eq!(daemon.refused("snapshot_create", contradiction)["data"]["field"], "pool");
}

#[test]
fn a_rollback_finds_the_snapshot_s_own_volume() {
    let daemon = Daemon::in_memory();
    let name = "x".repeat(223);
    let volume = daemon.call("volume_create", json!({ "name": name, "size": 1 << 20 }));
    let snapshot = daemon.call("snapshot_create", json!({ "volume": name, "name": "s" }));
    let done = daemon.call("volume_rollback", json!({ "snapshot": "s" }));
    assert_eq!((&done["name"], &done["snapshot"]), (&json!(name), &json!("s")));
    assert!(done["kept"].as_str().unwrap().ends_with("@before-rollback-1"), "{done}");
    // The volume has another name now; it is found all the same, and both are found by UUID.
    daemon.call("volume_rename", json!({ "name": name, "new_name": "short" }));
    let done = daemon.call("volume_rollback", json!({ "snapshot": snapshot["uuid"] }));
    assert_eq!((&done["name"], &done["kept"]), (&json!("short"), &json!("short@before-rollback-1")));
    let done =
        daemon.call("volume_rollback", json!({ "name": volume["uuid"], "snapshot": snapshot["uuid"] }));
    assert_eq!(done["kept"], "short@before-rollback-2");
    daemon.call("volume_delete", json!({ "name": "short" }));
    assert_eq!(daemon.refused("volume_rollback", json!({ "snapshot": "s" }))["code"], -19);
}

#[test]
fn what_others_put_on_a_device_is_not_overwritten_unasked() {
    let daemon = Daemon::start();
    let path = daemon.path().join("used.img");
    let mut image = vec![0; 128 << 20];
    image[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
    std::fs::write(&path, &image).unwrap();
    let uri = format!("uring:{}", path.display());
    let error = daemon.refused("pool_create", json!({ "name": "p", "devices": [uri] }));
    assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-17), &json!("devices")));
    assert!(error["message"].as_str().unwrap().contains("ext filesystem"), "{error}");
    assert!(std::fs::read(&path).unwrap() == image, "it is as it was");
    assert_eq!(daemon.call("device_list", Value::Null), json!([]));
    daemon.call("pool_create", json!({ "name": "p", "devices": [uri], "force": true }));
}

#[test]
fn a_device_is_closed_only_by_the_call_that_belongs_to_it() {
    let daemon = Daemon::in_memory();
    daemon.call("device_create", json!({ "name": "named", "uri": "ram:1MiB" }));
    for method in ["bdev_malloc_delete", "bdev_aio_delete", "bdev_uring_delete"] {
        assert_eq!(daemon.refused(method, json!({ "name": "named" }))["code"], -19, "{method}");
    }
    daemon.call("bdev_malloc_create", json!({ "name": "m", "num_blocks": 16, "block_size": 4096 }));
    assert_eq!(daemon.refused("bdev_aio_delete", json!({ "name": "m" }))["code"], -19);
    daemon.call("bdev_malloc_delete", json!({ "name": "m" }));
}

#[test]
fn more_memory_than_there_is_is_refused() {
    let mut daemon = Daemon::start();
    let error =
        daemon.refused("bdev_malloc_create", json!({ "num_blocks": 1_u64 << 40, "block_size": 4096 }));
    assert_eq!((&error["code"], &error["message"]), (&json!(-12), &json!("Cannot allocate memory")));
    daemon.assert_alive();
}

#[test]
fn the_answer_of_a_batch_is_bounded() {
    let daemon = Daemon::in_memory();
    let mut client = daemon.client();
    for number in 0..600 {
        let name = format!("v{number:05}{}", "x".repeat(200));
        client.call("volume_create", json!({ "name": name, "size": 1 << 20 }));
    }
    let batch: Vec<Value> = (0..100).map(|id| json!({ "id": id, "method": "bdev_get_bdevs" })).collect();
    let batch = [
        batch,
        vec![
            json!({ "id": 100, "method": "device_create", "params": { "name": "late", "uri": "ram:1MiB" } }),
        ],
    ]
    .concat();
    client.send(Value::Array(batch).to_string().as_bytes());
    let mut text = Vec::new();
    let mut reader = std::io::BufReader::new(&client.stream);
    std::io::BufRead::read_until(&mut reader, b'\n', &mut text).unwrap();
    let answers: Vec<Value> = serde_json::from_slice(&text).unwrap();
    assert!(
        answers.len() == 101 && text.len() < 40 << 20,
        "{} answers in {} bytes",
        answers.len(),
        text.len()
    );
    assert!(answers[0]["result"].is_array());
    assert_eq!(answers[100]["error"]["code"], -i64::from(libc::E2BIG));
    assert_eq!(daemon.refused("device_get", json!({ "name": "late" }))["code"], -19, "it was not made");
}

#[test]
fn calls_that_wait_end_with_their_client() {
    let daemon = Daemon::start();
    let waiting =
        r#"{"id":1,"method":"bdev_get_bdevs","params":{"name":"nothing","timeout":18446744073709551615}}"#;
    let mut clients: Vec<_> = (0..256).map(|_| daemon.client()).collect();
    clients.iter_mut().for_each(|client| client.send(waiting.as_bytes()));
    drop(clients);
    let started = Instant::now();
    while daemon.try_call("spdk_get_version", Value::Null).is_none() {
        assert!(started.elapsed() < Duration::from_secs(10), "their places are not free again");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn two_thousand_volumes_are_listed_and_a_long_call_repeated_is_made_once() {
    let daemon = Daemon::in_memory();
    let mut client = daemon.client();
    for number in 0..2000 {
        let answer = client.call("volume_create", json!({ "name": format!("v{number}"), "size": 1 << 20 }));
        assert!(answer["error"].is_null(), "{answer}");
    }
    assert_eq!(client.call("volume_list", Value::Null)["result"].as_array().unwrap().len(), 2000);
    // A client that gives up and asks again, and again, for something that takes long.
    let long = json!({ "id": 1, "method": "bdev_malloc_create",
        "params": { "name": "m", "num_blocks": 1 << 17, "block_size": 4096 } });
    let mut impatient: Vec<_> = (0..3).map(|_| daemon.client()).collect();
    impatient.iter_mut().for_each(|client| client.send(long.to_string().as_bytes()));
    let made =
        impatient.iter_mut().map(daemon::Client::receive).filter(|answer| answer["error"].is_null()).count();
    assert_eq!(made, 1, "a malloc bdev is made once");
}
